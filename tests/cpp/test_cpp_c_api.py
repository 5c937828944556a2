"""The C API through ctypes: tokens, text, stop strings and log-probabilities are those of the
Python runtime, and ONNX Runtime's messages reach a program's callback."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from pathlib import Path

import pytest
from cpp_programs import program_at

from pass_runtime import GenerateOptions, SamplingParams, load

ALLOWED = ctypes.CFUNCTYPE(
    c_int, c_void_p, POINTER(c_int64), c_size_t, POINTER(ctypes.c_uint32), c_size_t
)


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
        ("speculative_max_concurrency", c_int64),
        ("prefix_cache", c_int),
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
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("repetition_penalty", c_double),
        ("bias_token_ids", POINTER(c_int64)),
        ("biases", POINTER(c_double)),
        ("bias_count", c_size_t),
        ("min_tokens", c_int64),
        ("allowed_token_ids", POINTER(c_int64)),
        ("allowed_token_count", c_size_t),
        ("bad_words", POINTER(POINTER(c_int64))),
        ("bad_word_lengths", POINTER(c_size_t)),
        ("bad_word_count", c_size_t),
        ("allowed_tokens", ALLOWED),
        ("allowed_tokens_user", c_void_p),
        ("cache_salt", c_char_p),
    )


class Stats(ctypes.Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "prompt_tokens",
            "cached_tokens",
            "generated_tokens",
            "passes",
            "steps",
            "drafted",
            "accepted",
        )
    )


ERROR_SIZE = c_size_t(500)


def loaded() -> tuple[ctypes.CDLL, LoadOptions, ctypes.Array]:
    """Return the library, default options for the CPU, and a buffer for errors."""
    library = ctypes.CDLL(str(program_at("libpass.so")))
    for name in ("pass_open", "pass_submit", "pass_text"):
        getattr(library, name).restype = c_void_p
    for name in ("pass_finish_reason", "pass_version"):
        getattr(library, name).restype = c_char_p
    library.pass_encode.restype = c_int64
    opening = LoadOptions()
    library.pass_init_load_options(byref(opening), c_size_t(ctypes.sizeof(opening)))
    assert opening.size == ctypes.sizeof(opening)
    opening.device = b"cpu"
    return library, opening, ctypes.create_string_buffer(ERROR_SIZE.value)


def open_session(
    library: ctypes.CDLL, bundle: Path, opening: LoadOptions, error: ctypes.Array
) -> c_void_p:
    session = library.pass_open(str(bundle).encode(), byref(opening), error, ERROR_SIZE)
    assert session is not None, error.value
    return c_void_p(session)


def test_messages_reach_the_callback_and_tokens_can_be_polled(random_bundle: Path):
    library, opening, error = loaded()
    messages = []
    callback = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)(
        lambda _, level, text: messages.append((level, text))
    )
    library.pass_set_log(callback, None, 1)
    session = open_session(library, random_bundle, opening, error)
    prompt, polled, written = (c_int64 * 3)(5, 6, 7), (c_int64 * 4)(), []
    generation = c_void_p(
        library.pass_submit(session, prompt, c_size_t(3), None, error, ERROR_SIZE)
    )
    assert generation.value is not None, error.value

    def poll() -> int:
        return library.pass_poll(generation, polled, c_size_t(4), error, ERROR_SIZE)

    assert poll() == 0 and library.pass_finish_reason(generation) is None
    while library.pass_finish_reason(generation) is None:
        assert library.pass_step(session, error, ERROR_SIZE) >= 0, error.value
        while (count := poll()) > 0:
            written += polled[:count]
        assert count == 0, error.value
    with load(random_bundle, device="cpu") as python:
        assert written == python.generate_ids([5, 6, 7], GenerateOptions()).result().token_ids
    library.pass_free(generation)
    library.pass_close(session)
    library.pass_set_log(None, None, 0)
    [of_kernels] = [text for _, text in messages if text.startswith(b"kernels ")]
    assert of_kernels.endswith(b"/libpass_kernels.so")
    assert len(messages) > 1 and all(
        level in (1, 2) and (text == of_kernels or text.startswith(b"onnxruntime: "))
        for level, text in messages
    )

    opening.device = b"cpu:1"
    path = str(random_bundle).encode()
    assert library.pass_open(path, byref(opening), error, ERROR_SIZE) is None
    assert error.value == (
        b"device 'cpu:1': cpu takes no number; only cuda, tensorrt, tensorrt-rtx, "
        b"tensorrt-rtx-ep do, as in cuda:1"
    )


@pytest.mark.parametrize(("prefix_cache", "max_concurrency"), [(1, -1), (0, 0)])
def test_a_session_reuses_prompts_and_drafts_as_its_options_say(
    random_bundle: Path, prefix_cache: int, max_concurrency: int
):
    library, opening, error = loaded()
    assert (opening.prefix_cache, opening.speculative_max_concurrency) == (1, -1)
    opening.prefix_cache, opening.speculative_max_concurrency = prefix_cache, max_concurrency
    session = open_session(library, random_bundle, opening, error)
    options, prompt, tokens = Options(), (c_int64 * 40)(*range(40)), (c_int64 * 40)()
    library.pass_init_generate_options(byref(options), c_size_t(ctypes.sizeof(options)))
    options.max_new_tokens, options.ignore_eos, options.plan = 20, 1, b"fused"
    all_stats = []
    for salt in (None, None, b"another", b"another"):
        options.cache_salt = salt
        arguments = (session, prompt, c_size_t(40), byref(options), error, ERROR_SIZE)
        generation, stats = c_void_p(library.pass_submit(*arguments)), Stats()
        assert generation.value is not None, error.value
        while library.pass_next(generation, tokens, c_size_t(40), error, ERROR_SIZE) > 0:
            pass
        library.pass_read_stats(generation, byref(stats), c_size_t(ctypes.sizeof(stats)))
        library.pass_free(generation)
        all_stats.append(stats)
    library.pass_close(session)
    assert [stats.cached_tokens for stats in all_stats] == [0, 32 * prefix_cache] * 2
    assert [stats.drafted > 0 for stats in all_stats] == [max_concurrency != 0] * 4


def test_penalties_constraints_and_allowed_tokens_are_those_of_python(random_bundle: Path):
    library, opening, error = loaded()
    session = open_session(library, random_bundle, opening, error)

    def written(options: Options) -> list[int]:
        """Return the tokens that a request writes, or [-1] if it fails."""
        prompt, read, tokens = (c_int64 * 3)(5, 6, 7), (c_int64 * 40)(), []
        arguments = (session, prompt, c_size_t(3), byref(options), error, ERROR_SIZE)
        generation = c_void_p(library.pass_submit(*arguments))
        assert generation.value is not None, error.value
        while (count := library.pass_next(generation, read, c_size_t(40), error, ERROR_SIZE)) > 0:
            tokens += read[:count]
        library.pass_free(generation)
        return tokens if count == 0 else [-1]

    def options_with(plan: bytes) -> Options:
        options = Options()
        library.pass_init_generate_options(byref(options), c_size_t(ctypes.sizeof(options)))
        options.max_new_tokens, options.ignore_eos, options.plan = 20, 1, plan
        return options

    allowed_ids = [*range(20, 60)]
    with load(random_bundle, device="cpu") as python:
        sampling = SamplingParams(presence_penalty=1.5, logit_bias={30: 2.0, 31: -9.0})
        python_options = GenerateOptions(
            20, sampling, plan="ar", ignore_eos=True, allowed_token_ids=allowed_ids
        )
        expected = python.generate_ids([5, 6, 7], python_options).result().token_ids
    text_lengths: list[int] = []

    def allow_same_parity(_user, _text, count, allowed, words) -> int:
        """Allow even tokens at even positions of the text, and odd tokens at odd positions. Report
        an error at position 15 if `fails`."""
        text_lengths.append(count)
        for word in range(words):
            allowed[word] &= 0x55555555 << count % 2
        return int(count == 15 and fails)

    function, fails = ALLOWED(allow_same_parity), False
    for plan in (b"ar", b"two-pass", b"fused"):
        options = options_with(plan)
        options.presence_penalty = 1.5
        options.bias_token_ids = (c_int64 * 2)(30, 31)
        options.biases = (c_double * 2)(2, -9)
        options.bias_count = 2
        options.allowed_token_ids = (c_int64 * len(allowed_ids))(*allowed_ids)
        options.allowed_token_count = len(allowed_ids)
        assert written(options) == expected
        word = (c_int64 * 2)(*expected[:2])
        options.bad_words = (POINTER(c_int64) * 1)(ctypes.cast(word, POINTER(c_int64)))
        options.bad_word_lengths, options.bad_word_count = (c_size_t * 1)(2), 1
        without_bad_word = written(options)
        assert without_bad_word[0] == expected[0] and without_bad_word[1] != expected[1]
        options = options_with(plan)
        options.allowed_tokens = function
        assert [token % 2 for token in written(options)] == [position % 2 for position in range(20)]
    fails = True
    assert written(options) == [-1] and error.value == b"allowed_tokens reported an error"
    assert 15 in text_lengths
    library.pass_close(session)


def test_text_stop_strings_and_log_probabilities_are_those_of_python(tiny_bundle: Path):
    library, opening, error = loaded()
    options = Options()
    library.pass_init_generate_options(byref(options), c_size_t(ctypes.sizeof(options)))
    assert options.size == ctypes.sizeof(options)
    opening.text = 1
    session = library.pass_open(str(tiny_bundle).encode(), byref(opening), error, ERROR_SIZE)
    if session is None and b"onnxruntime-genai" in error.value:
        pytest.skip("onnxruntime-genai is not installed (extra peers)")
    assert session is not None, error.value
    ids = (c_int64 * 64)()
    prompt = "the cat sat on the mat"
    length = library.pass_encode(
        c_void_p(session), prompt.encode(), ids, c_size_t(64), error, ERROR_SIZE
    )
    assert length > 0, error.value

    with load(tiny_bundle, device="cpu") as python:
        text = python.generate(prompt, GenerateOptions(24, ignore_eos=True)).result().text
        stop = text[len(text) // 2 :][:2]  # ends the text in its middle
        with_stop = GenerateOptions(24, ignore_eos=True, stop=(stop,), logprobs=3)
        expected = python.generate(prompt, with_stop).result()

    options.max_new_tokens, options.ignore_eos, options.logprobs = 24, 1, 3
    options.stop, options.stop_count = (c_char_p * 1)(stop.encode()), 1
    generation = library.pass_submit(
        c_void_p(session), ids, c_size_t(length), byref(options), error, ERROR_SIZE
    )
    assert generation is not None, error.value
    read, written, logprobs = (c_int64 * 2)(), [], []
    while (
        count := library.pass_next(c_void_p(generation), read, c_size_t(2), error, ERROR_SIZE)
    ) > 0:
        written += read[:count]
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
    assert written == [token.id for token in expected.tokens]
    for (own, top), token in zip(logprobs, expected.tokens, strict=True):
        assert own == pytest.approx(token.logprobs.logprob, abs=1e-5)
        assert top == pytest.approx(dict(token.logprobs.top), abs=1e-5)
    library.pass_free(c_void_p(generation))
    library.pass_close(c_void_p(session))
