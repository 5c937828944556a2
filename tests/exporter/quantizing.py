from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conftest import SilentProgress
from pass_exporter.config import ExportConfig
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import mean_embedding
from pass_exporter.model.registry import resolve
from pass_exporter.quantize import run
from pass_exporter.quantize.rounding import QuantizedWeight
from pass_exporter.quantize.weights import QuantizedModel


def quantize(
    path: Path, weights: str = "int4", *, model: Any = None, **options: Any
) -> tuple[Any, QuantizedModel]:
    """Quantize the model at `path`, or `model` in its place, by the options of an export."""
    config = ExportConfig(str(path), weights=weights, **options)
    loaded = load_model(resolve(str(path)), config.dtype)
    loaded.model = model or loaded.model
    lookahead, text = mean_embedding(loaded.model, 2), config.calibration_text()
    quantized = run.quantize(loaded, lookahead, config.spec, text, SilentProgress())
    return loaded.model, quantized


def unsigned_values(weight: QuantizedWeight) -> np.ndarray:
    """Return the values of a weight's unsigned codes [out, in]."""
    codes, bits, scales, offsets = weight.unsigned()
    assert codes.dtype == np.uint8 and scales.dtype == offsets.dtype == np.float16
    assert codes.max() < 2**bits and np.isfinite(scales).all() and np.isfinite(offsets).all()
    blocks = codes.reshape(*scales.shape, -1).astype(np.float32)
    values = blocks * scales[..., None].astype(np.float32) + offsets[..., None].astype(np.float32)
    return values.reshape(codes.shape)
