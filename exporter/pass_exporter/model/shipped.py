"""Finds the look-ahead weights that this package ships for a model, by its fingerprint."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from pass_exporter.model.fingerprint import model_fingerprint, same_fingerprint
from pass_exporter.model.lookahead import FILE_NAME, read_fingerprint
from pass_exporter.model.registry import models_directory


def shipped_weights(model: PreTrainedModel) -> Path | None:
    """Return the weights file in models/ that was trained for `model`, in any dtype, or None.

    A fine-tuned model does not match its base model's file.
    """
    sample = model_fingerprint(model)
    files = sorted(models_directory().glob(f"*/{FILE_NAME}"))
    return next((file for file in files if same_fingerprint(read_fingerprint(file), sample)), None)
