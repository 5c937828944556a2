"""Writes a Llama of any size with random weights, shard by shard, to measure large models.

python scripts/random_llama.py build/random-7b
/usr/bin/time -v pass-export --model build/random-7b --dtype fp16 --lookahead 4
"""

from __future__ import annotations

import json
import shutil
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


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    help="A bundle whose tokenizer is copied.  [default: a new one]",
)
@click.option("--layers", default=32, show_default=True)
@click.option("--hidden", default=4096, show_default=True)
@click.option("--intermediate", default=11008, show_default=True)
@click.option("--heads", default=32, show_default=True)
@click.option("--kv-heads", default=0, help="0 is as many as heads.")
@click.option("--vocab", default=0, help="0 is the tokenizer's.")
@click.option(
    "--positions", default=4096, show_default=True, help="Tokens of the longest sequence."
)
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
    }
    config |= {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": sizes["layers"],
    }
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    config |= {"max_position_embeddings": sizes["positions"], "bos_token_id": 1, "eos_token_id": 2}
    (output / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    shards = {
        "embeddings": {"model.embed_tokens": (vocab, hidden)},
        "end": {"model.norm": (hidden,)},
    }
    shards["head"] = {"lm_head": (vocab, hidden)}
    keys, attention, mlp = hidden // heads * kv_heads, "self_attn.{}_proj", "mlp.{}_proj"
    for number in range(sizes["layers"]):
        layer: dict[str, tuple[int, ...]] = {
            attention.format(name): (hidden, hidden) for name in "qo"
        }
        layer |= {attention.format(name): (keys, hidden) for name in "kv"}
        layer |= {mlp.format(name): (intermediate, hidden) for name in ("gate", "up")}
        layer |= {mlp.format("down"): (hidden, intermediate), "input_layernorm": (hidden,)}
        layer |= {"post_attention_layernorm": (hidden,)}
        shards[f"layer-{number}"] = {
            f"model.layers.{number}.{name}": size for name, size in layer.items()
        }
    random, weight_map = np.random.default_rng(0), {}
    for name, parts in shards.items():
        tensors = {f"{part}.weight": weight(random, size) for part, size in parts.items()}
        save_file(tensors, output / f"{name}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
    (output / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    click.echo(output)


def weight(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    if len(size) == 1:
        return np.ones(size, np.float16)
    found = random.standard_normal(size, np.float32)
    found *= WEIGHT_SCALE * size[1] ** -0.5
    return found.astype(np.float16)


def write_tokenizer(output: Path, given: Path | None, vocab: int) -> int:
    """Write a tokenizer's files, and return the size of the vocabulary."""
    if given is not None:
        shutil.copy(given / "tokenizer.json", output)
        words = json.loads((output / "tokenizer.json").read_text(encoding="utf-8"))["model"][
            "vocab"
        ]
        vocab = vocab or max(len(words), max(words.values()) + 1)
    else:
        vocab = vocab or DEFAULT_VOCAB
        made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.save(str(output / "tokenizer.json"))
    (output / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return vocab


if __name__ == "__main__":
    main()
