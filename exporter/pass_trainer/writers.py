"""Writes training text with the frozen model in torch or, much faster on a CPU, its int8 bundle.
Rounding changes only the text: the distributions that look-ahead rows learn are the frozen
model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.config import ExportConfig
from pass_exporter.export import export
from pass_exporter.model.lookahead import BASELINE_NAME
from pass_exporter.progress import Progress
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session, load

Prompts = Sequence[Sequence[int]]
SLOTS = 32
"""A bundle writes so many sequences at a time. 64 were slower on a 2-core CPU."""


class TextWriter(Protocol):
    """Continues prompts. name: a part of the cache's key, as writers' logits differ slightly."""

    @property
    def name(self) -> str: ...

    def write(
        self, prompts: Prompts, length: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        """Return each prompt with its continuation, together `length` tokens, or fewer if they end
        with an end token."""
        ...


@dataclass(frozen=True)
class TorchTextWriter:
    model: PreTrainedModel
    eos_token_ids: tuple[int, ...]
    name: str = "torch"

    def write(
        self, prompts: Prompts, length: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        torch.manual_seed(seed)
        # These override the model's generation_config.json: drafts are verified against the model's
        # plain distribution.
        sampling: dict[str, Any] = {"do_sample": temperature > 0, "top_k": 0, "top_p": top_p}
        if temperature:
            sampling["temperature"] = temperature
        max_new_tokens = length - min(map(len, prompts))
        continuations = continue_prompts(
            self.model, prompts, max_new_tokens, self.eos_token_ids, **sampling
        )
        return [
            [*prompt, *until_end(continuation[: length - len(prompt)], self.eos_token_ids)]
            for continuation, prompt in zip(continuations, prompts, strict=True)
        ]


class BundleTextWriter:
    """Continues prompts, SLOTS at a time, in a session of the model's int8 bundle, which the first
    call exports to `directory`/int8 if it is missing."""

    name = "int8"

    def __init__(
        self,
        model: str,
        directory: Path,
        max_tokens: int,
        progress: Progress,
        *,
        revision: str | None = None,
    ) -> None:
        self._model, self._bundle, self._progress = model, directory / self.name, progress
        self._revision = revision
        self._capacity = -(-max_tokens // 4) * 4  # KV capacities are multiples of 4.

    def write(
        self, prompts: Prompts, length: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        streams = []
        for row, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature, top_p=top_p, seed=(seed + row) % 2**32)
            options = GenerateOptions(length - len(prompt), sampling, plan="ar")
            streams.append(self._session.generate_ids(prompt, options))
        return [
            list(prompt) + stream.result().token_ids
            for prompt, stream in zip(prompts, streams, strict=True)
        ]

    @cached_property
    def _session(self) -> Session:
        if not (self._bundle / FILE_NAME).is_file():
            config = ExportConfig(
                self._model,
                lookahead=1,  # The plan `ar` drafts nothing.
                lookahead_weights=Path(BASELINE_NAME),
                output=self._bundle,
                weights="int8",
                revision=self._revision,
            )
            try:
                export(config, self._progress)
            except PassError as error:
                raise PassError(
                    f"{error} (the bundle was needed to write training text; --write-with "
                    "torch needs none)"
                ) from None
        return load(
            self._bundle, "cpu", verify=False, max_batch_size=SLOTS, capacity=self._capacity
        )


def chat_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """Return the chat template with a user's message, up to where the answer begins."""
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def plain_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the token ids of `text` without added special tokens: chat templates contain them."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def message_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the token ids of a user's message, in the chat template if there is one."""
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    return plain_ids(tokenizer, chat_prompt(tokenizer, text))


@torch.no_grad()
def continue_prompts(
    model: PreTrainedModel,
    prompts: Prompts,
    tokens: int,
    eos_token_ids: Sequence[int],
    **sampling: Any,
) -> list[list[int]]:
    """Return up to `tokens` new tokens for each prompt, padded to the same number for all.
    sampling: arguments of transformers' `generate`."""
    width = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
        # A dynamic cache is copied for every token, which takes a CPU 1.5 times as long.
        cache_implementation="static",
        disable_compile=True,
        repetition_penalty=1.0,  # overrides generation_config.json
        **sampling,
    )
    continuations: list[list[int]] = out[:, width:].tolist()
    return continuations


def until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first end token."""
    last = next((i for i, token in enumerate(tokens) if token in eos_token_ids), len(tokens) - 1)
    return tokens[: last + 1]
