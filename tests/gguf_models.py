"""Models whose weights have been rounded as a type of .gguf files does it, to test exports with
--weights source, which keep such values exactly."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import export_bundle, make_model


def of_type(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight [out,in] as the GGUF type `kind` rounds it, in float32."""
    gguf_type = getattr(gguf.GGMLQuantizationType, kind)
    packed = gguf.quants.quantize(np.ascontiguousarray(weight.float().numpy()), gguf_type)
    return torch.from_numpy(gguf.quants.dequantize(packed, gguf_type).copy())


def export_of_type(kind: str, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Export a model whose layers have values of the GGUF type `kind`, with --weights source. The
    export compares the bundle with torch. Return the bundle and the model's weights by name."""
    model = make_model(directory / "model", tie_word_embeddings=False)
    tensors = load_file(model / "model.safetensors")
    tensors |= {name: of_type(kind, tensor) for name, tensor in tensors.items() if "_proj" in name}
    tensors["lm_head.weight"] = of_type("Q8_0", tensors["lm_head.weight"])
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        # The check reads the types in a .gguf file, and this model is none.
        patch.setattr("pass_exporter.export.check_gguf_types", lambda _: None)
        return export_bundle(model, directory / "bundle", lookahead=2, weights="source"), tensors
