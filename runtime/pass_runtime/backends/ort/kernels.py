"""Finds the library of CPU kernels (runtime/kernels): ONNX Runtime operators, which the bundle's
trunk for the CPU consists of."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import onnxruntime as ort

SETTING = "PASS_KERNELS"
"""The environment variable with another library's path, or `off`, as if there were none."""
LIBRARY = Path(__file__).parents[2] / "libpass_kernels.so"
HOW_TO_GET = (
    "install a C++ compiler, then reinstall pass-toolkit (in a clone: python "
    "runtime/kernels/build.py)"
)


class Kernels(NamedTuple):
    """A library that was loaded. name: its kernels for this CPU, such as avx512-vnni."""

    path: Path
    name: str


def library() -> Path | None:
    """Return the library's path, or None if there is none that can be loaded."""
    found = find_kernels()
    return found.path if isinstance(found, Kernels) else None


def kernels_name() -> str | None:
    found = find_kernels()
    return found.name if isinstance(found, Kernels) else None


def find_kernels() -> Kernels | str:
    """Return the library, or the reason why there is none. A process loads a library once."""
    setting = os.environ.get(SETTING)
    if setting == "off":
        return f"{SETTING} is off"
    return _load(Path(setting) if setting else LIBRARY)


@cache
def _load(path: Path) -> Kernels | str:
    try:
        if _is_cut_off(path):
            return f"{path} is damaged"
        loaded = ctypes.CDLL(str(path))
        loaded.pass_kernels_name.restype = ctypes.c_char_p
        ort.SessionOptions().register_custom_ops_library(str(path))
        return Kernels(path, loaded.pass_kernels_name().decode())
    except FileNotFoundError:
        return f"there is no {path}"
    except Exception as error:  # onnxruntime raises bare classes of its own
        return " ".join(str(error).split())


def _is_cut_off(path: Path) -> bool:
    """Whether the end of an ELF file is missing. Loading such a file could crash the process."""
    content = path.read_bytes()
    sections, count = int.from_bytes(content[40:48], "little"), content[60:62]
    end = sections + 64 * int.from_bytes(count, "little")
    return content[:6] == b"\x7fELF\x02\x01" and end > len(content)
