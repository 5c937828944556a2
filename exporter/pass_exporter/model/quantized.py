"""Refuses checkpoints that are quantized already, before their weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig

from pass_exporter.model.files import QUANTIZATION_FILES
from pass_runtime.errors import PassError

SETTINGS = {
    "quantization": "MLX",
    "compression_config": "compressed-tensors",
    "quantization_config": "its config.json has a quantization_config",
}
"""Settings of a configuration that state a quantization."""
TENSORS = {
    "weight_scale_2": "ModelOpt NVFP4",
    "weight_global_scale": "compressed-tensors NVFP4",
    "weight_packed": "compressed-tensors",
    "qweight": "GPTQ or AWQ",
    "biases": "MLX",
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
    "weight_scale_inv": "FP8",
    "weight_scale": "scales as of FP8 or INT8",
}
"""The last part of names that only tensors of quantized checkpoints have."""
NUMBERS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "BOOL"}
"""Types that are not codes: a float of 8 bits without a scale is a number."""

PathOf = Callable[[str], str | None]
"""The path of a file of the checkpoint; None if it lacks it."""


def check_not_quantized(name: str, config: PretrainedConfig, path_of: PathOf) -> None:
    """Raise PassError if a file of the checkpoint states a quantization. Remove empty statements
    from `config`: transformers refuses them."""
    for key, method in SETTINGS.items():
        if hasattr(config, key):
            _check_settings(name, method, "", getattr(config, key))
            delattr(config, key)
    for file, method in QUANTIZATION_FILES.items():
        if (path := path_of(file)) is not None:
            settings = json.loads(Path(path).read_text(encoding="utf-8"))
            _check_settings(name, method, file, settings.get("quantization", settings))


def check_tensors_not_quantized(name: str, path_of: PathOf) -> None:
    """Raise PassError if a .safetensors file that is here has tensors of a quantized checkpoint."""
    config = path_of("config.json")
    for path in sorted(Path(config).parent.glob("model*.safetensors")) if config else ():
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            parts = {tensor.rpartition(".")[2] for tensor in names}
            for part, method in TENSORS.items():
                if part in parts:
                    raise _refusal(name, method)
            for tensor in names:
                if (dtype := file.get_slice(tensor).get_dtype()) not in NUMBERS:
                    raise _refusal(name, f"{tensor} is stored as {dtype}")


def _check_settings(name: str, method: str, file: str, settings: Any) -> None:
    stated = settings if isinstance(settings, Mapping) else {"": settings}
    # Lists only say which layers are left out.
    if any(value for value in stated.values() if not isinstance(value, list)):
        method = str(stated.get("quant_method") or method)
        kinds = (stated.get(key) for key in ("quant_algo", "format"))
        how = " ".join([method, *(kind for kind in kinds if isinstance(kind, str))])
        raise _refusal(name, f"{how}, by its {file}" if file else how)


def _refusal(name: str, how: str) -> PassError:
    return PassError(
        f"{name} is already quantized ({how}), which is not supported: export the unquantized "
        "model, and pass --weights int4"
    )
