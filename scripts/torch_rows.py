"""What rows of a pass cost in plain torch, where no engine of this toolkit runs on the GPU.

    python scripts/torch_rows.py --num-hidden-layers 4 --rows 1 --rows 5

A pass is a forward pass of random Llama layers in fp16 over a window of rows, which attends to all columns of a static
KV cache through a mask, and the logits of every row. On a GPU it is captured as a CUDA graph. The table is that of
scripts/step_time.py, and the numbers are torch's: engines may be faster, but what a row costs depends mostly on what is
read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from step_time import COPIED, COPIES, COPY_ROUNDS, STD, Shape, cells_of, median_seconds, print_table, shape_options
from torch import Tensor
from torch.nn import functional

from pass_runtime.cli.bench import write_json
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.errors import PassError


class Passes:
    """Layers of `shape` with a KV cache of `capacity` tokens, on `device`; on the CPU in fp32."""

    def __init__(self, shape: Shape, capacity: int, device: str) -> None:
        self.shape, self.capacity, self.device = shape, capacity, device
        self.options: dict[str, Any] = {"device": device, "dtype": torch.float16 if device == "cuda" else torch.float32}
        queries, keys = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.layers = [
            {
                "qkv": self._weight(queries + 2 * keys, shape.hidden_size),
                "out": self._weight(shape.hidden_size, queries),
                "up": self._weight(2 * shape.intermediate_size, shape.hidden_size),
                "down": self._weight(shape.hidden_size, shape.intermediate_size),
                "cache": torch.zeros(2, shape.num_key_value_heads, capacity, shape.head_dim, **self.options),
            }
            for _ in range(shape.num_hidden_layers)
        ]
        self.head = self._weight(shape.vocab_size, shape.hidden_size)

    def _weight(self, *size: int) -> Tensor:
        return torch.empty(size, **self.options).normal_(0, STD)

    def window(self, rows: int) -> Callable[[], Tensor]:
        """A pass over the last `rows` columns of the cache, which returns logits [rows, V] when the device is done."""
        hidden = torch.empty(rows, self.shape.hidden_size, **self.options).normal_()
        mask = torch.ones(rows, self.capacity, device=self.device, dtype=torch.bool).tril(self.capacity - rows)
        forward = partial(self._forward, hidden, mask)
        if self.device != "cuda":
            return forward
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what runs for the first time may do work that a capture does not allow
            forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = forward()

        def replay() -> Tensor:
            graph.replay()
            torch.cuda.synchronize()
            return logits

        return replay

    def _forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        shape, rows = self.shape, len(hidden)
        heads, groups = shape.num_attention_heads, shape.num_key_value_heads
        for layer in self.layers:
            split = [heads * shape.head_dim, groups * shape.head_dim, groups * shape.head_dim]
            q, *new = functional.linear(_norm(hidden), layer["qkv"]).split(split, dim=-1)
            for cache, values in zip(layer["cache"], new, strict=True):
                cache[:, self.capacity - rows :] = values.view(rows, groups, shape.head_dim).transpose(0, 1)
            k, v = layer["cache"]
            q = q.view(rows, heads, shape.head_dim).transpose(0, 1)
            attended = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, enable_gqa=heads != groups
            )[0]
            hidden = hidden + functional.linear(attended.transpose(0, 1).reshape(rows, -1), layer["out"])
            gate, up = functional.linear(_norm(hidden), layer["up"]).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(_norm(hidden), self.head)


def _norm(hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:])


def copy_bandwidth(device: str) -> float:
    """The bytes that copies in the device's memory read and write per second."""
    size = COPIED["gpu" if device == "cuda" else "cpu"]
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        for _ in range(COPIES):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * size * COPIES / median_seconds([copy], COPY_ROUNDS)[0]


@click.command()
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True)
@click.option("--rows", multiple=True, type=click.IntRange(1), default=(1, 5, 9, 25), show_default=True)
@click.option("--capacity", "capacities", multiple=True, type=int, default=(512, 2048, 8192), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Rounds; each runs every width.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the results here, as JSON.")
@shape_options
@one_line_errors
def main(
    device: str, rows: Sequence[int], capacities: Sequence[int], rounds: int, output: Path | None, **sizes: int
) -> None:
    """Print a table of milliseconds, ratio to the narrowest pass, and share of the bandwidth bound."""
    shape, rows, capacities = Shape(**sizes), sorted({*rows}), sorted({*capacities})
    if capacities[0] < rows[-1]:
        raise PassError(f"--capacity {capacities[0]} has no room for a window of {rows[-1]} rows")
    if device == "cuda" and not torch.cuda.is_available():
        raise PassError(f"torch {torch.__version__} sees no CUDA device; use --device cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    bandwidth = copy_bandwidth(device)
    report: dict[str, Any] = {"engine": f"torch {torch.__version__}", "device": name, "shape": asdict(shape)}
    report |= {"weight_bytes": shape.weight_bytes, "copy_bandwidth": bandwidth, "cells": []}
    with torch.inference_mode():
        for capacity in capacities:
            passes = Passes(shape, capacity, device)
            seconds = median_seconds([passes.window(count) for count in rows], rounds)
            report["cells"] += cells_of(shape, bandwidth, capacity, rows, seconds)
            write_json(report, output)  # after every capacity, so that an interrupted run keeps its results
    print_table(report)


if __name__ == "__main__":
    main()
