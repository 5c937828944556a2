"""Measures the perplexity of an export on a text (`--verify`), and how often its greedy choice is
that of the full-precision model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pass_exporter.model.load import LoadedModel
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

CHUNK_TOKENS = 256
MAX_CHUNKS = 24
MAX_CHARACTERS_PER_TOKEN = 16
"""More of a text is cut off before it is tokenized."""


@dataclass(frozen=True)
class TextScores:
    """Scores of N chunks of T tokens [N,T]: log-probabilities [N,T-1] of every token but the first,
    and greedy choices [N,T-1] in their places."""

    chunks: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]
    choices: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """`agreement`: for which share of `tokens` tokens both models have the same greedy choice."""

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
def score_text(loaded: LoadedModel, text: str) -> TextScores:
    """Score up to MAX_CHUNKS chunks of a text in torch. Raises PassError if it is too short."""
    size = min(CHUNK_TOKENS, loaded.geometry.max_capacity // 2)
    text = text[: MAX_CHARACTERS_PER_TOKEN * size * MAX_CHUNKS]
    ids = loaded.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    count = min(len(ids) // size, MAX_CHUNKS)
    if not count:
        raise PassError(f"the text of --verify has {len(ids)} tokens; give one of at least {size}")
    chunks = np.array(ids[: count * size], np.int64).reshape(count, size)
    logprobs, choices = [], []
    for chunk in torch.from_numpy(chunks):
        logits = loaded.model(input_ids=chunk[None]).logits[0, :-1].float()
        logprobs.append(logits.log_softmax(-1).gather(1, chunk[1:, None])[:, 0].double())
        choices.append(logits.argmax(-1))
    return TextScores(chunks, torch.stack(logprobs).numpy(), torch.stack(choices).numpy())


def measure_quality(session: Session, full: TextScores) -> Quality:
    """Score the chunks of `full`, the full-precision model's scores, with a bundle."""
    options = GenerateOptions(0, prompt_logprobs=1)
    generations = [session.generate(chunk.tolist(), options).result() for chunk in full.chunks]
    scored = [
        [token for token in generation.prompt_logprobs or () if token is not None]
        for generation in generations
    ]
    logprobs = np.array([[token.logprob for token in chunk] for chunk in scored])
    choices = np.array([[token.top[0][0] for token in chunk] for chunk in scored])
    perplexity, full_perplexity = (
        float(np.exp(-each.mean())) for each in (logprobs, full.logprobs)
    )
    agreement = float((choices == full.choices).mean())
    return Quality(logprobs.size, perplexity, full_perplexity, agreement)
