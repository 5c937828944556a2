"""WindowAttention against NumPy; a row's bits depend on it and what it sees alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import Array, feed_of, open_operator, random_floats, run

from pass_runtime.backends.ort.session import find_kernels, library

pytestmark = pytest.mark.skipif(library() is None, reason=f"no CPU kernels: {find_kernels()}")
QUICK = settings(derandomize=True, deadline=None, max_examples=60)
SIZES = (8, 16, 20, 24, 40, 56, 64, 72, 80, 96, 104, 120, 128)
LENGTHS = (0, 1, 15, 16, 120, 127, 128, 129, 250, 384, 600)
POSITIONS = 700
lengths, sizes = st.sampled_from(LENGTHS), st.sampled_from(SIZES)


@dataclass(repr=False)
class Attention:
    """q [B,Q,H*D], k and v [B,Q,G*D], keys and values [B,G,S,D]."""

    q: Array
    k: Array
    v: Array
    keys: Array
    values: Array
    length: Array
    row_position: Array
    window_mask: Array
    cos: Array
    sin: Array
    heads: int
    kv_heads: int
    scale: float = 0.2
    window: int = 0
    joined: bool = False
    inputs: list[Array | None] = field(init=False)

    def __post_init__(self) -> None:
        first: list[Array | None] = [self.q, self.k, self.v]
        if self.joined:
            first = [np.concatenate([self.q, self.k, self.v], -1), None, None]
        rest = [self.keys, self.values, self.length, self.row_position, self.window_mask]
        self.inputs = [*first, *rest, self.cos, self.sin]

    @property
    def attributes(self) -> dict[str, float]:
        names = ("heads", "kv_heads", "scale", "window")
        return {name: getattr(self, name) for name in names}

    @property
    def slots(self) -> int:
        return len(self.q)

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    def run(self, threads: int = 1) -> list[Array]:
        """Return y, and new caches of keys and values."""
        return run("WindowAttention", *self.inputs, outputs=3, threads=threads, **self.attributes)

    def run_in_place(self, threads: int = 1) -> list[Array]:
        """With caches that are inputs and outputs in the same memory."""
        session = open_operator("WindowAttention", self.inputs, 3, threads, **self.attributes)
        binding = session.io_binding()
        binding.bind_output("y0")
        feed = {name: array.copy() for name, array in feed_of(self.inputs).items()}
        for name, array in feed.items():
            value = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, value)
            if array.ndim == 4:
                binding.bind_ortvalue_output({"x3": "y1", "x4": "y2"}[name], value)
        session.run_with_iobinding(binding)
        return [binding.get_outputs()[0].numpy(), feed["x3"], feed["x4"]]

    def with_rows(self, rows: list[int], length: Array | None = None) -> Attention:
        mask = self.window_mask[np.ix_(rows, rows)]
        q, k, v = (each[:, rows] for each in (self.q, self.k, self.v))
        positions, length = self.row_position[rows], self.length if length is None else length
        changes = {"q": q, "k": k, "v": v, "row_position": positions, "window_mask": mask}
        return replace(self, **changes, length=length)

    def with_slots(self, slots: list[int]) -> Attention:
        names = ("q", "k", "v", "keys", "values", "length")
        return replace(self, **{name: getattr(self, name)[slots] for name in names})

    def expected(self) -> list[Array]:
        """In float64."""
        size, group = self.keys.shape[-1], self.heads // self.kv_heads
        present = [self.keys.astype(float), self.values.astype(float)]
        y = np.zeros((self.slots, self.rows, self.heads, size))
        for slot, length in enumerate(self.length):
            end = length + self.rows
            q, k, v = (each[slot].reshape(self.rows, -1, size) for each in (self.q, self.k, self.v))
            present[0][slot, :, length:end] = self.rotated(k, length).swapaxes(0, 1)
            present[1][slot, :, length:end] = v.swapaxes(0, 1)
            keys, values = (np.repeat(each[slot, :, :end], group, 0) for each in present)
            scores = np.einsum("qhd,hsd->hqs", self.rotated(q, length), keys) * self.scale
            scores[:, ~self.seen(length)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            y[slot] = np.einsum("hqs,hsd->qhd", weights, values)
        return [y.reshape(self.q.shape), *present]

    def rotated(self, heads: Array, length: int) -> Array:
        """Heads [Q,heads,D]."""
        positions = np.clip(length + self.row_position, 0, len(self.cos) - 1)
        cos, sin = (each[positions, None].astype(float) for each in (self.cos, self.sin))
        half = self.cos.shape[1]
        a, b, rest = (heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :])
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], -1)

    def seen(self, length: int) -> Array:
        """[Q,length+Q]"""
        seen = np.concatenate([np.ones((self.rows, length), bool), self.window_mask], 1)
        positions = np.concatenate([np.arange(-length, 0), self.row_position])
        if self.window:
            seen &= self.row_position[:, None] - positions < self.window
        return seen


def mask_of(parents: list[int]) -> tuple[Array, Array]:
    """Row i follows row parents[i], or none."""
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask.sum(1) - 1, mask


def random_attention(
    seed: int,
    lengths: list[int],
    parents: list[int],
    size: int = 16,
    kv_heads: int = 2,
    group: int = 2,
    half: int | None = None,
    room: int = 0,
    **options: float,
) -> Attention:
    """room: behind the longest window."""
    rng, slots, rows = np.random.default_rng(seed), len(lengths), len(parents)
    row_position, window_mask = mask_of(parents)
    shape = (slots, kv_heads, max(lengths) + rows + room, size)
    angles = rng.random((POSITIONS, size // 2 if half is None else half)) * 6
    return Attention(
        random_floats(rng, slots, rows, kv_heads * group * size),
        random_floats(rng, slots, rows, kv_heads * size),
        random_floats(rng, slots, rows, kv_heads * size),
        random_floats(rng, *shape),
        random_floats(rng, *shape),
        np.array(lengths),
        row_position,
        window_mask,
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        kv_heads * group,
        kv_heads,
        **options,
    )


@st.composite
def attentions(draw: st.DrawFn, max_slots: int = 3) -> Attention:
    slots = draw(st.integers(1, max_slots))
    rows, size = draw(st.integers(1, 30)), draw(sizes)
    parents = list(range(-1, rows - 1))
    if draw(st.booleans()):  # a tree
        parents = [-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows))]
    return random_attention(
        draw(st.integers(0, 1 << 30)),
        draw(st.lists(lengths, min_size=slots, max_size=slots)),
        parents,
        size,
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 2, 3, 4, 8))),
        draw(st.integers(1, size // 2)),
        draw(st.sampled_from((0, 1, 70))),
        scale=draw(st.sampled_from((0.1, 0.3, 2.0))),
        window=draw(st.sampled_from((0, 0, 1, 7, 140))),
        joined=draw(st.booleans()),
    )


def chain(seed: int, length: int, rows: int, **options: float) -> Attention:
    return random_attention(seed, [length], list(range(-1, rows - 1)), **options)


def assert_same(actual: list[Array], expected: list[Array]) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@QUICK
@given(attentions())
def test_attention(attention: Attention):
    actual, expected = attention.run(), attention.expected()
    size = attention.keys.shape[-1]
    largest = np.abs(attention.values).max()
    score = attention.scale * size * np.abs(attention.q).max() * np.abs(attention.keys).max()
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=(score + 8) * 2e-7 * largest)
    for one, other in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert_same(attention.run_in_place(), actual)


def test_scores_that_are_far_apart():
    attention = chain(0, 300, 3, scale=1.0)
    attention.keys[:, :, 140] *= 300
    attention.values[:, :, 140] = 7
    actual, expected = attention.run()[0], attention.expected()[0]
    assert (np.abs(expected - 7) < 1e-6).any()
    np.testing.assert_allclose(actual, expected, atol=1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [0, 130])
def test_infinity_and_nan_are_not_lost(length: int, value: float):
    attention = random_attention(0, [length], [-1, 0, 1, 0, 3], room=1)
    expected = attention.run()[0]
    for name in ("q", "k"):
        spoiled = getattr(attention, name).copy()
        spoiled[0, 1, 3] = value  # of the first head
        y = replace(attention, **{name: spoiled}).run()[0]
        is_nan = np.zeros_like(y, bool)
        if name == "q":
            is_nan[0, 1, :16] = True
        else:
            is_nan[0, 1:3, :32] = True  # the row and its child
        np.testing.assert_array_equal(np.isnan(y), is_nan)
        np.testing.assert_array_equal(y[~is_nan], expected[~is_nan])


@QUICK
@given(attentions())
def test_slots_do_not_depend_on_their_neighbours(attention: Attention):
    y, keys, values = attention.run()
    for slot in range(attention.slots):
        own, end = attention.with_slots([slot]), attention.length[slot] + attention.rows
        own = replace(own, keys=own.keys[:, :, :end], values=own.values[:, :, :end])
        alone = own.run()
        assert_same(alone, [each[slot : slot + 1, ..., :end, :] for each in (y, keys, values)])


@QUICK
@given(attentions())
def test_what_lies_behind_the_window_does_not_matter(attention: Attention):
    expected = attention.run()[0]
    for slot, length in enumerate(attention.length):
        for cache in (attention.keys, attention.values):
            cache[slot, :, length:] = np.nan
    np.testing.assert_array_equal(attention.run()[0], expected)
    np.testing.assert_array_equal(attention.run_in_place()[0], expected)


@QUICK
@given(attentions(max_slots=2))
def test_rows_depend_on_what_they_see_alone(attention: Attention):
    expected = attention.run()[0]
    rng = np.random.default_rng(0)
    for row in {0, attention.rows // 2, attention.rows - 1}:
        first_rows = attention.with_rows(list(range(row + 1)))
        np.testing.assert_array_equal(first_rows.run()[0][:, row], expected[:, row])
        unseen = ~attention.window_mask[row]
        changed = {name: getattr(attention, name).copy() for name in ("q", "k", "v")}
        for rows in changed.values():
            rows[:, unseen] = random_floats(rng, *rows[:, unseen].shape)
        y = replace(attention, **changed).run()[0]
        np.testing.assert_array_equal(y[:, row], expected[:, row])


@QUICK
@given(lengths, st.integers(1, 30), sizes, st.sampled_from((0, 1, 5, 130)), st.data())
def test_chunks_of_a_text_do_not_change_bits(length, rows, size, window, data):
    """A row has the same bits alone, and anywhere in a window."""
    whole = chain(size, length, rows, size=size, window=window)
    expected = whole.run()
    done, keys, values = 0, whole.keys, whole.values
    while done < rows:
        count = data.draw(st.integers(1, rows - done))
        part = whole.with_rows(list(range(done, done + count)), whole.length + done)
        part = replace(part, row_position=np.arange(count), keys=keys, values=values)
        y, keys, values = part.run()
        np.testing.assert_array_equal(y, expected[0][:, done : done + count])
        done += count
    assert_same([keys, values], expected[1:])


@pytest.mark.parametrize(
    ("slots", "kv_heads", "rows"), [(1, 1, 1), (1, 3, 5), (2, 3, 20), (4, 4, 50), (1, 2, 130)]
)
def test_threads_do_not_change_bits(slots: int, kv_heads: int, rows: int):
    """A few parts are split by segments of the cache, many are not."""
    lengths, parents = [610, 3, 250, 128][:slots], list(range(-1, rows - 1))
    attention = random_attention(0, lengths, parents, kv_heads=kv_heads, group=3)
    one = attention.run()
    for threads in (2, 4):
        for _ in range(3):
            assert_same(attention.run(threads), one)
            assert_same(attention.run_in_place(threads), one)
    # In more slots, there are enough parts.
    many = attention.with_slots([*range(slots)] * 8)
    for tensor, expected in zip(many.run(2), one, strict=True):
        np.testing.assert_array_equal(tensor[:slots], expected)


# ---- refusals ------------------------------------------------------------------------------------


def refuse(attention: Attention, words: str, **change: Any) -> None:
    with pytest.raises(Exception, match=f"WindowAttention: {words}"):
        replace(attention, **change).run()


@pytest.mark.parametrize("length", [-1, 8, 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_a_window_that_does_not_fit_into_the_cache_is_refused(length: int):
    attention = random_attention(0, [7, 7], [-1, 0, 1])
    refuse(attention, "the window does not fit into the cache", length=np.array([0, length]))
    assert_same(attention.run(), attention.run_in_place())


def test_sizes_that_do_not_fit_are_refused():
    attention = random_attention(0, [7, 7], [-1, 0, 1])
    flat, square = np.zeros((3, 5), np.float32), np.zeros((9, 9), np.float32)
    words = "q and the caches have other ranks or sizes"
    refuse(attention, words, q=attention.q[0])
    refuse(attention, words, keys=attention.keys[0])
    refuse(attention, words, values=attention.values[:, :, 1:])
    refuse(attention, words, kv_heads=0)
    refuse(attention, words, kv_heads=3)
    words = "q, k, v and the caches have other sizes"
    refuse(attention, words, q=attention.q[..., 1:])
    refuse(attention, words, k=attention.k[..., 1:])
    refuse(attention, words, v=attention.v[:, 1:])
    refuse(attention, words, joined=True, q=attention.q[..., 1:])
    refuse(attention, words, keys=attention.keys[:1], values=attention.values[:1])
    refuse(attention, words, heads=2, kv_heads=1)
    words = "length, row_position, window_mask, cos or sin do not fit"
    refuse(attention, words, length=attention.length[:1])
    refuse(attention, words, row_position=attention.row_position[1:])
    refuse(attention, words, window_mask=attention.window_mask[1:])
    refuse(attention, words, cos=attention.cos[1:])
    for table in (flat[0], square, flat[:0]):
        refuse(attention, words, cos=table, sin=table)
    attention.run()


@pytest.mark.parametrize("left_out", [*range(1, 10)])
def test_a_missing_input_is_refused(left_out: int):
    attention = random_attention(0, [7], [-1, 0, 1])
    attention.inputs[left_out] = None
    with pytest.raises(Exception, match=r"WindowAttention: (an input is missing|q)"):
        attention.run()


def test_no_rows_and_no_slots_have_no_results():
    attention = random_attention(0, [7, 7], [-1, 0, 1])
    no_rows = attention.with_rows([])
    y, keys, values = no_rows.run()
    assert y.shape == (2, 0, 64)
    assert_same([keys, values], [attention.keys, attention.values])
    assert attention.with_slots([]).run()[0].shape == (0, 3, 64)
