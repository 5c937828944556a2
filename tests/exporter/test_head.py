"""Draft heads: torch and numpy compute the same, bundles hold the head that they are exported with,
and heads of other models are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from checkpoints import load_path
from safetensors import safe_open

from conftest import VOCAB_SIZE, export_bundle, random_head, write_random_weights
from pass_exporter.checks.torch_cases import torch_cases
from pass_exporter.checks.trunks import Limits, check_trunks
from pass_exporter.model.draft_head import DraftHead
from pass_exporter.model.lookahead import read_lookahead
from pass_runtime import PassError
from pass_runtime.bundle.head import HEAD_FILE, HEAD_PREFIX, head_layout
from pass_runtime.bundle.manifest import HeadInfo
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from tail_definitions import adjusted_logits, head_drafts

HIDDEN = 48


def random_inputs(
    vocab: int, batch: int, rows: int, seed: int = 0
) -> tuple[DraftHead, np.ndarray, np.ndarray, np.ndarray]:
    head = random_head(torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(seed)))
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((batch, rows, HIDDEN)).astype(np.float32)
    logits = rng.normal(0, 2, (batch, rows, vocab)).astype(np.float32)
    return head, hidden, logits, rng.integers(0, vocab, batch)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.9, seed=3), SamplingParams(0.9, 40, 0.9, 3)]
)
@pytest.mark.parametrize("vocab", [24, 37, 512, 520, 2048, 2049])
def test_heads_in_torch_and_numpy_compute_the_same(vocab: int, params: SamplingParams):
    """torch scores all rows at once, after the drafts that numpy has chosen."""
    head, hidden, logits, root = random_inputs(vocab, 3, 5)
    positions = np.arange(5)[None] + np.array([[3], [40], [700]])
    drafts = head_drafts(head.arrays(), hidden, logits, root, positions, params)
    before = np.concatenate([root[:, None], drafts[:, :-1]], 1)
    adjusted = adjusted_logits(head.arrays(), hidden, logits, before)
    rows = np.tile(np.arange(5), (3, 1))  # the index of each row in its group
    with torch.no_grad():
        results = head(*map(torch.from_numpy, (hidden, logits, before, rows)))
    ids, scores = (result.numpy() for result in results)
    # A head chooses from 64 blocks of 8 tokens if the vocabulary is larger, and of whole blocks.
    assert ids.shape[2] == (512 if vocab in (520, 2048) else vocab)
    expected = np.full(adjusted.shape, -np.inf, np.float32)
    np.put_along_axis(expected, ids, scores, -1)
    np.testing.assert_allclose(adjusted, expected, atol=1e-4)
    assert np.take_along_axis(expected, drafts[..., None], -1).min() > -np.inf
    if params.temperature == 0:
        assert drafts.tolist() == expected.argmax(-1).tolist()
        assert np.mean(drafts != logits.argmax(-1)) > 0.3, "the head must matter"


def test_a_bundle_holds_the_weights_of_the_head(head_bundle, tiny_bundle, tiny_model):
    manifest = read_manifest(head_bundle)
    assert manifest.lookahead.head == HeadInfo(rank=12, width=24, blocks=64)
    content = (head_bundle / HEAD_FILE).read_bytes()
    stored = {
        name: np.ndarray(region.shape, region.dtype, content, region.offset)
        for name, region in head_layout(VOCAB_SIZE, 64, 12, 24).items()
    }
    weights = head_bundle.parent / "lookahead.safetensors"
    model = load_path(tiny_model).model
    embeddings = model.get_output_embeddings().weight.detach().numpy()
    with safe_open(weights, framework="np") as file:
        for name, array in stored.items():
            if name != "table":
                np.testing.assert_array_equal(array, file.get_tensor(f"head.{name}").T)
        table = (embeddings - embeddings.mean(0)) @ file.get_tensor("head.projection").astype(
            np.float32
        )
    np.testing.assert_allclose(stored["table"].astype(np.float32), table, rtol=2e-3, atol=1e-5)
    assert read_manifest(tiny_bundle).lookahead.head is None
    assert not (tiny_bundle / HEAD_FILE).exists()


def test_tails_that_draft_read_the_file_of_the_head(head_bundle: Path, adapter_bundle: Path):
    for path in sorted(head_bundle.glob("tail.*.onnx")):
        graph = onnx.load(path, load_external_data=False).graph
        names = {tensor.name for tensor in graph.initializer if tensor.name.startswith(HEAD_PREFIX)}
        drafting = path.name.startswith(("tail.draft", "tail.fused"))
        all_names = {f"{HEAD_PREFIX}{name}" for name in head_layout(1, 1, 1, 1)}
        expected = all_names if drafting else set()
        if "-1." in path.name:  # one draft: no second draft needs the state
            expected -= {f"{HEAD_PREFIX}state"}
        assert names == expected, path.name
        assert ("hidden" in {value.name for value in graph.input}) == drafting
        for tensor in graph.initializer:
            if tensor.name in names:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                assert entries["location"] == HEAD_FILE
        if not drafting:
            assert path.read_bytes() == (adapter_bundle / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"dtype": "fp16"}, {"dtype": "bf16"}, {"weights": "int8"}], ids=str
)
@pytest.mark.parametrize("rank", [0, 4])
def test_a_head_in_other_formats_passes_the_checks_of_an_export(
    tiny_model: Path, tmp_path: Path, rank: int, options: dict
):
    weights = write_random_weights(
        tiny_model, tmp_path / "lookahead.safetensors", 2, rank, head_rank=8
    )
    bundle = export_bundle(
        tiny_model, tmp_path / "bundle", lookahead=2, lookahead_weights=weights, **options
    )
    hidden = next(
        tensor for tensor in read_manifest(bundle).trunk.outputs if tensor.name == "hidden"
    )
    assert (hidden.dtype, hidden.shape) == ("float32", ("batch", "lookahead_rows", 64))


def test_the_check_finds_wrong_hidden_rows_and_nan_in_the_cache(tiny_model, head_bundle):
    model = load_path(tiny_model).model
    lookahead_weights = read_lookahead(head_bundle.parent / "lookahead.safetensors", 1, model)
    cases, manifest = torch_cases(model, lookahead_weights), read_manifest(head_bundle)
    limits = Limits(1e-4, 1e-4)
    assert check_trunks(head_bundle, manifest, cases, limits)[0] < 1e-4
    wrong_hidden = [replace(case, hidden=case.hidden * 1.001) for case in cases]
    nan = [
        replace(case, window_cache=[*case.window_cache[:-1], case.window_cache[-1] * np.nan])
        for case in cases
    ]
    for wrong in (wrong_hidden, nan):
        with pytest.raises(PassError, match="differs from torch"):
            check_trunks(head_bundle, manifest, wrong, limits)
