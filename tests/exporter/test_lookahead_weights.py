"""Look-ahead weights: what fits a model is read, anything else refused. Adapters change look-ahead
rows alone. Exports find the weights that the package ships."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import change_tensors, changed_copy, load_path
from export_process import command
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from conftest import export_bundle, make_model, write_random_weights
from pass_exporter.model.lookahead import (
    FILE_NAME,
    LookaheadWeights,
    model_fingerprint,
    read_lookahead,
    same_fingerprint,
    shipped_weights,
)
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
SHIPPED = "smollm2-135m"
"""The name of a model with shipped weights."""
slightly_changed = change_tensors(lambda old: {name: each * 1.02 for name, each in old.items()})
"""Changes all weights as fine-tuning does."""


def run_trunk(bundle: Path, window: Window) -> list[np.ndarray]:
    manifest, rng = read_manifest(bundle), np.random.default_rng(0)
    model = manifest.model
    tokens = rng.integers(0, model.vocab_size, (1, window.width))
    shape = (1, model.kv_heads, 48, model.head_dim)
    past = [rng.standard_normal(shape, np.float32) for _ in range(2 * model.layers)]
    session = open_session(bundle / manifest.trunk.file, "cpu")
    return session.run(None, trunk_feed(session, window, tokens, [ENTRIES], past))


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.name)
def test_an_adapter_changes_no_bit_of_the_rows_of_tokens(random_bundle, adapter_bundle, window):
    logits, *cache = run_trunk(random_bundle, window)
    adapted_logits, *adapted_cache = run_trunk(adapter_bundle, window)
    rows = window.width - len(window.lookahead_rows)  # the rows of tokens are the first ones
    np.testing.assert_array_equal(adapted_logits[:, :rows], logits[:, :rows])
    for adapted, plain in zip(adapted_cache, cache, strict=True):
        end = ENTRIES + rows
        np.testing.assert_array_equal(adapted[:, :, :end], plain[:, :, :end])


def test_only_a_trunk_with_an_adapter_has_the_input_lookahead_rows(random_bundle, adapter_bundle):
    for bundle, rank, expected in ((random_bundle, 0, False), (adapter_bundle, 4, True)):
        manifest = read_manifest(bundle)
        assert manifest.lookahead.adapter_rank == rank
        assert any(tensor.name == "lookahead_rows" for tensor in manifest.trunk.inputs) == expected


def test_the_fingerprint_of_a_model_is_the_same_in_every_precision(tiny_model: Path):
    models = [load_path(tiny_model, dtype).model for dtype in ("fp32", "fp16", "bf16")]
    samples = [model_fingerprint(model) for model in models]
    assert len(samples[0]) > 14
    assert all(same_fingerprint(a, b) for a in samples for b in samples)


def test_weights_of_another_model_are_refused(tiny_model, adapter_weights, tmp_path):
    fine_tuned = changed_copy(tiny_model, tmp_path / "fine-tuned", slightly_changed)
    larger = make_model(tmp_path / "larger", num_hidden_layers=3)
    for model in (fine_tuned, larger):
        with pytest.raises(PassError, match="was trained for another model"):
            export_bundle(
                model, tmp_path / "bundle", lookahead=2, lookahead_weights=adapter_weights
            )
    assert not (tmp_path / "bundle").exists()


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    return load_path(tiny_model).model


@pytest.fixture(scope="module")
def head_weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four embeddings, an adapter of rank 4, and a head of rank 8."""
    path = tmp_path_factory.mktemp("weights") / "head.safetensors"
    return write_random_weights(tiny_model, path, 4, head_rank=8)


def read_changed(
    weights: Path, path: Path, model: PreTrainedModel, change: dict[str, torch.Tensor | None]
) -> LookaheadWeights:
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()} | change  # noqa: SIM118
        metadata = file.metadata()
    remaining = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(remaining, path, metadata=metadata)
    return read_lookahead(path, 4, model)


