"""What record.py and compare.py decode."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pass_runtime import GenerateOptions, SamplingParams, Session
from pass_runtime.bundle.window import ar_window
from pass_runtime.measuring.lossless import token_scores

BUNDLES = ("tiny", "random", "adapter", "head", "int4")
PROMPT = "The quick brown fox jumps over"
PLANS = ("ar", "two-pass", "fused", "fused:4,3,2,2,1", "auto")
SAMPLING = ((0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 50, 0.8))
"""Temperature, top-k and top-p, for each sampler."""


def directory() -> Path:
    return Path(os.environ["PASS_RANGES"])


def tokens_file() -> Path:
    return directory() / "tokens.json"


def requests() -> dict[str, GenerateOptions]:
    return {
        f"{plan} at {values}": GenerateOptions(
            max_new_tokens=48, sampling=SamplingParams(*values, seed=7), plan=plan, ignore_eos=True
        )
        for plan in PLANS
        for values in SAMPLING
    }


def logits_after(session: Session, texts: Mapping[str, list[int]]) -> list[list[float]]:
    """Return the logits [7,V] of plain decoding in the greedy text."""
    key, logits = f"ar at {SAMPLING[0]}", []
    for count in (1, 8, 16, 24, 32, 40, 47):
        token_scores(session, [*session.encode(PROMPT), *texts[key][:count]], requests()[key])
        logits.append(session.backend.logits(ar_window())[0][0].tolist())
    return logits
