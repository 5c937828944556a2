"""Settings that a .gguf file states under its keys: each key becomes a setting of the model or is
refused by name."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import load_path, write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from conftest import make_model
from pass_exporter.model.gguf_config import (
    ARCHITECTURES,
    GEMMA3_27B_LAYERS,
    check_settings,
    gguf_settings,
)
from pass_exporter.model.gguf_reader import read_gguf
from pass_runtime import PassError

REQUIRED_KEYS: dict[str, Any] = {
    "block_count": 6,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
}


@pytest.fixture
def settings_of(tmp_path: Path):
    def settings(arch: str, keys: dict[str, Any]) -> dict[str, Any]:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, arch)
        for key, value in (REQUIRED_KEYS | keys).items():
            if value is not None:
                writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
        writer.add_tensor("token_embd.weight", np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return gguf_settings(read_gguf(path))

    return settings


def default_rope(theta: float = 5000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def gemma3_rope(full: dict[str, Any], sliding_theta: float) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": default_rope(sliding_theta)}


def scaling(**keys: Any) -> dict[str, Any]:
    return {f"rope.scaling.{name}": value for name, value in keys.items()}


LINEAR = default_rope() | {"rope_type": "linear", "factor": 4.0}
OF_YARN = {"original_context_length": 128, "yarn_attn_factor": 1.5}
OF_YARN |= {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0}
ALL_OF_YARN = {"original_max_position_embeddings": 128, "attention_factor": 1.5}
ALL_OF_YARN |= {"beta_fast": 16.0, "beta_slow": 2.0}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 512}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "required keys alone": (
        "llama",
        {},
        {"head_dim": 16, "num_key_value_heads": 4, "rope_parameters": default_rope()},
    ),
    "no base of rotary frequencies": (
        "llama",
        {"rope.freq_base": None},
        {"rope_parameters": default_rope(10000.0)},
    ),
    "size of heads": (
        "qwen3",
        {"attention.key_length": 24, "attention.value_length": 24},
        {"head_dim": 24},
    ),
    "kv heads": ("qwen2", {"attention.head_count_kv": 2}, {"num_key_value_heads": 2}),
    "linear by its factor": ("llama", scaling(factor=4.0), {"rope_parameters": LINEAR}),
    "no scaling": (
        "llama",
        scaling(factor=4.0, type="none"),
        {"rope_parameters": default_rope()},
    ),
    "yarn": ("qwen2", scaling(factor=4.0, type="yarn"), {"rope_parameters": YARN}),
    "all of yarn": (
        "qwen3",
        scaling(factor=4.0, type="yarn", **OF_YARN),
        {"rope_parameters": YARN | ALL_OF_YARN},
    ),
    "phi3": (
        "phi3",
        {"rope.dimension_count": 12, "attention.sliding_window": 64},
        {"rope_parameters": default_rope() | {"partial_rotary_factor": 0.75}, "sliding_window": 64},
    ),
    "gemma3": (
        "gemma3",
        {"attention.sliding_window": 64, "attention.key_length": 32} | scaling(factor=4.0),
        {
            "rope_parameters": gemma3_rope(LINEAR, 10000.0),
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
        },
    ),
    "all of gemma3": (
        "gemma3",
        {
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": 2,
            "attention.scale": 20**-0.5,
            "rope.freq_base_swa": 100.0,
        },
        {
            "rope_parameters": gemma3_rope(default_rope(), 100.0),
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3 without windows": (
        "gemma3",
        {},
        {"layer_types": ["full_attention"] * 6, "sliding_window": 512},
    ),
    "gemma3 27b": (
        "gemma3",
        {"block_count": GEMMA3_27B_LAYERS, "attention.key_length": 32},
        {"query_pre_attn_scalar": 16, "head_dim": 32},
    ),
    "a window that holds the longest text": (
        "llama",
        {"attention.sliding_window": 512},
        {"sliding_window": None},
    ),
}
"""By case: an architecture, keys of a file, and the settings of transformers that follow."""


@pytest.mark.parametrize("case", SETTINGS)
def test_keys_become_settings(settings_of, case: str):
    arch, keys, expected = SETTINGS[case]
    settings = settings_of(arch, keys)
    assert {name: settings[name] for name in expected} == expected


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "attention.head_count = [4, 4, 4, 4, 4, 4] has a value for each layer": (
        "llama",
        {"attention.head_count": [4] * 6},
    ),
    "attention.scale = 0.5 is not 1/sqrt(16)": ("llama", {"attention.scale": 0.5}),
    "attention.sliding_window = 64": ("qwen2", {"attention.sliding_window": 64}),
    "value_length = 8 is not the length of a key, 16": ("llama", {"attention.value_length": 8}),
    "expert_count = 8 is not supported": ("llama", {"expert_count": 8}),
    "final_logit_softcapping = 30.0": ("gemma3", {"final_logit_softcapping": 30.0}),
    "logit_scale = 0.5": ("llama", {"logit_scale": 0.5}),
    "dimension_count = 8 is not the size of a head, 16": ("qwen2", {"rope.dimension_count": 8}),
    "rope.scaling.factor = 4.0": ("phi3", scaling(factor=4.0)),
    "rope.scaling.type = 'longrope'": ("phi3", scaling(type="longrope")),
    "rope.scaling.type = 'yarn'": ("gemma3", scaling(type="yarn", factor=4.0)),
    "something.new = 3 is not known": ("qwen3", {"something.new": 3}),
    "the file has no llama.context_length": ("llama", {"context_length": None}),
    "the file has no gemma3.rope.freq_base": ("gemma3", {"rope.freq_base": None}),
    "architecture 'mamba'": ("mamba", {}),
    "architecture 'olmo2'": ("olmo2", {}),
}
"""By a part of the error: an architecture and keys of a file."""


@pytest.mark.parametrize("expected", REFUSED)
def test_unsupported_keys_are_refused_by_name(settings_of, expected: str):
    with pytest.raises(PassError) as refused:
        settings_of(*REFUSED[expected])
    assert expected in str(refused.value) and len(str(refused.value).splitlines()) == 1


YARN_KEYS = scaling(**OF_YARN).keys() - {"rope.scaling.yarn_ext_factor"}
"""Keys that only yarn scaling reads, which is refused for Phi3 and Gemma3."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_key_of_the_format_is_ignored(settings_of, arch: str):
    """But for the size of the vocabulary, and YARN_KEYS without yarn."""
    has_yarn = arch not in ("phi3", "gemma3")
    yarn = scaling(type="yarn", factor=4.0)
    other_keys = yarn if has_yarn else {"attention.sliding_window": 64}
    classes = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM)
    constants = {str(value) for each in classes for value in vars(each).values()}
    keys = {constant.removeprefix("{arch}.") for constant in constants}
    keys = {key for key in keys if set(key) <= set(ascii_lowercase + "._")}  # no Python attributes
    assert len(keys) > 80
    settings = settings_of(arch, other_keys)

    def has_effect(key: str, value: object) -> bool:
        try:
            return settings_of(arch, other_keys | {key: value}) != settings
        except (PassError, TypeError, ValueError, ZeroDivisionError):
            return True

    ignored = {
        key for key in keys if not any(has_effect(key, value) for value in (3, 3.5, True, "odd"))
    }
    assert ignored == {"vocab_size"} | (set() if has_yarn else YARN_KEYS)


