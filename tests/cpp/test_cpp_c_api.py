"""The C API writes what the Python runtime writes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import pytest
from c_api import ALLOWED, CSession, array

from pass_runtime import GenerateOptions, SamplingParams, load


def test_messages_reach_the_callback_and_tokens_can_be_polled(random_bundle: Path):
    messages: list[tuple[int, bytes]] = []
    callback = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)(
        lambda _, level, text: messages.append((level, text))
    )
    with CSession(random_bundle) as session:
        session.library.pass_set_log(callback, None, 1)
        with CSession(random_bundle):
            pass
        session.library.pass_set_log(None, None, 0)
        generation, written = session.submit([5, 6, 7]), []
        assert session.next(generation, 4, "pass_poll") == []
        while session.library.pass_finish_reason(generation) is None:
            session.checked(session.library.pass_step(session.handle, *session.error))
            while tokens := session.next(generation, 4, "pass_poll"):
                written += tokens
        session.library.pass_free(generation)
    with load(random_bundle, device="cpu") as python:
        assert written == python.generate_ids([5, 6, 7], GenerateOptions()).result().token_ids
    (of_kernels,) = (text for _, text in messages if text.startswith(b"kernels "))
    assert of_kernels.endswith(b"/libpass_kernels.so")
    assert len(messages) > 1 and all(
        level in (1, 2) and (text == of_kernels or text.startswith(b"onnxruntime: "))
        for level, text in messages
    )
    with pytest.raises(RuntimeError) as refused:
        CSession(random_bundle, device=b"cpu:1")
    assert str(refused.value) == (
        "device 'cpu:1': cpu takes no number; only cuda, tensorrt do, as in cuda:1"
    )


@pytest.mark.parametrize(("prefix_cache", "max_concurrency"), [(1, -1), (0, 0)])
def test_a_session_reuses_prompts_and_drafts_as_its_options_say(
    random_bundle: Path, prefix_cache: int, max_concurrency: int
):
    options = {"prefix_cache": prefix_cache, "speculative_max_concurrency": max_concurrency}
    all_stats = []
    with CSession(random_bundle, **options) as session:
        for salt in (None, None, b"another", b"another"):
            session.write(tuple(range(40)), max_new_tokens=20, plan=b"fused", cache_salt=salt)
            all_stats.append(session.stats)
    assert [stats.cached_tokens for stats in all_stats] == [0, 32 * prefix_cache] * 2
    assert [stats.drafted > 0 for stats in all_stats] == [max_concurrency != 0] * 4


def test_penalties_constraints_and_allowed_tokens_are_those_of_python(random_bundle: Path):
    allowed_ids = [*range(20, 60)]
    with load(random_bundle, device="cpu") as python:
        sampling = SamplingParams(presence_penalty=1.5, logit_bias={30: 2.0, 31: -9.0})
        options = GenerateOptions(
            20, sampling, plan="ar", ignore_eos=True, allowed_token_ids=allowed_ids
        )
        expected = python.generate_ids([5, 6, 7], options).result().token_ids
    text_lengths: list[int] = []

    def allow_same_parity(_user, _text, count, allowed, words) -> int:
        """Allow even tokens at even positions, and odd ones at odd positions. Report an error at
        position 15 if `fails`."""
        text_lengths.append(count)
        for word in range(words):
            allowed[word] &= 0x55555555 << count % 2
        return int(count == 15 and fails)

    function, fails = ALLOWED(allow_same_parity), False
    word = array(c_int64, expected[:2])
    penalties = {
        "presence_penalty": 1.5,
        "bias_token_ids": array(c_int64, [30, 31]),
        "biases": array(c_double, [2, -9]),
        "bias_count": 2,
        "allowed_token_ids": array(c_int64, allowed_ids),
        "allowed_token_count": len(allowed_ids),
    }
    bad_word = {
        "bad_words": array(POINTER(c_int64), [ctypes.cast(word, POINTER(c_int64))]),
        "bad_word_lengths": array(c_size_t, [2]),
        "bad_word_count": 1,
    }
    with CSession(random_bundle) as session:
        for plan in (b"ar", b"two-pass", b"fused"):
            fixed = {"plan": plan, "max_new_tokens": 20}
            assert session.write(**fixed, **penalties) == expected
            first, second, *_ = session.write(**fixed, **penalties, **bad_word)
            assert first == expected[0] and second != expected[1]
            written = session.write(**fixed, allowed_tokens=function)
            assert [token % 2 for token in written] == [position % 2 for position in range(20)]
        fails = True
        with pytest.raises(RuntimeError, match="allowed_tokens reported an error"):
            session.write(**fixed, allowed_tokens=function)
    assert 15 in text_lengths


def test_text_stop_strings_and_log_probabilities_are_those_of_python(tiny_bundle: Path):
    try:
        session = CSession(tiny_bundle, text=1)
    except RuntimeError as error:
        if "onnxruntime-genai" in str(error):
            pytest.skip("onnxruntime-genai is not installed (extra peers)")
        raise
    prompt, ids, library = "the cat sat on the mat", (c_int64 * 64)(), session.library
    arguments = (session.handle, prompt.encode(), ids, c_size_t(64))
    length = session.checked(library.pass_encode(*arguments, *session.error))
    with load(tiny_bundle, device="cpu") as python:
        text = python.generate(prompt, GenerateOptions(24, ignore_eos=True)).result().text
        stop = text[len(text) // 2 :][:2]  # ends the text in its middle
        with_stop = GenerateOptions(24, ignore_eos=True, stop=(stop,), logprobs=3)
        expected = python.generate(prompt, with_stop).result()

    stops = {"stop": array(c_char_p, [stop.encode()]), "stop_count": 1}
    fields = {"max_new_tokens": 24, "ignore_eos": 1, "logprobs": 3, **stops}
    generation, written, logprobs = session.submit(ids[:length], **fields), [], []
    while tokens := session.next(generation, 2):
        written += tokens
        for index in range(len(tokens)):
            own, top, tops = c_float(), (c_int64 * 3)(), (c_float * 3)()
            place = (generation, c_size_t(index), byref(own), top, tops, c_size_t(3))
            assert library.pass_token_logprobs(*place) == 3
            logprobs.append((own.value, dict(zip(top, tops, strict=True))))
    size = c_size_t()
    final_text = library.pass_text(generation, byref(size))
    assert ctypes.string_at(final_text, size.value).decode() == expected.text
    assert library.pass_finish_reason(generation) == b"stop"
    assert written == [token.id for token in expected.tokens]
    for (own, top), token in zip(logprobs, expected.tokens, strict=True):
        assert own == pytest.approx(token.logprobs.logprob, abs=1e-5)
        assert top == pytest.approx(dict(token.logprobs.top), abs=1e-5)
    library.pass_free(generation)
    library.pass_close(session.handle)
