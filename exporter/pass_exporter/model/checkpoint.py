"""Checks that a checkpoint is complete and fits its configuration. Error messages name the tensors.

transformers only warns about such checkpoints: it fills missing tensors with random numbers and
ignores unknown ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from pass_runtime.errors import PassError

MAX_NAMED_TENSORS = 3
"""The most tensors that a message names. The message gives the number of the others."""


def check_not_quantized(name: str, config: PretrainedConfig) -> None:
    """Raise PassError for GPTQ, AWQ, bitsandbytes and the like, which the exporter cannot read."""
    found = getattr(config, "quantization_config", None)
    if found:
        settings = found if isinstance(found, dict) else found.to_dict()
        method = settings.get("quant_method") or "its config.json has a quantization_config"
        raise PassError(
            f"{name} is already quantized ({getattr(method, 'value', method)}), which is not "
            "supported: export the unquantized model, and pass --weights int4"
        )


def check_complete(name: str, report: Mapping[str, Collection[Any]]) -> None:
    """Raise PassError unless the checkpoint has exactly the tensors of the model, in their shapes.

    report: transformers' `output_loading_info`, which does not list tied tensors and computed
    buffers.
    """
    reshaped = [
        f"{key} {list(stored)}, not {list(shape)}"
        for key, stored, shape in report["mismatched_keys"]
    ]
    problems = [
        f"{len(keys)} {what}: {_listed_names(keys)}"
        for what, keys in (
            ("missing", report["missing_keys"]),
            ("not part of the model", report["unexpected_keys"]),
            ("of another shape", reshaped),
        )
        if keys
    ]
    if problems:
        raise PassError(
            f"the tensors of {name} are not those of its configuration ({'; '.join(problems)}); "
            "get the whole checkpoint, or correct its config.json"
        )


def unknown_gguf_tensors(file: Path, model: PreTrainedModel) -> set[str]:
    """Return the tensors of a .gguf file that the model lacks: transformers ignores them."""
    reader = gguf.GGUFReader(str(file))
    field = reader.fields["general.architecture"]
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == field.contents())
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    split = (key.rpartition(".") for key in model.state_dict())
    known = {f"{names.get_name(stem)}.{part}" for stem, _, part in split}
    return {tensor.name for tensor in reader.tensors if tensor.name not in known}


def check_finite(name: str, model: PreTrainedModel) -> None:
    """Raise PassError if a tensor of the checkpoint contains NaN or an infinity."""
    for key, tensor in model.state_dict().items():
        extremes = torch.stack(torch.aminmax(tensor))  # If there is a NaN, both are NaN.
        if bool(torch.isfinite(extremes).all()):
            continue
        if bool(torch.isnan(extremes).any()):
            raise PassError(f"{key} of {name} holds NaN: the checkpoint is damaged, get it again")
        if tensor.dtype == torch.float16:
            raise PassError(
                f"{key} of {name} holds numbers beyond the range of fp16: choose --dtype bf16 "
                "or fp32"
            )
        raise PassError(
            f"{key} of {name} holds infinite numbers: the checkpoint is damaged, get it again"
        )


def check_tokens(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise PassError if an id of the tokenizer, or an end token, is beyond the vocabulary."""
    vocabulary = int(model.config.vocab_size)
    added = tokenizer.backend_tokenizer.encode(
        ""
    ).ids  # tokens that the tokenizer adds to every prompt
    largest = max((*tokenizer.get_vocab().values(), *added), default=0)
    if largest >= vocabulary:
        raise PassError(
            f"the tokenizer of {name} has ids up to {largest}, but the model's vocabulary is "
            f"{vocabulary}: put the tokenizer that the model was trained with beside it"
        )
    for token in generation_eos(model) or ():
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise PassError(
                f"the eos_token_id {token!r} of {name} is not in the model's vocabulary of "
                f"{vocabulary}: correct it in its generation_config.json, or in config.json if it "
                "has no such file"
            )


def generation_eos(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """Return `eos_token_id` of the generation config as a tuple, or None if it has none."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return None if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def damaged_file(directory: Path) -> str | None:
    """Return the name of the first .safetensors file that cannot be read, or None."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return path.name
    return None


def _listed_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = (
        f" and {len(ordered) - MAX_NAMED_TENSORS} more" if len(ordered) > MAX_NAMED_TENSORS else ""
    )
    return ", ".join(ordered[:MAX_NAMED_TENSORS]) + more
