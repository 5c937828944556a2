"""Text from which prompts are taken: plain files, directories of them, or JSON lines."""

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
from typing import Any

from pass_runtime.errors import PassError
from pass_runtime.json_lines import lines_of

SELF = "self"
"""The value of --data for prompts that the model writes itself."""
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""The files that are read in a directory."""


@dataclass(frozen=True)
class TextSource:
    """The documents of one `--data` argument. Each source gives equally many prompts; in a source a document's chance
    is proportional to its length."""

    name: str
    documents: tuple[str, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(len(text) for text in self.documents))

    def excerpt(self, rng: random.Random, characters: int) -> str:
        """Return up to `characters` characters from a random place; they begin with a line, or else a word, if one is
        near."""
        at = rng.randrange(self._ends[-1])
        text = self.documents[bisect.bisect_right(self._ends, at)]
        start = rng.randrange(max(1, len(text) - characters))
        if start:
            line = text.find("\n", start, start + characters)
            word = text.find(" ", start, start + characters)
            start = (line if line >= 0 else word if word >= 0 else start - 1) + 1
        return text[start : start + characters].lstrip("\n")


def read_sources(paths: Sequence[Path]) -> list[TextSource | None]:
    """Read every path; SELF gives None. PassError names the first file that is not usable text."""
    if not paths:
        raise PassError("say where prompts come from: --data FILE, DIR, FILE.jsonl or self")
    return [None if str(path) == SELF else _read_source(path) for path in paths]


def digest(sources: Sequence[TextSource | None]) -> str:
    """Return the SHA-256 of all text and of its division into sources, for the names of caches and for model cards."""
    total = hashlib.sha256()
    for source in sources:
        if len(sources) > 1:
            total.update(str(1 if source is None else len(source.documents)).encode())
        for text in (SELF,) if source is None else source.documents:
            total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def _read_source(path: Path) -> TextSource:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise PassError(f"{path} holds no {', '.join(SUFFIXES)} file")
        documents = [text for file in files for text in documents_of(file)]
    else:
        documents = list(documents_of(path))
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise PassError(f"{path} is empty: there is nothing to train on")
    return TextSource(path.name, tuple(documents))


def documents_of(path: Path) -> Iterator[str]:
    """Yield the documents of a file: "text", or else "prompt", of every line of a .jsonl, or all of it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    if b"\0" in data:
        raise PassError(f"{path} is binary, not text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PassError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first, for example with iconv"
        ) from None
    if path.suffix == ".jsonl":
        for line in lines_of(text):
            try:
                yield _text_of(line.object())
            except PassError as error:
                raise PassError(f"{path} line {line.number}: {error}") from None
    else:
        yield text


def _text_of(value: dict[str, Any]) -> str:
    name = next((name for name in ("text", "prompt") if name in value), None)
    if name is None:
        raise PassError('expected {"text": ...} or {"prompt": ...}')
    if not isinstance(value[name], str):
        raise PassError(f'"{name}" must be a string, not {json.dumps(value[name])[:40]}')
    return str(value[name])
