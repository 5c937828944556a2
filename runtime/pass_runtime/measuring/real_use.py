"""Measures acceptance in real use: prompts of several kinds, tokens per pass, loops apart.

The trainer (`pass-train evaluate`) and the runtime (`pass-run bench`, `scripts/bench_peers.py`)
both measure with this module, so that their results can be compared. What is compared is measured
in turns, so that a noisy machine affects all alike.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pass_runtime.backends.base import PassKind
from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.decode.runner import Runner
from pass_runtime.errors import PassError
from pass_runtime.files import lines_of, read_text
from pass_runtime.measuring.lossless import loop_start

Name = TypeVar("Name")
Result = TypeVar("Result")

WARM_UP_PASSES, TIMED_PASSES = 2, 10
"""How many passes are run before some are timed, and how many are timed."""


def in_turns(
    calls: Mapping[Name, Callable[[], Result]], rounds: int
) -> Iterator[dict[Name, list[Result]]]:
    """Run every call once in each round. After each round, yield the results of all rounds so far.

    A round for warming up comes first; its results are left out.
    """
    found: dict[Name, list[Result]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            result = call()
            if number:
                found[name].append(result)
        if number:
            yield found


def pass_seconds(runner: Runner, kind: PassKind, *, tail: bool = True) -> tuple[float, float]:
    """The median seconds of trunk and tail in TIMED_PASSES consecutive passes over idle slots.

    While decoding, too, passes of one kind follow one another in one thread. The first ones after
    another kind or in another thread take longer, so they are not timed. tail: as for
    `Runner.time_masked_pass`.
    """
    times = [
        runner.time_masked_pass(kind, tail=tail) for _ in range(WARM_UP_PASSES + TIMED_PASSES)
    ][WARM_UP_PASSES:]
    trunks, tails = zip(*times, strict=True)
    return statistics.median(trunks), statistics.median(tails)


if TYPE_CHECKING:
    from pass_runtime.session import Session

FIRST_LOOK_PROMPTS = Path(__file__).with_name("first_look.jsonl")
"""The default prompts of `pass-run bench`: three of each of CORE_KINDS, which no weights were
trained on. The greedy texts of SmolLM2-135M and Qwen2.5-Coder-0.5B neither end nor repeat
themselves in the first 64 tokens after them."""
CORE_KINDS = ("chat", "text", "code")
"""The kinds that the runtime's scripts measure unless they are told otherwise."""
KINDS = (*CORE_KINDS, "lists", "dialogue", "mail", "json", "markdown", "summary", "reasoning")
CONTINUED_KINDS = ("text", "code")
"""The kinds whose prompts the model continues. Prompts of other kinds are chat messages."""
ALL_KINDS = "all"
"""The name of all kinds together, in results."""
EXTRA_TOKENS = MAX_LOOKAHEAD + 1
"""Tokens to generate after the counted ones, so that the last counted pass is complete."""


@dataclass(frozen=True)
class Prompt:
    """A prompt. kind: one of KINDS."""

    id: str
    kind: str
    text: str

    @property
    def is_message(self) -> bool:
        """Whether it is put into the model's chat template, if there is one."""
        return self.kind not in CONTINUED_KINDS

    @property
    def seed(self) -> int:
        """The seed of its sampling."""
        return zlib.crc32(self.id.encode())


@dataclass(frozen=True)
class PassCounts:
    """Passes of the trunk, and the tokens that they emitted."""

    passes: int = 0
    tokens: int = 0

    def __add__(self, other: PassCounts) -> PassCounts:
        return PassCounts(self.passes + other.passes, self.tokens + other.tokens)

    @property
    def tau(self) -> float:
        """Tokens per pass; 0 without passes."""
        return self.tokens / self.passes if self.passes else 0.0


def read_prompt_set(
    path: Path, kinds: Collection[str] = KINDS, each: int | None = None
) -> list[Prompt]:
    """The lines {"id", "kind", "prompt"} of a .jsonl file that are of these kinds, the first `each`
    of a kind (None: all of them). Raises PassError, with the line number, for any other line."""
    prompts: dict[str, Prompt] = {}
    for line in lines_of(read_text(path)):
        try:
            values = line.object()
            found = [values.get(name) for name in ("id", "kind", "prompt")]
            are_texts = all(isinstance(value, str) and value for value in found)
            if not are_texts or found[1] not in KINDS:
                raise PassError(f'it needs an "id", a "kind" ({", ".join(KINDS)}) and a "prompt"')
            prompt = Prompt(*map(str, found))
            if prompt.id in prompts:
                raise PassError(f"an earlier line has the id {prompt.id!r}, too; ids must differ")
        except PassError as error:
            raise PassError(f"{path}, line {line.number}: {error}") from None
        prompts[prompt.id] = prompt
    if not prompts:
        raise PassError(f"{path} is empty: it needs lines with id, kind and prompt")
    chosen = [prompt for prompt in prompts.values() if prompt.kind in kinds]
    if not chosen:
        raise PassError(f"{path} has no prompts of {', '.join(kinds)}; name others with --kinds")
    first = [prompt for kind in KINDS for prompt in [p for p in chosen if p.kind == kind][:each]]
    return [prompt for prompt in chosen if prompt in first]


def encode(session: Session, prompt: Prompt) -> list[int]:
    """Tokenize a prompt as the trainer does."""
    if prompt.is_message and session.chat_template is not None:
        return session.encode_chat([{"role": "user", "content": prompt.text}])
    return session.encode(prompt.text)


def parse_kinds(text: str) -> tuple[str, ...]:
    """Parse `code,chat` to ("chat", "code"), in the order of KINDS."""
    named = text.split(",")
    if unknown := [kind for kind in named if kind not in KINDS]:
        raise PassError(f"--kinds has {unknown[0]!r}, which is not one of {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in named)


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Parse `0,0.8` to (0.0, 0.8)."""
    try:
        return tuple(dict.fromkeys(float(value) for value in text.split(",")))
    except ValueError:
        raise PassError(f"--temperatures must list numbers, as in 0,0.8, not {text!r}") from None


def split_at_loop(written: Sequence[int], tokens: int) -> tuple[range, range]:
    """The indices of the first `tokens` written tokens: those before a loop, and those in it."""
    end = min(len(written), tokens)
    start = loop_start(written)
    loop = end if start is None else min(start, end)
    return range(loop), range(loop, end)


def count_passes(sizes: Iterable[int], indices: range) -> PassCounts:
    """Count the passes that begin at one of `indices`, each with all its tokens. sizes: tokens
    emitted by each pass."""
    found, begin = PassCounts(), 0
    for size in sizes:
        if begin in indices:
            found += PassCounts(1, size)
        begin += size
    return found
