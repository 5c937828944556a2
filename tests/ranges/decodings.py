"""What the newest and the oldest versions decode, and the file of the newest versions' tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pass_runtime import GenerateOptions, SamplingParams, Session
from pass_runtime.bundle.plan import ar_plan
from pass_runtime.measuring.lossless import token_scores

BUNDLES = ("tiny", "random", "adapter", "head", "int4")
PROMPT = "The quick brown fox jumps over"
PLANS = ("ar", "two-pass", "fused", "fused:4,3,2,2,1", "auto")
SAMPLING = ((0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 50, 0.8))
"""Temperature, top-k, top-p: one of each sampler."""


def directory() -> Path:
    """The directory in which scripts/test.sh ranges keeps the bundles."""
    return Path(os.environ["PASS_RANGES"])


def tokens_file() -> Path:
    return directory() / "tokens.json"


def requests() -> dict[str, GenerateOptions]:
    """The requests that are compared, by name."""
    return {
        f"{plan} at {values}": GenerateOptions(
            max_new_tokens=48, sampling=SamplingParams(*values, seed=7), plan=plan, ignore_eos=True
        )
        for plan in PLANS
        for values in SAMPLING
    }


def logits_after(session: Session, texts: Mapping[str, list[int]]) -> list[list[float]]:
    """[n][V] logits of plain decoding after n beginnings of the greedy text."""
    key, found = f"ar at {SAMPLING[0]}", []
    for count in (1, 8, 16, 24, 32, 40, 47):
        token_scores(session, [*session.encode(PROMPT), *texts[key][:count]], requests()[key])
        found.append(session.backend.logits(ar_plan())[0][0].tolist())
    return found
