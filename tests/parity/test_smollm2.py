from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import SMOLLM2, THREADS
from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.measuring.lossless import run_tokens
from same_text import assert_plans_write_plain_text, assert_same_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [
    json.loads(line)["prompt"]
    for line in (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
# Temperature, top-k and top-p.
SAMPLING = [(0.0, 0, 1.0), (0.7, 40, 1.0), (1.0, 0, 1.0), (1.0, 50, 0.8)]
TOKENS = 64
PLANS = [
    *(("two-pass", 1), ("two-pass", 4), ("fused", 2), ("fused", 4)),
    *(("fused:4,3,2,2,1", None), ("auto", None)),
]
"""Plans, and look-aheads."""
References = dict[int, tuple[list[int], list[int]]]
OFTEN, LONG = range(0, len(PROMPTS), 3), (3, 4)
"""Indices of prompts: those that are compared with transformers without --all, and those whose
whole answers every plan writes."""


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> References:
    """Return the token ids of prompts and of their greedy texts by transformers, by the index of
    each prompt in PROMPTS."""
    import torch

    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve

    loaded = load_model(resolve(SMOLLM2), "fp32")
    tokenizer, texts = loaded.tokenizer, {}
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    numbers = range(len(PROMPTS)) if request.config.getoption("--all") else sorted({*OFTEN, *LONG})
    by_length = sorted((PROMPTS[number] for number in numbers), key=len)
    for start in range(0, len(by_length), 9):  # a batch of 9 takes little longer than one prompt
        prompts = by_length[start : start + 9]
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.no_grad():
            out = loaded.model.generate(**batch, do_sample=False, max_new_tokens=TOKENS)
        width = batch["input_ids"].shape[1]
        for prompt, mask, row in zip(prompts, batch["attention_mask"].bool(), out, strict=True):
            text = _until_end(row[width:].tolist(), loaded.eos_token_ids)
            texts[prompt] = (row[:width][mask].tolist(), text)
    return {number: texts[PROMPTS[number]] for number in numbers}


def _until_end(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]


@pytest.fixture(scope="module")
def session(references: References, smollm2_bundle: Path) -> Iterator[Session]:
    yield load(smollm2_bundle, "cpu", threads=THREADS)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.seldom] * (n not in OFTEN)) for n in range(len(PROMPTS))],
)
def test_greedy_text_is_that_of_transformers(session: Session, references: References, number: int):
    ids, expected = references[number]
    assert session.encode(PROMPTS[number]) == ids  # the bundle's tokenizer is the model's
    assert_same_text(session, ids, GenerateOptions(TOKENS, plan="ar"), expected)


@pytest.mark.parametrize(
    ("number", "values"), list(zip([1, 17] * 2, SAMPLING, strict=True)), ids=str
)
def test_every_plan_is_plain_decoding(
    session: Session, number: int, values: tuple[float, int, float]
):
    prompt, sampling = session.encode(PROMPTS[number]), SamplingParams(*values, seed=number)
    plain = GenerateOptions(20, sampling, plan="ar", ignore_eos=True)
    assert_plans_write_plain_text(session, prompt, plain, PLANS)


@pytest.mark.parametrize("plan", ["two-pass", "fused", "auto"])
def test_every_plan_writes_whole_answers(session: Session, references: References, plan: str):
    """The bundle has the shipped weights, so that drafts are accepted."""
    assert session.manifest.lookahead.trained and session.manifest.lookahead.adapter_rank == 64
    assert session.manifest.lookahead.head is not None
    accepted = 0
    for ids, expected in (references[number] for number in LONG):
        options = GenerateOptions(max_new_tokens=TOKENS, plan=plan)
        stream = run_tokens(session, ids, options)
        accepted += stream.stats.accepted
        assert_same_text(session, ids, options, expected, stream.token_ids)
    assert accepted > 0


@pytest.fixture(scope="module")
def requests_and_texts(session: Session) -> list[tuple[list[int], GenerateOptions, list[int]]]:
    """Return sixteen requests, of every plan with every sampling: the prompt, the options, and the
    text of plain decoding."""
    plans = ["auto", "two-pass", "fused:2,1,1", "ar"]
    requests = []
    for i in range(16):
        sampling = SamplingParams(*SAMPLING[i % 4], seed=i)
        options = GenerateOptions(16, sampling, plan=plans[i // 4], ignore_eos=True)
        prompt = session.encode(PROMPTS[i])
        text = run_tokens(session, prompt, replace(options, plan="ar")).token_ids
        requests.append((prompt, options, text))
    return requests


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.seldom), 4])
def test_requests_of_a_batch_write_what_they_write_alone(
    session: Session, smollm2_bundle: Path, requests_and_texts, slots: int
):
    opening = {"threads": THREADS, "verify": False, "max_batch_size": slots}
    with load(smollm2_bundle, "cpu", **opening) as batched:
        streams = [
            batched.generate_ids(prompt, options) for prompt, options, _ in requests_and_texts
        ]
        for (prompt, options, expected), stream in zip(requests_and_texts, streams, strict=True):
            assert_same_text(session, prompt, options, expected, stream.result().token_ids)
