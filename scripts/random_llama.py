"""Writes a Llama of any size with random weights, shard by shard, to measure the export of a large model.

python scripts/random_llama.py build/random-7b --layers 32 --hidden 4096 --intermediate 11008 --heads 32
/usr/bin/time -v pass-export --model build/random-7b --dtype fp16 --lookahead 4
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import numpy as np
from safetensors.numpy import save_file


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
    vocab, kv_heads = vocab or max(len(words), max(words.values()) + 1), kv_heads or heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (output / "config.json").write_text(json.dumps(config))
    (output / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    rng, found = np.random.default_rng(0), {}
    kv = hidden // heads * kv_heads

    def write(name: str, tensors: dict[str, tuple[int, ...]]) -> None:
        save_file({key: _random(rng, shape) for key, shape in tensors.items()}, output / name, {"format": "pt"})
        found.update(dict.fromkeys(tensors, name))

    write("embed.safetensors", {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)})
    write("head.safetensors", {"lm_head.weight": (vocab, hidden)})
    for i in range(layers):
        layer = f"model.layers.{i}"
        sizes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        write(f"layer-{i}.safetensors", {f"{layer}.{part}.weight": shape for part, shape in sizes.items()})
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))
    click.echo(output)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float16)
    spread = 1.7 * shape[1] ** -0.5  # this spreads logits, so that near-ties are few
    return (rng.random(shape, np.float32) * np.float32(2 * spread) - np.float32(spread)).astype(np.float16)


if __name__ == "__main__":
    main()
