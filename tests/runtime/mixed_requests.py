"""Requests of every kind for the tiny bundles, and their texts by plain decoding in one slot."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from pass_runtime import GenerateOptions, SamplingParams, Session
from pass_runtime.measuring.lossless import first_difference

TEXTS = (
    "a",
    "The quick brown fox jumps over",
    "def add(a, b):\n    return",
    "Über 12345 naïve",
    "import numpy as np\nfor i in range(10):\n    print(i)\n" * 2,
    "The quick brown fox jumps over the lazy dog. def add(a, b): " * 14,
)
"""The last one is longer than the first KV capacity of a session."""
SAMPLING = (
    SamplingParams(),
    SamplingParams(0.8, seed=1),
    SamplingParams(1.0, seed=2**63 + 5),
    SamplingParams(1.0, 40, 0.9, seed=3),
    SamplingParams(0.7, 5, seed=4),
    SamplingParams(0.9, seed=6, min_p=0.05),
)
PLANS = ("ar", "two-pass", "fused", "fused:2,1,1", "auto")
STOPS = ((), (), (), ("e",), ("th", "\n\n"), ("<eos>",))
STOP_TOKENS = ((), (), (7,), tuple(range(100, 140)))


@dataclass(frozen=True)
class MixedRequest:
    """The fields from `plan` on must not change the text."""

    text: str
    sampling: SamplingParams
    tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = True
    plan: str = field(default="ar", compare=False)
    lookahead: int | None = field(default=None, compare=False)
    draft: str | None = field(default=None, compare=False)
    logprobs: int | None = field(default=None, compare=False)
    reuse_prefix: bool = field(default=False, compare=False)

    def options(self, *, plain: bool = False) -> GenerateOptions:
        names = ["stop", "stop_token_ids", "ignore_eos"]
        names += [] if plain else ["plan", "lookahead", "draft", "logprobs", "reuse_prefix"]
        values = {"plan": "ar"} | {name: getattr(self, name) for name in names}
        return GenerateOptions(self.tokens, self.sampling, **values)


@st.composite
def requests(draw: st.DrawFn) -> MixedRequest:
    plan = draw(st.sampled_from(PLANS))
    lookahead = None if plan.startswith("fused:") else draw(st.sampled_from([None, None, 0, 1, 3]))
    return MixedRequest(
        text=draw(st.sampled_from(TEXTS)),
        sampling=draw(st.sampled_from(SAMPLING)),
        tokens=draw(st.integers(1, 40)),
        stop=draw(st.sampled_from(STOPS)),
        stop_token_ids=draw(st.sampled_from(STOP_TOKENS)),
        ignore_eos=draw(st.booleans()),
        plan=plan,
        lookahead=lookahead,
        draft=None if plan == "ar" else draw(st.sampled_from([None, "both", "ngram"])),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        reuse_prefix=draw(st.booleans()),
    )


def random_request(chance: random.Random, text: str, max_tokens: int) -> MixedRequest:
    return MixedRequest(
        text,
        chance.choice(SAMPLING),
        chance.randint(1, max_tokens),
        chance.choice(STOPS),
        plan=chance.choice(PLANS),
        logprobs=chance.choice([None, 2]),
        reuse_prefix=chance.random() < 0.3,
    )


class PlainDecoder:
    def __init__(self, session: Session) -> None:
        self.session = session
        self._tokens: dict[MixedRequest, list[int]] = {}

    def tokens(self, request: MixedRequest) -> list[int]:
        if request not in self._tokens:
            stream = self.session.generate(request.text, request.options(plain=True))
            self._tokens[request] = stream.result().token_ids
        return self._tokens[request]

    def assert_same(
        self, request: MixedRequest, written: Sequence[int], *, whole: bool = True
    ) -> None:
        """whole: or the first tokens only. Near-ties may differ."""
        expected = self.tokens(request)
        if not whole and list(written) == expected[: len(written)]:
            return
        prompt, options = self.session.encode(request.text), request.options(plain=True)
        difference = first_difference(self.session, prompt, options, expected, written)
        assert difference is None or difference.is_near_tie, f"{request}: {difference}"
