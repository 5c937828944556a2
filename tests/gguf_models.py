"""Models whose weights have the values of a GGUF type, for exports with --weights source."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import export_bundle, make_model


def of_type(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight [out,in] as rounded by llama.cpp's format `kind`, in float32."""
    found = getattr(gguf.GGMLQuantizationType, kind)
    packed = gguf.quants.quantize(np.ascontiguousarray(weight.float().numpy()), found)
    return torch.from_numpy(gguf.quants.dequantize(packed, found).copy())


def export_of_type(kind: str, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Export a model whose decoder has values of a GGUF type with --weights source, which compares
    it with torch. Return the bundle and the model's weights."""
    model = make_model(directory / "model", tie_word_embeddings=False)
    tensors = load_file(model / "model.safetensors")
    tensors |= {name: of_type(kind, tensor) for name, tensor in tensors.items() if "_proj" in name}
    tensors["lm_head.weight"] = of_type("Q8_0", tensors["lm_head.weight"])
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        # The model is no .gguf file.
        patch.setattr("pass_exporter.export.check_gguf_types", lambda _: None)
        return export_bundle(model, directory / "bundle", lookahead=2, weights="source"), tensors
