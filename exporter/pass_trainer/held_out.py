"""Acceptance in real use, on prompts that nothing was trained on: what `pass-train evaluate` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.lookahead import Lookahead, mean_embedding, read_lookahead
from pass_exporter.model.registry import cache_directory, resolve
from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.bundle.reference import sample
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.testing.real_use import MARGIN, Prompt, read_use
from pass_trainer.config import TrainDtype
from pass_trainer.drafter import Drafter
from pass_trainer.drafts import drafts_of
from pass_trainer.figures import Found, Report, by_kind, found_in
from pass_trainer.run import Progress, fingerprint, make_accelerator
from pass_trainer.writing import Asked, Text, Writer, encode

PROMPTS = Path(__file__).with_name("prompts") / "evaluation.jsonl"
"""Forty chat messages, twenty beginnings of texts and twenty of code, written for this."""


@dataclass(frozen=True)
class EvaluateConfig:
    """weights: a file of pass-train's, or None for the untrained baseline. prompts: see `real_use.read_use`.

    tokens: written after each prompt, which count. temperatures, top_k: how they are drawn; each is measured.
    lookahead: at most what the file holds.
    """

    model: str
    weights: Path | None = None
    prompts: Path = PROMPTS
    tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    top_k: int = 0
    lookahead: int = 4
    dtype: TrainDtype = "fp32"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise PassError(f"--tokens must be at least 2, not {self.tokens}")
        if not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise PassError(f"--lookahead must be 1 to {MAX_LOOKAHEAD}, not {self.lookahead}")
        for temperature in self.temperatures:
            SamplingParams(temperature, self.top_k)

    def as_json(self) -> dict[str, Any]:
        """What was measured, for a report."""
        return {
            "model": self.model,
            "weights": None if self.weights is None else str(self.weights),
            "prompts": len(read_use(self.prompts)),
            "tokens": self.tokens,
            "top_k": self.top_k,
            "lookahead": self.lookahead,
            "dtype": self.dtype,
        }


def evaluate(config: EvaluateConfig, progress: Progress) -> Report:
    """Figures by temperature and kind of prompt."""
    prompts = read_use(config.prompts)
    accelerator = make_accelerator(config.device)
    source = resolve(config.model)
    progress.phase(f"loading {source.name}")
    loaded = load_model(source, config.dtype)
    asked = [encode(loaded.tokenizer, prompt) for prompt in prompts]
    _check_lengths(config, loaded, prompts, asked)
    loaded.model.to(accelerator.device)
    lookahead = _lookahead(config, loaded)
    drafter = Drafter(loaded.model, lookahead.embeddings, lookahead.adapter, lookahead.head).to(accelerator.device)
    writer = Writer(
        loaded.model, loaded.eos_token_ids, config.tokens + MARGIN, f"{fingerprint(loaded.model)} {config.dtype}"
    )
    report = {}
    for temperature in config.temperatures:
        sampling = [SamplingParams(temperature, config.top_k, seed=prompt.seed) for prompt in prompts]
        step = progress.phase(f"writing at temperature {temperature:g}")
        texts = writer.texts(cache_directory(), [Asked(*each) for each in zip(asked, sampling, strict=True)], step)
        step, found = progress.phase(f"drafting at temperature {temperature:g}"), []
        for text, each in zip(texts, sampling, strict=True):
            found.append(_measure(config, drafter, text, each))
            step(len(found), len(texts))
        report[f"{temperature:g}"] = by_kind([prompt.kind for prompt in prompts], found, config.lookahead)
    return report


def _measure(config: EvaluateConfig, drafter: Drafter, text: Text, sampling: SamplingParams) -> Found:
    """A draft behind every token that counts, but for the last."""
    places = min(config.tokens, len(text.written)) - 1
    anchors = range(len(text.prompt) - 1, len(text.prompt) - 1 + places)
    drafts = drafts_of(
        drafter,
        text.prompt + text.written,
        anchors,
        config.lookahead,
        lambda logits, positions: sample(logits, positions, sampling),
    )
    return found_in(drafts, text.written, config.tokens)


def _check_lengths(
    config: EvaluateConfig, loaded: LoadedModel, prompts: Sequence[Prompt], asked: Sequence[list[int]]
) -> None:
    room = loaded.geometry.max_capacity - MARGIN - config.tokens
    for prompt, ids in zip(prompts, asked, strict=True):
        if not ids:
            raise PassError(f"the prompt {prompt.id} has no tokens")
        if len(ids) > room:
            raise PassError(
                f"the prompt {prompt.id} has {len(ids)} tokens, and the model takes {max(room, 0)} with "
                f"{config.tokens} behind them; shorten it, or give fewer --tokens"
            )


def _lookahead(config: EvaluateConfig, loaded: LoadedModel) -> Lookahead:
    if config.weights is None:
        return mean_embedding(loaded.model, config.lookahead)
    return read_lookahead(config.weights, config.lookahead, loaded.model)
