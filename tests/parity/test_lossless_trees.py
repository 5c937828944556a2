"""Trees of drafts write plain decoding's text, and the K/V of what they accept are where plain
decoding puts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load
from pass_runtime.backends.memory import KVCache
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.bundle.read import read_manifest
from pass_runtime.measuring.lossless import first_difference, run_tokens
from pass_runtime.options import LoadOptions
from pass_runtime.session import load_verified

SAMPLING = [SamplingParams(), SamplingParams(0.8, seed=7), SamplingParams(1.0, 50, 0.8, seed=7)]
TREES = ("tree-3", "tree-5", "tree-8", "tree-16", "tree:2,0,1,1", "tree:4,3,2,2,1,1,0,2,1")


@pytest.fixture(scope="module")
def session(subset_bundle: Path) -> Session:
    return load(subset_bundle, "cpu", threads=1)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of accepted drafts that were not where a chain has them."""
    found: list[int] = []
    keep_rows = KVCache.keep_rows

    def noted(self: KVCache, slot: int, length: int, rows: list[int]) -> None:
        found.extend(row for place, row in enumerate(rows) if row != place)
        keep_rows(self, slot, length, rows)

    monkeypatch.setattr(KVCache, "keep_rows", noted)
    return found


@pytest.mark.parametrize("draft", ["lookahead", "both"])
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sample", "truncated"])
def test_every_tree_is_plain_decoding(
    session: Session, moved: list[int], sampling: SamplingParams, draft: str
):
    prompt = session.encode("The quick brown fox jumps over")
    plain = run_tokens(
        session, prompt, GenerateOptions(160, sampling, plan="ar", ignore_eos=True)
    ).token_ids
    for plan in TREES:
        options = GenerateOptions(160, sampling, plan=plan, draft=draft, ignore_eos=True)
        difference = first_difference(
            session, prompt, options, plain, run_tokens(session, prompt, options).token_ids
        )
        assert difference is None or difference.is_near_tie, (plan, str(difference))
    assert moved, "no second choice was ever accepted, so that this test shows little"


@pytest.mark.parametrize("rounded", [False, True])
def test_auto_takes_no_trees_where_activations_are_rounded_to_8_bits(
    subset_bundle: Path, rounded: bool
):
    """The last bits of a second choice's row are not those of plain decoding, and would decide what
    is rounded up."""
    manifest = read_manifest(subset_bundle)
    backend = OrtBackend(subset_bundle, manifest, "cpu", threads=1)
    backend.capabilities = replace(backend.capabilities, rounds_activations=rounded)
    with load_verified(subset_bundle, manifest, LoadOptions(), backend=backend) as session:
        found = session.tuner(SamplingParams()).candidates(manifest.lookahead.length)
        assert any(candidate.cycle.is_tree for candidate in found) != rounded


def test_a_named_tree_is_refused_where_activations_are_rounded_to_8_bits(rounding_bundle: Path):
    """It could change the text of its own request, and of every other one in the batch."""
    for slots in (1, 2):
        with load(rounding_bundle, "cpu", threads=1, max_batch_size=slots) as session:
            assert session.backend.capabilities.trees
            for plan in TREES:
                with pytest.raises(
                    PassError, match=f"{plan} could change texts: activations are rounded"
                ):
                    session.generate("A", GenerateOptions(plan=plan))
            assert (
                session.generate("A", GenerateOptions(4, plan="fused", ignore_eos=True))
                .result()
                .token_ids
            )


def entries(
    session: Session, prompt: list[int], options: GenerateOptions
) -> tuple[list[int], list[np.ndarray]]:
    """The tokens, and every layer's cache entries [heads,n,D] of the prompt and of the tokens but
    the last."""
    tokens = run_tokens(session, prompt, options).token_ids
    cache, count = session.backend.cache, len(prompt) + len(tokens) - 1
    _, heads, capacity, size = cache.shape(1)
    found = []
    for _, address in cache.places():
        whole = np.empty((heads, capacity, size), cache.dtype)
        session.backend.memory.download(whole, address)
        found.append(whole[:, :count].copy())
    return tokens, found


