"""How drafts do in real use: prompts as people give them, which part of a text counts, and passes counted over it.

The trainer (`pass-train evaluate`) and the runtime (`scripts/acceptance.py`) measure by this, so that their figures can
be compared. Stretches that loop are counted apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.cli.prompts import read_lines
from pass_runtime.errors import PassError
from pass_runtime.testing.loops import loop_start

KINDS = ("chat", "text", "code")
ALL = "all"
"""All kinds together, in figures."""
MARGIN = MAX_LOOKAHEAD + 1
"""Tokens that are written beyond those that count, so that a pass which begins among these is seen whole."""


@dataclass(frozen=True)
class Prompt:
    """kind: one of KINDS; what is chat goes through the model's chat template."""

    id: str
    kind: str
    text: str

    @property
    def seed(self) -> int:
        """Of its sampling."""
        return zlib.crc32(self.id.encode())


@dataclass(frozen=True)
class Passes:
    """Passes of the trunk, and the tokens that they emitted."""

    passes: int = 0
    tokens: int = 0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.passes + other.passes, self.tokens + other.tokens)

    @property
    def tau(self) -> float:
        """Tokens per pass; 0 where there was none."""
        return self.tokens / self.passes if self.passes else 0.0


def read_use(path: Path) -> list[Prompt]:
    """The lines {"id", "kind", "prompt"} of a .jsonl file; PassError names the line that is none."""
    prompts: dict[str, Prompt] = {}
    for line in read_lines(path):
        try:
            values = line.object()
            found = [values.get(name) for name in ("id", "kind", "prompt")]
            if not all(isinstance(value, str) and value for value in found) or found[1] not in KINDS:
                raise PassError(f'it needs an "id", a "kind" ({", ".join(KINDS)}) and a "prompt"')
            prompt = Prompt(*map(str, found))
            if prompt.id in prompts:
                raise PassError(f"the id {prompt.id!r} stands in an earlier line, too")
        except PassError as error:
            raise PassError(f"{path}, line {line.number}: {error}") from None
        prompts[prompt.id] = prompt
    if not prompts:
        raise PassError(f"{path} is empty: it needs lines with id, kind and prompt")
    return list(prompts.values())


def stretches(written: Sequence[int], tokens: int) -> tuple[range, range]:
    """Which of the first `tokens` places of what was written count, and which are in a loop."""
    end = min(len(written), tokens)
    start = loop_start(written)
    loop = end if start is None else min(start, end)
    return range(loop), range(loop, end)


def count_passes(sizes: Iterable[int], where: range) -> Passes:
    """sizes: the tokens of each pass, from the first that was written. Those that begin in `where` count, whole."""
    found, begin = Passes(), 0
    for size in sizes:
        if begin in where:
            found += Passes(1, size)
        begin += size
    return found
