"""Answers prompts with the frozen model, sampled with the runtime's Gumbel noise.

The answers do not depend on look-ahead weights, and are kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from pass_exporter.progress import Step
from pass_runtime.bundle import noise
from pass_runtime.bundle.reference import gumbel_scores
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_runtime.measuring.real_use import Prompt
from pass_trainer.writers import continue_prompts, message_ids, until_end

BATCH_PROMPTS = 40


@dataclass(frozen=True)
class SeededPrompt:
    ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class AnswerWriter:
    """identity: of model and dtype in the cache."""

    model: PreTrainedModel
    eos_token_ids: tuple[int, ...]
    max_tokens: int
    identity: str

    def answers(
        self, cache: Path, prompts: Sequence[SeededPrompt], progress: Step
    ) -> list[list[int]]:
        """Return the tokens of an answer, with its end token, for each prompt, from the directory
        `cache` if it has them."""
        settings = [self.identity, self.max_tokens, noise.SCHEME]
        key = json.dumps([*settings, [[p.ids, asdict(p.sampling)] for p in prompts]])
        path = cache / "written" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(self._write(prompts, progress)))
        try:
            answers = json.loads(path.read_text(encoding="utf-8"))
            return [[int(token) for token in tokens] for tokens in answers]
        except (OSError, ValueError, TypeError) as error:
            raise PassError(
                f"{path} is damaged ({error}); delete it, and it will be made again"
            ) from None

    def _write(self, prompts: Sequence[SeededPrompt], progress: Step) -> list[list[int]]:
        # Prompts of similar lengths share a batch: less padding.
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        answers: dict[int, list[int]] = {}
        for first in range(0, len(prompts), BATCH_PROMPTS):
            batch = by_length[first : first + BATCH_PROMPTS]
            seeded = [prompts[i] for i in batch]
            continuations = continue_prompts(
                self.model,
                [p.ids for p in seeded],
                self.max_tokens,
                self.eos_token_ids,
                do_sample=False,  # Greedy search takes the argmax of the scores.
                logits_processor=LogitsProcessorList([_GumbelScores(seeded)]),
            )
            for i, tokens in zip(batch, continuations, strict=True):
                answers[i] = until_end(tokens, self.eos_token_ids)
            progress(len(answers), len(prompts))
        return [answers[i] for i in range(len(prompts))]


class _GumbelScores(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Maps logits to scores whose argmax is the sampled token."""

    def __init__(self, prompts: Sequence[SeededPrompt]) -> None:
        self._sampling, lengths = [p.sampling for p in prompts], [len(p.ids) for p in prompts]
        self._padding = [max(lengths) - length for length in lengths]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [B,V] of logits [B,V] after ids [B,N], padded on the left."""
        if all(sampling.temperature == 0 for sampling in self._sampling):
            return scores
        logits = scores.float().cpu().numpy()
        positions = input_ids.shape[1] - np.array(self._padding)  # of the next tokens
        rows = [
            gumbel_scores(logits[row : row + 1], positions[row : row + 1], sampling)
            for row, sampling in enumerate(self._sampling)
        ]
        return torch.from_numpy(np.concatenate(rows)).to(scores)


def encode(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> list[int]:
    if prompt.is_message:
        return message_ids(tokenizer, prompt.text)
    return list(tokenizer(prompt.text)["input_ids"])
