"""Writes a Llama of any size with random weights, shard by shard, to measure large models.

python scripts/random_llama.py build/random-7b
/usr/bin/time -v pass-export --model build/random-7b --dtype fp16 --lookahead 4
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

WEIGHT_SCALE = 0.98
"""Standard deviation of a matrix's weights times the square root of its number of inputs. With it,
logits differ enough that near-ties are rare."""
DEFAULT_VOCAB = 32000
"""The vocabulary size of a new tokenizer, whose words are w0, w1, ..."""


@click.command(context_settings={"show_default": True})
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    help="A bundle whose tokenizer is copied (default: a new tokenizer is made).",
)
@click.option("--layers", default=32)
@click.option("--hidden", default=4096)
@click.option("--intermediate", default=11008)
@click.option("--heads", default=32)
@click.option("--kv-heads", default=0, help="0 is as many as heads.")
@click.option("--vocab", default=0, help="0 is the tokenizer's.")
@click.option("--positions", default=4096, help="Tokens of the longest sequence.")
def main(output: Path, tokenizer: Path | None, vocab: int, **sizes: int) -> None:
    """Write OUTPUT, a model directory in fp16. The default sizes are LLaMA-7B's."""
    output.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(output, tokenizer, vocab)
    hidden, intermediate, heads = sizes["hidden"], sizes["intermediate"], sizes["heads"]
    kv_heads = sizes["kv_heads"] or heads
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": sizes["positions"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (output / "config.json").write_text(json.dumps(config))
    random, weight_map = np.random.default_rng(0), {}
    key_size = hidden // heads * kv_heads
    for name, shapes in shards(sizes["layers"], vocab, hidden, intermediate, key_size):
        tensors = {f"{part}.weight": weight(random, shape) for part, shape in shapes.items()}
        save_file(tensors, output / f"{name}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    click.echo(output)


def shards(
    layers: int, vocab: int, hidden: int, intermediate: int, key_size: int
) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """Yield each file's name, and the shapes of its tensors by name. key_size: of all KV heads."""
    yield "embeddings", {"model.embed_tokens": (vocab, hidden)}
    yield "end", {"model.norm": (hidden,)}
    yield "head", {"lm_head": (vocab, hidden)}
    layer: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"},
        **{f"self_attn.{name}_proj": (key_size, hidden) for name in "kv"},
        **{f"mlp.{name}_proj": (intermediate, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    for number in range(layers):
        yield (
            f"layer-{number}",
            {f"model.layers.{number}.{name}": shape for name, shape in layer.items()},
        )


def weight(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return a random matrix in fp16, or ones for a norm's scale, which is a vector."""
    if len(shape) == 1:
        return np.ones(shape, np.float16)
    matrix = random.standard_normal(shape, np.float32)
    matrix *= WEIGHT_SCALE * shape[1] ** -0.5
    return matrix.astype(np.float16)


def write_tokenizer(output: Path, bundle: Path | None, vocab: int) -> int:
    """Write a tokenizer's files, those of `bundle` if given. Return the size of the vocabulary:
    `vocab`, or if it is 0, the number of the tokenizer's words."""
    if bundle is not None:
        shutil.copy(bundle / "tokenizer.json", output)
        tokenizer = json.loads((output / "tokenizer.json").read_text(encoding="utf-8"))
        words = tokenizer["model"]["vocab"]
        vocab = vocab or max(len(words), max(words.values()) + 1)
    else:
        vocab = vocab or DEFAULT_VOCAB
        new = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
        new.pre_tokenizer = pre_tokenizers.Whitespace()
        new.save(str(output / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (output / "tokenizer_config.json").write_text(json.dumps(config))
    return vocab


if __name__ == "__main__":
    main()
