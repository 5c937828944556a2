"""A loaded model -> the same on the grids of a spec, calibrated where the spec rounds activations."""

from __future__ import annotations

import torch

from pass_exporter.model.load import LoadedModel
from pass_exporter.model.lookahead import Lookahead
from pass_exporter.progress import Progress
from pass_exporter.quantize.calibrate import channel_maxima, static_scales, too_costly
from pass_exporter.quantize.sites import find_sites
from pass_exporter.quantize.smooth import smooth
from pass_exporter.quantize.spec import Activations, Grid, QuantSpec
from pass_exporter.quantize.text import file_ids, own_ids
from pass_exporter.quantize.weights import Quantized, quantize_model

OWN_TEXT, FILE_TEXT = "the model's own text", "a file"


def quantize(
    loaded: LoadedModel, lookahead: Lookahead, spec: QuantSpec, calibration: str | None, progress: Progress
) -> Quantized:
    """Changes the model and the adapter in place. calibration: text; None lets the model write some."""
    scales: dict[str, float] = {}
    if spec.activations is not None and spec.grid is not None:
        if calibration is None:
            progress.phase("writing text to calibrate on")
            ids = own_ids(loaded.model, loaded.tokenizer, loaded.geometry.max_capacity)
        else:
            ids = file_ids(loaded.tokenizer, calibration)
        scales = _calibrate(loaded, lookahead, spec.grid, spec.activations, ids, progress)
    quantized = quantize_model(loaded.model, lookahead.adapter, spec, progress.phase("quantizing"), scales)
    if spec.activations is not None:
        quantized.calibration = OWN_TEXT if calibration is None else FILE_TEXT
    return quantized


def _calibrate(
    loaded: LoadedModel,
    lookahead: Lookahead,
    grid: Grid,
    activations: Activations,
    ids: torch.Tensor,
    progress: Progress,
) -> dict[str, float]:
    """Smooths the model, and returns the scale of what a layer reads, by layer."""
    model, sites = loaded.model, find_sites(loaded.model)
    maxima = channel_maxima(model, sites, ids, progress.phase("calibrating: channels"))
    maxima = smooth(model, lookahead.adapter, maxima, activations.exponent)
    found = static_scales(model, maxima, grid, ids, progress.phase("calibrating: scales"))
    left_out = set(too_costly(found, activations.budget))
    return {name: static.scale for site, static in found.items() if site not in left_out for name in site.readers}
