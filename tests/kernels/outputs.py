"""Prints hashes of what every operator computes of fixed inputs, as JSON, for test_variants.py and
tests/cpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np
from operators import BITS, GELU_TANH, LAYOUTS, SILU, Array, random_floats, random_weight, run

from pass_exporter.derived.packing import interleave
from pass_runtime.backends.ort.session import kernels_name

ROWS = (1, 2, 3, 4, 5, 7, 12, 13, 30)
SPECIAL = np.array(
    [0, -0.0, 1e-45, -1e-39, 1e-31, 1e-20, 1e20, -1e30, np.inf, -np.inf, np.nan], np.float32
)


def products(rng: np.random.Generator) -> Iterator[tuple[str, list[Array]]]:
    for bits, symmetric in LAYOUTS:
        for inputs, columns in ((32, 16), (50, 20), (200, 70)):
            weight = random_weight(rng, columns, inputs, bits, symmetric)
            sizes = {"K": inputs, "N": columns, **weight.layout}
            for rows in ROWS:
                x = random_floats(rng, rows, inputs)
                y = run("Product", x, weight.packed.reshape(-1), **sizes)
                yield f"{bits} bits, {symmetric=}, {rows} rows of {inputs}", y
    for bits in BITS:
        largest = random_weight(rng, 16, 64, bits)
        largest.codes[:] = 2**bits - 1
        x = np.repeat(np.array([1, -1], np.float32), 32)[None]
        packed = largest.packed.reshape(-1)
        yield f"{bits} bits, largest", run("Product", x, packed, K=64, N=16, bits=bits)
        x = random_floats(rng, len(SPECIAL), 64)
        x[np.arange(len(SPECIAL)), rng.integers(0, 64, len(SPECIAL))] = SPECIAL
        x[:3, 1:] *= np.float32(1e-35)
        yield f"{bits} bits, special", run("Product", x, packed, K=64, N=16, bits=bits)


def adapted_products(rng: np.random.Generator) -> Iterator[tuple[str, list[Array]]]:
    for activation in (0, SILU, GELU_TANH):
        for rank in (4, 33):
            weights = [random_weight(rng, 48, 70, 5) for _ in range(2)]
            down = random_weight(rng, 2 * rank, 70, 8, symmetric=True)
            ups = [random_weight(rng, 48, rank, 8, symmetric=True) for _ in range(2)]
            sizes = {"K": 70, "N": 48 if activation else 96, "bits": 5, "rank": rank}
            join = interleave if activation else lambda *parts: np.concatenate(parts)
            sizes |= {"activation": activation} if activation else {"part1": 3}
            packed, up = (join(*(each.packed for each in pair)) for pair in (weights, ups))
            arrays = [packed, None, np.array([2, 5, 6]), down.packed, up]
            flat = [None if each is None else each.reshape(-1) for each in arrays]
            x, bias = random_floats(rng, 2, 7, 70), random_floats(rng, sizes["N"])
            flat[1] = bias
            yield f"adapter, {activation}, rank {rank}", run("Product", x, *flat, **sizes)


def dense_products(rng: np.random.Generator) -> Iterator[tuple[str, list[Array]]]:
    for inputs, columns in ((16, 64), (37, 101), (200, 130)):
        weight, bias = random_floats(rng, inputs, columns), random_floats(rng, columns)
        for rows in ROWS:
            x = random_floats(rng, rows, inputs)
            by_row = run("DenseProduct", x, weight, bias)
            by_column = run("DenseProduct", x, np.ascontiguousarray(weight.T), by_column=1)
            yield f"dense, {rows} rows of {inputs}", by_row + by_column


def small_operators(rng: np.random.Generator) -> Iterator[tuple[str, list[Array]]]:
    for size in (8, 16, 100, 576):
        x, r, scale = (random_floats(rng, *shape) for shape in ((3, size), (3, size), (size,)))
        yield f"norm of {size}", run("AddNorm", x, r, scale, outputs=2)
        gates = [run("Gate", x * 30, r, activation=each)[0] for each in (SILU, GELU_TANH)]
        yield f"gate of {size}", gates
    special = np.concatenate([SPECIAL, np.float32([80, -80, 87.5, 88.5, -90, 1e4])])
    for activation in (SILU, GELU_TANH):
        y = run("Gate", special, np.ones_like(special), activation=activation)
        yield f"special gates, {activation}", y
    ids = np.arange(23)[None]
    for layout in LAYOUTS:
        weight, lookahead = random_weight(rng, 20, 50, *layout), random_floats(rng, 3, 50)
        arrays, sizes = (ids, weight.packed.reshape(-1), lookahead), {"K": 50, "N": 20}
        y = run("EmbedPacked", *arrays, factor=3.3, **sizes, **weight.layout)
        yield f"embeddings of {layout}", y


def attentions(rng: np.random.Generator) -> Iterator[tuple[str, list[Array]]]:
    for size, group, rows, window in (
        *((8, 1, 1, 0), (16, 3, 5, 0), (20, 2, 9, 40), (24, 8, 4, 0)),
        *((64, 3, 13, 7), (72, 1, 30, 0), (80, 4, 2, 100), (128, 2, 25, 0)),
    ):
        lengths = np.array([0, 130, 300])
        kv_heads, heads, slots = 2, 2 * group, len(lengths)
        cache = (slots, kv_heads, 340, size)
        q = random_floats(rng, slots, rows, (heads + 2 * kv_heads) * size)
        mask = np.tril(rng.integers(0, 2, (rows, rows), np.uint8).astype(bool))
        mask |= np.eye(rows, dtype=bool)
        half = size // 2 - size % 3
        cos, sin = random_floats(rng, 400, half), random_floats(rng, 400, half)
        arrays = [random_floats(rng, *cache), random_floats(rng, *cache), lengths]
        arrays += [np.arange(rows), mask, cos, sin]
        sizes = {"heads": heads, "kv_heads": kv_heads, "scale": 0.3, "window": window}
        y = run("WindowAttention", q, None, None, *arrays, outputs=3, **sizes)
        yield f"attention, {size}, {group}, {rows} rows, window {window}", y
        for slot, value in enumerate((np.nan, np.inf, 1e30)):
            q[slot, 0, 1] = value
        y = run("WindowAttention", q, None, None, *arrays, outputs=3, **sizes)
        yield f"special attention, {size}, {group}, {rows} rows, window {window}", y


def hash_of(tensors: list[Array]) -> str:
    """All NaN count as equal."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(np.where(np.isnan(tensor), np.float32(np.nan), tensor).tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    hashes = {}
    for operators in (products, adapted_products, dense_products, small_operators, attentions):
        for name, tensors in operators(np.random.default_rng(0)):
            assert name not in hashes
            hashes[name] = hash_of(tensors)
    print(json.dumps({"kernels": kernels_name(), "outputs": hashes}))


if __name__ == "__main__":
    main()
