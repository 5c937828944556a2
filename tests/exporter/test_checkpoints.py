"""Checkpoints that do not fit their configuration or tokenizer are refused in one line; sound ones
load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from checkpoints import (
    WEIGHTS,
    Change,
    add_adapter,
    add_tokens,
    add_words,
    broken,
    cut,
    filled,
    settings,
    sharded,
    tensors,
    write_gguf,
)
from click.testing import CliRunner
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import pass_exporter.cli
import pass_trainer.cli
from conftest import EOS, VOCAB_SIZE, export_bundle, make_model
from pass_exporter.bundle import write_tokenizer
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import PassError

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}


def unlink(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def only_adapter(directory: Path) -> None:
    add_adapter(directory)
    (directory / "config.json").unlink()


BROKEN: dict[str, tuple[Change, str]] = {
    "a layer missing": (
        tensors(lambda found: {name: t for name, t in found.items() if ".layers.1." not in name}),
        f"9 missing: {NORM}, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 6 more",
    ),
    "no head": (
        tensors(lambda found: {name: t for name, t in found.items() if "lm_head" not in name}),
        "1 missing: lm_head.weight",
    ),
    "every body tensor renamed": (
        tensors(lambda found: {n.replace("model.", "body."): t for n, t in found.items()}),
        "20 not part of the model: body.embed_tokens.weight",
    ),
    "more layers in the config": (
        settings(num_hidden_layers=4),
        "18 missing: model.layers.2.input_layernorm.weight",
    ),
    "fewer layers in the config": (
        settings(num_hidden_layers=1),
        f"9 not part of the model: {NORM}",
    ),
    "no layers": (settings(num_hidden_layers=0), "0 layers"),
    "extra": (
        tensors(lambda found: found | {"vision.proj.weight": torch.zeros(4, 4)}),
        "1 not part of the model: vision.proj.weight",
    ),
    "mismatched": (
        tensors(lambda found: found | {UP: torch.zeros(90, 64)}),
        f"1 of another shape: {UP} [90, 64], not [96, 64]",
    ),
    "a smaller vocabulary in the config": (
        settings(vocab_size=300),
        "model.embed_tokens.weight [320, 64], not [300",
    ),
    "NaN": (filled(UP, float("nan")), f"{UP} of model holds NaN"),
    "infinite": (filled(NORM, float("-inf")), f"{NORM} of model holds infinite numbers"),
    "wrong tokenizer": (add_words, "ids up to 351, but the model's vocabulary is 320"),
    "an end beyond the vocabulary": (
        settings("generation_config.json", eos_token_id=[1, 999]),
        "eos_token_id 999 of model is not in the model's vocabulary of 320",
    ),
    "an end below the vocabulary": (
        settings("generation_config.json", eos_token_id=-1),
        "eos_token_id -1",
    ),
    "an end that is no number": (
        settings("generation_config.json", eos_token_id="</s>"),
        "eos_token_id '</s>'",
    ),
    "truncated": (lambda directory: cut(directory / WEIGHTS), f"{WEIGHTS} is damaged"),
    "truncated shard": (sharded(cut), "model-00002-of-00005.safetensors is damaged"),
    "missing shard": (sharded(Path.unlink), "model-00002-of-00005.safetensors"),
    "truncated tokenizer": (
        lambda directory: cut(directory / "tokenizer.json"),
        "tokenizer.json is cut off or damaged",
    ),
    "too few positions": (settings(max_position_embeddings=3), "at most 3 tokens"),
    "PEFT adapter": (only_adapter, "is a PEFT adapter for somebody/base, not a whole model: merge"),
    "PEFT adapter in a model": (
        add_adapter,
        "is a PEFT adapter for somebody/base, not a whole model: merge",
    ),
    "code of its own": (
        settings(auto_map=CODE, model_type="mine"),
        "is never run: take a model of a family",
    ),
    "code of its own without a type": (
        settings(auto_map=CODE, model_type=None),
        "is never run: take a model of a",
    ),
    **{
        method: (
            settings(quantization_config={"quant_method": method, "bits": 4}),
            f"already quantized ({method}), which is not supported: export the unquantized model",
        )
        for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8", "hqq")
    },
}


@pytest.fixture
def run() -> Callable[..., str]:
    """Return a function: a command that is refused -> the one line of its error."""

    def refused(command: click.Command, *arguments: object) -> str:
        done = CliRunner().invoke(command, list(map(str, arguments)))
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert errors == lines[-1:] and "Traceback" not in done.stderr, done.stderr
        return errors[0]

    return refused


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_are_refused(
    run: Callable[..., str], tiny_model: Path, tmp_path: Path, case: str
):
    change, expected = BROKEN[case]
    model = broken(tiny_model, tmp_path / "model", change)
    (tmp_path / "bundles").mkdir()
    assert expected in run(
        pass_exporter.cli.main, "--model", model, "-o", tmp_path / "bundles" / "bundle"
    )
    assert list((tmp_path / "bundles").iterdir()) == []


@pytest.mark.parametrize("case", ["a layer missing", "NaN", "gptq", "an end beyond the vocabulary"])
def test_training_and_evaluation_refuse_the_same_checkpoints(
    run: Callable[..., str], tiny_model: Path, tmp_path: Path, case: str
):
    change, expected = BROKEN[case]
    model = broken(tiny_model, tmp_path / "model", change)
    assert expected in run(
        pass_trainer.cli.main, "--model", model, "-o", tmp_path / "run", "--device", "cpu"
    )
    assert not any(path.is_file() for path in (tmp_path / "run").rglob("*"))
    assert expected in run(pass_trainer.cli.main, "evaluate", "--model", model, "--device", "cpu")


def test_weights_beyond_the_range_of_fp16_are_refused(tiny_model: Path, tmp_path: Path):
    model = resolve(str(broken(tiny_model, tmp_path / "model", filled(UP, 1e5))))
    load_model(model, "fp32")
    with pytest.raises(PassError, match="beyond the range of fp16: choose --dtype bf16 or fp32"):
        load_model(model, "fp16")


SOUND: dict[str, Change] = {
    "as saved": lambda directory: None,
    "old rotary buffers": tensors(
        lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    ),
    "in shards": sharded(lambda path: None),
    "with code, of a family that is known": settings(auto_map=CODE),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_checkpoints_load(tiny_model: Path, tmp_path: Path, case: str):
    loaded = load_model(resolve(str(broken(tiny_model, tmp_path / "model", SOUND[case]))), "fp32")
    expected = load_model(resolve(str(tiny_model)), "fp32").model.state_dict()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items()
    )


def test_a_tied_head_needs_no_tensor_of_its_own(tmp_path: Path):
    loaded = load_model(
        resolve(str(make_model(tmp_path / "tied", tie_word_embeddings=True))), "fp32"
    )
    assert loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight


@pytest.mark.slow
def test_every_family_loads(tmp_path: Path):
    """transformers adds tokens to some tokenizers, for which a model has no embeddings."""
    for family in SUPPORTED_FAMILIES:
        loaded = load_model(resolve(str(make_model(tmp_path / family, family))), "fp32")
        assert max(loaded.tokenizer.get_vocab().values()) < VOCAB_SIZE, family


def test_added_tokens_beyond_the_vocabulary_are_read_as_text(tiny_model: Path, tmp_path: Path):
    """Published models have such tokens, as Gemma3's text models have one for pictures."""
    model = broken(tiny_model, tmp_path / "model", add_tokens)
    with pytest.warns(
        UserWarning,
        match="model has no embeddings for the added tokens <extra 0>, <extra 1>, .* read as "
        "plain text",
    ):
        tokenizer = load_model(resolve(str(model)), "fp32").tokenizer
    text = "The <extra 0>fox<extra 31>"
    assert tokenizer.encode(text) == load_model(resolve(str(tiny_model)), "fp32").tokenizer.encode(
        text
    )
    assert max(tokenizer.encode(text)) < VOCAB_SIZE


