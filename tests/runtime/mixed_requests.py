"""Requests of every kind for the tiny bundles, and their texts by plain decoding in one slot."""

from __future__ import annotations

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
"""The last one is longer than the first capacity."""
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
class Asked:
    """A request: what decides its text, and then what must not change it (plan to reuse_prefix)."""

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

    def options(self, *, alone: bool = False) -> GenerateOptions:
        """alone: plain decoding, with nothing that must not change the text."""
        names = ["stop", "stop_token_ids", "ignore_eos"]
        names += [] if alone else ["plan", "lookahead", "draft", "logprobs", "reuse_prefix"]
        chosen = {"plan": "ar"} | {name: getattr(self, name) for name in names}
        return GenerateOptions(self.tokens, self.sampling, **chosen)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    plan = draw(st.sampled_from(PLANS))
    lookahead = None if plan.startswith("fused:") else draw(st.sampled_from([None, None, 0, 1, 3]))
    return Asked(
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


class Alone:
    """The texts of requests by plain decoding, one at a time; each is decoded once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._texts: dict[Asked, list[int]] = {}

    def tokens(self, asked: Asked) -> list[int]:
        if asked not in self._texts:
            stream = self.session.generate(asked.text, asked.options(alone=True))
            self._texts[asked] = stream.result().token_ids
        return self._texts[asked]

    def assert_same(self, asked: Asked, got: Sequence[int], *, whole: bool = True) -> None:
        """Check the tokens of a request, or (not `whole`) its first tokens, up to a near-tie."""
        expected = self.tokens(asked)
        if not whole and list(got) == expected[: len(got)]:
            return
        prompt, options = self.session.encode(asked.text), asked.options(alone=True)
        difference = first_difference(self.session, prompt, options, expected, got)
        assert difference is None or difference.is_near_tie, f"{asked}: {difference}"
