"""Who writes training text: the frozen model in torch, or on a CPU its w8a8 bundle, four times as fast in batches.

Eight bits are near enough here. They decide which text is trained on, at a perplexity 1.04 times the model's; what a
look-ahead row should predict there is taken from the model itself.
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
from pass_exporter.model.lookahead import BASELINE
from pass_exporter.progress import Progress
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session, load
from pass_trainer.continuing import continue_prompts, until_end

SLOTS = 32
"""Sequences that a bundle writes at a time; with 64 a 2-core CPU was slower again."""


class Writer(Protocol):
    """name: becomes part of the cache's name, since writers differ in the last digits of their logits."""

    @property
    def name(self) -> str: ...

    def write(
        self, prompts: Sequence[Sequence[int]], length: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        """Every prompt continued to `length` tokens in all, or up to an end token, which is the last one then."""
        ...


@dataclass(frozen=True)
class TorchWriter:
    """All prompts in one batch."""

    model: PreTrainedModel
    eos_token_ids: tuple[int, ...]
    name: str = "torch"

    def write(
        self, prompts: Sequence[Sequence[int]], length: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        torch.manual_seed(seed)
        # What a generation_config.json may set otherwise: it is the model's plain distribution that drafts meet.
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        sampling |= {"top_k": 0, "top_p": top_p}
        most = length - min(map(len, prompts))
        lines = continue_prompts(self.model, prompts, most, self.eos_token_ids, **sampling)
        return [
            [*prompt, *until_end(line[: length - len(prompt)], self.eos_token_ids)]
            for line, prompt in zip(lines, prompts, strict=True)
        ]


class BundleWriter:
    """Through a session over the model's w8a8 bundle, SLOTS sequences at a time. longest: tokens of a sequence.

    The bundle is exported into `directory` when the first text is asked for, if it is not there yet.
    """

    name = "w8a8"

    def __init__(self, model: str, directory: Path, longest: int, progress: Progress) -> None:
        self._model, self._bundle, self._progress = model, directory / self.name, progress
        self._capacity = -(-longest // 4) * 4

    def write(
        self, prompts: Sequence[Sequence[int]], length: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        streams = []
        for row, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=(seed + row) % 2**32)
            options = GenerateOptions(max_new_tokens=length - len(prompt), sampling=sampling, plan="ar")
            streams.append(self._session.generate_ids(prompt, options))
        return [list(prompt) + stream.result().token_ids for prompt, stream in zip(prompts, streams, strict=True)]

    @cached_property
    def _session(self) -> Session:
        if not (self._bundle / FILE_NAME).is_file():
            config = ExportConfig(
                self._model, lookahead=1, lookahead_weights=Path(BASELINE), output=self._bundle, weights="w8a8"
            )
            try:
                export(config, self._progress)
            except PassError as error:
                raise PassError(f"{error} (it was to write training text; --write-with torch does without)") from None
        return load(self._bundle, "cpu", verify=False, max_batch_size=SLOTS, capacity=self._capacity)
