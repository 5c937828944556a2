"""Product and DenseProduct against NumPy; a row's bits depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import (
    BITS,
    EPSILON,
    GELU_TANH,
    LAYOUTS,
    NONE,
    SILU,
    Array,
    Weight,
    gated,
    random_floats,
    random_weight,
    run,
)

from pass_exporter.derived.packing import BLOCK, GROUP, interleave
from pass_runtime.backends.ort.session import find_kernels, library

pytestmark = pytest.mark.skipif(library() is None, reason=f"no CPU kernels: {find_kernels()}")
QUICK = settings(derandomize=True, deadline=None, max_examples=60)
LEAST = 2.0**-149 * 2**21
"""The largest error of a block's sum where float32 has fewer digits."""


# ---- what a product is ---------------------------------------------------------------------------


def rounded(x: Array) -> tuple[Array, Array]:
    """Return 8-bit codes [rows,blocks,32] in float64, and their scales."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    largest = np.abs(padded).max(-1, initial=0)
    is_zero = largest <= np.float32(1e-30)
    factors = np.float32(127) / np.where(is_zero, 1, largest).astype(np.float32)
    codes = np.rint(padded * factors[..., None])
    scales = largest / np.float32(127)
    return np.where(is_zero[..., None], 0, codes).astype(float), np.where(is_zero, 0, scales)


def restored(x: Array) -> Array:
    codes, scales = rounded(x)
    return (codes * scales[..., None].astype(float)).reshape(len(x), -1)[:, : x.shape[1]]


def product(x: Array, weight: Weight) -> tuple[Array, Array]:
    """Return the product and its largest error in float32."""
    rows, values = restored(x), weight.values
    blocks = weight.scales.shape[1]
    offsets = np.repeat(np.abs(weight.offsets.astype(float)), BLOCK, 1)[:, : weight.inputs]
    summed = np.abs(rows) @ (np.abs(values) + 2 * offsets).T
    return rows @ values.T, (2 * blocks + 4) * EPSILON * summed + blocks * LEAST


def float32_product(x: Array, weight: Weight) -> Array:
    """The product's bits: two fused operations a block, or one without offsets, whose codes count
    from the middle."""
    codes, scales = rounded(x)
    padded = np.pad(weight.codes, ((0, 0), (0, -weight.inputs % BLOCK)))
    middle = 2 ** (weight.bits - 1) if weight.symmetric else 0
    by_block = padded.reshape(len(padded), -1, BLOCK).astype(float) - middle
    total = np.zeros((len(x), weight.columns), np.float32)
    for block in range(codes.shape[1]):
        sums = codes[:, block] @ by_block[:, block].T
        row_scales, row_sums = scales[:, block], codes[:, block].sum(-1)
        both = np.multiply.outer(row_scales, weight.scales[:, block].astype(np.float32))
        total = (sums * both.astype(float) + total).astype(np.float32)
        if weight.symmetric:
            continue
        row_sums = (row_scales * row_sums.astype(np.float32)).astype(float)
        offsets = np.multiply.outer(row_sums, weight.offsets[:, block].astype(float))
        total = (offsets + total).astype(np.float32)
    return total


def multiply(x: Array, weight: Weight, bias: Array | None = None, threads: int = 1) -> Array:
    sizes = {"K": weight.inputs, "N": weight.columns, **weight.layout}
    return run("Product", x, weight.packed.reshape(-1), bias, threads=threads, **sizes)[0]


def multiply_gated(x: Array, gate: Weight, up: Weight, activation: int, bias: Array | None = None):
    weights = interleave(gate.packed, up.packed).reshape(-1)
    sizes = {"K": gate.inputs, "N": gate.columns, **gate.layout, "activation": activation}
    return run("Product", x, weights, bias, **sizes)[0]


sizes = st.tuples(st.integers(1, 200), st.integers(1, 100), st.integers(1, 40))
seeds = st.integers(0, 1 << 30)


@QUICK
@given(seeds, sizes, st.sampled_from(LAYOUTS), st.booleans(), st.data())
def test_a_product(seed, sizes, layout, with_bias, data):
    rng, (inputs, columns, rows) = np.random.default_rng(seed), sizes
    weight, x = random_weight(rng, columns, inputs, *layout), random_floats(rng, rows, inputs)
    bias = random_floats(rng, columns) if with_bias else None
    actual = multiply(x, weight, bias)
    expected, error = product(x, weight)
    if bias is not None:
        expected = expected + bias
        error += EPSILON * np.abs(expected)
    assert np.all(np.abs(actual - expected) <= error)
    bits_of_product = float32_product(x, weight) + (0 if bias is None else bias)
    np.testing.assert_array_equal(actual, bits_of_product.astype(np.float32))
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=40))
    np.testing.assert_array_equal(multiply(x[chosen], weight, bias), actual[chosen])
    np.testing.assert_array_equal(multiply(x[None, chosen], weight, bias)[0], actual[chosen])


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_codes_do_not_overflow(bits: int):
    inputs, columns = 96, 32
    shape = (columns, inputs // BLOCK)
    codes = np.full((columns, inputs), 2**bits - 1, np.uint8)
    weight = Weight(codes, bits, np.ones(shape, np.float16), np.zeros(shape, np.float16))
    x = np.ones((3, inputs), np.float32) * [[1], [-1], [127]]
    expected = x.sum(1, keepdims=True) * codes[0, 0]
    np.testing.assert_allclose(
        multiply(x.astype(np.float32), weight), np.repeat(expected, columns, 1), rtol=1e-6
    )


magnitudes = st.sampled_from((0.0, 1e-45, 1e-38, 1e-31, 1e-20, 1.0, 1e20, 1e36))


@QUICK
@given(seeds, st.lists(magnitudes, min_size=1, max_size=6), st.sampled_from(LAYOUTS), st.data())
def test_zeros_and_tiny_and_huge_values(seed, by_block, layout, data):
    """Blocks below 1e-30 count as 0."""
    rng, inputs = np.random.default_rng(seed), BLOCK * len(by_block) - data.draw(st.integers(0, 31))
    weight = random_weight(rng, 20, inputs, *layout)
    factors = np.repeat(np.array(by_block), BLOCK)[:inputs]
    x = (rng.integers(-256, 257, (3, inputs)) / 256 * factors).astype(np.float32)
    actual = multiply(x, weight)
    expected, error = product(x, weight)
    assert np.all(np.abs(actual - expected) <= error)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("activation", [NONE, SILU, GELU_TANH])
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_infinity_and_nan_spoil_their_own_row_alone(rows: int, activation: int, value: float):
    rng, inputs = np.random.default_rng(0), 80
    gate, up = (random_weight(rng, 40, inputs, 4) for _ in range(2))

    def of(x: Array) -> Array:
        return multiply_gated(x, gate, up, activation) if activation else multiply(x, gate)

    x = random_floats(rng, rows, inputs)
    expected = of(x)
    place = rows // 2
    x[place, 70] = value
    expected[place] = np.nan
    np.testing.assert_array_equal(of(x), expected)


@QUICK
@given(seeds, sizes, st.sampled_from(LAYOUTS), st.sampled_from((SILU, GELU_TANH)), st.booleans())
def test_a_gate(seed, sizes, layout, activation, with_bias):
    rng, (inputs, columns, rows) = np.random.default_rng(seed), sizes
    weights = [random_weight(rng, columns, inputs, *layout) for _ in range(2)]
    x = random_floats(rng, rows, inputs)
    bias = random_floats(rng, columns) if with_bias else None
    actual = multiply_gated(x, *weights, activation, bias)
    gate, up = (float32_product(x, weight).astype(float) for weight in weights)
    expected, error = gated(activation, gate, up)
    if bias is not None:
        expected = expected + bias
        error += EPSILON * np.abs(expected)
    assert np.all(np.abs(actual - expected) <= error)


# ---- the adapter ---------------------------------------------------------------------------------


@dataclass
class Adapted:
    """downs: A [in,rank] of each part. up: B [rank,out] by part. starts: the first group of each
    part but the first."""

    weight: list[Weight]
    downs: list[Weight]
    ups: list[Weight]
    rank: int
    activation: int = NONE

    def __call__(self, x: Array, rows: Array | None, threads: int = 1) -> Array:
        columns = sum(each.columns for each in self.weight)
        sizes = {"K": self.weight[0].inputs, "N": columns, "rank": self.rank}
        sizes |= self.weight[0].layout
        weights, ups = ([each.packed for each in parts] for parts in (self.weight, self.ups))
        if self.activation:
            sizes |= {"activation": self.activation, "N": columns // 2}
            packed, up = interleave(*weights), interleave(*ups)
        else:
            starts = np.cumsum([each.columns for each in self.weight])[:-1] // GROUP
            sizes |= {f"part{i}": int(start) for i, start in enumerate(starts, 1)}
            packed, up = np.concatenate(weights), np.concatenate(ups)
        adapter = [] if rows is None else [rows, self.down.packed.reshape(-1), up.reshape(-1)]
        return run("Product", x, packed.reshape(-1), None, *adapter, threads=threads, **sizes)[0]

    @property
    def down(self) -> Weight:
        first = self.downs[0]
        codes, scales, offsets = (
            np.concatenate([getattr(each, name) for each in self.downs])
            for name in ("codes", "scales", "offsets")
        )
        return Weight(codes, first.bits, scales, offsets, first.symmetric)

    def expected(self, x: Array, rows: Array) -> tuple[Array, Array]:
        """For x [Q,K], with its largest error."""
        parts = [product(x, weight) for weight in self.weight]
        for (result, error), down, up in zip(parts, self.downs, self.ups, strict=True):
            for row in rows:
                lowered = float32_product(x[row : row + 1], down)
                added, of_added = product(lowered, up)
                result[row] += added[0]
                error[row] += of_added[0] + EPSILON * np.abs(result[row])
        if not self.activation:
            results, errors = (np.concatenate(each, 1) for each in zip(*parts, strict=True))
            return results, errors
        (gate, of_gate), (up, of_up) = parts
        result, error = gated(self.activation, gate, up)
        return result, error + 1.2 * of_gate * np.abs(up) + of_up * np.abs(gate)


def make_adapted(
    rng: np.random.Generator, inputs: int, widths: list[int], rank: int, activation: int = NONE
) -> Adapted:
    weight = [random_weight(rng, width, inputs, 4) for width in widths]
    downs = [random_weight(rng, rank, inputs, 8, symmetric=True) for _ in widths]
    ups = [random_weight(rng, width, rank, 8, symmetric=True) for width in widths]
    return Adapted(weight, downs, ups, rank, activation)


@st.composite
def adapted_products(draw: st.DrawFn) -> Adapted:
    rng = np.random.default_rng(draw(seeds))
    inputs, rank = draw(st.integers(1, 100)), draw(st.integers(1, 40))
    activation = draw(st.sampled_from((NONE, SILU, GELU_TANH)))
    if activation:
        widths = [draw(st.integers(1, 60))] * 2
    else:
        groups = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
        widths = [*(16 * count for count in groups), draw(st.integers(1, 60))]
    return make_adapted(rng, inputs, widths, rank, activation)


@QUICK
@given(adapted_products(), seeds, st.integers(1, 3), st.integers(1, 16), st.data())
def test_adapted_rows_get_their_update(op, seed, slots, width, data):
    """Others have the bits of a product without an adapter. No row depends on another."""
    rows = np.array(data.draw(st.lists(st.integers(0, width - 1), unique=True)), np.int64)
    x = random_floats(np.random.default_rng(seed), slots, width, op.weight[0].inputs)
    actual, plain = op(x, rows), op(x, None)
    others = np.setdiff1d(np.arange(width), rows)
    np.testing.assert_array_equal(actual[:, others], plain[:, others])
    for slot in range(slots):
        expected, error = op.expected(x[slot], rows)
        assert np.all(np.abs(actual[slot] - expected) <= error)
        for row in {*rows[:1], *rows[-1:]}:
            alone = op(x[slot : slot + 1, row : row + 1], np.array([0]))
            np.testing.assert_array_equal(alone[0, 0], actual[slot, row])


# ---- a row's bits depend on nothing else ---------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_do_not_change_bits(layout: tuple[int, bool]):
    rng = np.random.default_rng(0)
    weight, op = random_weight(rng, 1500, 300, *layout), make_adapted(rng, 400, [800, 160, 500], 16)
    for rows in (1, 2, 13, 90):
        x = random_floats(rng, rows, 300)
        assert_threads_do_not_matter(lambda threads, x=x: multiply(x, weight, threads=threads))
    x, adapted = random_floats(rng, 2, 40, 400), np.arange(9, 40)
    assert_threads_do_not_matter(lambda threads: op(x, adapted, threads))


def assert_threads_do_not_matter(multiplied: Callable[[int], Array]) -> None:
    one, *others = (multiplied(threads) for threads in (1, 2, 4))
    for other in others:
        np.testing.assert_array_equal(other, one)


# ---- refusals ------------------------------------------------------------------------------------


FLOATS = np.zeros((3, 40), np.float32)
PACKED = random_weight(np.random.default_rng(0), 20, 40, 4).packed.reshape(-1)
SIZES = {"K": 40, "N": 20, "bits": 4}
MISFIT = "Product: the sizes of inputs, weights"
OUT_OF_RANGE = "Product: K, N or bits are out of range"
DENSE = np.zeros((40, 7), np.float32)


@pytest.mark.parametrize(
    ("words", "arguments", "attributes"),
    [
        (f"{MISFIT} and attributes do not fit", (FLOATS[:, :39], PACKED), SIZES),
        (MISFIT, (FLOATS, PACKED[:-1]), SIZES),
        (MISFIT, (FLOATS, PACKED), SIZES | {"bits": 8}),
        (MISFIT, (FLOATS, PACKED), SIZES | {"N": 40}),
        (MISFIT, (FLOATS, PACKED, FLOATS[0, :19]), SIZES),
        *(
            (OUT_OF_RANGE, (FLOATS[:, :0], PACKED[:0]), SIZES | change)
            for change in ({"K": 0}, {"K": -1}, {"N": 0}, {"bits": 6}, {"bits": 0})
        ),
        (f"Dense{MISFIT} and bias do not fit", (FLOATS[:, :4], DENSE), {}),
        (f"Dense{MISFIT}", (FLOATS, DENSE), {"by_column": 1}),
        (f"Dense{MISFIT}", (FLOATS, DENSE, DENSE[0, :6]), {}),
        ("DenseProduct: weights are no matrix", (FLOATS, DENSE[None]), {}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(words: str, arguments: tuple[Array], attributes: dict):
    with pytest.raises(Exception, match=words):
        run("DenseProduct" if "Dense" in words else "Product", *arguments, **attributes)


@pytest.mark.parametrize("row", [-1, 3, 1 << 40])
def test_an_adapter_of_another_size_or_row_is_refused(row: int):
    op = make_adapted(np.random.default_rng(0), 32, [16], 8)
    x = np.zeros((2, 3, 32), np.float32)
    with pytest.raises(Exception, match="Product: an adapted row is not in the window"):
        op(x, np.array([0, row]))
    with pytest.raises(Exception, match=MISFIT):
        replace(op, rank=33)(x, np.array([0]))
    assert op(x, np.array([0, 2])).shape == (2, 3, 16)


def test_no_rows_have_no_results():
    weight = random_weight(np.random.default_rng(0), 20, 40, 4)
    assert multiply(np.zeros((2, 0, 40), np.float32), weight).shape == (2, 0, 20)


# ---- weights in float32 --------------------------------------------------------------------------

dense_sizes = st.tuples(st.integers(1, 100), st.integers(1, 200), st.integers(1, 20))


def multiply_dense(x: Array, weight: Array, bias: Array | None, by_column: bool, threads: int = 1):
    """weight: [in,out]"""
    stored = np.ascontiguousarray(weight.T) if by_column else weight
    return run("DenseProduct", x, stored, bias, threads=threads, by_column=int(by_column))[0]


@QUICK
@given(seeds, dense_sizes, st.booleans(), st.booleans(), st.data())
def test_a_dense_product(seed, sizes, by_column, with_bias, data):
    rng, (inputs, columns, rows) = np.random.default_rng(seed), sizes
    x, weight = random_floats(rng, rows, inputs), random_floats(rng, inputs, columns)
    bias = random_floats(rng, columns) if with_bias else None
    actual = multiply_dense(x, weight, bias, by_column)
    expected = x.astype(float) @ weight + (0 if bias is None else bias)
    error = (inputs + 8) * EPSILON * (np.abs(x).astype(float) @ np.abs(weight) + np.abs(expected))
    assert np.all(np.abs(actual - expected) <= error)
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20))
    np.testing.assert_array_equal(
        multiply_dense(x[chosen], weight, bias, by_column), actual[chosen]
    )


@pytest.mark.parametrize("by_column", [False, True])
def test_threads_do_not_change_the_bits_of_dense_products(by_column: bool):
    rng = np.random.default_rng(0)
    weight, bias = random_floats(rng, 300, 1100), random_floats(rng, 1100)
    for rows in (1, 7):
        x = random_floats(rng, rows, 300)
        assert_threads_do_not_matter(
            lambda threads, x=x: multiply_dense(x, weight, bias, by_column, threads)
        )


def test_infinity_and_nan_in_a_dense_product():
    rng = np.random.default_rng(0)
    x, weight = random_floats(rng, 4, 70), random_floats(rng, 70, 100)
    for by_column in (False, True):
        expected = multiply_dense(x, weight, None, by_column)
        spoiled = x.copy()
        spoiled[1, 69], spoiled[2, 3] = np.nan, np.inf
        actual = multiply_dense(spoiled, weight, None, by_column)
        np.testing.assert_array_equal(actual[[0, 3]], expected[[0, 3]])
        assert np.isnan(actual[1]).all()
        np.testing.assert_array_equal(actual[2], np.copysign(np.inf, weight[3]))
