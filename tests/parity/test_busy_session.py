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
from test_lossless_processors import CONSTRAINTS

from conftest import export_bundle, make_model, write_random_weights
from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.decode.engine import Engine
from pass_runtime.decode.prefix_cache import common_prefix
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.text.detokenizer import TextStream
from pass_runtime.tuning.auto import Auto

TEXTS = (
    "The quick brown fox jumps over the lazy dog. ",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. Once more: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10. ",
)
PLANS = ("ar", "two-pass", "two-pass", "fused", "fused", "fused:2,1,1", "auto", "auto")
EVENTS = ("moves", "passes of several", "accepted", "cancelled", "processed", "found in the cache")


@dataclass
class Comparison:
    tokens: int = 0
    differences: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


class Requests:
    def __init__(self, session: Session, rng: random.Random) -> None:
        self._rng = rng
        self._texts = [session.encode(text * 4) for text in TEXTS]

    def prompt(self) -> list[int]:
        text = self._rng.choice(self._texts)
        own = [self._rng.randrange(4, 200) for _ in range(self._rng.randrange(4))]
        return [*text[: self._rng.randrange(1, len(text))], *own]

    def options(self) -> GenerateOptions:
        choice, random_share = self._rng.choice, self._rng.random
        plan = choice(PLANS)
        options = GenerateOptions(
            self._rng.randrange(1, 96),
            self._sampling(),
            plan=plan,
            draft=None if plan == "ar" else choice([None, None, "both", "ngram"]),
            lookahead=choice([None, None, 1, 3]) if plan in ("two-pass", "fused", "auto") else None,
            ignore_eos=True,
            stop_token_ids=choice([(), (), range(100, 140)]),
            logprobs=choice([None, None, None, 2]),
            reuse_prefix=random_share() < 0.2,
            cache_salt=choice(["", "", "a"]),
        )
        if random_share() < 0.5:
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
        if self._rng.random() < 0.7:
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
                {"constraint": self._rng.choice(CONSTRAINTS[1:4]), "ignore_eos": False},
                {"bad_words": ("the", "a", "in")},
                {"allowed_token_ids": range(0, 200, 3)},
                {"min_tokens": 1, "ignore_eos": False},
            ]
        )


class WatchedEngine(Engine):
    def __init__(self, session: Session, events: Counter[str]) -> None:
        auto = Auto(session.manifest.lookahead, session.backend.capabilities)
        super().__init__(session.backend, auto, 1000)
        self.events = events

    def _move(self, source, target, sequence):
        self.events["moves"] += 1
        super()._move(source, target, sequence)

    def _run(self, batch, decoding):
        result, seconds = super()._run(batch, decoding)
        self.events["passes of several"] += len(decoding) > 1
        self.events["accepted"] += sum(len(tokens) - 1 for tokens in result.tokens if tokens)
        return result, seconds


def plain(session: Session, sequence: SequenceState, options: GenerateOptions) -> list[int]:
    without_drafts = {"draft": None, "lookahead": None, "logprobs": None, "reuse_prefix": False}
    alone = replace(options, plan="ar", **without_drafts)
    return session.generate_ids(sequence.request.prompt_ids, alone).result().token_ids


def compare(bundle: Path, slots: int, tokens: int, seed: int, comparison: Comparison) -> None:
    rng, sequences = random.Random(seed), list[tuple[SequenceState, GenerateOptions]]()
    options = {"threads": 1, "verify": False, "max_batch_size": slots}
    with load(bundle, "cpu", **options) as session:
        requests = Requests(session, rng)
        engine = WatchedEngine(session, comparison.events)
        written = 0
        while written < tokens or not engine.idle:
            if written < tokens and len(engine.waiting) < 2 and rng.random() < 0.5:
                request, prompt = requests.options(), requests.prompt()
                text = TextStream(session.tokenizer, prompt, ())
                sequence = SequenceState(session.request(prompt, request), text)
                engine.reserve(1)
                engine.add(sequence)
                sequences.append((sequence, request))
            if sequences and rng.random() < 0.02:
                rng.choice(sequences[-slots:])[0].cancelled = True
            engine.step()
            written = sum(sequence.stats.generated_tokens for sequence, _ in sequences)
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


def compared(bundle: Path, tokens: int, seed: int) -> Comparison:
    comparison, sessions = Comparison(), max(3, tokens // 1000)
    for number in range(sessions):
        slots = (2, 4, 3, 8)[number % 4]
        compare(bundle, slots, tokens // sessions, seed + number, comparison)
    assert not comparison.differences, "\n".join(comparison.differences)
    for name in EVENTS:
        assert comparison.events[name], f"this has not happened: {name}"
    return comparison


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that exports a model in a format of --weights."""
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
    compared(bundles(weights), 1500, seed=0)


@pytest.mark.slow
@pytest.mark.seldom
def test_no_token_of_many_busy_sessions_differs(bundles: Callable[[str], Path]):
    """PASS_BUSY_BUNDLE names a bundle to test, PASS_BUSY_TOKENS says how many tokens to compare."""
    tokens = int(os.environ.get("PASS_BUSY_TOKENS", "7000"))
    given = os.environ.get("PASS_BUSY_BUNDLE")
    for bundle in (Path(given),) if given else map(bundles, ("full", "int8")):
        comparison = compared(bundle, tokens, seed=100)
        print(f"{bundle}: {comparison.tokens} tokens, no difference; {dict(comparison.events)}")
