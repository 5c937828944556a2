"""Checkpoints that do not fit their configuration or tokenizer are refused in one line; valid ones
load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    WEIGHTS,
    Change,
    add_adapter,
    add_tokens,
    add_words,
    change_settings,
    change_tensors,
    changed_copy,
    cut_off,
    load_path,
    set_number,
    split_weights,
    write_gguf,
    write_json,
)
from export_process import command, error_line
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import pass_trainer.cli
from conftest import EOS, VOCAB_SIZE, make_model
from pass_exporter.bundle import write_tokenizer
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import PassError

UP = "model.layers.0.mlp.up_proj.weight"
UP_NAME = UP.removesuffix(".weight")
NORM = "model.layers.1.input_layernorm.weight"
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
"""What config.json names if a checkpoint comes with its own modeling code."""


def unlink(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def drop_tensors(part: str) -> Change:
    return change_tensors(lambda old: {name: t for name, t in old.items() if part not in name})


def leave_only_adapter(directory: Path) -> None:
    add_adapter(directory)
    unlink("config.json")(directory)


def unlink_tokenizer(directory: Path) -> None:
    for path in directory.glob("*token*"):
        path.unlink()


def config_alone(**changes: Any) -> Change:
    """Change the configuration of a model without weights: it must be refused before they are
    read."""

    def change(directory: Path) -> None:
        unlink(WEIGHTS)(directory)
        change_settings(**changes)(directory)

    return change


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = DYNAMIC | {"rope_type": "longrope", "original_max_position_embeddings": 256}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
STATIC = {"rope_type": "default", "rope_theta": 1e4}
OF_GEMMA3 = {"sliding_attention": STATIC, "full_attention": DYNAMIC}
ADAPTER = "is a PEFT adapter for somebody/base, not a whole model: merge"
NEVER_RUN = "is never run: take a model of a family"
STATIC_TYPES = "is not supported; the exporter supports default, linear, llama3, yarn"
BROKEN: dict[str, tuple[Change, str]] = {
    **{
        model_type: (
            config_alone(model_type=model_type),
            f"model type '{model_type}' is not supported; the exporter supports "
            f"{', '.join(SUPPORTED_FAMILIES)}",
        )
        for model_type in ("gpt2", "gemma2", "mixtral")
    },
    "dynamic": (config_alone(rope_parameters=DYNAMIC), f"rotary type 'dynamic' {STATIC_TYPES}"),
    "longrope": (config_alone(rope_parameters=LONGROPE), f"rotary type 'longrope' {STATIC_TYPES}"),
    "dynamic in some layers": (
        config_alone(model_type="gemma3_text", rope_parameters=OF_GEMMA3),
        f"rotary type 'dynamic' {STATIC_TYPES}",
    ),
    **{
        setting: (
            config_alone(model_type="gemma3_text", sliding_window=32, **{setting: value}),
            f"({setting} in config.json) is not supported",
        )
        for setting, value in (
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
            ("use_bidirectional_attention", True),
        )
    },
    "no config": (unlink("config.json"), "has no config.json"),
    "no model type": (write_json("config.json", {}), "cannot load"),
    "a model type that is no text": (write_json("config.json", {"model_type": 5}), "cannot load"),
    "no weights": (unlink(WEIGHTS), "safetensors"),
    "no tokenizer": (unlink_tokenizer, "token"),
    "a layer missing": (
        drop_tensors(".layers.1."),
        f"9 missing: {NORM}, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 6 more",
    ),
    "no head": (drop_tensors("lm_head"), "1 missing: lm_head.weight"),
    "every body tensor renamed": (
        change_tensors(lambda old: {n.replace("model.", "body."): t for n, t in old.items()}),
        "20 not part of the model: body.embed_tokens.weight",
    ),
    "more layers in the config": (
        change_settings(num_hidden_layers=4),
        "18 missing: model.layers.2.input_layernorm.weight",
    ),
    "fewer layers in the config": (
        change_settings(num_hidden_layers=1),
        f"9 not part of the model: {NORM}",
    ),
    "no layers": (change_settings(num_hidden_layers=0), "0 layers"),
    "extra": (
        change_tensors(lambda old: old | {"vision.proj.weight": torch.zeros(4, 4)}),
        "1 not part of the model: vision.proj.weight",
    ),
    "mismatched": (
        change_tensors(lambda old: old | {UP: torch.zeros(90, 64)}),
        f"1 of another shape: {UP} [90, 64], not [96, 64]",
    ),
    "a smaller vocabulary in the config": (
        change_settings(vocab_size=300),
        "model.embed_tokens.weight [320, 64], not [300",
    ),
    "NaN": (set_number(UP, float("nan")), f"{UP} of model holds NaN"),
    "infinite": (set_number(NORM, float("-inf")), f"{NORM} of model holds infinite numbers"),
    "wrong tokenizer": (add_words, "ids up to 351, but the model's vocabulary is 320"),
    "an end beyond the vocabulary": (
        change_settings("generation_config.json", eos_token_id=[1, 999]),
        "eos_token_id 999 of model is not in the model's vocabulary of 320",
    ),
    "an end below the vocabulary": (
        change_settings("generation_config.json", eos_token_id=-1),
        "eos_token_id -1",
    ),
    "an end that is no number": (
        change_settings("generation_config.json", eos_token_id="</s>"),
        "eos_token_id '</s>'",
    ),
    "truncated": (lambda directory: cut_off(directory / WEIGHTS), f"{WEIGHTS} is damaged"),
    "truncated shard": (split_weights(cut_off), "model-00002-of-00005.safetensors is damaged"),
    "missing shard": (split_weights(Path.unlink), "model-00002-of-00005.safetensors"),
    "too few positions": (change_settings(max_position_embeddings=3), "at most 3 tokens"),
    "PEFT adapter": (leave_only_adapter, ADAPTER),
    "PEFT adapter in a model": (add_adapter, ADAPTER),
    "code of its own": (change_settings(auto_map=CODE, model_type="mine"), NEVER_RUN),
    "code of its own without a type": (change_settings(auto_map=CODE, model_type=None), NEVER_RUN),
}


def store(**parts: torch.Tensor) -> Change:
    def change(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: tensor for name, tensor in old.items() if name != UP}
        return kept | {f"{UP_NAME}.{part}": tensor for part, tensor in parts.items()}

    return change_tensors(change)


def zeros(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(rows, columns).to(dtype)


MLX = {"group_size": 64, "bits": 4, "mode": "affine"}
COMPRESSED = {"quant_method": "compressed-tensors"}
TORCHAO = {"default": {"_type": "Int4WeightOnlyConfig", "_version": 1, "_data": {}}}
NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
MODELOPT = {"name": "modelopt", "version": "0.29.0"}
FP8_SCALES = zeros(96, 4, torch.float8_e4m3fn)
PACKED = zeros(96, 32, torch.uint8)
QUANTIZED: dict[str, tuple[Change, str]] = {
    **{
        method: (
            change_settings(quantization_config={"quant_method": method, "bits": 4}),
            method,
        )
        for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8", "hqq")
    },
    "MLX": (change_settings(quantization=MLX), "MLX"),
    "MLX, stated twice": (change_settings(quantization=MLX, quantization_config=MLX), "MLX"),
    "MLX's tensors": (
        store(weight=zeros(96, 8, torch.uint32), scales=torch.ones(96, 1), biases=torch.ones(96)),
        "MLX",
    ),
    "ModelOpt": (
        write_json("hf_quant_config.json", {"producer": MODELOPT, "quantization": NVFP4}),
        "ModelOpt NVFP4, by its hf_quant_config.json",
    ),
    "ModelOpt in the config": (
        change_settings(quantization_config={**NVFP4, "quant_method": "modelopt"}),
        "modelopt NVFP4",
    ),
    "ModelOpt's tensors": (
        store(weight=PACKED, weight_scale=FP8_SCALES, weight_scale_2=torch.ones(())),
        "ModelOpt NVFP4",
    ),
    "torchao": (
        change_settings(quantization_config={"quant_method": "torchao", "quant_type": TORCHAO}),
        "torchao",
    ),
    "NVFP4": (
        change_settings(quantization_config={**COMPRESSED, "format": "nvfp4-pack-quantized"}),
        "compressed-tensors nvfp4-pack-quantized",
    ),
    "NVFP4's tensors": (
        store(weight_packed=PACKED, weight_scale=FP8_SCALES, weight_global_scale=torch.ones(1)),
        "compressed-tensors NVFP4",
    ),
    "an older compressed-tensors": (
        change_settings(compression_config={**COMPRESSED, "format": "pack-quantized"}),
        "compressed-tensors pack-quantized",
    ),
    "AutoGPTQ": (
        write_json("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}),
        "GPTQ, by its quantize_config.json",
    ),
    "AutoAWQ": (
        write_json("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4}),
        "AWQ, by its quant_config.json",
    ),
    "GPTQ's tensors": (
        store(qweight=zeros(8, 96, torch.int32), qzeros=zeros(1, 12, torch.int32)),
        "GPTQ or AWQ",
    ),
    "bitsandbytes' tensors": (
        change_tensors(lambda old: old | {UP: PACKED, f"{UP}.absmax": torch.ones(96)}),
        "bitsandbytes",
    ),
    "FP8's tensors": (
        store(weight=zeros(96, 64, torch.float8_e4m3fn), weight_scale_inv=torch.ones(1, 1)),
        "FP8",
    ),
    "scales": (
        change_tensors(lambda old: old | {f"{UP}_scale": torch.ones(96, 1)}),
        "scales as of FP8 or INT8",
    ),
    "integers": (store(weight=zeros(96, 64, torch.int8)), f"{UP} is stored as I8"),
    "no method": (
        change_settings(quantization_config={"bits": 4}),
        "its config.json has a quantization_config",
    ),
}
BROKEN |= {
    case: (change, f"model is already quantized ({how}), which is not supported: export the un")
    for case, (change, how) in QUANTIZED.items()
}
BROKEN["a damaged statement"] = (
    lambda directory: (directory / "hf_quant_config.json").write_text("{"),
    "hf_quant_config.json is cut off or damaged",
)


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_are_refused(tiny_model: Path, tmp_path: Path, case: str):
    change, expected = BROKEN[case]
    model = changed_copy(tiny_model, tmp_path / "model", change)
    (tmp_path / "bundles").mkdir()
    output = tmp_path / "bundles" / "bundle"
    assert expected in error_line(command("--model", model, "-o", output))
    assert list((tmp_path / "bundles").iterdir()) == []


@pytest.mark.parametrize(
    "case", ["a layer missing", "NaN", "gptq", "MLX", "an end beyond the vocabulary"]
)
def test_training_and_evaluation_refuse_the_same_checkpoints(tiny_model, tmp_path, case):
    change, expected = BROKEN[case]
    model = changed_copy(tiny_model, tmp_path / "model", change)
    flags, main = ("--model", model, "--device", "cpu"), pass_trainer.cli.main
    assert expected in error_line(command(*flags, "-o", tmp_path / "run", main=main))
    assert not any(path.is_file() for path in (tmp_path / "run").rglob("*"))
    assert expected in error_line(command("evaluate", *flags, main=main))


def test_weights_beyond_the_range_of_fp16_are_refused(tiny_model: Path, tmp_path: Path):
    model = resolve(str(changed_copy(tiny_model, tmp_path / "model", set_number(UP, 1e5))))
    load_model(model, "fp32")
    with pytest.raises(PassError, match="beyond the range of fp16: choose --dtype bf16 or fp32"):
        load_model(model, "fp16")


VALID: dict[str, Change] = {
    "old rotary buffers": change_tensors(
        lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    ),
    "in shards": split_weights(lambda path: None),
    "with code, of a supported family": change_settings(auto_map=CODE),
    "no quantization": change_settings(quantization_config={}, quantization={}),
    "null for a quantization": change_settings(quantization_config=None, quantization=None),
    "null for all of a quantization": change_settings(
        quantization_config={"quant_method": None, "ignore": []}
    ),
    "ModelOpt without a quantization": write_json(
        "hf_quant_config.json",
        {"producer": MODELOPT, "quantization": {**NVFP4, **dict.fromkeys(list(NVFP4)[:2])}},
    ),
    "in float64": change_tensors(lambda old: {name: each.double() for name, each in old.items()}),
}


@pytest.mark.parametrize("case", VALID)
def test_valid_checkpoints_load(tiny_model: Path, tmp_path: Path, case: str):
    model = changed_copy(tiny_model, tmp_path / "model", VALID[case])
    loaded = load_path(model)
    expected = load_path(tiny_model).model.state_dict()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items()
    )


def test_a_tied_head_needs_no_tensor_of_its_own(tmp_path: Path):
    loaded = load_path(make_model(tmp_path / "tied", tie_word_embeddings=True))
    assert loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight


@pytest.mark.slow
def test_every_family_loads(tmp_path: Path):
    for family in SUPPORTED_FAMILIES:
        loaded = load_path(make_model(tmp_path / family, family))
        assert max(loaded.tokenizer.get_vocab().values()) < VOCAB_SIZE, family


def test_added_tokens_beyond_the_vocabulary_are_read_as_text(tiny_model: Path, tmp_path: Path):
    model = changed_copy(tiny_model, tmp_path / "model", add_tokens)
    with pytest.warns(
        UserWarning,
        match="model has no embeddings for the added tokens <extra 0>, <extra 1>, .* read as "
        "plain text",
    ):
        tokenizer = load_path(model).tokenizer
    text, original = "The <extra 0>fox<extra 31>", load_path(tiny_model)
    assert tokenizer.encode(text) == original.tokenizer.encode(text)
    assert max(tokenizer.encode(text)) < VOCAB_SIZE


def set_far_end_token(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"eos_token": "<far>", "bos_token": "<far>"})
    tokenizer.save_pretrained(directory)


def test_start_and_end_tokens_beyond_the_vocabulary_are_left_out(tiny_model: Path, tmp_path: Path):
    model = changed_copy(tiny_model, tmp_path / "model", set_far_end_token)
    with pytest.warns(UserWarning, match="no embeddings for the added tokens <far>"):
        loaded = load_path(model)
    assert loaded.tokenizer.bos_token_id is loaded.tokenizer.eos_token_id is None
    assert loaded.eos_token_ids == (EOS,)
    # A tokenizer that writes this token before every text cannot be used.
    saved = Tokenizer.from_file(str(model / "tokenizer.json"))
    saved.post_processor = TemplateProcessing("<far> $A", special_tokens=[("<far>", VOCAB_SIZE)])
    saved.save(str(model / "tokenizer.json"))
    with pytest.warns(UserWarning), pytest.raises(PassError, match="ids up to 320"):
        load_path(model)


def test_saved_truncation_and_padding_are_left_out(tiny_model: Path, tmp_path: Path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    saved = Tokenizer.from_file(str(model / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=64, pad_id=EOS, pad_token="<eos>")
    saved.save(str(model / "tokenizer.json"))
    tokenizer = load_path(model).tokenizer
    text = "The quick brown fox jumps over the lazy dog."
    expected = AutoTokenizer.from_pretrained(model)(text).input_ids
    assert tokenizer.backend_tokenizer.encode(text).ids == expected
    write_tokenizer(tmp_path, tokenizer)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == expected


def test_a_gguf_file_with_missing_or_extra_tensors_is_refused(tiny_model: Path, tmp_path: Path):
    loaded = load_path(write_gguf(tiny_model, tmp_path / "valid.gguf"))
    # transformers adds GPT-2's token <|endoftext|>, for which the model has no embedding.
    assert max(loaded.tokenizer.get_vocab().values()) < VOCAB_SIZE
    text, original = "The fox <|endoftext|>", load_path(tiny_model)
    assert loaded.tokenizer.encode(text) == original.tokenizer.encode(text)
    short = write_gguf(tiny_model, tmp_path / "short.gguf", without=("blk.1.ffn_up",))
    with pytest.raises(
        PassError, match=r"short .*\(1 missing: model.layers.1.mlp.up_proj.weight\)"
    ):
        load_path(short)
    extra = write_gguf(tiny_model, tmp_path / "extra.gguf", extra=("rope_freqs.weight",))
    with pytest.raises(PassError, match=r"extra .*\(1 not part of the model: rope_freqs.weight\)"):
        load_path(extra)
