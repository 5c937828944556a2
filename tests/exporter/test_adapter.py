"""Adapters in a trunk change look-ahead rows alone, and weights of another model are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import change_tensors, changed_copy
from safetensors import safe_open
from safetensors.torch import save_file

from conftest import export_bundle, make_model
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import model_fingerprint, read_lookahead, same_fingerprint
from pass_exporter.model.registry import resolve
from pass_runtime import PassError
from pass_runtime.backends.ort.session import open_session
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.window import (
    Window,
    ar_window,
    draft_window,
    prefill_window,
    verify_window,
)
from trunk_feeds import trunk_feed

ENTRIES = 20
"""The number of cache entries before a window."""
WINDOWS = [
    ar_window(),
    verify_window(4),
    draft_window(1),
    draft_window(6),
    prefill_window(16),
    Window("fused", 2, (2, 2, 2)),
]


def run_trunk(bundle: Path, window: Window) -> list[np.ndarray]:
    manifest, rng = read_manifest(bundle), np.random.default_rng(0)
    model = manifest.model
    tokens = rng.integers(0, model.vocab_size, (1, window.width))
    shape = (1, model.kv_heads, 48, model.head_dim)
    past = [rng.standard_normal(shape, np.float32) for _ in range(2 * model.layers)]
    session = open_session(bundle / manifest.trunk.file, "cpu")
    return session.run(None, trunk_feed(session, window, tokens, [ENTRIES], past))


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.name)
def test_an_adapter_changes_no_bit_of_the_rows_of_tokens(
    random_bundle: Path, adapter_bundle: Path, window: Window
):
    logits, *cache = run_trunk(random_bundle, window)
    adapted_logits, *adapted_cache = run_trunk(adapter_bundle, window)
    rows = window.width - len(window.lookahead_rows)  # the rows of tokens are the first ones
    np.testing.assert_array_equal(adapted_logits[:, :rows], logits[:, :rows])
    for adapted, plain in zip(adapted_cache, cache, strict=True):
        end = ENTRIES + rows
        np.testing.assert_array_equal(adapted[:, :, :end], plain[:, :, :end])


def test_only_a_trunk_with_an_adapter_has_the_input_lookahead_rows(
    random_bundle: Path, adapter_bundle: Path
):
    for bundle, rank, expected in ((random_bundle, 0, False), (adapter_bundle, 4, True)):
        manifest = read_manifest(bundle)
        assert manifest.lookahead.adapter_rank == rank
        assert any(tensor.name == "lookahead_rows" for tensor in manifest.trunk.inputs) == expected


def test_the_fingerprint_of_a_model_is_the_same_in_every_precision(tiny_model: Path):
    models = [
        load_model(resolve(str(tiny_model)), dtype).model for dtype in ("fp32", "fp16", "bf16")
    ]
    samples = [model_fingerprint(model) for model in models]
    assert len(samples[0]) > 14
    assert all(same_fingerprint(a, b) for a in samples for b in samples)


def test_weights_of_another_model_are_refused(
    tiny_model: Path, adapter_weights: Path, tmp_path: Path
):
    generator = torch.Generator().manual_seed(0)
    fine_tune = change_tensors(
        lambda old: {
            name: tensor * (1 + 0.02 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in old.items()
        }
    )
    fine_tuned = changed_copy(tiny_model, tmp_path / "fine-tuned", fine_tune)
    larger, output = make_model(tmp_path / "larger", num_hidden_layers=3), tmp_path / "bundle"
    for model in (fine_tuned, larger):
        with pytest.raises(PassError, match="was trained for another model"):
            export_bundle(model, output, lookahead=2, lookahead_weights=adapter_weights)
    assert not output.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"adapter.layers.0.self_attn.o_proj.lora_A": torch.zeros(4, 63)}, "does not fit"),
        ({"adapter.layers.0.self_attn.o_proj.lora_B": torch.zeros(64, 5)}, "does not fit"),
        ({"adapter.layers.0.self_attn.o_proj.lora_B": None}, "does not fit"),
        ({"adapter.layers.9.mlp.down_proj.lora_A": torch.zeros(4, 96)}, "layers.9.mlp.down_proj"),
        ({"adapter.layers.0.mlp.down_proj.lora_A": torch.full((4, 96), torch.nan)}, "not finite"),
        ({"base_sample": None}, "another model"),
        ({"lookahead": None}, "'lookahead'"),
    ],
    ids=str,
)
def test_look_ahead_weights_with_wrong_or_missing_tensors_are_refused(
    tiny_model: Path, adapter_weights: Path, tmp_path: Path, change: dict, reason: str
):
    with safe_open(adapter_weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()} | change  # noqa: SIM118
        metadata = file.metadata()
    path = tmp_path / "damaged.safetensors"
    remaining = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(remaining, path, metadata=metadata)
    with pytest.raises(PassError, match=reason):
        read_lookahead(path, 2, load_model(resolve(str(tiny_model)), "fp32").model)


@pytest.mark.parametrize("record", ['{"format": "pass-lookahead", "version": 2}', "{}", "no"])
def test_look_ahead_weights_of_another_version_are_refused(
    tiny_model: Path, tmp_path: Path, record: str
):
    path = tmp_path / "other.safetensors"
    save_file({"lookahead": torch.zeros(2, 64)}, path, metadata={"pass": record})
    with pytest.raises(PassError, match="another version of pass-train"):
        read_lookahead(path, 2, load_model(resolve(str(tiny_model)), "fp32").model)
