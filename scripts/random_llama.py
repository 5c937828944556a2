"""Writes a Llama of any size with random weights, shard by shard, to measure the export of a large model.

python scripts/random_llama.py build/random-7b --layers 32 --hidden 4096 --intermediate 11008 --heads 32
/usr/bin/time -v pass-export --model build/random-7b --dtype fp16 --lookahead 4
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from step_time import STD, Shape, random_llama

SPREAD = 0.98
"""The standard deviation of a weight, times the root of the numbers that it is summed over: it spreads logits, so that
near-ties are few."""


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer", type=click.Path(exists=True, path_type=Path), required=True, help="A bundle to take one from."
)
@click.option("--layers", default=32, show_default=True)
@click.option("--hidden", default=4096, show_default=True)
@click.option("--intermediate", default=11008, show_default=True)
@click.option("--heads", default=32, show_default=True)
@click.option("--kv-heads", default=0, help="0 is as many as heads.")
@click.option("--vocab", default=0, help="0 is the tokenizer's.")
def main(
    output: Path, tokenizer: Path, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int
) -> None:
    """Write OUTPUT, a model directory in fp16."""
    output.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer / "tokenizer.json", output)
    words = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    vocab = vocab or max(len(words), max(words.values()) + 1)
    model = random_llama(Shape(hidden, intermediate, layers, heads, kv_heads or heads, hidden // heads, vocab))
    model.config.update({"architectures": ["LlamaForCausalLM"], "dtype": "float16", "max_position_embeddings": 4096})
    model.config.save_pretrained(output)
    (output / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        shards.setdefault(".".join(name.split(".")[:3]) + ".safetensors", {})[name] = weight
    for file, weights in shards.items():
        scales = {name: 1 if w.ndim == 1 else SPREAD * w.shape[1] ** -0.5 / STD for name, w in weights.items()}
        tensors = {name: (weight.detach() * scales[name]).contiguous() for name, weight in weights.items()}
        save_file(tensors, output / file, {"format": "pt"})
    found = {name: file for file, weights in shards.items() for name in weights}
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))
    click.echo(output)


if __name__ == "__main__":
    main()
