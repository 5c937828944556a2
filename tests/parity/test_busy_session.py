"""Requests in a busy session write the tokens that each of them writes alone by plain decoding.

The session has the prefix cache. Plans, sampling, processors, salts and cancellations of requests
are random, and so are the requests that are decoded beside them. The test calls the scheduler's
steps itself, so that a seed repeats a failure; only `auto` also depends on the speed of passes.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conftest import export_bundle, make_model, write_random_weights
from pass_runtime import Constraint, GenerateOptions, SamplingParams, Session, load
from pass_runtime.bundle.read import read_manifest
from pass_runtime.decode.prefix_cache import common_prefix
from pass_runtime.decode.runner import Runner
from pass_runtime.decode.scheduler import Scheduler
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.text.detokenizer import TextStream
from pass_runtime.tuning.tuner import Tuners

TEXTS = (
    "The quick brown fox jumps over the lazy dog. ",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. Once more: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10. ",
)
CONSTRAINTS = (
    Constraint(regex="(ab|cd|[0-9]{2,5}){1,30}"),
    Constraint(choice=["the quick brown fox", "the lazy dog", "def add(a, b):"]),
    Constraint(
        json_schema={
            "type": "object",
            "properties": {"a": {"type": "integer"}, "list": {"type": "array"}},
        }
    ),
)
PLANS = ("ar", "two-pass", "two-pass", "fused", "fused", "fused:2,1,1", "auto", "auto")
EVENTS = ("moves", "passes of several", "accepted", "cancelled", "processed", "found in the cache")
TREES = ("tree-3", "tree-5", "tree-8", "tree-16", "tree:2,0,1,1")


@dataclass
class Comparison:
    """Results. tokens: how many were compared. differences: a line for each request whose tokens
    differ. events: how often each of EVENTS happened; without them a comparison shows little."""

    tokens: int = 0
    differences: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


class Requests:
    """Draws prompts that often begin alike, and options of any kind. If the bundle has trees, all
    requests of some sessions take one, since a pass is a tree only if all its requests do."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self._rng = rng
        self._texts = [session.encode(text * 4) for text in TEXTS]
        self._trees = TREES if session.backend.capabilities.exact_trees else ()
        self._only_trees = bool(self._trees) and rng.random() < 0.4
        self._plans = (*self._trees, "auto") if self._only_trees else (*PLANS, *self._trees)

    def prompt(self) -> list[int]:
        text = self._rng.choice(self._texts)
        own = [self._rng.randrange(4, 200) for _ in range(self._rng.randrange(4))]
        return [*text[: self._rng.randrange(1, len(text))], *own]

    def options(self) -> GenerateOptions:
        choice, random_share = self._rng.choice, self._rng.random
        plan = choice(self._plans)
        options = GenerateOptions(
            self._rng.randrange(1, 96),
            self._sampling(),
            plan=plan,
            draft=None if plan == "ar" else choice([None, None, "both", "ngram"]),
            lookahead=choice([None, None, 1, 3]) if plan in ("two-pass", "fused", "auto") else None,
            ignore_eos=True,
            stop_token_ids=choice([(), (), range(100, 140)]),
            logprobs=None if self._only_trees else choice([None, None, None, 2]),
            reuse_prefix=random_share() < 0.2,
            cache_salt=choice(["", "", "a"]),
        )
        if self._only_trees or random_share() < 0.5:
            return options
        return replace(options, **self._processors())

    def _sampling(self) -> SamplingParams:
        sampling = SamplingParams(
            self._rng.choice([0.0, 0.8, 1.2]),
            top_k=self._rng.choice([0, 0, 20]),
            top_p=self._rng.choice([1.0, 0.9]),
            min_p=self._rng.choice([0.0, 0.0, 0.05]),
            seed=self._rng.randrange(1 << 64),
        )
        if self._only_trees or self._rng.random() < 0.7:
            return sampling
        return replace(
            sampling,
            presence_penalty=self._rng.choice([0.0, 1.5]),
            frequency_penalty=self._rng.choice([0.0, 0.7, -0.3]),
            repetition_penalty=self._rng.choice([1.0, 1.3]),
            logit_bias={self._rng.randrange(200): 4.0 for _ in range(self._rng.randrange(8))},
        )

    def _processors(self) -> dict[str, Any]:
        return self._rng.choice(
            [
                {},
                {"constraint": self._rng.choice(CONSTRAINTS), "ignore_eos": False},
                {"bad_words": ("the", "a", "in")},
                {"allowed_token_ids": range(0, 200, 3)},
                {"min_tokens": 1, "ignore_eos": False},
            ]
        )


class WatchedRunner(Runner):
    """A runner that counts events of its passes."""

    def __init__(self, session: Session, events: Counter[str]) -> None:
        super().__init__(session.backend)
        self.events = events

    def _move(self, source, target):
        self.events["moves"] += 1
        super()._move(source, target)

    def run(self, plan, drafts):
        results, seconds = super().run(plan, drafts)
        self.events["trees"] += bool(plan.parents)
        self.events["passes of several"] += len(results) > 1
        self.events["accepted"] += sum(len(result.tokens) - 1 for result in results)
        return results, seconds