def test_the_cache_is_that_of_plain_decoding(session: Session, moved: list[int]):
    prompt = session.encode("The quick brown fox jumps over")
    plain, expected = entries(session, prompt, GenerateOptions(160, plan="ar", ignore_eos=True))
    tokens, found = entries(session, prompt, GenerateOptions(160, plan="tree-16", ignore_eos=True))
    assert tokens == plain and moved
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_log_probabilities_are_read_from_a_chain(session: Session, moved: list[int]):
    """Their graph reads the rows of a chain, so such a request is decoded with one."""
    prompt = session.encode("A fox")
    plain, found = (
        session.generate_ids(
            prompt, GenerateOptions(24, plan=plan, ignore_eos=True, logprobs=2)
        ).result()
        for plan in ("ar", "tree-8")
    )
    assert found.token_ids == plain.token_ids and not moved
    for one, other in zip(found.tokens, plain.tokens, strict=True):
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


def passes_of(session: Session) -> list[tuple[bool, set[str]]]:
    """Grows by every pass: whether it was a tree, and how the requests in it are to be decoded."""
    runner, found = session._scheduler.runner, []
    run = runner.run

    def noted(plan, drafts):
        found.append((bool(plan.parents), {slot.current.request.mode for slot in runner.decoding}))
        return run(plan, drafts)

    runner.run = noted
    return found


@pytest.mark.parametrize(
    "others", [["ar", "fused", "two-pass"], ["tree-16", "auto", "tree:2,1,1,0"]]
)
def test_a_tree_runs_only_if_all_ask_for_one(
    subset_bundle: Path, moved: list[int], others: list[str]
):
    """Requests in one batch, of which some come later, some ask for another plan, and some end
    early."""
    prompts = [f"The number {i} is" for i in range(7)]
    options = [
        GenerateOptions(
            20 + 9 * i, SamplingParams(0.8 * (i % 2), seed=i), plan=plan, ignore_eos=True
        )
        for i, plan in enumerate(
            ["tree-5", "tree-5", others[0], "tree-16", others[1], others[2], "tree-5"]
        )
    ]
    with load(subset_bundle, "cpu", threads=1, max_batch_size=4) as batched:
        passes = passes_of(batched)
        together = [
            stream.result().token_ids
            for stream in [batched.generate(p, o) for p, o in zip(prompts, options, strict=True)]
        ]
        alone = [
            batched.generate(
                p, GenerateOptions(o.max_new_tokens, o.sampling, plan="ar", ignore_eos=True)
            ).result()
            for p, o in zip(prompts, options, strict=True)
        ]
    assert together == [each.token_ids for each in alone]
    trees = [names for tree, names in passes if tree]
    assert all(name.startswith(("tree", "auto")) for names in trees for name in names)
    if "auto" in others:
        assert moved and len(trees) > 10
    assert any(not tree and {"tree-5", others[0]} <= names for tree, names in passes) == (
        "ar" in others
    )


def test_near_the_end_of_the_capacity_a_narrower_plan_takes_over(subset_bundle: Path):
    with load(subset_bundle, "cpu", threads=1, capacity=64) as small:
        prompt = small.encode("The quick brown fox")
        texts = [
            small.generate_ids(prompt, GenerateOptions(200, plan=plan, ignore_eos=True)).result()
            for plan in ("ar", "tree-16")
        ]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].finish_reason == "length"


def test_a_bundle_without_trees_says_so(random_bundle: Path):
    with (
        load(random_bundle, "cpu", threads=1) as session,
        pytest.raises(PassError, match="no tree-3 here: trees of drafts"),
    ):
        session.generate("A", GenerateOptions(plan="tree-3"))
