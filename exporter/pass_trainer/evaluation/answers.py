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
from pass_trainer.writers import chat_prompt, continue_prompts, plain_ids, until_end

BATCH_PROMPTS = 40


@dataclass(frozen=True)
class SeededPrompt:
    prompt: list[int]
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
        key = json.dumps([*settings, [[p.prompt, asdict(p.sampling)] for p in prompts]])
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
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].prompt))
        answers: dict[int, list[int]] = {}
        for first in range(0, len(prompts), BATCH_PROMPTS):
            batch = by_length[first : first + BATCH_PROMPTS]
            answers |= zip(batch, self._continue([prompts[i] for i in batch]), strict=True)
            progress(len(answers), len(prompts))
        return [answers[i] for i in range(len(prompts))]

    def _continue(self, prompts: Sequence[SeededPrompt]) -> list[list[int]]:
        ids = [p.prompt for p in prompts]
        # Greedy search takes the argmax of the scores.
        scores = LogitsProcessorList([_GumbelScores(prompts, max(map(len, ids)))])
        continuations = continue_prompts(
            self.model,
            ids,
            self.max_tokens,
            self.eos_token_ids,
            do_sample=False,
            logits_processor=scores,
        )
        return [until_end(tokens, self.eos_token_ids) for tokens in continuations]


class _GumbelScores(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Maps logits to scores whose argmax is the sampled token."""

    def __init__(self, prompts: Sequence[SeededPrompt], width: int) -> None:
        self._sampling = [p.sampling for p in prompts]
        self._padding = [width - len(p.prompt) for p in prompts]

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
    """A message is put into the chat template, if there is one."""
    if not prompt.is_message or not tokenizer.chat_template:
        return list(tokenizer(prompt.text)["input_ids"])
    return plain_ids(tokenizer, chat_prompt(tokenizer, prompt.text))
