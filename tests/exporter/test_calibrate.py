"""Calibration text: what a model writes, in bf16 where CPUs have it, and what a file gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export_process import command, error_line
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_model
from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.registry import resolve
from pass_exporter.quantize import text
from pass_exporter.quantize.text import bf16_copy, file_ids, own_ids, uses_bf16


def no_report(_done: int, _steps: int) -> None:
    pass


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedModel:
    return load_model(resolve(str(tiny_model)), "fp32")


def set_bf16(monkeypatch: pytest.MonkeyPatch, *, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})


def test_bf16_is_used_for_fp32_models_on_cpus_that_have_it(
    loaded: LoadedModel, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    fp16 = load_model(resolve(str(tiny_model)), "fp16").model
    for has_bf16 in (True, False):
        set_bf16(monkeypatch, has_bf16=has_bf16)
        assert uses_bf16(loaded.model) == has_bf16
        assert not uses_bf16(fp16)


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="lists the CPU's features on Linux alone"
)
def test_torch_names_the_features_of_this_cpu(loaded: LoadedModel):
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    assert uses_bf16(loaded.model) == any(word in words for word in text.CPU_FEATURES)


def test_a_copy_in_bf16_does_not_change_the_model(tmp_path: Path):
    model = load_model(
        resolve(str(make_model(tmp_path / "tied", tie_word_embeddings=True))), "fp32"
    ).model
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    copied = bf16_copy(model)
    assert all(weight.dtype == torch.bfloat16 for weight in copied.parameters())
    assert copied.lm_head.weight is copied.get_input_embeddings().weight
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    ids = torch.arange(8)[None]
    exact, rounded = (each(input_ids=ids).logits.float() for each in (model, copied))
    assert torch.nn.functional.cosine_similarity(rounded, exact, -1).min() > 0.999


def test_a_model_writes_all_its_calibration_sequences_in_one_batch(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    set_bf16(monkeypatch, has_bf16=False)
    passes, steps = [], []
    handle = loaded.model.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        ids = own_ids(
            loaded.model, loaded.tokenizer, 700, lambda done, total: steps.append((done, total))
        )
    finally:
        handle.remove()
    assert ids.shape == (
        text.OWN_SEQUENCES // text.SEQUENCES_PER_ROW,
        text.OWN_TOKENS * text.SEQUENCES_PER_ROW,
    )
    assert ids.numel() >= 3000
    assert len(passes) == len(steps) < text.OWN_TOKENS
    assert steps[-1] == (text.OWN_TOKENS, text.OWN_TOKENS)
    prompts = [
        loaded.tokenizer.backend_tokenizer.encode(p, add_special_tokens=False).ids
        for p in text.PROMPTS
    ]
    given = text.OWN_TOKENS - len(passes)
    sequences = torch.cat(ids.chunk(text.SEQUENCES_PER_ROW, 1))
    expected = text.SEQUENCES_PER_ROW * [prompt[:given] for prompt in prompts]
    assert sequences[:, :given].tolist() == expected
    assert len({tuple(sequence) for sequence in sequences.tolist()}) == len(sequences)


def test_calibration_sequences_are_no_longer_than_the_capacity(loaded: LoadedModel):
    assert own_ids(loaded.model, loaded.tokenizer, 20, no_report).shape == (16, 20)


@given(st.integers(0, 2**32 - 1))
def test_tokens_are_drawn_as_often_as_they_are_likely(seed: int):
    shares = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = text._sampled(shares.log().expand(4000, -1), torch.Generator().manual_seed(seed))
    assert drawn.shape == (4000, 1)
    drawn_shares = torch.bincount(drawn.flatten(), minlength=6) / 4000
    assert (drawn_shares - shares).abs().max() < 0.06  # more than seven standard deviations
    assert not drawn_shares[shares == 0].any()


def test_a_file_is_cut_into_sequences_for_calibration(loaded: LoadedModel):
    sentences = "The quick brown fox jumps over the lazy dog. " * 1000
    assert file_ids(loaded.tokenizer, sentences).shape == (24, 256)


@pytest.mark.parametrize(
    ("file", "weights", "error"),
    [
        ("short.txt", "int4", "give one of at least 512"),
        ("empty.txt", "int4", "--calibrate needs text"),
        ("missing.txt", "int4", "No such file"),
        ("short.txt", "full", "--calibrate is for --weights int4: full needs no text"),
        ("none", "int8", "--calibrate is for --weights int4: int8 needs no text"),
    ],
)
def test_unusable_text_for_calibration_is_refused(
    tiny_model: Path, tmp_path: Path, file: str, weights: str, error: str
):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty.txt").write_text("\n")
    flags = ("--model", tiny_model, "--weights", weights, "-o", tmp_path / "bundle", "--calibrate")
    given = file if file == "none" else tmp_path / file
    assert error in error_line(command(*flags, given))
    assert not (tmp_path / "bundle").exists()
