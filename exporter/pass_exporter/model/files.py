"""Checks a checkpoint's files before transformers reads them: its errors name no file, and it
ignores a generation_config.json that it cannot read."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pass_runtime.errors import PassError

QUANTIZATION_FILES = {
    "hf_quant_config.json": "ModelOpt",
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "quanto_qmap.json": "quanto",
}
"""Files that say how a checkpoint is quantized, and by whom."""
JSON_FILES = (
    *QUANTIZATION_FILES,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "preprocessor_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
TEXT_FILES = ("chat_template.jinja", "merges.txt")
WEIGHTS = ("*.safetensors", "*.bin", "*.model")
LFS_POINTER, ANNEX_POINTER = b"version https://git-lfs.github.com/spec/", b"/annex/objects/"
FIRST_PART = re.compile(r"-00001-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""The first part of a split .gguf file."""
AGAIN = "get it again"


def check_files(directory: Path, *, is_complete: bool = True) -> None:
    """Raise PassError for the first file that is damaged or a pointer to the real file.
    is_complete: whether all files that an index names must be there."""
    for name in JSON_FILES:
        if (text := _read_text(directory / name)) is not None:
            _check_json(directory / name, text, is_complete=is_complete)
    for path in (
        *(directory / name for name in TEXT_FILES),
        *sorted(directory.glob("additional_chat_templates/*")),
    ):
        _read_text(path)  # called for its checks alone
    for pattern in WEIGHTS:
        for path in sorted(directory.glob(pattern)):
            check_file(path)


def check_file(path: Path) -> None:
    """Raise PassError if a file cannot be read, is empty, or is a pointer to the real file."""
    if path.is_dir():
        raise PassError(f"{path} is a directory, not a file: {AGAIN}")
    if not path.is_file():
        raise PassError(f"{path} is a link to a file that is not there: {AGAIN}")
    try:
        with path.open("rb") as file:
            beginning = file.read(64)
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    if not beginning:
        raise PassError(f"{path} is empty: {AGAIN}")
    if beginning.startswith(LFS_POINTER):
        raise PassError(f"{path} is a Git LFS pointer, not the file itself: run git lfs pull")
    if beginning.startswith(ANNEX_POINTER):
        raise PassError(f"{path} is a git-annex pointer, not the file itself: run git annex get")


def _read_text(path: Path) -> str | None:
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


def _check_json(path: Path, text: str, *, is_complete: bool) -> None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PassError(f"{path} is cut off or damaged, and no JSON ({error}): {AGAIN}") from None
    if not isinstance(content, dict):
        raise PassError(f"{path} must hold a JSON object, not {type(content).__name__}: {AGAIN}")
    if path.name.endswith(".index.json"):
        files_by_tensor = content.get("weight_map")
        if not isinstance(files_by_tensor, dict) or not files_by_tensor:
            raise PassError(f"{path} has no weight_map: {AGAIN}")
        for file in sorted({str(file) for file in files_by_tensor.values()}):
            if is_complete and not (path.parent / file).is_file():
                raise PassError(f"{path} names {file}, which is not there: {AGAIN}")
