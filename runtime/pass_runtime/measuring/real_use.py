"""Prompts of several kinds, the passes they take, and times measured in turns."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pass_runtime.backends.base import Batch
from pass_runtime.bundle.window import MAX_LOOKAHEAD
from pass_runtime.decode.engine import Engine
from pass_runtime.errors import PassError
from pass_runtime.files import lines_of, read_text
from pass_runtime.measuring.lossless import loop_start
from pass_runtime.session import Session

Name = TypeVar("Name")
Result = TypeVar("Result")

WARM_UP_PASSES, TIMED_PASSES = 2, 10


def in_turns(
    calls: Mapping[Name, Callable[[], Result]], rounds: int
) -> Iterator[dict[Name, list[Result]]]:
    """Run every call once a round, and yield the results so far. The first round warms up."""
    results: dict[Name, list[Result]] = {name: [] for name in calls}
    for round_number in range(1 + rounds):
        for name, call in calls.items():
            result = call()
            if round_number > 0:
                results[name].append(result)
        if round_number > 0:
            yield results


def pass_seconds(engine: Engine, batch: Batch, *, tail: bool = True) -> tuple[float, float]:
    """Return the median seconds of trunk and tail in masked passes. The first ones take longer
    and are not timed."""
    for _ in range(WARM_UP_PASSES):
        engine.time_pass(batch, tail=tail)
    times = [engine.time_pass(batch, tail=tail) for _ in range(TIMED_PASSES)]
    trunks, tails = zip(*times, strict=True)
    return statistics.median(trunks), statistics.median(tails)


FIRST_LOOK_PROMPTS = Path(__file__).with_name("first_look.jsonl")
"""Of each of CORE_KINDS. No weights were trained on them."""
CORE_KINDS = ("chat", "text", "code")
KINDS = (*CORE_KINDS, "lists", "dialogue", "mail", "json", "markdown", "summary", "reasoning")
COPYING_KINDS = ("edit", "quote", "reformat")
"""Kinds whose answers copy much of the prompt. They are measured only if they are named."""
ALL_NAMES = (*KINDS, *COPYING_KINDS)
CONTINUED_KINDS = ("text", "code")
"""Prompts of other kinds are chat messages."""
ALL_KINDS = "all"
EXTRA_TOKENS = MAX_LOOKAHEAD + 1
"""They complete the last counted pass."""


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    text: str

    @property
    def is_message(self) -> bool:
        return self.kind not in CONTINUED_KINDS

    @property
    def seed(self) -> int:
        return zlib.crc32(self.id.encode())


@dataclass(frozen=True)
class PassCounts:
    passes: int = 0
    tokens: int = 0

    def __add__(self, other: PassCounts) -> PassCounts:
        return PassCounts(self.passes + other.passes, self.tokens + other.tokens)

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


def read_prompt_set(
    path: Path, kinds: Collection[str] = KINDS, each: int | None = None
) -> list[Prompt]:
    """Read lines {"id": ..., "kind": ..., "prompt": ...}: the first `each` of every kind. Raises
    PassError for another line, or without any."""
    prompts: dict[str, Prompt] = {}
    for line in lines_of(read_text(path)):
        try:
            values = line.object()
            fields = [values.get(name) for name in ("id", "kind", "prompt")]
            are_texts = all(isinstance(value, str) and value for value in fields)
            if not are_texts or fields[1] not in ALL_NAMES:
                names = ", ".join(ALL_NAMES)
                raise PassError(f'it needs an "id", a "kind" ({names}) and a "prompt"')
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
    """In the chat template if it is a message."""
    if prompt.is_message and session.chat_template is not None:
        return session.encode_chat([{"role": "user", "content": prompt.text}])
    return session.encode(prompt.text)


def parse_kinds(text: str) -> tuple[str, ...]:
    """`code,chat` -> ("chat", "code"), in the order of ALL_NAMES."""
    named = text.split(",")
    if unknown := [kind for kind in named if kind not in ALL_NAMES]:
        raise PassError(f"--kinds has {unknown[0]!r}, which is not one of {', '.join(ALL_NAMES)}")
    return tuple(kind for kind in ALL_NAMES if kind in named)


def parse_temperatures(text: str) -> tuple[float, ...]:
    """`0,0.8` -> (0.0, 0.8)."""
    try:
        return tuple(dict.fromkeys(float(value) for value in text.split(",")))
    except ValueError:
        raise PassError(f"--temperatures must list numbers, as in 0,0.8, not {text!r}") from None


def split_at_loop(tokens: Sequence[int], count: int) -> tuple[range, range]:
    """Return the indices of `count` tokens: before the loop, and in it."""
    end = min(len(tokens), count)
    start = loop_start(tokens)
    loop_index = end if start is None else min(start, end)
    return range(loop_index), range(loop_index, end)


def count_passes(sizes: Iterable[int], indices: range) -> PassCounts:
    """Count the passes whose first token is at one of `indices`, and their tokens. sizes: tokens
    by pass."""
    counts, first_index = PassCounts(), 0
    for size in sizes:
        if first_index in indices:
            counts += PassCounts(1, size)
        first_index += size
    return counts
