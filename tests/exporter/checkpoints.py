"""Changed copies of the tiny model, most of which are broken, and .gguf files of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pass_exporter.config import Dtype
from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.registry import resolve

Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], None]
"""Changes the files of a model's directory, in place."""
WEIGHTS = "model.safetensors"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 180\n"
"""What a clone without Git LFS has in place of a large file."""


def change_tensors(change: Callable[[Tensors], Tensors]) -> Change:
    def apply(directory: Path) -> None:
        changed = change(load_file(directory / WEIGHTS))
        save_file(changed, directory / WEIGHTS, metadata={"format": "pt"})

    return apply


def set_number(name: str, value: float) -> Change:
    def change(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[5] = value
        return tensors

    return change_tensors(change)


def change_settings(file: str = "config.json", **changes: Any) -> Change:
    def apply(directory: Path) -> None:
        path = directory / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def write_json(file: str, content: object) -> Change:
    def apply(directory: Path) -> None:
        (directory / file).write_text(json.dumps(content))

    return apply


def split_weights(damage: Callable[[Path], None]) -> Change:
    """Save the weights in several files, and damage the second."""

    def apply(directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory)
        (directory / WEIGHTS).unlink()
        model.save_pretrained(directory, max_shard_size="100KB")
        damage(sorted(directory.glob("model-*.safetensors"))[1])

    return apply


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def add_tokens(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(32)])
    tokenizer.save_pretrained(directory)


def add_words(directory: Path) -> None:
    """As if the tokenizer were that of another model."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"word{i}": 320 + i for i in range(32)}
    path.write_text(json.dumps(content))


def add_adapter(directory: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "somebody/base"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def load_path(path: Path, dtype: Dtype = "fp32") -> LoadedModel:
    return load_model(resolve(str(path)), dtype)


def changed_copy(model: Path, directory: Path, change: Change) -> Path:
    shutil.copytree(model, directory)
    change(directory)
    return directory


def write_gguf(
    model: Path,
    path: Path,
    *,
    without: Collection[str] = (),
    extra: Collection[str] = (),
    keys: Mapping[str, Any] = MappingProxyType({}),
    **split: Any,
) -> Path:
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "llama", **split)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in keys.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(model / WEIGHTS).items():
        module, _, parameter = name.rpartition(".")
        gguf_name = names.get_name(module)
        if gguf_name not in without:
            writer.add_tensor(f"{gguf_name}.{parameter}", tensor.numpy())
    for name in extra:
        writer.add_tensor(name, torch.ones(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
