"""Tokens of requests in a busy session are those of plain decoding in a fresh one, whatever happens
beside them.

Random plans, samplings, processors, salts, neighbours, cancellations and moves, with the prefix
cache. The scheduler's steps are driven by hand, so that a seed that fails can be had again; only
`auto` also depends on the speed of passes.
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
TREES = ("tree-3", "tree-5", "tree-8", "tree-16", "tree:2,0,1,1")


@dataclass
class Found:
    """What was compared. noted: how often what the test is about has happened."""

    tokens: int = 0
    differences: list[str] = field(default_factory=list)
    noted: Counter[str] = field(default_factory=Counter)


class Requests:
    """Draws requests: prompts that often begin alike, and options that decide the text, and how it
    is decoded. Where there are trees, all requests of some sessions take one."""

    def __init__(self, session: Session, chance: random.Random) -> None:
        self._chance, self._session = chance, session
        self._texts = [session.encode(text * 4) for text in TEXTS]
        self._trees = TREES if session.backend.capabilities.exact_trees else ()
        self._only_trees = bool(self._trees) and chance.random() < 0.4
        self._plans = (*self._trees, "auto") if self._only_trees else (*PLANS, *self._trees)

    def prompt(self) -> list[int]:
        text = self._chance.choice(self._texts)
        own = [self._chance.randrange(4, 200) for _ in range(self._chance.randrange(4))]
        return [*text[: self._chance.randrange(1, len(text))], *own]

    def options(self) -> GenerateOptions:
        one, often = self._chance.choice, self._chance.random
        plan = one(self._plans)
        options = GenerateOptions(
            self._chance.randrange(1, 96),
            self._sampling(),
            plan=plan,
            draft=None if plan == "ar" else one([None, None, "both", "ngram"]),
            lookahead=one([None, None, 1, 3]) if plan in ("two-pass", "fused", "auto") else None,
            ignore_eos=True,
            stop_token_ids=one([(), (), range(100, 140)]),
            logprobs=None if self._only_trees else one([None, None, None, 2]),
            reuse_prefix=often() < 0.2,
            cache_salt=one(["", "", "a"]),
        )
        return (
            options if self._only_trees or often() < 0.5 else replace(options, **self._processors())
        )

    def _sampling(self) -> SamplingParams:
        sampling = SamplingParams(
            self._chance.choice([0.0, 0.8, 1.2]),
            top_k=self._chance.choice([0, 0, 20]),
            top_p=self._chance.choice([1.0, 0.9]),
            min_p=self._chance.choice([0.0, 0.0, 0.05]),
            seed=self._chance.randrange(1 << 64),
        )
        if self._only_trees or self._chance.random() < 0.7:
            return sampling
        return replace(
            sampling,
            presence_penalty=self._chance.choice([0.0, 1.5]),
            frequency_penalty=self._chance.choice([0.0, 0.7, -0.3]),
            repetition_penalty=self._chance.choice([1.0, 1.3]),
            logit_bias={self._chance.randrange(200): 4.0 for _ in range(self._chance.randrange(8))},
        )

    def _processors(self) -> dict[str, Any]:
        return self._chance.choice(
            [
                {},
                {"constraint": self._chance.choice(CONSTRAINTS), "ignore_eos": False},
                {"bad_words": ("the", "a", "in")},
                {"allowed_token_ids": range(0, 200, 3)},
                {"min_tokens": 1, "ignore_eos": False},
            ]
        )


class WatchedRunner(Runner):
    """Counts what happens."""

    def __init__(self, session: Session, noted: Counter[str]) -> None:
        super().__init__(session.backend)
        self.noted = noted

    def _move(self, source, target):
        self.noted["moves"] += 1
        super()._move(source, target)

    def run(self, plan, drafts):
        results, seconds = super().run(plan, drafts)
        self.noted["trees"] += bool(plan.parents)
        self.noted["passes of several"] += len(results) > 1
        self.noted["accepted"] += sum(len(result.tokens) - 1 for result in results)
        return results, seconds


def plain(session: Session, sequence: SequenceState, options: GenerateOptions) -> list[int]:
    alone = replace(
        options, plan="ar", draft=None, lookahead=None, logprobs=None, reuse_prefix=False
    )
    return session.generate_ids(sequence.request.prompt_ids, alone).result().token_ids


def compare(
    bundle: Path, slots: int, tokens: int, seed: int, found: Found, threads: int = 1
) -> None:
    """Decode requests until `tokens` tokens are written, and every one of them again, alone."""
    chance, asked = random.Random(seed), list[tuple[SequenceState, GenerateOptions]]()
    with load(bundle, "cpu", threads=threads, verify=False, max_batch_size=slots) as session:
        requests = Requests(session, chance)
        runner = WatchedRunner(session, found.noted)
        tuners = Tuners(
            session.manifest, session.backend.capabilities, runner.idle_pass, lambda: runner.room
        )
        scheduler = Scheduler(runner, tuners, 1000)
        written = 0
        while written < tokens or not scheduler.idle:
            if written < tokens and len(scheduler.waiting) < 2 and chance.random() < 0.5:
                options, prompt = requests.options(), requests.prompt()
                sequence = SequenceState(
                    session.request(prompt, options), TextStream(session.tokenizer, prompt, ())
                )
                scheduler.reserve(1)
                scheduler.add(sequence)
                asked.append((sequence, options))
            if asked and chance.random() < 0.02:
                chance.choice(asked[-slots:])[0].cancelled = True
            scheduler.step()
            written = sum(sequence.written for sequence, _ in asked)
    with load(
        bundle, "cpu", threads=threads, verify=False, max_batch_size=slots, prefix_cache=False
    ) as fresh:
        for number, (sequence, options) in enumerate(asked):
            got, expected = (
                sequence.tokens[len(sequence.request.prompt_ids) :],
                plain(fresh, sequence, options),
            )
            assert sequence.finished is not None and sequence.finished.error is None, (
                sequence.finished
            )
            cancelled = sequence.finished.reason == "cancelled"
            found.noted["cancelled"] += cancelled
            found.noted["found in the cache"] += sequence.stats.cached_tokens
            found.noted["processed"] += sequence.processors is not None
            found.tokens += len(got)
            if got != (expected[: len(got)] if cancelled else expected):
                at = next(
                    (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), -1
                )
                found.differences.append(
                    f"seed {seed}, {slots} slots, request {number}, token {at}: {options}"
                )


def compared(bundle: Path, tokens: int, seed: int = 0) -> Found:
    found = Found()
    for number in range(max(3, tokens // 1000)):
        slots = (2, 4, 3, 8)[number % 4]
        compare(bundle, slots, tokens // max(3, tokens // 1000), seed + number, found)
    assert not found.differences, "\n".join(found.differences)
    return found


def check_noted(found: Found, *, trees: bool) -> None:
    for name in (
        "moves",
        "passes of several",
        "accepted",
        "cancelled",
        "found in the cache",
        "processed",
    ):
        assert found.noted[name], f"{name}: it has not happened, so that this test shows little"
    assert bool(found.noted["trees"]) == trees


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Exports a model that soon repeats itself, so that drafts of every kind are accepted, with
    these weights."""
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


@pytest.mark.parametrize("weights", ["full", "w8a8"])
def test_no_token_differs(bundles: Callable[[str], Path], weights: str):
    check_noted(compared(bundles(weights), 1500), trees=weights == "full")


@pytest.mark.slow
@pytest.mark.seldom
def test_no_token_of_many_differs(bundles: Callable[[str], Path]):
    """PASS_BUSY_BUNDLE names another bundle, PASS_BUSY_TOKENS says how many tokens to compare."""
    tokens, given = (
        int(os.environ.get("PASS_BUSY_TOKENS", "7000")),
        os.environ.get("PASS_BUSY_BUNDLE"),
    )
    for bundle in (Path(given),) if given else map(bundles, ("full", "w8a8")):
        found = compared(bundle, tokens, seed=100)
        print(f"{bundle}: {found.tokens} tokens, no difference; {dict(found.noted)}")
        check_noted(found, trees=read_manifest(bundle).model.weights == "full")
