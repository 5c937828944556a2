"""Text to take prompts from: plain files, directories of them, or JSON lines."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pass_runtime.errors import PassError

SELF = "self"
"""In place of a path: prompts that the model writes itself."""
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""What is read out of a directory."""


@dataclass(frozen=True)
class Source:
    """One `--data` argument: its documents. Sources are drawn from equally often, documents by their length."""

    name: str
    documents: tuple[str, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(len(text) for text in self.documents))

    def excerpt(self, rng: random.Random, characters: int) -> str:
        """Up to `characters` from a random place, from the start of a line if one is near."""
        at = rng.randrange(self._ends[-1])
        text = self.documents[bisect.bisect_right(self._ends, at)]
        start = rng.randrange(max(1, len(text) - characters))
        if start:
            line = text.find("\n", start, start + characters)
            word = text.find(" ", start, start + characters)
            start = (line if line >= 0 else word if word >= 0 else start - 1) + 1
        return text[start : start + characters].lstrip("\n")


def read_sources(paths: Sequence[Path]) -> list[Source | None]:
    """Read every path, None for SELF; PassError names the first file that is not usable text."""
    if not paths:
        raise PassError("say where prompts come from: --data FILE, DIR, FILE.jsonl or self")
    return [None if str(path) == SELF else _read_source(path) for path in paths]


def digest(sources: Sequence[Source | None]) -> str:
    """SHA-256 of all text, for caches and model cards."""
    total = hashlib.sha256()
    for source in sources:
        for text in (SELF,) if source is None else source.documents:
            total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def _read_source(path: Path) -> Source:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise PassError(f"{path} holds no {', '.join(SUFFIXES)} file")
        documents = [text for file in files for text in _read_file(file)]
    else:
        documents = list(_read_file(path))
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise PassError(f"{path} is empty: there is nothing to train on")
    return Source(path.name, tuple(documents))


def _read_file(path: Path) -> Iterator[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    if b"\0" in data:
        raise PassError(f"{path} is binary, not text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PassError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first, for example with iconv"
        ) from None
    if path.suffix == ".jsonl":
        yield from _json_lines(path, text)
    else:
        yield text


def _json_lines(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            yield str(value["text"] if "text" in value else value["prompt"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise PassError(f'{path} line {number}: expected {{"text": ...}} or {{"prompt": ...}}') from None
