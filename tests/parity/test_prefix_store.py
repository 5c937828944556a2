"""What slots give up is kept for later prompts: the bits of it, the texts used last, and no more
than the budget."""

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

PROMPT = np.random.default_rng(0).integers(4, 200, 400).tolist()
CAPACITY, ROOM = 256, 400
"""Of the slots; tokens that the budget is good for."""


@pytest.fixture(scope="module")
def backend(tiny_bundle: Path) -> Iterator[OrtBackend]:
    backend = OrtBackend(
        tiny_bundle, read_manifest(tiny_bundle), "cpu", threads=1, max_batch_size=2
    )
    backend.resize(CAPACITY, [0, 0])
    yield backend
    backend.close()


def write(backend: OrtBackend, slot: int, values: np.ndarray) -> None:
    """Fill the whole cache of `slot` with what `values` says of every entry."""
    _, heads, capacity, size = backend.cache.shape(1)
    for number, (_, address) in enumerate(backend.cache.places(slot)):
        entries = np.zeros((heads, capacity, size), backend.cache.dtype)
        entries[:, : len(values)] = values[:, None] + number
        backend.memory.upload(address, entries)


def read(backend: OrtBackend, slot: int, count: int) -> np.ndarray:
    _, heads, capacity, size = backend.cache.shape(1)
    found = []
    for _, address in backend.cache.places(slot):
        entries = np.empty((heads, capacity, size), backend.cache.dtype)
        backend.memory.download(entries, address)
        found.append(entries[:, :count])
    return np.stack(found)


Salted = tuple[list[int], str]
texts = st.tuples(st.integers(0, 4), st.integers(1, 120), st.integers(0, 3)).map(
    lambda drawn: [drawn[0]] * drawn[1] + [9] * (40 * drawn[2])
)
salted = st.tuples(texts, st.sampled_from(["", "a"]))


def entries_of(text: list[int], salt: str) -> np.ndarray:
    return np.cumsum(text).astype(np.float32) + 1000 * len(salt)


@settings(max_examples=60, deadline=None)
@given(saved=st.lists(salted, max_size=8), prompts=st.lists(salted, min_size=1, max_size=4))
def test_what_is_kept_comes_back(backend: OrtBackend, saved: list[Salted], prompts: list[Salted]):
    """Entries are a function of the tokens up to them, as in a model, so any text that begins alike
    has the same. They are one of the salt too, so that those of another one would be seen."""
    budget = backend.cache.saved_bytes(ROOM)
    store, before = PrefixStore(backend.cache, backend.memory, budget), len(backend.memory._blocks)
    for text, salt in saved:
        write(backend, 0, entries_of(text, salt))
        store.save(0, text, salt)
        assert store.used <= budget
        found, count = store.match(text, salt)
        if MIN_SAVED_TOKENS <= len(text) <= ROOM:
            assert found is not None and count == len(text), "the text used last is kept"
    for prompt, salt in prompts:
        found, count = store.match(prompt, salt)
        if found is None:
            continue
        write(backend, 1, np.zeros(1, np.float32))
        store.load(found, 1, count)
        write(backend, 0, entries_of(prompt, salt))
        assert np.array_equal(read(backend, 1, count), read(backend, 0, count))
        assert count == common_prefix(found.tokens, prompt)
    for one in list(store._saved):
        store._drop(one)
    assert len(backend.memory._blocks) == before and store.used == 0


def test_the_text_used_last_stays(backend: OrtBackend):
    store = PrefixStore(backend.cache, backend.memory, backend.cache.saved_bytes(ROOM))
    first, second, third = ([number] * 150 for number in (1, 2, 3))
    store.save(0, first, "")
    store.save(0, second, "")
    store.load(store.match(first, "")[0], 1, 10)
    store.save(0, third, "")
    assert [store.match(text, "")[1] for text in (first, second, third)] == [150, 0, 150]
    store.save(0, first[:100], "")  # begins a text that is kept already
    assert len(store._saved) == 2
    store.save(0, [*first, 4], "")  # goes on from one, and takes its place
    assert [len(saved.tokens) for saved in store._saved] == [150, 151]
    for number in range(2 * MAX_SAVED_PREFIXES):
        store.save(0, [4 + number] * MIN_SAVED_TOKENS, "")
    assert len(store._saved) <= MAX_SAVED_PREFIXES


def tokens_read(session: Session, prompt: list[int]) -> int:
    """The tokens of `prompt` that had to be read."""
    done = session.generate_ids(prompt, GenerateOptions(3, plan="ar", ignore_eos=True)).result()
    return len(prompt) - done.stats.cached_tokens


@pytest.mark.parametrize("slots", [1, 3])
def test_short_requests_do_not_cost_a_long_prompt(tiny_bundle: Path, slots: int):
    """They take its slot, and shorten the cache: it is still there, whatever comes between."""
    with load(tiny_bundle, "cpu", threads=1, max_batch_size=slots) as session:
        assert tokens_read(session, [*PROMPT, 5]) == 401
        for number in range(4):
            assert tokens_read(session, [*PROMPT[:3], 7, number]) >= 1
            assert tokens_read(session, [6, number, 8]) >= 1
        assert tokens_read(session, [*PROMPT, 9, 9]) == 2  # 400 are 25 blocks
        conversation = [*PROMPT, 11]
        for turn in range(3):
            assert tokens_read(session, [*conversation, turn]) == 2 + turn
            tokens_read(session, [12, 13])
            conversation.append(turn)


def test_without_memory_it_is_read_again(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    with load(tiny_bundle, "cpu", threads=1) as session:
        assert tokens_read(session, [*PROMPT, 5]) == 401
        session.backend.cache.saved_bytes = lambda _: 1 << 60
        session._scheduler.runner._store._budget = 1 << 61
        tokens_read(session, [6, 7, 8])
        assert tokens_read(session, [*PROMPT, 5]) > 300
