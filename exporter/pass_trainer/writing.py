"""What the frozen model writes behind prompts, drawn as the runtime draws; kept on disk.

It does not depend on look-ahead weights, so comparing several files of them makes it once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.progress import Step
from pass_runtime.bundle import noise
from pass_runtime.bundle.reference import race_scores
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_runtime.testing.real_use import Prompt
from pass_trainer.continuing import chat_prompt, continue_prompts, plain_ids, until_end

BATCH = 40
"""Prompts that are continued together."""


@dataclass(frozen=True)
class Text:
    """The tokens of a prompt, and what the model wrote behind it, with an end token where it came to one."""

    prompt: list[int]
    written: list[int]


@dataclass(frozen=True)
class Asked:
    """A prompt's tokens, and how to draw behind it; sampling has a seed."""

    prompt: list[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class Writer:
    """Continues prompts by up to `tokens`. identity: names what decides about the text beside the prompts."""

    model: PreTrainedModel
    eos_token_ids: tuple[int, ...]
    tokens: int
    identity: str

    def texts(self, cache: Path, asked: Sequence[Asked], progress: Step) -> list[Text]:
        """One for each of `asked`: from the directory `cache`, else written now and kept there."""
        key = json.dumps([self.identity, self.tokens, noise.SCHEME, [[a.prompt, asdict(a.sampling)] for a in asked]])
        path = cache / "written" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(self._write(asked, progress)))
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            return [Text(a.prompt, [int(t) for t in tokens]) for a, tokens in zip(asked, written, strict=True)]
        except (OSError, ValueError, TypeError) as error:
            raise PassError(f"{path} is damaged ({error}); delete it, it will be made again") from None

    def _write(self, asked: Sequence[Asked], progress: Step) -> list[list[int]]:
        by_length = sorted(range(len(asked)), key=lambda i: len(asked[i].prompt))
        written: dict[int, list[int]] = {}
        for first in range(0, len(asked), BATCH):
            batch = by_length[first : first + BATCH]
            written |= zip(batch, self._continue([asked[i] for i in batch]), strict=True)
            progress(len(written), len(asked))
        return [written[i] for i in range(len(asked))]

    def _continue(self, asked: Sequence[Asked]) -> list[list[int]]:
        prompts = [a.prompt for a in asked]
        race = LogitsProcessorList([_Race(asked, max(map(len, prompts)))])  # nothing else draws: do_sample is off
        lines = continue_prompts(
            self.model, prompts, self.tokens, self.eos_token_ids, do_sample=False, logits_processor=race
        )
        return [until_end(line, self.eos_token_ids) for line in lines]


class _Race(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Turns logits into the runtime's scores: their argmax is the token that it draws."""

    def __init__(self, asked: Sequence[Asked], widest: int) -> None:
        self._sampling = [a.sampling for a in asked]
        self._padding = [widest - len(a.prompt) for a in asked]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B,N] with padding on the left, [B,V] -> [B,V]."""
        if all(sampling.temperature == 0 for sampling in self._sampling):
            return scores
        logits, length = scores.float().cpu().numpy(), input_ids.shape[1]
        rows = [
            race_scores(logits[row : row + 1], np.array([length - padding]), sampling)
            for row, (padding, sampling) in enumerate(zip(self._padding, self._sampling, strict=True))
        ]
        return torch.from_numpy(np.concatenate(rows)).to(scores)


def encode(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> list[int]:
    """Tokens; chat through the chat template, where the model has one."""
    if prompt.kind != "chat" or not tokenizer.chat_template:
        return list(tokenizer(prompt.text)["input_ids"])
    return plain_ids(tokenizer, chat_prompt(tokenizer, prompt.text))
