"""The default model, real prompts: the runtime's text is Hugging Face's, and every plan's text is
plain decoding's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SMOLLM2, THREADS
from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.measuring.lossless import first_difference, run_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [
    json.loads(line)["prompt"]
    for line in (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
SAMPLING = [(0.0, 0, 1.0), (0.7, 40, 1.0), (1.0, 0, 1.0), (1.0, 50, 0.8)]
TOKENS = 64
References = dict[int, tuple[list[int], list[int]]]
OFTEN, LONG = range(0, len(PROMPTS), 3), (3, 4)
"""The prompts that are compared with Hugging Face without --all, and those whose answers every plan
writes."""


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> References:
    """Prompt and greedy continuation by Hugging Face, of the prompts that tests use; torch's copy
    of the weights is gone afterwards."""
    import torch

    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve

    loaded = load_model(resolve(SMOLLM2), "fp32")
    tokenizer, found = loaded.tokenizer, {}
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    numbers = range(len(PROMPTS)) if request.config.getoption("--all") else sorted({*OFTEN, *LONG})
    by_length = sorted((PROMPTS[number] for number in numbers), key=len)
    for start in range(0, len(by_length), 9):  # nine cost little more than one
        prompts = by_length[start : start + 9]
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.no_grad():
            out = loaded.model.generate(**batch, do_sample=False, max_new_tokens=TOKENS)
        width = batch["input_ids"].shape[1]
        for prompt, mask, row in zip(prompts, batch["attention_mask"].bool(), out, strict=True):
            found[prompt] = (
                row[:width][mask].tolist(),
                _until_end(row[width:].tolist(), loaded.eos_token_ids),
            )
    return {number: found[PROMPTS[number]] for number in numbers}


def _until_end(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    """What comes before a batch's padding: up to the first end token, which belongs to the text."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]


@pytest.fixture(scope="module")
def session(references: References, smollm2_bundle: Path) -> Iterator[Session]:
    """After `references`, so that the weights are in memory once at a time."""
    yield load(smollm2_bundle, "cpu", threads=THREADS)


def assert_same(
    session: Session, prompt: list[int], options: GenerateOptions, a: list[int], b: list[int]
) -> None:
    difference = first_difference(session, prompt, options, a, b)
    if difference is not None:
        print(
            f"\n{options.plan} L={options.lookahead} {options.sampling}, prompt {prompt[:8]}: "
            f"{difference}"
        )
        assert difference.is_near_tie, str(difference)


def test_the_prompts_are_varied(session: Session):
    lengths = [len(session.encode(prompt)) for prompt in PROMPTS]
    assert len(PROMPTS) == len(set(PROMPTS)) == 24
    assert min(lengths) >= 5 and max(lengths) <= 60


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.seldom] * (n not in OFTEN)) for n in range(len(PROMPTS))],
)
def test_greedy_text_is_hugging_faces(session: Session, references: References, number: int):
    ids, expected = references[number]
    assert session.encode(PROMPTS[number]) == ids  # the bundle's tokenizer is the model's
    options = GenerateOptions(max_new_tokens=TOKENS, plan="ar")
    assert_same(session, ids, options, expected, run_tokens(session, ids, options).token_ids)


@pytest.mark.parametrize(
    ("number", "values"), list(zip([1, 17] * 2, SAMPLING, strict=True)), ids=str
)
def test_every_plans_text_is_plain_decodings(
    session: Session, number: int, values: tuple[float, int, float]
):
    prompt, sampling = session.encode(PROMPTS[number]), SamplingParams(*values, seed=number)
    plain_options = GenerateOptions(
        max_new_tokens=20, sampling=sampling, plan="ar", ignore_eos=True
    )
    plain = run_tokens(session, prompt, plain_options).token_ids
    plans = [
        ("two-pass", 1),
        ("two-pass", 4),
        ("fused", 2),
        ("fused", 4),
        ("fused:4,3,2,2,1", None),
        ("auto", None),
    ]
    for plan, lookahead in plans:
        options = GenerateOptions(
            max_new_tokens=20, sampling=sampling, plan=plan, lookahead=lookahead, ignore_eos=True
        )
        assert_same(session, prompt, options, plain, run_tokens(session, prompt, options).token_ids)


@pytest.mark.parametrize("plan", ["two-pass", "fused", "auto"])
def test_through_a_long_answer(session: Session, references: References, plan: str):
    """All of L and the shipped weights, as people run it, to the answer's own end."""
    assert session.manifest.lookahead.trained and session.manifest.lookahead.adapter_rank == 64
    assert session.manifest.lookahead.head is not None
    accepted = 0
    for ids, expected in (references[number] for number in LONG):
        options = GenerateOptions(max_new_tokens=TOKENS, plan=plan)
        stream = run_tokens(session, ids, options)
        accepted += stream.stats.accepted
        assert_same(session, ids, options, expected, stream.token_ids)
    assert accepted > 0


@pytest.fixture(scope="module")
def alone(session: Session) -> list[tuple[list[int], GenerateOptions, list[int]]]:
    """Prompt, options, and the text of plain decoding: sixteen of every plan and sampling."""
    plans = ["auto", "two-pass", "fused:2,1,1", "ar"]
    found = []
    for i in range(16):
        sampling = SamplingParams(*SAMPLING[i % 4], seed=i)
        options = GenerateOptions(16, sampling, plan=plans[(i // 4) % 4], ignore_eos=True)
        prompt = session.encode(PROMPTS[i])
        found.append(
            (
                prompt,
                options,
                run_tokens(session, prompt, dataclasses.replace(options, plan="ar")).token_ids,
            )
        )
    return found


@pytest.mark.parametrize(
    "slots", [pytest.param(1, marks=pytest.mark.seldom), 4]
)  # one at a time: other tests, too
def test_requests_at_once_write_what_they_write_alone(
    session: Session, smollm2_bundle: Path, alone, slots: int
):
    """Side by side; batches change shapes, and with them how sums are rounded."""
    with load(
        smollm2_bundle, "cpu", threads=THREADS, verify=False, max_batch_size=slots
    ) as batched:
        streams = [batched.generate_ids(prompt, options) for prompt, options, _ in alone]
        for (prompt, options, expected), stream in zip(alone, streams, strict=True):
            assert_same(session, prompt, options, expected, stream.result().token_ids)