def plain(session: Session, sequence: SequenceState, options: GenerateOptions) -> list[int]:
    """Return the tokens that plain decoding writes after the sequence's prompt."""
    without_drafts = {"draft": None, "lookahead": None, "logprobs": None, "reuse_prefix": False}
    alone = replace(options, plan="ar", **without_drafts)
    return session.generate_ids(sequence.request.prompt_ids, alone).result().token_ids


def compare(bundle: Path, slots: int, tokens: int, seed: int, comparison: Comparison) -> None:
    """Decode requests until `tokens` tokens are written. Then decode each of the requests again,
    alone, and add the differences to `comparison`."""
    rng, sequences = random.Random(seed), list[tuple[SequenceState, GenerateOptions]]()
    options = {"threads": 1, "verify": False, "max_batch_size": slots}
    with load(bundle, "cpu", **options) as session:
        requests = Requests(session, rng)
        runner = WatchedRunner(session, comparison.events)
        tuners = Tuners(
            session.manifest,
            session.backend.capabilities,
            runner.time_masked_pass,
            lambda: runner.room,
        )
        scheduler = Scheduler(runner, tuners, 1000)
        written = 0
        while written < tokens or not scheduler.idle:
            if written < tokens and len(scheduler.waiting) < 2 and rng.random() < 0.5:
                request, prompt = requests.options(), requests.prompt()
                text = TextStream(session.tokenizer, prompt, ())
                sequence = SequenceState(session.request(prompt, request), text)
                scheduler.reserve(1)
                scheduler.add(sequence)
                sequences.append((sequence, request))
            if sequences and rng.random() < 0.02:
                rng.choice(sequences[-slots:])[0].cancelled = True
            scheduler.step()
            written = sum(sequence.written for sequence, _ in sequences)
    with load(bundle, "cpu", **options, prefix_cache=False) as fresh:
        for number, (sequence, request) in enumerate(sequences):
            busy_tokens = sequence.tokens[len(sequence.request.prompt_ids) :]
            expected = plain(fresh, sequence, request)
            end = sequence.finished
            assert end is not None and end.error is None, end
            cancelled = end.reason == "cancelled"
            comparison.events["cancelled"] += cancelled
            comparison.events["found in the cache"] += sequence.stats.cached_tokens
            comparison.events["processed"] += sequence.processors is not None
            comparison.tokens += len(busy_tokens)
            if cancelled:
                expected = expected[: len(busy_tokens)]
            if busy_tokens != expected:
                place = f"seed {seed}, {slots} slots, request {number}"
                equal_tokens = common_prefix(busy_tokens, expected)
                comparison.differences.append(f"{place}, token {equal_tokens}: {request}")


def compared(bundle: Path, tokens: int, seed: int, *, trees: bool) -> Comparison:
    """Compare `tokens` tokens of several sessions. trees: whether the bundle decodes with trees."""
    comparison, sessions = Comparison(), max(3, tokens // 1000)
    for number in range(sessions):
        slots = (2, 4, 3, 8)[number % 4]
        compare(bundle, slots, tokens // sessions, seed + number, comparison)
    assert not comparison.differences, "\n".join(comparison.differences)
    for name in (*EVENTS, *(["trees"] if trees else [])):
        assert comparison.events[name], f"this has not happened: {name}"
    assert trees or not comparison.events["trees"]
    return comparison


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that exports a model in a format of --weights. The model soon repeats
    itself, so that drafts of every kind are accepted."""
    directory = tmp_path_factory.mktemp("busy")
    model = make_model(directory / "model", vocab_size=1024, initializer_range=0.06)
    drafting = write_random_weights(
        model, directory / "w.safetensors", lookahead=4, head_rank=12, head_strength=0.1
    )

    @cache
    def exported(weights: str) -> Path:
        return export_bundle(
            model, directory / weights, lookahead=4, lookahead_weights=drafting, weights=weights
        )

    return exported


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["full", "int8"])
def test_no_token_of_a_busy_session_differs(bundles: Callable[[str], Path], weights: str):
    compared(bundles(weights), 1500, seed=0, trees=weights == "full")


@pytest.mark.slow
@pytest.mark.seldom
def test_no_token_of_many_busy_sessions_differs(bundles: Callable[[str], Path]):
    """PASS_BUSY_BUNDLE names a bundle to test, PASS_BUSY_TOKENS says how many tokens to compare."""
    tokens = int(os.environ.get("PASS_BUSY_TOKENS", "7000"))
    given = os.environ.get("PASS_BUSY_BUNDLE")
    for bundle in (Path(given),) if given else map(bundles, ("full", "int8")):
        trees = read_manifest(bundle).model.weights == "full"
        comparison = compared(bundle, tokens, seed=100, trees=trees)
        print(f"{bundle}: {comparison.tokens} tokens, no difference; {dict(comparison.events)}")
