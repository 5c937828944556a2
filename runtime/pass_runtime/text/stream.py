"""From tokens to text, as they come: no half characters, nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pass_runtime.decode.loop import FinishReason, TokenStream
from pass_runtime.decode.stats import Stats


@dataclass(frozen=True)
class Piece:
    """Text that is final, and the tokens read since the last piece (either may be empty)."""

    text: str
    token_ids: tuple[int, ...]


class StopFilter:
    """Holds back the end of the text while it may still grow into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """-> (text to show, the stop string that ended it). The stop that is complete first wins, and is not shown."""
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, stop = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            shown, self._held = self._held[:at], ""
            return shown, stop
        held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        at = len(self._held) - held
        shown, self._held = self._held[:at], self._held[at:]
        return shown, None

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """The longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _context(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The prompt's last tokens, which decide whether the first piece begins with a space.

    None where they end inside a character: the decoder would show them again once it is whole.
    """
    context = list(prompt_ids[-8:])
    return [] if tokenizer.decode(context).endswith("\ufffd") else context


class Generation:
    """A running generation as text. Iterate for pieces; the other attributes are final when it is exhausted.

    `text` is the pieces joined. Bytes of a character that was never completed are left out of it; they are in
    `token_ids`. Special tokens are in `token_ids` but not in `text`.
    """

    def __init__(
        self, stream: TokenStream, prompt_ids: Sequence[int], tokenizer: Tokenizer, stop: Sequence[str] = ()
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.text = ""
        self._stream, self._tokenizer = stream, tokenizer
        self._filter = StopFilter(stop)
        self._decode = DecodeStream(ids=_context(prompt_ids, tokenizer), skip_special_tokens=True)

    @property
    def token_ids(self) -> list[int]:
        return self._stream.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self._stream.stop_reason

    @property
    def stats(self) -> Stats:
        return self._stream.stats

    def run(self) -> Generation:
        """Run to the end without looking at the pieces."""
        for _ in self:
            pass
        return self

    def __iter__(self) -> Iterator[Piece]:
        for tokens in self._stream:
            piece = self._read(tokens)
            self.text += piece.text
            yield piece
        rest = self._filter.flush()
        if rest:
            self.text += rest
            yield Piece(rest, ())

    def _read(self, tokens: list[int]) -> Piece:
        shown = ""
        for i, token in enumerate(tokens):
            text, stop = self._filter.push(self._decode.step(self._tokenizer, token) or "")
            shown += text
            if stop is not None:
                self._stream.stop(stop, keep=len(self.token_ids) - len(tokens) + i + 1)
                return Piece(shown, tuple(tokens[: i + 1]))
        return Piece(shown, tuple(tokens))
