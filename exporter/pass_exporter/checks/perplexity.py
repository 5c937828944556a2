"""Measures the perplexity of an export, and its greedy agreement with the full-precision model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pass_runtime.backends.ort.trunks import open_trunk
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import prefill_plan
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS, PAST, cache_names
from pass_runtime.errors import PassError

WINDOW_TOKENS = 256
MAX_WINDOWS = 24
Logits = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]
"""ids [WINDOW_TOKENS] -> logits [WINDOW_TOKENS,V]."""


@dataclass(frozen=True)
class TextScores:
    """A model's scores of a text. T is WINDOW_TOKENS.

    windows [N,T]: the token ids of the text.
    likelihood [N,T-1]: the log-likelihood of every next token.
    choice [N,T-1]: the greedy choice at the same positions.
    """

    windows: npt.NDArray[np.int64]
    likelihood: npt.NDArray[np.float64]
    choice: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """perplexity: exp of the mean negative log-likelihood of `tokens` tokens; full_perplexity is
    the torch model's.
    agreement: the share of these tokens at which both models' greedy choices are equal."""

    tokens: int
    perplexity: float
    full_perplexity: float
    agreement: float

    def check(self, max_ratio: float) -> None:
        """Raises PassError if the perplexity is more than `max_ratio` times the torch model's."""
        if not self.perplexity <= max_ratio * self.full_perplexity:
            raise PassError(
                f"perplexity is {self.perplexity:.3f}, more than {max_ratio:g} times the "
                f"full-precision model's {self.full_perplexity:.3f}: choose other --weights, or "
                "allow it by --max-perplexity-ratio"
            )


@torch.no_grad()
def score_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str) -> TextScores:
    """Score up to MAX_WINDOWS windows of a text in torch. Raises PassError if it is too short."""
    text = text[: 16 * WINDOW_TOKENS * MAX_WINDOWS]  # 16 characters for each token
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    count = min(len(ids) // WINDOW_TOKENS, MAX_WINDOWS)
    if not count:
        raise PassError(
            f"the text of --verify has {len(ids)} tokens; give one of at least {WINDOW_TOKENS}"
        )
    windows = np.array(ids[: count * WINDOW_TOKENS], np.int64).reshape(count, WINDOW_TOKENS)
    return _scores(
        windows, lambda row: model(input_ids=torch.from_numpy(row[None])).logits[0].float().numpy()
    )


def score_tokens(
    logits: npt.NDArray[np.float32], row: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """logits [T,V], ids [T] -> the log-likelihood of each next token and the greedy choice there,
    [T-1] each."""
    values = torch.from_numpy(logits[:-1])
    likelihood = values.log_softmax(-1).gather(1, torch.from_numpy(row[1:, None]))[:, 0]
    return likelihood.double().numpy(), values.argmax(-1).numpy()


def trunk_logits(bundle: Path, manifest: Manifest) -> Logits:
    """Return a function that computes the trunk's logits of one window, with an empty KV cache."""
    session = open_trunk(bundle, manifest, "cpu", 1, 0).plain
    plan, model = prefill_plan(WINDOW_TOKENS), manifest.model
    names = {value.name for value in session.get_inputs()}
    cache = np.zeros((1, model.kv_heads, WINDOW_TOKENS, model.head_dim), model.dtype)
    feed = {
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "length": np.zeros(1, np.int64),
        "logit_rows": plan.logit_rows,
    }
    feed |= {LOOKAHEAD_ROWS: plan.lookahead_rows} if LOOKAHEAD_ROWS in names else {}
    feed |= dict.fromkeys(cache_names(PAST, model.layers), cache)

    def logits(row: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = session.run(["logits"], feed | {"input_ids": row[None]})[
            0
        ][0]
        return found

    return logits


def measure_quality(bundle: Path, manifest: Manifest, expected: TextScores) -> Quality:
    """Run the trunk over the windows of `expected`, and compare."""
    logits = trunk_logits(bundle, manifest)
    found = _scores(expected.windows, logits)
    agreement = float((found.choice == expected.choice).mean())
    perplexity, full_perplexity = (
        float(np.exp(-each.likelihood.mean())) for each in (found, expected)
    )
    return Quality(found.likelihood.size, perplexity, full_perplexity, agreement)


def _scores(windows: npt.NDArray[np.int64], logits: Logits) -> TextScores:
    scored = [score_tokens(logits(row), row) for row in windows]
    return TextScores(windows, np.stack([s[0] for s in scored]), np.stack([s[1] for s in scored]))
