from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import SilentProgress, make_model, randomize_vectors
from pass_exporter.config import ExportConfig
from pass_exporter.export import ExportReport, export
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_runtime import GenerateOptions, load
from same_text import assert_same_text, greedy_text

pytestmark = pytest.mark.slow

PROMPT = "The quick brown fox"
RELATIVE_ERROR = 2e-5
"""A fifth of the exporter's limit."""
WINDOW = 32


def rotation(kind: str, theta: float = 10000.0, **fields: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **fields}


LINEAR = rotation("linear", factor=4.0)
YARN = rotation("yarn", factor=4.0, original_max_position_embeddings=192)
LLAMA3 = rotation("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 256
PARTIAL = rotation("default", partial_rotary_factor=0.5)
TIED, BIASES = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
MHA, MQA = {"num_key_value_heads": 4}, {"num_key_value_heads": 1}
"""Multi-head attention, and multi-query attention."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied llama3-rope MQA": ("llama", TIED | {"rope_parameters": LLAMA3} | MQA),
    "llama biases linear-rope MHA": ("llama", BIASES | {"rope_parameters": LINEAR} | MHA),
    "mistral window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", TIED | {"use_sliding_window": False, "sliding_window": 16}),
    "qwen3 yarn-rope": ("qwen3", {"rope_parameters": YARN}),
    "phi3": ("phi3", MHA),
    "phi3 partial rotary": ("phi3", {"rope_parameters": PARTIAL}),
    "gemma": ("gemma", {"hidden_activation": "gelu_pytorch_tanh"} | MQA),
    "gemma3 window": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": rotation("default", 100.0),
                "full_attention": LINEAR,
            },
        }
        | MQA,
    ),
    "olmo2": ("olmo2", {}),
}
"""Family and configuration by name."""


def test_every_supported_family_has_a_model():
    assert {family for family, _ in MODELS.values()} == set(SUPPORTED_FAMILIES)


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "-"))
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ExportReport]:
    family, config = MODELS[request.param]
    directory = tmp_path_factory.mktemp(family)
    model = make_model(directory / "model", family, **config)
    randomize_vectors(model)
    config = ExportConfig(str(model), lookahead=2, output=directory / "bundle")
    return model, export(config, SilentProgress())


def test_logits_and_text_are_those_of_transformers(exported: tuple[Path, ExportReport]):
    model, report = exported
    assert report.relative_error < RELATIVE_ERROR
    session = load(report.output, "cpu")
    prompt = session.encode(PROMPT)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = greedy_text(base, prompt, 24)
    for plan in ("ar", "two-pass"):
        options = GenerateOptions(24, plan=plan, ignore_eos=True)
        assert_same_text(session, prompt, options, expected)


def test_log_probabilities_of_a_prompt_are_those_of_transformers(
    exported: tuple[Path, ExportReport],
):
    """Of a prompt that is read in several pieces, and is longer than sliding windows."""
    model, report = exported
    prompt = [2 + (i * 37 + i // 5) % 300 for i in range(150)]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = torch.log_softmax(base(torch.tensor([prompt])).logits[0].double(), -1)
    expected = rows[range(149), prompt[1:]].tolist()
    with load(report.output, "cpu") as session:
        generation = session.generate(prompt, GenerateOptions(0, prompt_logprobs=0)).result()
    scored = [each.logprob for each in generation.prompt_logprobs[1:]]
    assert scored == pytest.approx(expected, rel=1e-5, abs=1e-3)
