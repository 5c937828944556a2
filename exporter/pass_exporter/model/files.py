"""Says which file of a checkpoint is not what it should be, before transformers reads it.

transformers' errors name no file, and it ignores a generation_config.json that it cannot read, with
its end tokens.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

from pass_runtime.errors import PassError

JSON_FILES = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ),
    *("added_tokens.json", "vocab.json", "chat_template.json", "preprocessor_config.json"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
)
TEXT_FILES = ("chat_template.jinja", "merges.txt")
WEIGHTS = ("*.safetensors", "*.bin", "*.model")
LFS_POINTER, ANNEX_POINTER = b"version https://git-lfs.github.com/spec/", b"/annex/objects/"
FIRST_PART = re.compile(r"-00001-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""Matches the name of the first part of a split .gguf file, as llama.cpp writes it."""
AGAIN = "get it again"


def check_files(directory: Path, *, whole: bool = True) -> None:
    """Raise PassError for the first file of a checkpoint that is a stand-in, damaged, or, if the
    directory is `whole`, missing though the index of the weights names it."""
    for name in JSON_FILES:
        if (text := _text(directory / name)) is not None:
            _check_json(directory / name, text, whole=whole)
    for path in (
        *(directory / name for name in TEXT_FILES),
        *sorted(directory.glob("additional_chat_templates/*")),
    ):
        _text(path)
    for pattern in WEIGHTS:
        for path in sorted(directory.glob(pattern)):
            check_file(path)
    has_json = any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    if (
        (directory / "tokenizer.model").is_file()
        and not has_json
        and find_spec("sentencepiece") is None
    ):
        raise PassError(
            f"{directory} has its tokenizer as tokenizer.model alone, which sentencepiece reads: "
            "pip install sentencepiece, or put the model's tokenizer.json beside it"
        )


def check_file(path: Path) -> None:
    """Raise PassError if a file is empty, no file, or a stand-in for the real one."""
    if path.is_dir():
        raise PassError(f"{path} is a directory, not a file: {AGAIN}")
    if not path.is_file():
        raise PassError(f"{path} is a link to a file that is not there: {AGAIN}")
    try:
        with path.open("rb") as file:
            begin = file.read(64)
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    if not begin:
        raise PassError(f"{path} is empty: {AGAIN}")
    if begin.startswith(LFS_POINTER):
        raise PassError(f"{path} is a Git LFS pointer, not the file itself: run git lfs pull")
    if begin.startswith(ANNEX_POINTER):
        raise PassError(f"{path} is a git-annex pointer, not the file itself: run git annex get")


def _text(path: Path) -> str | None:
    """Return the text of a file; None if there is none."""
    if not path.exists() and not path.is_symlink():
        return None
    check_file(path)
    content = path.read_bytes()
    if content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise PassError(f"{path} begins with a byte order mark: save it as UTF-8 without one")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text: {AGAIN}") from None


def _check_json(path: Path, text: str, *, whole: bool) -> None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PassError(f"{path} is cut off or damaged, and no JSON ({error}): {AGAIN}") from None
    if not isinstance(found, dict):
        raise PassError(f"{path} must hold a JSON object, not {type(found).__name__}: {AGAIN}")
    if path.name.endswith(".index.json"):
        parts = found.get("weight_map")
        if not isinstance(parts, dict) or not parts:
            raise PassError(f"{path} has no weight_map: {AGAIN}")
        for name in sorted({str(part) for part in parts.values()}):
            if whole and not (path.parent / name).is_file():
                raise PassError(f"{path} names {name}, which is not there: {AGAIN}")
