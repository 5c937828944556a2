"""Writes training text with the frozen model in torch or, much faster on a CPU, with the model's
int8 bundle.

The bundle's numbers are rounded, but this changes only the text that is trained on. The
distributions that look-ahead rows learn always come from the frozen model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from pass_exporter.config import ExportConfig
from pass_exporter.export import export
from pass_exporter.model.lookahead import BASELINE_NAME
from pass_exporter.progress import Progress
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session, load
from pass_trainer.torch_generate import continue_prompts, until_end

SLOTS = 32
"""A bundle writes so many sequences at a time. 64 were slower on a 2-core CPU."""


class TextWriter(Protocol):
    """Continues prompts. name: a part of the cache's key, as writers' logits differ slightly."""

    @property
    def name(self) -> str: ...

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        length: int,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> list[list[int]]:
        """Return each prompt with its continuation, together `length` tokens, or fewer if they end
        with an end token. top_p: at most 1, which keeps all tokens."""
        ...


@dataclass(frozen=True)
class TorchTextWriter:
    """Continues all prompts as one batch in torch."""

    model: PreTrainedModel
    eos_token_ids: tuple[int, ...]
    name: str = "torch"

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        length: int,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> list[list[int]]:
        torch.manual_seed(seed)
        # These override the model's generation_config.json: drafts are verified against the model's
        # plain distribution.
        sampling = (
            {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        )
        sampling |= {"top_k": 0, "top_p": top_p}
        max_new_tokens = length - min(map(len, prompts))
        continuations = continue_prompts(
            self.model, prompts, max_new_tokens, self.eos_token_ids, **sampling
        )
        return [
            [*prompt, *until_end(continuation[: length - len(prompt)], self.eos_token_ids)]
            for continuation, prompt in zip(continuations, prompts, strict=True)
        ]


class BundleTextWriter:
    """Continues prompts in a session of the model's int8 bundle, SLOTS at a time.

    model, revision: what pass-export takes. The first call exports the bundle to `directory`/int8
    if it is missing. max_tokens: the most tokens of a prompt and its continuation together.
    """

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
        self,
        prompts: Sequence[Sequence[int]],
        length: int,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> list[list[int]]:
        streams = []
        for row, prompt in enumerate(prompts):
            sampling = SamplingParams(
                temperature=temperature, top_p=top_p, seed=(seed + row) % 2**32
            )
            options = GenerateOptions(
                max_new_tokens=length - len(prompt), sampling=sampling, plan="ar"
            )
            streams.append(self._session.generate_ids(prompt, options))
        return [
            list(prompt) + stream.result().token_ids
            for prompt, stream in zip(prompts, streams, strict=True)
        ]

    @cached_property
    def _session(self) -> Session:
        """The session of the bundle, which is exported if it is missing."""
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
