"""A loaded model -> the same on the grids of a spec, with text run through it where the spec asks for that."""

from __future__ import annotations

from pass_exporter.model.load import LoadedModel
from pass_exporter.model.lookahead import Lookahead
from pass_exporter.progress import Progress
from pass_exporter.quantize.gptq import round_while_reading
from pass_exporter.quantize.source import keep_grids
from pass_exporter.quantize.spec import QuantSpec
from pass_exporter.quantize.text import file_ids, own_ids
from pass_exporter.quantize.weights import Quantized, quantize_model

OWN_TEXT, FILE_TEXT = "the model's own text", "a file"


def quantize(
    loaded: LoadedModel, lookahead: Lookahead, spec: QuantSpec, calibration: str | None, progress: Progress
) -> Quantized:
    """Changes the model and the adapter in place. calibration: text; None lets the model write some."""
    if spec.keeps_source:
        step = progress.phase("quantizing")
        return quantize_model(loaded.model, lookahead.adapter, spec, step, keep_grids(loaded.model, step))
    if not spec.compensated:
        return quantize_model(loaded.model, lookahead.adapter, spec, progress.phase("quantizing"))
    grid, sensitive, head = spec.grid, spec.sensitive or spec.grid, spec.lm_head
    assert grid is not None and sensitive is not None and head is not None
    if calibration is None:
        progress.phase("writing text to calibrate on")
        ids = own_ids(loaded.model, loaded.tokenizer, loaded.geometry.max_capacity)
    else:
        ids = file_ids(loaded.tokenizer, calibration)
    step = progress.phase("quantizing")
    rounded = round_while_reading(
        loaded.model, lambda kind: sensitive if kind == "attention_in" else grid, head, ids, step
    )
    quantized = quantize_model(loaded.model, lookahead.adapter, spec, step, rounded)
    quantized.calibration = OWN_TEXT if calibration is None else FILE_TEXT
    return quantized
