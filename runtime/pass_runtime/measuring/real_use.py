"""Measures how many tokens a pass writes in real use, on prompts of several kinds.

The trainer (`pass-train evaluate`) and the runtime (`pass-run bench`, `scripts/bench_peers.py`)
both use this module, so that their results can be compared. Passes after the text has begun to
repeat itself are counted apart (`lossless.loop_start`). Times that are to be compared are measured
in turns, so that a busy machine affects all of them alike.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pass_runtime.backends.base import PassKind
from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.decode.runner import Runner
from pass_runtime.errors import PassError
from pass_runtime.files import lines_of, read_text
from pass_runtime.measuring.lossless import loop_start
from pass_runtime.session import Session

Name = TypeVar("Name")
Result = TypeVar("Result")

WARM_UP_PASSES, TIMED_PASSES = 2, 10
"""How many passes are run before some are timed, and how many are timed."""


def in_turns(
    calls: Mapping[Name, Callable[[], Result]], rounds: int
) -> Iterator[dict[Name, list[Result]]]:
    """Run every call once in each round. The first round warms up and its results are left out;
    after every other round, yield the results so far."""
    results: dict[Name, list[Result]] = {name: [] for name in calls}
    for round_number in range(1 + rounds):
        for name, call in calls.items():
            result = call()
            if round_number > 0:
                results[name].append(result)
        if round_number > 0:
            yield results


def pass_seconds(runner: Runner, kind: PassKind, *, tail: bool = True) -> tuple[float, float]:
    """Return the median seconds of the trunk and of the tail in TIMED_PASSES consecutive passes
    that change no sequence (`Runner.time_masked_pass`).

    The first passes after those of another kind or in another thread take longer, so they are not
    timed: when requests decode, passes of one kind follow one another in one thread. tail: as for
    `Runner.time_masked_pass`.
    """
    times = [
        runner.time_masked_pass(kind, tail=tail) for _ in range(WARM_UP_PASSES + TIMED_PASSES)
    ][WARM_UP_PASSES:]
    trunks, tails = zip(*times, strict=True)
    return statistics.median(trunks), statistics.median(tails)


FIRST_LOOK_PROMPTS = Path(__file__).with_name("first_look.jsonl")
"""The default prompts of `pass-run bench`: three of each kind in CORE_KINDS. No weights were
trained on them. SmolLM2-135M and Qwen2.5-Coder-0.5B, decoding greedily, continue each of them by
at least 64 tokens before the text ends or repeats itself."""
CORE_KINDS = ("chat", "text", "code")
"""The kinds that the runtime's scripts measure by default."""
KINDS = (*CORE_KINDS, "lists", "dialogue", "mail", "json", "markdown", "summary", "reasoning")
CONTINUED_KINDS = ("text", "code")
"""The kinds whose prompts are texts to continue. Prompts of other kinds are chat messages."""
ALL_KINDS = "all"
"""The name that results have for all kinds together."""
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
        """Whether the prompt is put into the model's chat template, if there is one."""
        return self.kind not in CONTINUED_KINDS

    @property
    def seed(self) -> int:
        """The seed to sample with after this prompt, the same in every run."""
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
    """Read a .jsonl file whose lines are {"id": ..., "kind": ..., "prompt": ...}, and return its
    prompts of `kinds`, the first `each` of every kind (None: all), in the order of the file. Raises
    PassError, with the line number, for any other line, or if there are no such prompts."""
    prompts: dict[str, Prompt] = {}
    for line in lines_of(read_text(path)):
        try:
            values = line.object()
            fields = [values.get(name) for name in ("id", "kind", "prompt")]
            are_texts = all(isinstance(value, str) and value for value in fields)
            if not are_texts or fields[1] not in KINDS:
                raise PassError(f'it needs an "id", a "kind" ({", ".join(KINDS)}) and a "prompt"')
            prompt = Prompt(*map(str, fields))
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
    first = {kind: [prompt for prompt in chosen if prompt.kind == kind][:each] for kind in kinds}
    return [prompt for prompt in chosen if prompt in first[prompt.kind]]


def encode(session: Session, prompt: Prompt) -> list[int]:
    """Tokenize a prompt, in the chat template if it is a message and the bundle has a template."""
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


def split_at_loop(tokens: Sequence[int], count: int) -> tuple[range, range]:
    """Return the indices of the first `count` tokens: those before the loop, and those in it."""
    end = min(len(tokens), count)
    start = loop_start(tokens)
    loop_index = end if start is None else min(start, end)
    return range(loop_index), range(loop_index, end)


def count_passes(sizes: Iterable[int], indices: range) -> PassCounts:
    """Count the passes whose first token has one of `indices`, and all tokens of these passes.
    sizes: the number of tokens that each pass emitted."""
    counts, first_index = PassCounts(), 0
    for size in sizes:
        if first_index in indices:
            counts += PassCounts(1, size)
        first_index += size
    return counts
