"""Reads the text from which prompts are taken: plain files, directories, or JSON lines."""

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
from pass_runtime.files import lines_of

SELF_NAME = "self"
"""The value of --data for prompts that the model writes itself."""
TEXT, PROMPT, MESSAGE = NAMES = "text", "prompt", "message"
"""The keys of a line of a .jsonl file: "text" or "prompt" is text, a part of which becomes a prompt; "message" is a
user's message to a chat model."""
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""The suffixes of files that are read in a directory."""


@dataclass(frozen=True)
class TextSource:
    """The documents of one `--data` argument.

    Each source gives equally many prompts. Within a source, excerpts are taken from a document with a probability
    proportional to its length.

    messages: whether each document is a whole message of a user; otherwise prompts are excerpts of documents.
    """

    name: str
    documents: tuple[str, ...]
    messages: bool = False

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(len(text) for text in self.documents))

    def excerpt(self, rng: random.Random, characters: int) -> str:
        """Return up to `characters` characters from a random place, from the start of a line or word if one is near."""
        at = rng.randrange(self._ends[-1])
        text = self.documents[bisect.bisect_right(self._ends, at)]
        start = rng.randrange(max(1, len(text) - characters))
        if start:
            line = text.find("\n", start, start + characters)
            word = text.find(" ", start, start + characters)
            start = (line if line >= 0 else word if word >= 0 else start - 1) + 1
        return text[start : start + characters].lstrip("\n")


def read_sources(paths: Sequence[Path]) -> list[TextSource | None]:
    """Read every path; SELF_NAME gives None. Raises PassError if a file is not usable text."""
    if not paths:
        raise PassError("give a source of prompts: --data FILE, DIR, FILE.jsonl or self")
    return [None if str(path) == SELF_NAME else _read_source(path) for path in paths]


def digest(sources: Sequence[TextSource | None]) -> str:
    """Return the SHA-256 of all text and its division into sources. Names of caches and model cards contain it."""
    total = hashlib.sha256()
    for source in sources:
        if source is not None and source.messages:
            total.update(MESSAGE.encode())
        if len(sources) > 1:
            total.update(str(1 if source is None else len(source.documents)).encode())
        for text in (SELF_NAME,) if source is None else source.documents:
            total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def _read_source(path: Path) -> TextSource:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise PassError(f"{path} holds no {', '.join(SUFFIXES)} file")
        found = [each for file in files for each in documents_of(file)]
    else:
        found = list(documents_of(path))
    found = [(name, text) for name, text in found if text.strip()]
    if not found:
        raise PassError(f"{path} is empty: there is nothing to train on")
    messages = {name == MESSAGE for name, _ in found}
    if len(messages) > 1:
        raise PassError(f'{path} has "{MESSAGE}" and other text; put them in two files, and give each with --data')
    return TextSource(path.name, tuple(text for _, text in found), messages.pop())


def documents_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each document of a file, the name being one of NAMES.

    A .jsonl file has a document per line, under the first name that the line has. Any other file is one "text".
    """
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
                yield _document_of(line.object())
            except PassError as error:
                raise PassError(f"{path} line {line.number}: {error}") from None
    else:
        yield TEXT, text


def _document_of(value: dict[str, Any]) -> tuple[str, str]:
    name = next((name for name in NAMES if name in value), None)
    if name is None:
        raise PassError("expected " + " or ".join(f'{{"{name}": ...}}' for name in NAMES))
    if not isinstance(value[name], str):
        raise PassError(f'"{name}" must be a string, not {json.dumps(value[name])[:40]}')
    return name, str(value[name])
