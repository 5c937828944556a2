"""Adapters in a trunk: they change look-ahead rows and nothing else, and belong to one base
model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import export_bundle, make_model, write_random_weights
from pass_exporter.model.fingerprint import model_fingerprint, same_fingerprint
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import read_lookahead
from pass_exporter.model.registry import resolve
from pass_runtime import PassError, load
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.bundle.plan import Plan, ar_plan, draft_plan, prefill_plan, verify_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.tensors import PAST, cache_names

WINDOWS = [
    ar_plan(),
    verify_plan(4),
    draft_plan(1),
    draft_plan(6),
    prefill_plan(16),
    Plan("fused", 2, (2, 2, 2)),
]


def run_trunk(bundle: Path, plan: Plan) -> list[np.ndarray]:
    """Every row's logits and the cache after `plan`'s window, over a random cache of 20 entries."""
    manifest, rng = read_manifest(bundle), np.random.default_rng(0)
    model = manifest.model
    tokens = rng.integers(0, model.vocab_size, plan.width - sum(plan.groups))
    feed: dict[str, Any] = {
        "input_ids": np.concatenate([tokens, plan.lookahead_ids(model.vocab_size)])[None].astype(
            np.int64
        ),
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "length": np.array([20]),
        "logit_rows": plan.logit_rows,
        "lookahead_rows": plan.lookahead_rows,
    }
    for name in cache_names(PAST, model.layers):
        feed[name] = rng.standard_normal((1, model.kv_heads, 48, model.head_dim)).astype(np.float32)
    session = open_session(bundle / manifest.trunk.file, "cpu")
    names = {value.name for value in session.get_inputs()}
    return session.run(None, {name: value for name, value in feed.items() if name in names})


@pytest.fixture(scope="module")
def plain_bundle(
    tiny_model: Path, adapter_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The adapter bundle's embeddings without its adapter."""
    directory = tmp_path_factory.mktemp("plain")
    with safe_open(adapter_weights, framework="pt") as file:
        save_file({"lookahead": file.get_tensor("lookahead")}, directory / "embeddings.safetensors")
    return export_bundle(
        tiny_model,
        directory / "bundle",
        lookahead=6,
        lookahead_weights=directory / "embeddings.safetensors",
    )


@pytest.mark.parametrize("plan", WINDOWS, ids=lambda plan: plan.name)
def test_token_rows_are_bit_identical(plain_bundle: Path, adapter_bundle: Path, plan: Plan):
    plain, adapted = run_trunk(plain_bundle, plan), run_trunk(adapter_bundle, plan)
    rows = plan.width - len(plan.lookahead_rows)
    np.testing.assert_array_equal(adapted[0][:, :rows], plain[0][:, :rows])
    for mine, base in zip(adapted[1:], plain[1:], strict=True):
        np.testing.assert_array_equal(mine[:, :, : 20 + rows], base[:, :, : 20 + rows])
    if len(plan.lookahead_rows):
        assert np.abs(adapted[0][:, rows:] - plain[0][:, rows:]).max() > 0.1


def test_the_trunk_asks_for_look_ahead_rows_only_with_an_adapter(
    plain_bundle: Path, adapter_bundle: Path
):
    for bundle, rank, expected in ((plain_bundle, 0, False), (adapter_bundle, 4, True)):
        manifest = read_manifest(bundle)
        assert manifest.lookahead.adapter_rank == rank
        assert any(tensor.name == "lookahead_rows" for tensor in manifest.trunk.inputs) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "gemma", "gemma3_text", "olmo2"])
def test_other_families(family: str, tmp_path: Path):
    """The exporter's own check compares with torch."""
    model = make_model(tmp_path / family, family)
    weights = write_random_weights(model, tmp_path / "lookahead.safetensors", lookahead=2)
    export_bundle(model, tmp_path / "bundle", lookahead=2, lookahead_weights=weights)


def test_fewer_rows_than_trained(tiny_model: Path, adapter_weights: Path, tmp_path: Path):
    bundle = export_bundle(
        tiny_model, tmp_path / "bundle", lookahead=2, lookahead_weights=adapter_weights
    )
    assert load(bundle, "cpu", threads=1).manifest.lookahead.length == 2
    with pytest.raises(PassError, match="--lookahead 8"):
        export_bundle(tiny_model, tmp_path / "more", lookahead=9, lookahead_weights=adapter_weights)


def test_half_precision(tiny_model: Path, adapter_weights: Path, tmp_path: Path):
    export_bundle(
        tiny_model,
        tmp_path / "bundle",
        lookahead=2,
        lookahead_weights=adapter_weights,
        dtype="fp16",
    )


def test_any_precision_of_the_base_is_the_base(tiny_model: Path):
    models = [
        load_model(resolve(str(tiny_model)), dtype).model for dtype in ("fp32", "fp16", "bf16")
    ]
    samples = [model_fingerprint(model) for model in models]
    assert len(samples[0]) > 14
    assert all(same_fingerprint(a, b) for a in samples for b in samples)


def test_weights_of_another_model_are_refused(
    tiny_model: Path, adapter_weights: Path, tmp_path: Path
):
    other = tmp_path / "fine-tuned"
    shutil.copytree(tiny_model, other)
    tensors = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    nudged = {
        name: t * (1 + 0.02 * torch.randn(t.shape, generator=generator))
        for name, t in tensors.items()
    }
    save_file(nudged, other / "model.safetensors", metadata={"format": "pt"})
    bigger = make_model(tmp_path / "bigger", num_hidden_layers=3)
    for model in (other, bigger):
        with pytest.raises(PassError, match="was trained for another model"):
            export_bundle(
                model, tmp_path / "bundle", lookahead=2, lookahead_weights=adapter_weights
            )
    assert not (tmp_path / "bundle").exists()


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
def test_damaged_weights(
    tiny_model: Path, adapter_weights: Path, tmp_path: Path, change: dict, reason: str
):
    with safe_open(adapter_weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()} | change  # noqa: SIM118
        metadata = file.metadata()
    path = tmp_path / "damaged.safetensors"
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        path,
        metadata=metadata,
    )
    with pytest.raises(PassError, match=reason):
        read_lookahead(path, 2, load_model(resolve(str(tiny_model)), "fp32").model)


@pytest.mark.parametrize("record", ['{"format": "pass-lookahead", "version": 2}', "{}", "no"])
def test_metadata_of_another_version(tiny_model: Path, tmp_path: Path, record: str):
    path = tmp_path / "other.safetensors"
    save_file({"lookahead": torch.zeros(2, 64)}, path, metadata={"pass": record})
    with pytest.raises(PassError, match="another version of pass-train"):
        read_lookahead(path, 2, load_model(resolve(str(tiny_model)), "fp32").model)