def test_a_setting_that_transformers_would_change_is_refused():
    config = AutoConfig.for_model("llama", num_hidden_layers=6, rope_parameters=LINEAR)
    check_settings("m", {"num_hidden_layers": 6, "rope_parameters": LINEAR}, config)
    with pytest.raises(
        PassError, match="num_hidden_layers of m is 5 in the file, but transformers would use 6"
    ):
        check_settings("m", {"num_hidden_layers": 5}, config)
    with pytest.raises(PassError, match="rope_parameters of m"):
        check_settings("m", {"rope_parameters": YARN}, config)


def test_biases_of_a_file_are_used(tmp_path: Path):
    model = make_model(tmp_path / "model", attention_bias=True, mlp_bias=True)
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(".bias"):
            tensor.fill_(0.5)  # equal, because GGUF has the rows of some tensors in another order
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    loaded = load_path(write_gguf(model, tmp_path / "model.gguf")).model
    biases = [tensor for name, tensor in loaded.named_parameters() if name.endswith(".bias")]
    assert len(biases) == 14 and all(bool((tensor == 0.5).all()) for tensor in biases)


@pytest.mark.parametrize("key", ["eot", "eom"])
def test_the_end_tokens_of_turns_and_messages_are_end_tokens(tiny_model, tmp_path, key):
    path = write_gguf(
        tiny_model, tmp_path / "model.gguf", keys={f"tokenizer.ggml.{key}_token_id": 7}
    )
    assert load_path(path).eos_token_ids == (1, 7)


def test_tokenizers_of_other_kinds_are_refused(tiny_model, tmp_path, monkeypatch):
    def write_kind(writer: gguf.GGUFWriter, _kind: str) -> None:
        writer.add_string("tokenizer.ggml.model", "t5")

    def write_scores(writer: gguf.GGUFWriter, _merges: list[str]) -> None:
        writer.add_token_scores([0.0] * 320)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", write_kind)
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", write_scores)
    path = write_gguf(tiny_model, tmp_path / "model.gguf")
    with pytest.raises(PassError, match=r"tokenizer.ggml.model = 't5' is not supported"):
        load_path(path)
