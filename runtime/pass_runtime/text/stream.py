"""Tokens to text, one at a time, without half characters and without what may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopFilter:
    """Holds back the end of the text while it may still grow into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._beginnings = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """-> (text to show, the stop string that ended it). The stop that is complete first counts; it is not shown."""
        self._held += text
        if self._beginnings.isdisjoint(self._held):  # the usual case, kept fast since this runs for every token
            return self.flush(), None
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
        """The text that was held back, once no more text comes."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """The longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _context(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The prompt's last tokens, which decide whether the first piece begins with a space.

    Empty where they end inside a character, which the decoder would show again once it is whole.
    """
    context = list(prompt_ids[-8:])
    return [] if tokenizer.decode(context).endswith("\ufffd") else context


class TextStream:
    """The text of one request, token by token. stop: strings that end it and are not part of it.

    A stop string that is the text of a special token ends at that token, though special tokens are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._filter = StopFilter(stop)
        self._special = {token for string in stop if (token := _special_id(tokenizer, string)) is not None}
        self._decode = DecodeStream(ids=_context(prompt_ids, tokenizer), skip_special_tokens=True)

    def read(self, token: int) -> tuple[str, str | None]:
        """-> (text that is final now, the stop string that ended it)"""
        if token in self._special:
            return self._filter.flush(), self._tokenizer.id_to_token(token)
        return self._filter.push(self._decode.step(self._tokenizer, token) or "")

    def flush(self) -> str:
        """The text that was held back, once no more tokens come."""
        return self._filter.flush()


def _special_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the special token whose text is `text`; None where there is none."""
    added = tokenizer.get_added_tokens_decoder()
    return next((number for number, token in added.items() if token.special and token.content == text), None)
