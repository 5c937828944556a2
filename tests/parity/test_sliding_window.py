from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conftest import export_bundle, make_model, randomize_vectors, write_random_weights
from pass_runtime import GenerateOptions, SamplingParams, load, read_manifest
from pass_runtime.backends.ort.session import open_session
from pass_runtime.bundle.plan import make_plan
from pass_runtime.bundle.window import Window, prefill_window
from same_text import assert_plans_write_plain_text
from trunk_feeds import trunk_feed

pytestmark = pytest.mark.slow

WINDOW, TEXT, CAPACITY = 24, 90, 128
"""All in tokens."""
RELATIVE_ERROR = 2e-5
"""Ten times the error of float32 sums in another order."""
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "layer_types": LAYERS,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        },
    ),
    "mistral": ("mistral", {}),
}
WINDOWS = [
    *(window for plan in ("ar", "two-pass", "fused") for window in make_plan(plan, 3).windows),
    prefill_window(16),
]
TRUNKS = ("trunk.onnx", "trunk.cpu.onnx")
SAMPLINGS = [SamplingParams(), SamplingParams(0.8, 40, 0.95, seed=7)]
opened = cache(open_session)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, config = MODELS[request.param]
    sizes = {"num_hidden_layers": len(LAYERS), "sliding_window": WINDOW}
    directory = make_model(tmp_path_factory.mktemp(family) / "model", family, **sizes, **config)
    randomize_vectors(directory)
    return directory


@pytest.fixture(scope="module")
def bundle(model: Path) -> Path:
    return export_bundle(model, model.parent / "bundle", lookahead=3)


@pytest.fixture
def base(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def random_text(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(2, 300, (1, count))


def run(
    bundle: Path, file: str, window: Window, text: np.ndarray, past: list[np.ndarray], length: int
) -> list[np.ndarray]:
    """Return the outputs of a trunk, logits and KV cache, for a window of `window` that holds
    `text` [1,Q], after the first `length` entries of the cache `past`."""
    session = opened(bundle / file, "cpu")
    copies = [tensor.copy() for tensor in past]  # GroupQueryAttention overwrites its inputs
    return session.run(None, trunk_feed(session, window, text, [length], copies))


def read_text(
    bundle: Path, file: str, text: np.ndarray, chunk: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    model = read_manifest(bundle).model
    shape = (1, model.kv_heads, CAPACITY, model.head_dim)
    past = [np.zeros(shape, np.float32) for _ in range(2 * model.layers)]
    logits = []
    for start in range(0, text.shape[1], chunk):
        part = text[:, start : start + chunk]
        chunk_logits, *past = run(bundle, file, prefill_window(part.shape[1]), part, past, start)
        logits.append(chunk_logits)
    return np.concatenate(logits, 1), past


@pytest.mark.parametrize("file", TRUNKS)
@pytest.mark.parametrize("chunk", [1, 7, 64, TEXT])
@torch.no_grad()
def test_chunks_of_a_long_text_equal_torch(
    base: PreTrainedModel, bundle: Path, file: str, chunk: int
):
    text = random_text(TEXT)
    expected = base(torch.from_numpy(text)).logits.numpy()
    logits, _ = read_text(bundle, file, text, chunk)
    assert np.abs(logits - expected).max() <= RELATIVE_ERROR * np.abs(expected).max()


@torch.no_grad()
def test_the_window_changes_the_logits_of_later_tokens(base: PreTrainedModel):
    text = torch.from_numpy(random_text(TEXT))
    logits = base(text).logits
    base.config.sliding_window = 2 * TEXT
    difference = (base(text).logits - logits).abs().amax(-1)[0]
    assert difference[:WINDOW].max() < 1e-4 and difference[WINDOW:].min() > 1e-2


@pytest.mark.parametrize("file", TRUNKS)
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"{window.name}-{window.width}")
@torch.no_grad()
def test_every_row_of_a_window_equals_torch(
    base: PreTrainedModel, bundle: Path, file: str, window: Window
):
    """A row's logits are those of torch for the last token of a text: the cached tokens, and then
    the rows that this row sees."""
    text = random_text(TEXT + window.width)
    _, past = read_text(bundle, file, text[:, :TEXT], TEXT)
    logits = run(bundle, file, window, text[:, TEXT:], past, TEXT)[0][0]
    embed = base.get_input_embeddings()
    row_embeddings = embed(torch.from_numpy(text[:, TEXT:]))[0]
    scale = getattr(embed, "scalar_embed_scale", 1.0)
    mean = scale * embed.weight.mean(0)  # the untrained look-ahead embedding
    row_embeddings[window.width - len(window.lookahead_rows) :] = mean
    cached = embed(torch.from_numpy(text[:, :TEXT]))
    for row in range(window.width):
        seen_rows = torch.from_numpy(np.flatnonzero(window.window_mask[row]))
        embeddings = torch.cat([cached, row_embeddings[seen_rows][None]], 1)
        expected = base(inputs_embeds=embeddings).logits[0, -1].numpy()
        assert np.abs(logits[row] - expected).max() <= RELATIVE_ERROR * np.abs(expected).max(), row


@pytest.mark.parametrize("weights", ["full", "int8", "int4"])
def test_every_plan_writes_the_text_of_ar_beyond_the_window(
    model: Path, bundle: Path, weights: str
):
    if weights != "full":
        bundle = export_bundle(model, model.parent / weights, weights=weights, lookahead=3)
    for slots in (1, 2):
        check_plans(bundle, slots, "two-pass", "fused", "fused:2,1,2")


def test_a_draft_head_writes_the_text_of_ar_beyond_the_window(tmp_path: Path):
    family, config = MODELS["gemma3"]
    sizes = {"num_hidden_layers": len(LAYERS), "sliding_window": WINDOW, "vocab_size": 1024}
    model = make_model(tmp_path / "model", family, **sizes, **config)
    weights = write_random_weights(model, tmp_path / "w.safetensors", lookahead=4, head_rank=12)
    bundle = export_bundle(model, tmp_path / "bundle", lookahead=4, lookahead_weights=weights)
    check_plans(bundle, 1, "fused")


def check_plans(bundle: Path, slots: int, *plans: str) -> None:
    session = load(bundle, "cpu", threads=1, max_batch_size=slots)
    prompt = random_text(TEXT)[0].tolist()
    for sampling in SAMPLINGS:
        plain = GenerateOptions(2 * WINDOW, sampling, plan="ar", ignore_eos=True)
        assert_plans_write_plain_text(session, prompt, plain, [(plan, None) for plan in plans])
