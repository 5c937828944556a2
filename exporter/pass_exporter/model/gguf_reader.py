"""Reads .gguf files, also split ones, with errors that say what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from pass_exporter.model.files import AGAIN, FIRST_PART, check_file
from pass_runtime.errors import PassError

ARCHITECTURE = "general.architecture"


class GgufReader(gguf.GGUFReader):  # type: ignore[misc]
    """`data` is a plain array, which slices faster than numpy's memmap."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)

    def key(self, name: str) -> Any:
        return field.contents() if (field := self.fields.get(name)) else None

    def tensor_names(self, model: PreTrainedModel) -> gguf.TensorNameMap:
        """Return the names of the file's tensors, by those of the model's modules."""
        arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == self.key(ARCHITECTURE))
        return gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)


def read_gguf(path: Path) -> GgufReader:
    """Parse a .gguf file, with all parts if it is the first of several. Raises PassError if a file
    is damaged or big-endian, or if a part is missing."""
    reader = _read_file(path)
    count = int(reader.key("split.count") or 1)
    if count > 1:
        _add_parts(reader, path, count)
    if ARCHITECTURE not in reader.fields:
        raise PassError(f"{path} has no key {ARCHITECTURE}, so it is no model: {AGAIN}")
    return reader


def _add_parts(reader: GgufReader, path: Path, count: int) -> None:
    index = int(reader.key("split.no") or 0)
    place = f"{path} is part {index + 1} of {count} of a split file"
    name = FIRST_PART.search(path.name)
    if name is None or int(name[1]) != count or index:
        raise PassError(
            f"{place}: give the joined file (llama-gguf-split --merge), or the first part beside "
            f"the others, NAME-00001-of-{count:05}.gguf"
        )
    for i in range(1, count):
        part_path = path.with_name(FIRST_PART.sub(f"-{i + 1:05}-of-{count:05}", path.name))
        if not part_path.exists():
            raise PassError(
                f"{place}, and {part_path.name} is not beside it: {AGAIN}, or give the joined file"
            )
        part = _read_file(part_path)
        if (part.key("split.no"), part.key("split.count")) != (i, count):
            raise PassError(
                f"{part_path} is not part {i + 1} of {count} of a split file, as its name says: "
                f"{AGAIN}"
            )
        reader.tensors += part.tensors
    if len(reader.tensors) != int(reader.key("split.tensors.count") or len(reader.tensors)):
        raise PassError(f"the parts beside {path} do not have all of its tensors: {AGAIN}")


def _read_file(path: Path) -> GgufReader:
    check_file(path)
    with path.open("rb") as file:
        beginning = file.read(8)
    if beginning[:4] != b"GGUF":
        raise PassError(f"{path} is no GGUF file: it does not begin with GGUF")
    # The version, a small number of 4 bytes, has its zeros first only if it is big-endian.
    if len(beginning) == 8 and beginning[4:6] == b"\0\0":
        raise PassError(
            f"{path} is big-endian: convert it with gguf_convert_endian.py of llama.cpp, or "
            "get another file"
        )
    try:
        reader = GgufReader(str(path))
        end = max(
            (int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors), default=0
        )
    except (ValueError, LookupError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())[:100]
        raise PassError(f"{path} is cut off or damaged ({reason}): {AGAIN}") from None
    if end > path.stat().st_size:
        raise PassError(f"{path} is cut off: {AGAIN}")
    return reader
