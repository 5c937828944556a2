from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime import GenerateOptions, Session, load
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.bundle.read import read_manifest
from pass_runtime.decode.prefix_cache import (
    MAX_SAVED_PREFIXES,
    MIN_SAVED_TOKENS,
    PrefixStore,
    common_prefix,
)
from same_text import cache_entries

PROMPT = np.random.default_rng(0).integers(4, 200, 400).tolist()
CAPACITY, ROOM = 256, 400
"""The KV capacity of a slot, and how many tokens fit into the budget."""


@pytest.fixture(scope="module")
def backend(tiny_bundle: Path) -> Iterator[OrtBackend]:
    backend = OrtBackend(
        tiny_bundle, read_manifest(tiny_bundle), "cpu", threads=1, max_batch_size=2
    )
    backend.resize(CAPACITY, [0, 0])
    yield backend
    backend.close()


def write(backend: OrtBackend, slot: int, values: np.ndarray) -> None:
    """Fill the first cache entries of `slot`, each with one of `values` [entries] plus the number
    of the tensor (0 to 2 * layers - 1)."""
    _, heads, capacity, size = backend.cache.shape(1)
    for number, (_, address) in enumerate(backend.cache.addresses(slot)):
        entries = np.zeros((heads, capacity, size), backend.cache.dtype)
        entries[:, : len(values)] = values[:, None] + number
        backend.memory.upload(address, entries)


SaltedText = tuple[list[int], str]
# Often two texts begin alike, or one is the beginning of the other.
texts = st.builds(
    lambda token, count, ends: [token] * count + [9] * (40 * ends),
    st.integers(0, 4),
    st.integers(1, 120),
    st.integers(0, 3),
)
salted_texts = st.tuples(texts, st.sampled_from(["", "a"]))


def entries_of(text: list[int], salt: str) -> np.ndarray:
    """Return a value for each cache entry of a text: it depends on all tokens up to the entry, as
    in a model, and on the salt, so that an entry of another salt is noticed."""
    return np.cumsum(text).astype(np.float32) + 1000 * len(salt)


@settings(max_examples=60, deadline=None)
@given(
    saved=st.lists(salted_texts, max_size=8), prompts=st.lists(salted_texts, min_size=1, max_size=4)
)
def test_saved_entries_are_loaded_for_prompts_that_begin_alike(
    backend: OrtBackend, saved: list[SaltedText], prompts: list[SaltedText]
):
    budget = backend.cache.saved_bytes(ROOM)
    store = PrefixStore(backend.cache, backend.memory, budget)
    block_count = len(backend.memory._blocks)
    for text, salt in saved:
        write(backend, 0, entries_of(text, salt))
        store.save(0, text, salt)
        assert store.used_bytes <= budget
        prefix, count = store.match(text, salt)
        if MIN_SAVED_TOKENS <= len(text) <= ROOM:
            assert prefix is not None and count == len(text), "the text saved last is kept"
    for prompt, salt in prompts:
        prefix, count = store.match(prompt, salt)
        if prefix is None:
            continue
        write(backend, 1, np.zeros(1, np.float32))
        store.load(prefix, 1, count)
        write(backend, 0, entries_of(prompt, salt))
        assert np.array_equal(*(cache_entries(backend, count, slot) for slot in (1, 0)))
        assert count == common_prefix(prefix.tokens, prompt)
    for prefix in list(store._saved):
        store._drop(prefix)
    assert len(backend.memory._blocks) == block_count and store.used_bytes == 0


def test_the_text_used_longest_ago_is_dropped(backend: OrtBackend):
    store = PrefixStore(backend.cache, backend.memory, backend.cache.saved_bytes(ROOM))
    first, second, third = ([number] * 150 for number in (1, 2, 3))
    store.save(0, first, "")
    store.save(0, second, "")
    store.load(store.match(first, "")[0], 1, 10)
    store.save(0, third, "")
    assert [store.match(text, "")[1] for text in (first, second, third)] == [150, 0, 150]
    store.save(0, first[:100], "")  # the beginning of a saved text is not saved again
    assert len(store._saved) == 2
    store.save(0, [*first, 4], "")  # a longer text replaces its beginning
    assert [len(saved.tokens) for saved in store._saved] == [150, 151]
    for number in range(2 * MAX_SAVED_PREFIXES):
        store.save(0, [4 + number] * MIN_SAVED_TOKENS, "")
    assert len(store._saved) <= MAX_SAVED_PREFIXES


def tokens_read(session: Session, prompt: list[int]) -> int:
    done = session.generate_ids(prompt, GenerateOptions(3, plan="ar", ignore_eos=True)).result()
    return len(prompt) - done.stats.cached_tokens


@pytest.mark.parametrize("slots", [1, 3])
def test_a_long_prompt_is_still_cached_after_short_requests(tiny_bundle: Path, slots: int):
    with load(tiny_bundle, "cpu", threads=1, max_batch_size=slots) as session:
        assert tokens_read(session, [*PROMPT, 5]) == 401
        for number in range(4):
            assert tokens_read(session, [*PROMPT[:3], 7, number]) >= 1
            assert tokens_read(session, [6, number, 8]) >= 1
        assert tokens_read(session, [*PROMPT, 9, 9]) == 2  # 400 tokens are 25 whole blocks
        conversation = [*PROMPT, 11]
        for turn in range(3):
            assert tokens_read(session, [*conversation, turn]) == 2 + turn
            tokens_read(session, [12, 13])
            conversation.append(turn)
