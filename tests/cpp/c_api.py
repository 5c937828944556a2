"""Sessions of the C API, through ctypes."""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from types import TracebackType

from cpp_programs import ROOT, program_at

ALLOWED = ctypes.CFUNCTYPE(
    c_int, c_void_p, POINTER(c_int64), c_size_t, POINTER(ctypes.c_uint32), c_size_t
)
TYPES = {
    "size_t": c_size_t,
    "int": c_int,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "double": c_double,
    "pass_allowed_tokens": ALLOWED,
    "void*": c_void_p,
    "const char*": c_char_p,
    "const char* const*": POINTER(c_char_p),
    "const int64_t*": POINTER(c_int64),
    "const int64_t* const*": POINTER(POINTER(c_int64)),
    "const double*": POINTER(c_double),
    "const size_t*": POINTER(c_size_t),
}


def struct(name: str) -> type[ctypes.Structure]:
    """Return a struct of pass.h."""
    header = (ROOT / "runtime/cpp/include/pass/pass.h").read_text(encoding="utf-8")
    (body,) = re.findall(rf"typedef struct {name} {{(.*?)}} {name};", header, re.DOTALL)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    fields = [
        (field, TYPES[kind.strip()])
        for kind, names in re.findall(r"([\w ]*?\w(?:\*(?: const\*)?)?) (\w+(?:,\s+\w+)*);", body)
        for field in re.split(r",\s+", names)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


LoadOptions, Options, Stats = map(
    struct, ("pass_load_options", "pass_generate_options", "pass_stats")
)


def array(kind: type, values: list | tuple) -> ctypes.Array:
    return (kind * len(values))(*values)


class CSession:
    """Raises RuntimeError with the library's message if a call fails."""

    def __init__(self, bundle: Path, **options: object) -> None:
        self.library = library = ctypes.CDLL(str(program_at("libpass.so")))
        for name in ("pass_open", "pass_submit", "pass_text"):
            getattr(library, name).restype = c_void_p
        library.pass_finish_reason.restype = c_char_p
        library.pass_encode.restype = c_int64
        self._buffer = ctypes.create_string_buffer(500)
        self.error = (self._buffer, c_size_t(500))
        opening = LoadOptions()
        library.pass_init_load_options(byref(opening), c_size_t(ctypes.sizeof(opening)))
        assert opening.size == ctypes.sizeof(opening)
        for name, value in {"device": b"cpu", **options}.items():
            setattr(opening, name, value)
        path = str(bundle).encode()
        self.handle = c_void_p(self.checked(library.pass_open(path, byref(opening), *self.error)))

    def __enter__(self) -> CSession:
        return self

    def __exit__(
        self, kind: type | None, error: Exception | None, trace: TracebackType | None
    ) -> None:
        self.library.pass_close(self.handle)

    def checked(self, result: int | None) -> int:
        if result is None or result < 0:
            raise RuntimeError(self._buffer.value.decode())
        return result

    def submit(self, prompt: list[int], **fields: object) -> c_void_p:
        """Submit a request with these fields of `Options`."""
        options = Options()
        self.library.pass_init_generate_options(byref(options), c_size_t(ctypes.sizeof(options)))
        for name, value in fields.items():
            setattr(options, name, value)
        ids, count = array(c_int64, prompt), c_size_t(len(prompt))
        submitted = self.library.pass_submit(self.handle, ids, count, byref(options), *self.error)
        return c_void_p(self.checked(submitted))

    def next(self, generation: c_void_p, room: int = 40, function: str = "pass_next") -> list[int]:
        tokens = (c_int64 * room)()
        call = getattr(self.library, function)
        return tokens[: self.checked(call(generation, tokens, c_size_t(room), *self.error))]

    def write(self, prompt: tuple[int, ...] = (5, 6, 7), **fields: object) -> list[int]:
        """Decode a request, and return its tokens. `stats` are then those of the request."""
        generation, written = self.submit([*prompt], ignore_eos=1, **fields), []
        try:
            while tokens := self.next(generation):
                written += tokens
            self.stats = Stats()
            size = c_size_t(ctypes.sizeof(self.stats))
            self.library.pass_read_stats(generation, byref(self.stats), size)
        finally:
            self.library.pass_free(generation)
        return written
