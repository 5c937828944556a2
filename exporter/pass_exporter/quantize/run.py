"""Quantizes a loaded model by a spec, on calibration text if the spec needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from pass_exporter.model.load import LoadedModel
from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.progress import Progress
from pass_exporter.quantize.calibrate import channel_maxima, static_scales, too_costly
from pass_exporter.quantize.columns import split_columns
from pass_exporter.quantize.gptq import gptq_model
from pass_exporter.quantize.points import find_points
from pass_exporter.quantize.smooth import smooth
from pass_exporter.quantize.source import keep_source_codes
from pass_exporter.quantize.spec import QuantSpec
from pass_exporter.quantize.text import file_ids, own_ids
from pass_exporter.quantize.weights import QuantizedModel, factor_name, quantize_model, weight_name

OWN_TEXT, FILE_TEXT = "the model's own text", "a file"


def quantize(
    loaded: LoadedModel,
    lookahead_weights: LookaheadWeights,
    spec: QuantSpec,
    calibration: str | None,
    progress: Progress,
) -> QuantizedModel:
    """Quantize the model and the adapter in place, and return their codes and static scales.

    calibration: the text of a file to calibrate on; None if the model writes the text itself.
    """
    model, quantized = loaded.model, QuantizedModel(spec)
    ids = _calibration_ids(loaded, calibration, progress) if spec.reads_text else None
    if ids is not None:
        quantized.calibration = OWN_TEXT if calibration is None else FILE_TEXT
        if spec.activations is not None:
            with _head_maxima(model) as maxima:
                scales = _calibrate(loaded, lookahead_weights, spec, ids, progress)
            # SmoothQuant cannot move the scales of the LM head's inputs into a layer before it, so
            # columns with large inputs are split (see `columns`).
            head, columns = "lm_head", split_columns(model.lm_head.weight.detach(), maxima)
            quantized.columns[weight_name(head)] = columns
            scales[head] = columns.scale
            quantized.activations = {weight_name(layer): scale for layer, scale in scales.items()}
            # An adapter's A reads the input of its layer.
            adapted = () if lookahead_weights.adapter is None else lookahead_weights.adapter.names
            for index, layer in enumerate(adapted):
                if layer in scales:
                    quantized.activations[factor_name("lora_A", index)] = scales[layer]
    step = progress.phase("quantizing")
    rounded = {}
    if spec.keeps_source:
        rounded = keep_source_codes(model, step)
    elif ids is not None and spec.gptq:
        rounded = gptq_model(model, spec, ids, step)
    quantized.weights = {weight_name(layer): weight for layer, weight in rounded.items()}
    quantize_model(model, lookahead_weights.adapter, quantized, step)
    return quantized


@contextmanager
def _head_maxima(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Yield the largest magnitudes [in] of the LM head's input channels, which every pass within
    the block updates."""
    maxima = torch.zeros(model.config.hidden_size)

    def record(_: torch.nn.Module, __: Any, outputs: Any) -> None:
        largest = outputs.last_hidden_state.detach().abs().flatten(0, -2).amax(0)
        torch.maximum(maxima, largest.float(), out=maxima)

    hook = model.model.register_forward_hook(record)
    try:
        yield maxima
    finally:
        hook.remove()


def _calibration_ids(loaded: LoadedModel, text: str | None, progress: Progress) -> torch.Tensor:
    if text is not None:
        return file_ids(loaded.tokenizer, text)
    step = progress.phase("writing text to calibrate on")
    return own_ids(loaded.model, loaded.tokenizer, loaded.geometry.max_capacity, step)


def _calibrate(
    loaded: LoadedModel,
    lookahead_weights: LookaheadWeights,
    spec: QuantSpec,
    ids: torch.Tensor,
    progress: Progress,
) -> dict[str, float]:
    """Apply SmoothQuant to the model, and return the static scales of layers' inputs by layer.

    Layers whose rounded inputs would cost too much accuracy get no scale. Channel maxima are
    measured on one half of the text and scales on the other: scales chosen on the same text would
    be too small for rare large values of other text.
    """
    model, points, activations = loaded.model, find_points(loaded.model), spec.activations
    assert activations is not None and spec.scheme is not None
    maxima = channel_maxima(model, points, ids[::2], progress.phase("calibrating: channels"))
    maxima = smooth(model, lookahead_weights.adapter, maxima, activations.exponent)
    scales = static_scales(
        model, maxima, spec.scheme, ids[1::2], progress.phase("calibrating: scales")
    )
    left_out = set(too_costly(scales, activations.budget))
    return {
        name: static.scale
        for point, static in scales.items()
        if point not in left_out
        for name in point.readers
    }
