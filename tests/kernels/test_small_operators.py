"""The operators AddNorm, Gate, Embed and EmbedPacked, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import GELU_TANH, LAYOUTS, SILU, Array, random_floats, random_weight, run

from pass_runtime.backends.ort.session import find_kernels, library

pytestmark = pytest.mark.skipif(library() is None, reason=f"no CPU kernels: {find_kernels()}")
QUICK = settings(derandomize=True, deadline=None, max_examples=60)
seeds = st.integers(0, 1 << 30)


def norm(x: Array, scale: Array, epsilon: float) -> Array:
    mean = (x**2).mean(-1, keepdims=True)
    return x / np.sqrt(mean + epsilon) * scale


@QUICK
@given(
    seeds,
    st.integers(1, 300),
    st.integers(1, 60),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from((1e-20, 1e-3, 1.0, 1e15)),
)
def test_norms(seed: int, size: int, rows: int, adds: bool, outputs: int, magnitude: float):
    rng, epsilon = np.random.default_rng(seed), 1e-5
    x = random_floats(rng, rows, size) * np.float32(magnitude)
    r = random_floats(rng, rows, size) * np.float32(magnitude) if adds else None
    scale = random_floats(rng, size)
    actual = run("AddNorm", x, r, scale, outputs=outputs, epsilon=epsilon)
    total = x if r is None else x + r
    expected = norm(total.astype(float), scale, np.float32(epsilon))
    np.testing.assert_allclose(actual[0], expected, rtol=2e-6)
    if outputs == 2:
        np.testing.assert_array_equal(actual[1], total)
    for threads in (2, 4):
        again = run("AddNorm", x, r, scale, outputs=outputs, threads=threads, epsilon=epsilon)
        np.testing.assert_array_equal(again[0], actual[0])
    r_of_last = None if r is None else r[-1:]
    alone = run("AddNorm", x[-1:], r_of_last, scale, outputs=outputs, epsilon=epsilon)
    np.testing.assert_array_equal(alone[0], actual[0][-1:])


def test_a_norm_of_zeros_and_of_nan():
    x, scale = np.zeros((3, 20), np.float32), np.ones(20, np.float32)
    x[1, 19] = np.nan
    (y,) = run("AddNorm", x, None, scale)
    assert not y[[0, 2]].any() and np.isnan(y[1]).all()


@pytest.mark.parametrize("change", ["other rows", "other scale", "no scale"])
def test_norms_whose_sizes_differ_are_refused(change: str):
    x, r, scale = np.zeros((3, 8), np.float32), None, np.ones(8, np.float32)
    if change == "other rows":
        r = x[1:]
    elif change == "other scale":
        scale = scale[1:]
    else:
        scale = None
    with pytest.raises(Exception, match="AddNorm: the sizes of the inputs do not fit"):
        run("AddNorm", x, r, scale)


GATES = np.array([0, -0.0, 1e-40, 1, -1, 20, -20, 80, -80, 87.5, -89, 1e4, -1e4, 1e30])


@QUICK
@given(seeds, st.integers(1, 1200), st.sampled_from((SILU, GELU_TANH)))
def test_gates(seed: int, count: int, activation: int):
    rng = np.random.default_rng(seed)
    gate = random_floats(rng, count) * 4
    places = rng.integers(0, count, len(GATES))
    gate[places] = GATES
    up = random_floats(rng, count)
    (actual,) = run("Gate", gate, up, activation=activation)
    x = gate.astype(float)
    exponent = x
    if activation == GELU_TANH:
        exponent = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    with np.errstate(over="ignore"):
        expected = x / (1 + np.exp(-exponent)) * up
    rounding = 5e-7 * (2 + np.abs(exponent).clip(max=88)) * np.abs(expected)
    assert np.all(np.abs(actual - expected) <= rounding + 2 * np.exp(-88) * np.abs(x * up) + 1e-44)
    for threads in (2, 4):
        again = run("Gate", gate, up, threads=threads, activation=activation)
        np.testing.assert_array_equal(again[0], actual)
    np.testing.assert_array_equal(
        run("Gate", gate[-1:], up[-1:], activation=activation)[0], actual[-1:]
    )


@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gates_of_nan_are_nan(activation: int):
    gate, up = np.ones((2, 20), np.float32)
    gate[3], up[5] = np.nan, np.nan
    (y,) = run("Gate", gate, up, activation=activation)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(y)), [3, 5])


def test_gates_whose_sizes_differ_are_refused():
    with pytest.raises(Exception, match="Gate: the sizes differ"):
        run("Gate", np.zeros(5, np.float32), np.zeros(6, np.float32))


@QUICK
@given(
    seeds,
    st.integers(1, 50),
    st.integers(1, 100),
    st.integers(0, 5),
    st.sampled_from((None, 1.0, 8.5)),
    st.sampled_from((None, *LAYOUTS)),
)
def test_embeddings(
    seed: int,
    vocabulary: int,
    size: int,
    lookahead: int,
    factor: float | None,
    layout: tuple[int, bool] | None,
):
    rng = np.random.default_rng(seed)
    of_lookahead = random_floats(rng, lookahead, size)
    ids = rng.integers(0, vocabulary + lookahead, (2, 7))
    options: dict[str, float] = {} if factor is None else {"factor": factor}
    if layout is None:
        table = random_floats(rng, vocabulary, size)
        (actual,) = run("Embed", ids, table, of_lookahead, **options)
    else:
        weight = random_weight(rng, vocabulary, size, *layout)
        table, packed = weight.values, weight.packed.reshape(-1)
        sizes = {"K": size, "N": vocabulary, **weight.layout}
        (actual,) = run("EmbedPacked", ids, packed, of_lookahead, **sizes, **options)
    tokens = (table * (factor or 1)).astype(np.float32)
    expected = np.concatenate([tokens, of_lookahead])[ids]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-7 * np.abs(expected).max())
    is_lookahead = ids >= vocabulary
    np.testing.assert_array_equal(actual[is_lookahead], expected[is_lookahead])
    if layout is None and factor is None:
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("row", [-1, 13, 1 << 40, -(1 << 63)])
@pytest.mark.parametrize("op_type", ["Embed", "EmbedPacked"])
def test_an_id_out_of_range_is_refused(op_type: str, row: int):
    weight = random_weight(np.random.default_rng(0), 10, 40, 8)
    of_lookahead, sizes = np.ones((3, 40), np.float32), {}
    table = weight.values.astype(np.float32)
    if op_type == "EmbedPacked":
        table, sizes = weight.packed.reshape(-1), {"K": 40, "N": 10, "bits": 8}
    with pytest.raises(Exception, match="Embed: an id is out of range"):
        run(op_type, np.array([[3, row]]), table, of_lookahead, **sizes)
    (y,) = run(op_type, np.array([[0, 12]]), table, of_lookahead, **sizes)
    np.testing.assert_allclose(y[0, 0], weight.values[0], atol=1e-6)
    assert (y[0, 1] == 1).all()


def test_tables_of_other_sizes_are_refused():
    ids, table, of_lookahead = np.zeros((1, 1), np.int64), np.ones((4, 8)), np.ones((2, 7))
    with pytest.raises(Exception, match="Embed: the tables have rows of other sizes"):
        run("Embed", ids, table.astype(np.float32), of_lookahead.astype(np.float32))
    packed = random_weight(np.random.default_rng(0), 4, 8, 4).packed.reshape(-1)
    with pytest.raises(Exception, match="EmbedPacked: the table has another size"):
        run("EmbedPacked", ids, packed, of_lookahead.astype(np.float32), K=7, N=20)