def add_end(directory: Path) -> None:
    """Make the start and the end token one that is beyond the vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"eos_token": "<far>", "bos_token": "<far>"})
    tokenizer.save_pretrained(directory)


def test_start_and_end_tokens_beyond_the_vocabulary_are_left_out(tiny_model: Path, tmp_path: Path):
    model = broken(tiny_model, tmp_path / "model", add_end)
    with pytest.warns(UserWarning, match="no embeddings for the added tokens <far>"):
        loaded = load_model(resolve(str(model)), "fp32")
    assert (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id, loaded.eos_token_ids) == (
        None,
        None,
        (EOS,),
    )
    path = model / "tokenizer.json"
    first = {"SpecialToken": {"id": "<far>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"<far>": {"id": "<far>", "ids": [VOCAB_SIZE], "tokens": ["<far>"]}}
    processor = {"type": "TemplateProcessing", "single": first, "pair": first}
    processor["special_tokens"] = tokens
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": processor}))
    with pytest.warns(UserWarning), pytest.raises(PassError, match="ids up to 320"):
        load_model(resolve(str(model)), "fp32")


SAVED = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<eos>",
    },
}


@pytest.mark.parametrize("saved", SAVED)
def test_saved_truncation_and_padding_are_left_out(tiny_model: Path, tmp_path: Path, saved: str):
    """A tokenizer.json has those of its last call; transformers ignores them."""
    model = broken(
        tiny_model, tmp_path / "model", settings("tokenizer.json", **{saved: SAVED[saved]})
    )
    tokenizer = load_model(resolve(str(model)), "fp32").tokenizer
    text = "The quick brown fox jumps over the lazy dog."
    expected = AutoTokenizer.from_pretrained(model)(text).input_ids
    assert tokenizer.backend_tokenizer.encode(text).ids == expected
    write_tokenizer(tmp_path, tokenizer)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == expected


def test_a_gguf_file_with_missing_or_extra_tensors_is_refused(tiny_model: Path, tmp_path: Path):
    loaded = load_model(resolve(str(write_gguf(tiny_model, tmp_path / "sound.gguf"))), "fp32")
    # transformers adds a token of GPT-2's
    assert max(loaded.tokenizer.get_vocab().values()) < VOCAB_SIZE
    own = load_model(resolve(str(tiny_model)), "fp32").tokenizer
    assert loaded.tokenizer.encode("The fox <|endoftext|>") == own.encode("The fox <|endoftext|>")
    short = write_gguf(tiny_model, tmp_path / "short.gguf", without=("blk.1.ffn_up",))
    with pytest.raises(
        PassError, match=r"short .*\(1 missing: model.layers.1.mlp.up_proj.weight\)"
    ):
        load_model(resolve(str(short)), "fp32")
    more = write_gguf(tiny_model, tmp_path / "more.gguf", extra=("rope_freqs.weight",))
    with pytest.raises(PassError, match=r"more .*\(1 not part of the model: rope_freqs.weight\)"):
        load_model(resolve(str(more)), "fp32")


def test_the_option_trust_remote_code_is_refused(run: Callable[..., str]):
    for command in (pass_exporter.cli.main, pass_trainer.cli.main):
        line = run(command, "--model", "somebody/model", "--trust-remote-code")
        assert (
            "--trust-remote-code is refused: code that comes with a checkpoint is never run: "
            "take a model of" in line
        )


@pytest.mark.slow
def test_a_bundle_that_the_runtime_refuses_is_not_delivered(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Here the check of the model misses an end token, and the runtime finds it."""
    monkeypatch.setattr("pass_exporter.model.load.end_tokens", lambda *_: (999,))
    with pytest.raises(
        PassError, match=r"the runtime refuses the bundle .* token 999 is not in the vocabulary"
    ) as refused:
        export_bundle(tiny_model, tmp_path / "bundles" / "bundle", lookahead=2)
    assert "export the bundle again" not in str(refused.value)
    assert list((tmp_path / "bundles").iterdir()) == []
