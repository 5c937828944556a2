"""Checks that a checkpoint is complete, where transformers would only warn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.model.gguf_reader import GgufReader
from pass_runtime.errors import PassError

MAX_NAMED_TENSORS = 3


def check_complete(name: str, report: Mapping[str, Collection[Any]]) -> None:
    """Raise PassError unless the checkpoint has exactly the tensors of the model, in their shapes.
    report: transformers' `output_loading_info`, without tied tensors and computed buffers."""
    reshaped = [
        f"{tensor} {list(stored_shape)}, not {list(shape)}"
        for tensor, stored_shape, shape in report["mismatched_keys"]
    ]
    problems = [
        f"{len(tensors)} {problem}: {_listed_names(tensors)}"
        for problem, tensors in (
            ("missing", report["missing_keys"]),
            ("not part of the model", report["unexpected_keys"]),
            ("of another shape", reshaped),
        )
        if tensors
    ]
    if problems:
        raise PassError(
            f"the tensors of {name} are not those of its configuration ({'; '.join(problems)}); "
            "get the whole checkpoint, or correct its config.json"
        )


def unknown_gguf_tensors(file: GgufReader, model: PreTrainedModel) -> set[str]:
    """Return the tensors of a .gguf file that the model lacks: transformers ignores them."""
    name_map = file.tensor_names(model)
    parameters = (parameter.rpartition(".") for parameter in model.state_dict())
    model_tensors = {f"{name_map.get_name(module)}.{suffix}" for module, _, suffix in parameters}
    return {tensor.name for tensor in file.tensors} - model_tensors


def check_finite(name: str, model: PreTrainedModel) -> None:
    """Raise PassError if a tensor contains NaN or an infinity."""
    for tensor_name, tensor in model.state_dict().items():
        extremes = torch.stack(torch.aminmax(tensor))  # If there is a NaN, both are NaN.
        if bool(torch.isfinite(extremes).all()):
            continue
        place = f"{tensor_name} of {name}"
        if bool(torch.isnan(extremes).any()):
            raise PassError(f"{place} holds NaN: the checkpoint is damaged, get it again")
        if tensor.dtype == torch.float16:
            raise PassError(
                f"{place} holds numbers beyond the range of fp16: choose --dtype bf16 or fp32"
            )
        raise PassError(f"{place} holds infinite numbers: the checkpoint is damaged, get it again")


def check_tokens(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise PassError if a token id of the tokenizer, or an end token, is not in the vocabulary."""
    vocab_size = int(model.config.vocab_size)
    added_to_prompts = tokenizer.backend_tokenizer.encode("").ids
    largest = max((*tokenizer.get_vocab().values(), *added_to_prompts), default=0)
    if largest >= vocab_size:
        raise PassError(
            f"the tokenizer of {name} has ids up to {largest}, but the model's vocabulary is "
            f"{vocab_size}: put the tokenizer that the model was trained with beside it"
        )
    for token in generation_eos(model) or ():
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise PassError(
                f"the eos_token_id {token!r} of {name} is not in the model's vocabulary of "
                f"{vocab_size}: correct it in its generation_config.json, or in config.json if it "
                "has no such file"
            )


def generation_eos(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """Return `eos_token_id` of the generation config as a tuple; None if it has none."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        return None
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def damaged_file(directory: Path) -> str | None:
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return path.name
    return None


def _listed_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    others = len(ordered) - MAX_NAMED_TENSORS
    return ", ".join(ordered[:MAX_NAMED_TENSORS]) + (f" and {others} more" if others > 0 else "")