O_PROJ, DOWN_PROJ = "adapter.layers.0.self_attn.o_proj", "adapter.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({f"{O_PROJ}.lora_A": torch.zeros(4, 63)}, "does not fit"),
        ({f"{O_PROJ}.lora_B": torch.zeros(64, 5)}, "does not fit"),
        ({f"{O_PROJ}.lora_B": None}, "does not fit"),
        ({"adapter.layers.9.mlp.down_proj.lora_A": torch.zeros(4, 96)}, "layers.9.mlp.down_proj"),
        ({f"{DOWN_PROJ}.lora_A": torch.full((4, 96), torch.nan)}, "not finite"),
        ({"base_sample": None}, "was trained for another model"),
        ({"lookahead": None}, "no tensor 'lookahead'"),
        ({"lookahead": torch.zeros(4, 32)}, r"\[4, 32\], .* made for another model"),
        ({"lookahead": torch.zeros(4 * 64)}, r"\[256\], .* made for another model"),
        ({"lookahead": torch.zeros(3, 64)}, "use --lookahead 3 or less"),
        ({"lookahead": torch.full((4, 64), torch.inf)}, "lookahead holds values that are not fini"),
        ({"head.projection": torch.ones(60, 8)}, r"projection has shape \[60, 8\], .* \[64, 8\]"),
        ({"head.table": torch.ones(1024, 8)}, r"table has shape \[1024, 8\], .* \[320, 8\]"),
    ],
    ids=str,
)
def test_wrong_or_missing_tensors_are_refused(model, head_weights, tmp_path, change, reason):
    with pytest.raises(PassError, match=rf"wrong\.safetensors.*{reason}"):
        read_changed(head_weights, tmp_path / "wrong.safetensors", model, change)


@pytest.mark.parametrize("content", [None, b"", b"hello", b"\xff" * 100, "directory"])
def test_a_file_that_cannot_be_read_is_refused(model, tmp_path, content):
    path = tmp_path / "la.safetensors"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(PassError, match=r"cannot read look-ahead weights from .*la\.safetensors"):
        read_lookahead(path, 4, model)


@pytest.mark.parametrize("record", ['{"format": "pass-lookahead", "version": 2}', "{}", "no"])
def test_weights_of_another_version_are_refused(model, tmp_path, record):
    save_file({"lookahead": torch.zeros(2, 64)}, tmp_path / "other", metadata={"pass": record})
    with pytest.raises(PassError, match="another version of pass-train"):
        read_lookahead(tmp_path / "other", 2, model)


def test_only_the_first_rows_of_the_weights_are_read(model: PreTrainedModel, tmp_path: Path):
    rows, path = torch.randn(6, 64).half(), tmp_path / "la.safetensors"
    save_file({"lookahead": rows}, path)
    assert torch.equal(read_lookahead(path, 4, model).embeddings, rows.float()[:4])


def test_a_head_with_a_table_of_its_own_is_read(model, head_weights, tmp_path):
    table = torch.randn(320, 8, generator=torch.Generator().manual_seed(7)).half()
    change = {"head.projection": None, "head.table": table}
    head = read_changed(head_weights, tmp_path / "own.safetensors", model, change).head
    assert head is not None
    np.testing.assert_array_equal(head.arrays().table, table.numpy())
    assert "head.table" in head.tensors() and "head.projection" not in head.tensors()


@pytest.mark.slow
def test_shipped_weights_are_found_by_the_weights_of_the_model_and_not_by_its_name(
    tiny_model: Path, adapter_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    models = tmp_path / "models"
    (models / SHIPPED).mkdir(parents=True)
    shutil.copy(adapter_weights, models / SHIPPED / FILE_NAME)
    monkeypatch.setattr("pass_exporter.model.lookahead.models_directory", lambda: models)
    assert shipped_weights(load_path(tiny_model, "bf16").model) is not None
    fine_tuned = changed_copy(tiny_model, tmp_path / SHIPPED, slightly_changed)
    for model, expected in (
        (tiny_model, "look-ahead embeddings file:lookahead"),
        (
            fine_tuned,
            "untrained: mean of the vocabulary embeddings no trained embeddings are shipped for "
            "this model: pass-train",
        ),
    ):
        done = command("--lookahead", 2, "--model", model, "-o", tmp_path / "bundle", "--force")
        assert done.returncode == 0 and expected in " ".join(done.stderr.split())
        assert read_manifest(tmp_path / "bundle").lookahead.trained == (model == tiny_model)
