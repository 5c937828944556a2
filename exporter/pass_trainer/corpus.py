"""Reads the text of `--data`: files, directories, or JSON lines."""

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
TEXT, PROMPT, MESSAGE = DOCUMENT_KEYS = "text", "prompt", "message"
"""Keys of a .jsonl line. Excerpts of a "text" or "prompt" become prompts; a "message" is a user's
whole message."""
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""Of the files that are read in a directory."""


@dataclass(frozen=True)
class TextSource:
    """The documents of one `--data`. messages: whether each is a user's message, not text for
    excerpts."""

    name: str
    documents: tuple[str, ...]
    messages: bool = False

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(len(text) for text in self.documents))

    def excerpt(self, rng: random.Random, characters: int) -> str:
        """Return up to `characters` characters from near a random offset, where a line or else a
        word begins."""
        offset = rng.randrange(self._ends[-1])
        text = self.documents[bisect.bisect_right(self._ends, offset)]
        start = rng.randrange(max(1, len(text) - characters))
        if start:
            for separator in ("\n", " "):
                index = text.find(separator, start, start + characters)
                if index >= 0:
                    start = index + 1
                    break
        return text[start : start + characters].lstrip("\n")


def read_sources(paths: Sequence[Path]) -> list[TextSource | None]:
    """Read every path; SELF_NAME gives None. Raises PassError if a file is not usable text."""
    if not paths:
        raise PassError("give a source of prompts: --data FILE, DIR, FILE.jsonl or self")
    return [None if str(path) == SELF_NAME else _read_source(path) for path in paths]


def digest(sources: Sequence[TextSource | None]) -> str:
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
        files = sorted(
            file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()
        )
        if not files:
            raise PassError(f"{path} has no {', '.join(SUFFIXES)} file; give a directory with text")
        documents = [each for file in files for each in read_documents(file)]
    else:
        documents = list(read_documents(path))
    documents = [(key, text) for key, text in documents if text.strip()]
    if not documents:
        raise PassError(f"{path} is empty: there is nothing to train on")
    are_messages = {key == MESSAGE for key, _ in documents}
    if len(are_messages) > 1:
        raise PassError(
            f'{path} has "{MESSAGE}" and other text; put them in two files, and give each with '
            "--data"
        )
    return TextSource(path.name, tuple(text for _, text in documents), are_messages.pop())


def read_documents(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of each document: a line of .jsonl, or another file."""
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
            f"{path} is not UTF-8 text (byte {error.start}); convert it first, for example "
            "with iconv"
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
    key = next((key for key in DOCUMENT_KEYS if key in value), None)
    if key is None:
        raise PassError("expected " + " or ".join(f'{{"{key}": ...}}' for key in DOCUMENT_KEYS))
    if not isinstance(value[key], str):
        raise PassError(f'"{key}" must be a string, not {json.dumps(value[key])[:40]}')
    return key, str(value[key])
