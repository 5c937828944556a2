"""The operators AddNorm, Gate, Embed and EmbedPacked, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import GELU_TANH, LAYOUTS, SILU, Array, gated, random_floats, random_weight, run

from pass_runtime.backends.ort.session import find_kernels, library

pytestmark = pytest.mark.skipif(library() is None, reason=f"no CPU kernels: {find_kernels()}")
QUICK = settings(derandomize=True, deadline=None, max_examples=60)
seeds = st.integers(0, 1 << 30)
magnitudes = st.sampled_from((1e-20, 1e-3, 1.0, 1e15))
factors = st.sampled_from((None, 1.0, 8.5))
layouts = st.sampled_from((None, *LAYOUTS))


def norm(x: Array, scale: Array, epsilon: float) -> Array:
    mean = (x**2).mean(-1, keepdims=True)
    return x / np.sqrt(mean + epsilon) * scale


@QUICK
@given(seeds, st.integers(1, 300), st.integers(1, 60), st.booleans(), st.integers(1, 2), magnitudes)
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
    expected, error = gated(activation, gate.astype(float), up)
    assert np.all(np.abs(actual - expected) <= error + 1e-44)
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


@QUICK
@given(seeds, st.integers(1, 50), st.integers(1, 100), st.integers(0, 5), factors, layouts)
def test_embeddings(seed, vocabulary, size, lookahead, factor, layout):
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


ROWS = np.zeros((3, 8), np.float32)
ID = np.zeros((1, 1), np.int64)
PACKED = random_weight(np.random.default_rng(0), 4, 8, 4).packed.reshape(-1)
NORM_MISFIT = "AddNorm: the sizes of the inputs do not fit"


@pytest.mark.parametrize(
    ("words", "arguments", "attributes"),
    [
        (NORM_MISFIT, (ROWS, ROWS[1:], ROWS[0]), {}),
        (NORM_MISFIT, (ROWS, None, ROWS[0, 1:]), {}),
        (NORM_MISFIT, (ROWS, None, None), {}),
        ("Gate: the sizes differ", (ROWS[0], ROWS[0, 1:]), {}),
        ("Embed: the tables have rows of other sizes", (ID, ROWS, ROWS[:, 1:]), {}),
        ("EmbedPacked: the table has another size", (ID, PACKED, ROWS[:, 1:]), {"K": 7, "N": 20}),
    ],
)
def test_sizes_that_differ_are_refused(words: str, arguments: tuple[Array], attributes: dict):
    with pytest.raises(Exception, match=words):
        run(words.partition(":")[0], *arguments, **attributes)
