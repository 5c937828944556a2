"""Writes a Llama of any size with random weights, tensor by tensor, to measure large models.

python scripts/random_llama.py build/random-7b
/usr/bin/time -v pass-export --model build/random-7b --dtype fp16 --lookahead 4
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHT_SCALE = 0.98
"""Standard deviation of a matrix's weights times the square root of its inputs: logits then differ
enough that near-ties are rare."""


@click.command(context_settings={"show_default": True})
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A bundle's; else w0, w1, ...")
@click.option("--layers", default=32)
@click.option("--hidden", default=4096)
@click.option("--intermediate", default=11008)
@click.option("--heads", default=32)
@click.option("--kv-heads", type=int, help="As many as heads, if not given.")
@click.option("--vocab", type=int, help="The bundle's, or 32000, if not given.")
@click.option("--positions", default=4096, help="Tokens of the longest sequence.")
def main(output: Path, tokenizer: Path | None, vocab: int | None, **sizes: int) -> None:
    """Write OUTPUT, a model directory in fp16. The default sizes are LLaMA-7B's."""
    if tokenizer is not None:
        words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        vocab = vocab or max(words.get_vocab().values()) + 1
    else:
        vocab = vocab or 32000
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(output)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=sizes["positions"],
        architectures=["LlamaForCausalLM"],
        dtype="float16",
    )
    config.save_pretrained(output)
    with torch.device("meta"):
        parameters = dict(LlamaForCausalLM(config).named_parameters())
    random, files = np.random.default_rng(0), {}
    for name, parameter in parameters.items():
        tensor = np.ones(parameter.shape, np.float16)  # the scale of a norm
        if parameter.ndim == 2:
            scale = WEIGHT_SCALE * parameter.shape[1] ** -0.5
            matrix = random.standard_normal(parameter.shape, np.float32)
            np.multiply(matrix, scale, out=tensor, casting="same_kind")
        files[name] = f"{name}.safetensors"
        save_file({name: tensor}, output / files[name], {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    click.echo(output)


if __name__ == "__main__":
    main()
