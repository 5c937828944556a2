"""With trees of drafts, the text and the KV cache are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load
from pass_runtime.backends.memory import KVCache
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.bundle.read import read_manifest
from pass_runtime.measuring.lossless import run_tokens
from pass_runtime.options import LoadOptions
from pass_runtime.session import load_verified
from same_text import assert_same_text, cache_entries

SAMPLING = [SamplingParams(), SamplingParams(0.8, seed=7), SamplingParams(1.0, 50, 0.8, seed=7)]
TREES = ("tree-3", "tree-5", "tree-8", "tree-16", "tree:2,0,1,1", "tree:4,3,2,2,1,1,0,2,1")


@pytest.fixture(scope="module")
def session(subset_bundle: Path) -> Session:
    return load(subset_bundle, "cpu", threads=1)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the window rows of accepted drafts whose K/V are moved, as they are
    from a second choice on."""
    moved_rows: list[int] = []
    keep_rows = KVCache.keep_rows

    def keep_and_record(self: KVCache, slot: int, length: int, rows: list[int]) -> None:
        moved_rows.extend(row for index, row in enumerate(rows) if row != index)
        keep_rows(self, slot, length, rows)

    monkeypatch.setattr(KVCache, "keep_rows", keep_and_record)
    return moved_rows


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["lookahead", "both"])
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sample", "truncated"])
def test_every_tree_is_plain_decoding(
    session: Session, moved: list[int], sampling: SamplingParams, draft: str
):
    prompt = session.encode("The quick brown fox jumps over")
    options = GenerateOptions(160, sampling, plan="ar", ignore_eos=True)
    plain = run_tokens(session, prompt, options).token_ids
    for plan in TREES:
        assert_same_text(session, prompt, replace(options, plan=plan, draft=draft), plain)
    assert moved, "no second choice was accepted"


@pytest.mark.parametrize("rounded", [False, True])
def test_auto_takes_no_trees_where_activations_are_rounded_to_8_bits(
    subset_bundle: Path, rounded: bool
):
    """The row of a second choice has other last bits than in plain decoding, so that activations
    could be rounded to other codes."""
    manifest = read_manifest(subset_bundle)
    backend = OrtBackend(subset_bundle, manifest, "cpu", threads=1)
    backend.capabilities = replace(backend.capabilities, rounds_activations=rounded)
    with load_verified(subset_bundle, manifest, LoadOptions(), backend=backend) as session:
        candidates = session.tuner(SamplingParams()).candidates(manifest.lookahead.length)
        assert any(candidate.cycle.is_tree for candidate in candidates) != rounded


def test_a_named_tree_is_refused_where_activations_are_rounded_to_8_bits(rounding_bundle: Path):
    """A tree could change the texts of all requests that are decoded together."""
    for slots in (1, 2):
        with load(rounding_bundle, "cpu", threads=1, max_batch_size=slots) as session:
            assert session.backend.capabilities.trees
            for plan in TREES:
                with pytest.raises(
                    PassError, match=f"{plan} could change texts: activations are r"
                ):
                    session.generate("A", GenerateOptions(plan=plan))
            fused = session.generate("A", GenerateOptions(4, plan="fused", ignore_eos=True))
            assert fused.result().token_ids


def test_the_cache_is_that_of_plain_decoding(session: Session, moved: list[int]):
    prompt, texts, caches = session.encode("The quick brown fox jumps over"), [], []
    for plan in ("ar", "tree-16"):
        options = GenerateOptions(160, plan=plan, ignore_eos=True)
        texts.append(run_tokens(session, prompt, options).token_ids)
        caches.append(cache_entries(session.backend, len(prompt) + 159))
    assert texts[0] == texts[1] and moved
    np.testing.assert_allclose(caches[1], caches[0], atol=1e-5)


def test_requests_for_log_probabilities_are_decoded_with_chains(session: Session, moved: list[int]):
    prompt = session.encode("A fox")
    plain, with_tree = (
        session.generate_ids(
            prompt, GenerateOptions(24, plan=plan, ignore_eos=True, logprobs=2)
        ).result()
        for plan in ("ar", "tree-8")
    )
    assert with_tree.token_ids == plain.token_ids and not moved
    for token, expected in zip(with_tree.tokens, plain.tokens, strict=True):
        assert token.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-4)


def passes_of(session: Session) -> list[tuple[bool, set[str]]]:
    """Return a list that gets a pair for each pass of a session: whether its plan is a tree, and
    the modes of its requests."""
    runner, passes = session._scheduler.runner, []
    run = runner.run

    def run_and_record(plan, drafts):
        modes = {slot.current.request.mode for slot in runner.decoding}
        passes.append((bool(plan.parents), modes))
        return run(plan, drafts)

    runner.run = run_and_record
    return passes


@pytest.mark.parametrize(
    "others", [["ar", "fused", "two-pass"], ["tree-16", "auto", "tree:2,1,1,0"]]
)
def test_a_pass_is_a_tree_only_if_all_its_requests_take_one(
    subset_bundle: Path, moved: list[int], others: list[str]
):
    """Four slots decode seven requests of different lengths: three have the modes `others`, and the
    rest take trees."""
    prompts = [f"The number {i} is" for i in range(7)]
    plans = ["tree-5", "tree-5", others[0], "tree-16", others[1], others[2], "tree-5"]
    options = [
        GenerateOptions(
            20 + 9 * i, SamplingParams(0.8 * (i % 2), seed=i), plan=plan, ignore_eos=True
        )
        for i, plan in enumerate(plans)
    ]
    with load(subset_bundle, "cpu", threads=1, max_batch_size=4) as batched:
        passes = passes_of(batched)
        together = [
            stream.result().token_ids for stream in list(map(batched.generate, prompts, options))
        ]
        alone = [
            batched.generate(prompt, replace(each, plan="ar")).result().token_ids
            for prompt, each in zip(prompts, options, strict=True)
        ]
    assert together == alone
    modes_of_trees = [modes for is_tree, modes in passes if is_tree]
    assert all(mode.startswith(("tree", "auto")) for modes in modes_of_trees for mode in modes)
    if "auto" in others:
        assert moved and len(modes_of_trees) > 10
    mixed_chains = any(not is_tree and {"tree-5", others[0]} <= modes for is_tree, modes in passes)
    assert mixed_chains == ("ar" in others)


def test_a_tree_writes_up_to_the_end_of_the_capacity(subset_bundle: Path):
    with load(subset_bundle, "cpu", threads=1, capacity=64) as small:
        prompt = small.encode("The quick brown fox")
        texts = [
            small.generate_ids(prompt, GenerateOptions(200, plan=plan, ignore_eos=True)).result()
            for plan in ("ar", "tree-16")
        ]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].finish_reason == "length"


def test_a_bundle_without_trees_refuses_them(random_bundle: Path):
    with (
        load(random_bundle, "cpu", threads=1) as session,
        pytest.raises(PassError, match="no tree-3 here: trees of drafts"),
    ):
        session.generate("A", GenerateOptions(plan="tree-3"))
