"""Finds the look-ahead weights that this package ships for a model, by the model's fingerprint."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from pass_exporter.model.fingerprint import model_fingerprint, same_fingerprint
from pass_exporter.model.lookahead import FILE_NAME, read_fingerprint
from pass_exporter.model.registry import models_directory


def shipped_weights(model: PreTrainedModel) -> Path | None:
    """Return the weights file in models/ that was trained for `model`, in whatever dtype it is now;
    None if there is none. The file of a base model does not match fine-tuned copies of the model.
    """
    fingerprint = model_fingerprint(model)
    for file in sorted(models_directory().glob(f"*/{FILE_NAME}")):
        if same_fingerprint(read_fingerprint(file), fingerprint):
            return file
    return None
