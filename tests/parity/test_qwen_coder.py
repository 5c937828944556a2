from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import THREADS, SilentProgress
from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.bundle.integrity import cache_directory
from same_text import assert_plans_write_plain_text, assert_same_text

MODEL, FILE = "qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.seldom,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (cache_directory() / FILE).is_file(),
        reason=f"{MODEL} was not fetched: pass-export --model {MODEL}",
    ),
]
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
][::8]
TOKENS = 24
# Plans, and look-aheads.
PLANS = (("two-pass", 1), ("two-pass", 4), ("fused", 2), ("fused", 4), ("auto", None))


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each prompt and of its greedy text by transformers."""
    import torch

    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve

    loaded, texts = load_model(resolve(MODEL), "fp32"), []
    for prompt in PROMPTS:
        batch = loaded.tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            # The penalty in the model's generation_config.json is not 1.
            greedy = {"do_sample": False, "repetition_penalty": 1.0}
            out = loaded.model.generate(**batch, **greedy, max_new_tokens=TOKENS)
        prompt_ids = batch["input_ids"][0].tolist()
        texts.append((prompt_ids, out[0, len(prompt_ids) :].tolist()))
    return texts


@pytest.fixture(scope="module")
def session(expected: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    from pass_exporter.config import ExportConfig
    from pass_exporter.export import export

    output = tmp_path_factory.mktemp("qwen") / "bundle"
    export(ExportConfig(MODEL, lookahead=4, output=output), SilentProgress())
    with load(output, "cpu", threads=THREADS, verify=False) as opened:
        yield opened


def test_an_export_takes_the_shipped_weights(session: Session):
    lookahead = session.manifest.lookahead
    assert lookahead.trained and lookahead.adapter_rank and lookahead.head is not None


def test_greedy_text_is_that_of_transformers(
    session: Session, expected: list[tuple[list[int], list[int]]]
):
    for prompt, text in expected:
        assert_same_text(session, prompt, GenerateOptions(TOKENS, plan="ar"), text)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_plan_is_plain_decoding(session: Session, temperature: float):
    accepted = 0
    for number, text in enumerate(PROMPTS):
        prompt, sampling = session.encode(text), SamplingParams(temperature, seed=number)
        options = GenerateOptions(TOKENS, sampling, plan="ar", ignore_eos=True)
        accepted += assert_plans_write_plain_text(session, prompt, options, PLANS)
    assert accepted > 0
