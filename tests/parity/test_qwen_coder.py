"""qwen2.5-coder-0.5b with the weights that ship for it: greedy text is Hugging Face's, and every
plan's text is plain decoding's. For machines that have the model already: it is half a gigabyte, in
six wheels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import THREADS, SilentProgress
from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.bundle.integrity import cache_directory
from pass_runtime.measuring.lossless import first_difference, run_tokens

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


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    """Prompts and greedy continuations by Hugging Face."""
    import torch

    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve

    loaded, found = load_model(resolve(MODEL), "fp32"), []
    for prompt in PROMPTS:
        batch = loaded.tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            # Plain greedy decoding: the model's own generation_config.json has a repetition
            # penalty.
            out = loaded.model.generate(
                **batch, do_sample=False, repetition_penalty=1.0, max_new_tokens=TOKENS
            )
        prompt_ids = batch["input_ids"][0].tolist()
        found.append((prompt_ids, out[0, len(prompt_ids) :].tolist()))
    return found


@pytest.fixture(scope="module")
def session(expected: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """After `expected`, so that the weights are in memory once at a time."""
    from pass_exporter.config import ExportConfig
    from pass_exporter.export import export

    output = tmp_path_factory.mktemp("qwen") / "bundle"
    export(ExportConfig(MODEL, lookahead=4, output=output), SilentProgress())
    with load(output, "cpu", threads=THREADS, verify=False) as opened:
        yield opened


def assert_same(
    session: Session, prompt: list[int], options: GenerateOptions, a: list[int], b: list[int]
) -> None:
    difference = first_difference(session, prompt, options, a, b)
    assert difference is None or difference.is_near_tie, str(difference)


def test_the_weights_that_ship_for_it_are_taken(session: Session):
    lookahead = session.manifest.lookahead
    assert lookahead.trained and lookahead.adapter_rank and lookahead.head is not None


def test_greedy_text_is_hugging_faces(
    session: Session, expected: list[tuple[list[int], list[int]]]
):
    options = GenerateOptions(max_new_tokens=TOKENS, plan="ar")
    for prompt, ids in expected:
        assert_same(session, prompt, options, ids, run_tokens(session, prompt, options).token_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_plans_text_is_plain_decodings(session: Session, temperature: float):
    accepted = 0
    for number, text in enumerate(PROMPTS):
        prompt, sampling = session.encode(text), SamplingParams(temperature, seed=number)
        plain = run_tokens(
            session, prompt, GenerateOptions(TOKENS, sampling, plan="ar", ignore_eos=True)
        ).token_ids
        for plan, lookahead in (
            ("two-pass", 1),
            ("two-pass", 4),
            ("fused", 2),
            ("fused", 4),
            ("auto", None),
        ):
            options = GenerateOptions(
                TOKENS, sampling, plan=plan, lookahead=lookahead, ignore_eos=True
            )
            stream = run_tokens(session, prompt, options)
            accepted += stream.stats.accepted
            assert_same(session, prompt, options, plain, stream.token_ids)
    assert accepted > 0
