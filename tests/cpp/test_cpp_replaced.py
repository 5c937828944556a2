"""The C++ runtime, whose bundle is replaced, removed or written into while a session is open."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int64, c_size_t, c_void_p
from pathlib import Path

import pytest
from replacing import REPLACEMENTS, copy_bundle, write_into
from test_cpp_c_api import ERROR_SIZE, Options, loaded, open_session

Write = Callable[..., list[int] | str]
"""Decodes a request with these fields of `Options`. Returns its tokens, or the error."""
LATER: list[dict[str, object]] = [
    {"plan": b"fused"},
    {"plan": b"two-pass", "temperature": 0.9},
    {"temperature": 0.9, "top_k": 50},
    {"logprobs": 2},
    {"presence_penalty": 1.5},
]
"""Requests that need further graphs than plain greedy decoding."""


@contextmanager
def writing(bundle: Path) -> Iterator[Write]:
    """Open a session."""
    library, opening, error = loaded()
    session = open_session(library, bundle, opening, error)

    def write(plan: bytes = b"ar", **fields: object) -> list[int] | str:
        options, prompt, read = Options(), (c_int64 * 3)(5, 6, 7), (c_int64 * 8)()
        library.pass_init_generate_options(byref(options), c_size_t(ctypes.sizeof(options)))
        fields |= {"plan": plan, "max_new_tokens": 8, "ignore_eos": 1, "has_seed": 1, "seed": 1}
        for name, value in fields.items():
            setattr(options, name, value)
        arguments = (session, prompt, c_size_t(3), byref(options), error, ERROR_SIZE)
        generation, tokens = c_void_p(library.pass_submit(*arguments)), []
        assert generation.value is not None, error.value
        while (count := library.pass_next(generation, read, c_size_t(8), error, ERROR_SIZE)) > 0:
            tokens += read[:count]
        library.pass_free(generation)
        return tokens if count == 0 else error.value.decode()

    yield write
    library.pass_close(session)


@pytest.fixture
def bundle(head_bundle: Path, tmp_path: Path) -> Path:
    return copy_bundle(head_bundle, tmp_path)


@pytest.mark.parametrize("way", REPLACEMENTS)
def test_a_session_goes_on_with_the_bundle_that_it_opened(
    bundle: Path, head_bundle: Path, subset_bundle: Path, way: str
):
    with writing(head_bundle) as write:
        expected = [write(**fields) for fields in LATER]
    with writing(bundle) as write:
        write()
        REPLACEMENTS[way](bundle, subset_bundle)
        assert [write(**fields) for fields in LATER] == expected
    assert all(len(tokens) == 8 for tokens in expected), expected


@pytest.mark.parametrize("name", ["trunk.onnx.data", "tail.noise.data", "tail.head.data"])
def test_a_session_ends_when_somebody_writes_into_a_file_of_its_bundle(bundle: Path, name: str):
    how = f"{name} was written while the bundle was open"
    with writing(bundle) as write:
        assert len(write()) == 8
        write_into(bundle / name)
        assert write() == f"the bundle has changed ({how}): open it again"
