"""Measures the perplexity of an export on a text (`--verify`), and how often its greedy choice is
that of the full-precision model."""

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
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.plan import prefill_plan
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS, PAST, cache_names
from pass_runtime.errors import PassError

CHUNK_TOKENS = 256
MAX_CHUNKS = 24
MAX_CHARACTERS_PER_TOKEN = 16
"""To save time, a text is cut to this many characters per scored token before it is tokenized."""
Logits = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]
"""Computes the logits [T,V] of a chunk of token ids [T] that nothing precedes."""


@dataclass(frozen=True)
class TextScores:
    """A model's scores of a text in N chunks of T = CHUNK_TOKENS tokens, each scored by itself.

    chunks [N,T]: the token ids of the text.
    logprobs [N,T-1]: the log-probability of every token of a chunk but the first.
    choices [N,T-1]: the tokens that greedy decoding would write in their places.
    """

    chunks: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]
    choices: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """The quality of a bundle on a text.

    perplexity: exp of the mean negative log-probability of `tokens` tokens; full_perplexity is that
    of the full-precision model in torch.
    agreement: the share of these tokens in whose places both models have the same greedy choice.
    """

    tokens: int
    perplexity: float
    full_perplexity: float
    agreement: float

    def check(self, max_ratio: float) -> None:
        """Raise PassError if `perplexity` is more than `max_ratio` times `full_perplexity`."""
        if not self.perplexity <= max_ratio * self.full_perplexity:
            raise PassError(
                f"perplexity is {self.perplexity:.3f}, more than {max_ratio:g} times the "
                f"full-precision model's {self.full_perplexity:.3f}: choose other --weights, or "
                "allow it by --max-perplexity-ratio"
            )


@torch.no_grad()
def score_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str) -> TextScores:
    """Score up to MAX_CHUNKS chunks of a text in torch. Raises PassError if it is too short."""
    text = text[: MAX_CHARACTERS_PER_TOKEN * CHUNK_TOKENS * MAX_CHUNKS]
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    count = min(len(ids) // CHUNK_TOKENS, MAX_CHUNKS)
    if not count:
        raise PassError(
            f"the text of --verify has {len(ids)} tokens; give one of at least {CHUNK_TOKENS}"
        )
    chunks = np.array(ids[: count * CHUNK_TOKENS], np.int64).reshape(count, CHUNK_TOKENS)
    return _scores(
        chunks, lambda ids: model(input_ids=torch.from_numpy(ids[None])).logits[0].float().numpy()
    )


def score_tokens(
    logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return `logprobs` and `choices` of TextScores for one chunk: logits [T,V], ids [T]."""
    values = torch.from_numpy(logits[:-1])
    logprobs = values.log_softmax(-1).gather(1, torch.from_numpy(ids[1:, None]))[:, 0]
    return logprobs.double().numpy(), values.argmax(-1).numpy()


def trunk_logits(bundle: Path, manifest: Manifest) -> Logits:
    """Return a function that computes the trunk's logits of a chunk of CHUNK_TOKENS tokens."""
    files = OpenFiles.of_graphs(bundle, manifest)
    session = open_trunk(files, manifest, "cpu", slots=1, threads=0).plain
    plan, model = prefill_plan(CHUNK_TOKENS), manifest.model
    input_names = {value.name for value in session.get_inputs()}
    cache = np.zeros((1, model.kv_heads, CHUNK_TOKENS, model.head_dim), model.dtype)
    feed = {
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "length": np.zeros(1, np.int64),
        "logit_rows": plan.logit_rows,
    }
    feed |= {LOOKAHEAD_ROWS: plan.lookahead_rows} if LOOKAHEAD_ROWS in input_names else {}
    feed |= dict.fromkeys(cache_names(PAST, model.layers), cache)

    def logits(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        (batch,) = session.run(["logits"], feed | {"input_ids": ids[None]})
        chunk_logits: npt.NDArray[np.float32] = batch[0]
        return chunk_logits

    return logits


def measure_quality(bundle: Path, manifest: Manifest, full: TextScores) -> Quality:
    """Score the chunks of `full` with the trunk. full: the full-precision model's scores."""
    scores = _scores(full.chunks, trunk_logits(bundle, manifest))
    agreement = float((scores.choices == full.choices).mean())
    perplexity, full_perplexity = (float(np.exp(-each.logprobs.mean())) for each in (scores, full))
    return Quality(scores.logprobs.size, perplexity, full_perplexity, agreement)


def _scores(chunks: npt.NDArray[np.int64], logits: Logits) -> TextScores:
    logprobs, choices = zip(*(score_tokens(logits(ids), ids) for ids in chunks), strict=True)
    return TextScores(chunks, np.stack(logprobs), np.stack(choices))
