"""A loaded model -> the same on the grids of a spec, with text run through it where the spec asks for that."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from pass_exporter.model.load import LoadedModel
from pass_exporter.model.lookahead import Lookahead
from pass_exporter.progress import Progress
from pass_exporter.quantize.calibrate import channel_maxima, static_scales, too_costly
from pass_exporter.quantize.gptq import round_while_reading
from pass_exporter.quantize.grid import Packed
from pass_exporter.quantize.sites import find_sites
from pass_exporter.quantize.smooth import smooth
from pass_exporter.quantize.source import keep_grids
from pass_exporter.quantize.spec import Activations, Grid, QuantSpec
from pass_exporter.quantize.text import file_ids, own_ids
from pass_exporter.quantize.weights import Quantized, quantize_model

OWN_TEXT, FILE_TEXT = "the model's own text", "a file"


def quantize(
    loaded: LoadedModel, lookahead: Lookahead, spec: QuantSpec, calibration: str | None, progress: Progress
) -> Quantized:
    """Changes the model and the adapter in place. calibration: text; None lets the model write some."""
    model, rounded, scales = loaded.model, dict[str, Packed](), dict[str, float]()
    ids = _calibration_ids(loaded, calibration, progress) if spec.reads_text else None
    if ids is not None and spec.activations is not None and spec.grid is not None:
        scales = _calibrate(loaded, lookahead, spec.grid, spec.activations, ids, progress)
    step = progress.phase("quantizing")
    if spec.keeps_source:
        rounded = keep_grids(model, step)
    elif ids is not None and spec.compensated:
        rounded = _compensate(model, spec, ids, step)
    quantized = quantize_model(model, lookahead.adapter, spec, step, rounded, scales)
    if spec.reads_text:
        quantized.calibration = OWN_TEXT if calibration is None else FILE_TEXT
    return quantized


def _calibration_ids(loaded: LoadedModel, text: str | None, progress: Progress) -> torch.Tensor:
    if text is not None:
        return file_ids(loaded.tokenizer, text)
    progress.phase("writing text to calibrate on")
    return own_ids(loaded.model, loaded.tokenizer, loaded.geometry.max_capacity)


def _compensate(
    model: PreTrainedModel, spec: QuantSpec, ids: torch.Tensor, step: Callable[[int, int], None]
) -> dict[str, Packed]:
    grid, sensitive, head = spec.grid, spec.sensitive or spec.grid, spec.lm_head
    assert grid is not None and sensitive is not None and head is not None
    return round_while_reading(model, lambda kind: sensitive if kind == "attention_in" else grid, head, ids, step)


def _calibrate(
    loaded: LoadedModel,
    lookahead: Lookahead,
    grid: Grid,
    activations: Activations,
    ids: torch.Tensor,
    progress: Progress,
) -> dict[str, float]:
    """Smooths the model, and returns the scale of what a layer reads, by layer.

    Channels are measured on one half of the text, scales on the other: what is rare in one is not in the other.
    """
    model, sites = loaded.model, find_sites(loaded.model)
    maxima = channel_maxima(model, sites, ids[::2], progress.phase("calibrating: channels"))
    maxima = smooth(model, lookahead.adapter, maxima, activations.exponent)
    found = static_scales(model, maxima, grid, ids[1::2], progress.phase("calibrating: scales"))
    left_out = set(too_costly(found, activations.budget))
    return {name: static.scale for site, static in found.items() if site not in left_out for name in site.readers}
