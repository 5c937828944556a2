"""Acceptance on text that was kept out of training: what `pass-train evaluate` measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.lookahead import Lookahead, mean_embedding, read_lookahead
from pass_exporter.model.registry import resolve
from pass_trainer.config import TrainDtype
from pass_trainer.corpus import Source, read_sources
from pass_trainer.distill import Distiller, Recipe
from pass_trainer.drafter import Drafter
from pass_trainer.evaluate import Acceptance, measure
from pass_trainer.run import Progress, distill, make_accelerator

PROMPT_SEED = 1
"""Other prompts than the default seed of training takes."""


@dataclass(frozen=True)
class EvaluateConfig:
    """weights: a file of pass-train's, or None for the untrained baseline. data: as for training; kept out of it.

    lookahead: at most what the file holds. sequences: that the model writes for each data argument and measurement.
    temperature, top_k: of the sampled measurement.
    """

    model: str
    data: tuple[Path, ...]
    weights: Path | None = None
    lookahead: int = 4
    sequences: int = 64
    temperature: float = 0.8
    top_k: int = 10
    dtype: TrainDtype = "bf16"
    device: str = "auto"


def evaluate(config: EvaluateConfig, progress: Progress) -> dict[str, dict[str, Acceptance]]:
    """By data argument: `greedy` acceptance on the model's greedy writing, `sampled` on its sampled writing."""
    sources = read_sources(config.data)
    accelerator = make_accelerator(config.device)
    progress.phase("loading the model")
    loaded = load_model(resolve(config.model), config.dtype)
    loaded.model.to(accelerator.device)
    lookahead = _lookahead(config, loaded)
    drafter = Drafter(loaded.model, lookahead.embeddings, lookahead.adapter).to(accelerator.device)
    kinds = {"greedy": (0.0, 0), "sampled": (config.temperature, config.top_k)}
    return {
        source.name: {
            name: _measure(config, loaded, drafter, accelerator, source, temperature, top_k, progress)
            for name, (temperature, top_k) in kinds.items()
        }
        for source in sources
    }


def _measure(
    config: EvaluateConfig,
    loaded: LoadedModel,
    drafter: Drafter,
    accelerator: Accelerator,
    source: Source,
    temperature: float,
    top_k: int,
    progress: Progress,
) -> Acceptance:
    recipe = Recipe(
        sequences=config.sequences,
        length=min(Recipe.length, loaded.geometry.max_capacity),
        temperatures=(temperature,),
        chat=0.0,
        seed=PROMPT_SEED,
    )
    distiller = Distiller(loaded.model, loaded.tokenizer, loaded.eos_token_ids, [source], recipe)
    data = distill(distiller, accelerator, progress)
    step = progress.phase(f"{source.name} at temperature {temperature}")
    return measure(drafter, data, config.lookahead, temperature, top_k, step)


def _lookahead(config: EvaluateConfig, loaded: LoadedModel) -> Lookahead:
    if config.weights is None:
        return mean_embedding(loaded.model, config.lookahead)
    return read_lookahead(config.weights, config.lookahead, loaded.model)
