"""The C API through ctypes: text, stop strings and log-probabilities as the Python runtime has them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

import pytest
from cpp_programs import program_at

from pass_runtime import GenerateOptions, load


class LoadOptions(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("device", c_char_p),
        ("onnxruntime", c_char_p),
        ("threads", c_int),
        ("max_batch_size", c_int),
        ("max_queue", c_int64),
        ("capacity", c_int64),
        ("verify", c_int),
        ("text", c_int),
    )


class Options(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("max_new_tokens", c_int64),
        ("temperature", c_double),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("min_p", c_double),
        ("has_seed", c_int),
        ("seed", c_uint64),
        ("plan", c_char_p),
        ("draft", c_char_p),
        ("lookahead", c_int),
        ("ignore_eos", c_int),
        ("stop_token_ids", POINTER(c_int64)),
        ("stop_token_count", c_size_t),
        ("stop", POINTER(c_char_p)),
        ("stop_count", c_size_t),
        ("logprobs", c_int),
    )


def test_text_stop_strings_and_log_probabilities(tiny_bundle: Path):
    library = ctypes.CDLL(str(program_at("libpass.so")))
    for name in ("pass_open", "pass_submit", "pass_text"):
        getattr(library, name).restype = c_void_p
    for name in ("pass_finish_reason", "pass_version"):
        getattr(library, name).restype = c_char_p
    library.pass_encode.restype = c_int64
    error = ctypes.create_string_buffer(500)
    opening, options = LoadOptions(), Options()
    library.pass_init_load_options(byref(opening), c_size_t(ctypes.sizeof(opening)))
    library.pass_init_generate_options(byref(options), c_size_t(ctypes.sizeof(options)))
    assert (opening.size, options.size) == (ctypes.sizeof(opening), ctypes.sizeof(options))
    opening.device, opening.text = b"cpu", 1
    session = library.pass_open(str(tiny_bundle).encode(), byref(opening), error, c_size_t(500))
    if session is None and b"onnxruntime-genai" in error.value:
        pytest.skip("onnxruntime-genai is not installed (extra peers)")
    assert session is not None, error.value
    ids = (c_int64 * 64)()
    prompt = "the cat sat on the mat"
    length = library.pass_encode(c_void_p(session), prompt.encode(), ids, c_size_t(64), error, c_size_t(500))
    assert length > 0, error.value

    with load(tiny_bundle, device="cpu") as python:
        whole = python.generate(prompt, GenerateOptions(max_new_tokens=24, ignore_eos=True)).result().text
        stop = whole[len(whole) // 2 :][:2]
        expected = python.generate(
            prompt, GenerateOptions(max_new_tokens=24, ignore_eos=True, stop=(stop,), logprobs=3)
        ).result()

    options.max_new_tokens, options.ignore_eos, options.logprobs = 24, 1, 3
    options.stop, options.stop_count = (c_char_p * 1)(stop.encode()), 1
    generation = library.pass_submit(c_void_p(session), ids, c_size_t(length), byref(options), error, c_size_t(500))
    assert generation is not None, error.value
    tokens, found, logprobs = (c_int64 * 2)(), [], []
    while (count := library.pass_next(c_void_p(generation), tokens, c_size_t(2), error, c_size_t(500))) > 0:
        found += tokens[:count]
        for index in range(count):
            own, top, tops = c_float(), (c_int64 * 3)(), (c_float * 3)()
            arguments = (c_void_p(generation), c_size_t(index), byref(own), top, tops, c_size_t(3))
            assert library.pass_token_logprobs(*arguments) == 3
            logprobs.append((own.value, dict(zip(top, tops, strict=True))))
    assert count == 0, error.value
    size = c_size_t()
    text = library.pass_text(c_void_p(generation), byref(size))
    assert ctypes.string_at(text, size.value).decode() == expected.text
    assert library.pass_finish_reason(c_void_p(generation)) == b"stop"
    assert found == [token.id for token in expected.tokens]
    for (own, top), token in zip(logprobs, expected.tokens, strict=True):
        assert own == pytest.approx(token.logprobs.logprob, abs=1e-5)
        assert top == pytest.approx(dict(token.logprobs.top), abs=1e-5)
    library.pass_free(c_void_p(generation))
    library.pass_close(c_void_p(session))
