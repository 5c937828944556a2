"""On the CPU every window writes the same bits of a token's K/V."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_sessions import submit_together
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.bundle.read import read_manifest
from pass_runtime.decode.prefix_cache import BLOCK_TOKENS, common_prefix
from same_text import cache_entries

PROMPT = np.random.default_rng(0).integers(4, 200, 150).tolist()
EXAMPLES = itertools.count()
"""Numbers that make the salts of each example of hypothesis new."""
CHUNKS = {"64": [64, 64], "16": [16] * 8, "1": [1] * 128, "ragged": [10, 64, 3, 40, 11]}
"""Lengths of chunks, 128 tokens in all."""


@pytest.fixture(scope="module", params=["full", "int8", "int4"])
def bundle(request: pytest.FixtureRequest, in_format: Callable[[str], Path]) -> Path:
    return in_format(request.param)


def prefilled(bundle: Path, chunks: list[int], slots: int, slot: int) -> np.ndarray:
    backend = OrtBackend(bundle, read_manifest(bundle), "cpu", threads=1, max_batch_size=slots)
    assert backend.capabilities.same_entries
    backend.resize(512, [0] * slots)
    length = 0
    for count in chunks:
        width = min(width for width in backend.capabilities.prefill_widths if width >= count)
        backend.prefill(slot, length, PROMPT[length : length + count], width)
        length += count
    entries = cache_entries(backend, length, slot)
    backend.close()
    return entries


@pytest.mark.parametrize("slots", [1, 3])
def test_chunks_of_every_length_write_the_same_entries(bundle: Path, slots: int):
    whole = prefilled(bundle, [128], slots, 0)
    for name, chunks in CHUNKS.items():
        assert np.array_equal(prefilled(bundle, chunks, slots, slots - 1), whole), name


@pytest.mark.parametrize("slots", [1, 2])
def test_decoding_writes_the_entries_of_a_prefill(bundle: Path, slots: int):
    for plan, sampling in (
        ("ar", SamplingParams()),
        ("fused", SamplingParams(0.9, seed=4)),
        ("two-pass", SamplingParams()),
    ):
        with load(bundle, "cpu", threads=1, max_batch_size=slots) as session:
            options = GenerateOptions(60, sampling, plan=plan, ignore_eos=True)
            written = session.generate_ids(PROMPT[:20], options).result().token_ids
            decoded = cache_entries(session.backend, 79)
        with load(bundle, "cpu", threads=1, max_batch_size=slots) as session:
            session.generate_ids([*PROMPT[:20], *written], GenerateOptions(1, plan="ar")).result()
            assert np.array_equal(cache_entries(session.backend, 79), decoded), plan


@pytest.fixture(scope="module")
def session(subset_bundle: Path) -> Session:
    return load(subset_bundle, "cpu", threads=1, max_batch_size=3)


def test_prompts_share_whole_blocks(tiny_bundle: Path):
    options = GenerateOptions(4, plan="ar", ignore_eos=True)
    with load(tiny_bundle, "cpu", threads=1, max_batch_size=2) as session:
        first = session.generate_ids([*PROMPT[:100], 5], options).result()
        second = session.generate_ids([*PROMPT[:100], 6, 7], options).result()
        assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, 96)
        with_answer = [*PROMPT[:100], 6, 7, *second.token_ids, 9]  # 105 tokens are cached
        answered = session.generate_ids(with_answer, options).result()
        assert answered.stats.cached_tokens == 96
        prompts = [[*PROMPT[100:148], 8, last] for last in (3, 4)]
        streams = submit_together(session, [(prompt, options) for prompt in prompts])
        assert sorted(stream.result().stats.cached_tokens for stream in streams) == [0, 48]


def test_the_last_token_of_an_answer_is_not_in_the_cache(tiny_bundle: Path):
    """The last token was never a root, so its K/V were not written."""
    for length, cached_tokens in ((107, 96), (108, 112)):  # of 111 and 112 entries
        prompt, options = PROMPT[:length], GenerateOptions(5, plan="ar", ignore_eos=True)
        with load(tiny_bundle, "cpu", threads=1) as session:
            answer = session.generate_ids(prompt, options).result().token_ids
            again = session.generate_ids([*prompt, *answer, 9], GenerateOptions(1)).result()
            assert again.stats.cached_tokens == cached_tokens


def test_nothing_is_shared_without_the_prefix_cache(tiny_bundle: Path):
    options = GenerateOptions(4, plan="ar", ignore_eos=True)
    with load(tiny_bundle, "cpu", threads=1, prefix_cache=False) as session:
        for _ in range(2):
            done = session.generate_ids([*PROMPT[:100], 5], options).result()
            assert done.stats.cached_tokens == 0


@settings(derandomize=True, deadline=None, max_examples=25)
@given(data=st.data())
def test_requests_share_whole_blocks_with_requests_of_their_salt_alone(
    session: Session, data: st.DataObject
):
    """Requests come together and one after another, so that entries come from slots in use, from
    free slots, and from the prefix store."""
    example = next(EXAMPLES)
    seen: dict[str, list[list[int]]] = {}
    for _ in range(data.draw(st.integers(1, 3))):
        requests = []
        for _ in range(data.draw(st.integers(1, 4))):
            prompt = PROMPT[: data.draw(st.integers(1, 100))]
            salt = f"{data.draw(st.sampled_from('ab'))} of example {example}"
            reuse, seed = data.draw(st.booleans()), data.draw(st.integers(0, 1 << 30))
            options = GenerateOptions(6, SamplingParams(1.0, seed=seed), plan="ar", ignore_eos=True)
            requests.append((prompt, replace(options, reuse_prefix=reuse, cache_salt=salt)))
        streams = submit_together(session, requests)
        for stream, (prompt, options) in zip(streams, requests, strict=True):
            seen.setdefault(options.cache_salt, []).append([*prompt, *stream.result().token_ids])
        for stream, (prompt, options) in zip(streams, requests, strict=True):
            own = [*prompt, *stream.token_ids]
            others = seen[options.cache_salt].copy()
            others.remove(own)
            longest = max((common_prefix(text, prompt[:-1]) for text in others), default=0)
            assert stream.stats.cached_tokens <= longest
            assert stream.stats.cached_tokens % BLOCK_TOKENS == 0


def test_guessing_a_token_of_another_prompt_shows_nothing(tiny_bundle: Path):
    """A client knows the beginning of a prompt, and guesses its next tokens."""
    secret = PROMPT[100:108]  # from the middle of a block to its end
    options = GenerateOptions(1, plan="ar")
    with load(tiny_bundle, "cpu", threads=1, max_batch_size=2) as session:
        session.generate_ids([*PROMPT[:40], *secret, 5, 6], options).result()

        def cached_tokens(guess: list[int], salt: str = "") -> int:
            salted = replace(options, cache_salt=salt)
            done = session.generate_ids([*PROMPT[:40], *guess, 7], salted).result()
            return done.stats.cached_tokens

        for right_tokens in range(8):
            assert cached_tokens([*secret[:right_tokens], 3]) == 32
        assert cached_tokens(secret) == 48
        assert cached_tokens(secret, "another") == 0


def test_a_shrinking_cache_keeps_the_sequences_that_are_decoded(tiny_bundle: Path):
    """The cache shrinks when a short request follows a long one."""
    prompt = PROMPT[50:90]
    counts = [(PROMPT * 3, 30), (prompt, 60), (PROMPT[20:25], 1)]
    requests = [(ids, GenerateOptions(count, plan="ar", ignore_eos=True)) for ids, count in counts]
    with load(tiny_bundle, "cpu", threads=1, max_batch_size=2) as session:
        capacities: list[int] = []
        resize = session.backend.resize

        def resize_and_record(capacity, lengths):
            capacities.append(capacity)
            resize(capacity, lengths)

        session.backend.resize = resize_and_record
        texts = [stream.result().token_ids for stream in submit_together(session, requests)]
        assert any(later < earlier for earlier, later in itertools.pairwise(capacities))
        next_turn = [*prompt, *texts[1], 9]
        again = session.generate_ids(next_turn, GenerateOptions(1, plan="ar")).result()
        assert again.stats.cached_tokens == 96  # of 99
