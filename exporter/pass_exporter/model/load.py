"""Loads the frozen torch model and its tokenizer, and checks both."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file

from pass_exporter.config import Dtype
from pass_exporter.model.checkpoint import (
    check_complete,
    check_finite,
    check_tokens,
    damaged_file,
    unknown_gguf_tensors,
)
from pass_exporter.model.end_tokens import end_tokens
from pass_exporter.model.families import Geometry, geometry
from pass_exporter.model.gguf_config import check_settings, gguf_settings
from pass_exporter.model.gguf_reader import GgufReader, read_gguf
from pass_exporter.model.gguf_tokenizer import fix_gguf_tokenizer
from pass_exporter.model.hub import check_cached_files, hub_arguments
from pass_exporter.model.quantized import check_not_quantized, check_tensors_not_quantized
from pass_exporter.model.registry import NO_REMOTE_CODE, ModelSource
from pass_runtime.errors import PassError

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass
class LoadedModel:
    """A model in evaluation mode, frozen, on the CPU."""

    source: ModelSource
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    geometry: Geometry
    eos_token_ids: tuple[int, ...]


def stored_dtype(source: ModelSource) -> Dtype:
    """Return the dtype of a model's stored weights; fp16 for .gguf files, whose scales are fp16."""
    if source.is_gguf:
        return "fp16"
    location, kwargs = _pretrained_arguments(source)
    with _errors_as_pass_error(source):
        dtype = AutoConfig.from_pretrained(location, **kwargs).dtype
    return next(
        (name for name, torch_dtype in TORCH_DTYPES.items() if torch_dtype == dtype), "fp32"
    )


def load_model(source: ModelSource, dtype: Dtype) -> LoadedModel:
    """Load a model with weights in `dtype`. Raises PassError if it is not supported, before its
    weights are read, or if the checkpoint is damaged or incomplete."""
    location, kwargs = _pretrained_arguments(source)
    with _errors_as_pass_error(source), _parsed_gguf(source) as gguf_file:
        settings = {} if gguf_file is None else gguf_settings(gguf_file)
        config = AutoConfig.from_pretrained(location, **kwargs)
        config = type(config).from_dict(config.to_dict() | settings) if settings else config
        sizes = geometry(config)
        path_of = functools.partial(_path_of, location, kwargs)
        if gguf_file is None:
            check_not_quantized(source.name, config, path_of)
            check_tensors_not_quantized(source.name, path_of)
        tokenizer = _load_tokenizer(source, gguf_file, location, kwargs, sizes.vocab_size)
        dequantize = None if gguf_file is None else transformers.GgufConfig(dequantize=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            location,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_complete` refuses them, and names the tensors.
            quantization_config=dequantize,
            **kwargs,
        )
        # transformers ignores a generation_config.json that it cannot read.
        if isinstance(source.location, str):
            check_cached_files(source.location, source.revision)
            check_tensors_not_quantized(source.name, path_of)  # They may have come only by now.
        if gguf_file is not None:
            report["unexpected_keys"] |= unknown_gguf_tensors(gguf_file, model)
            check_settings(source.name, settings, model.config)
        ends = end_tokens(model, tokenizer, location, kwargs, gguf_file)
    check_complete(source.name, report)
    check_finite(source.name, model)
    check_tokens(source.name, model, tokenizer)
    model.eval().requires_grad_(False)
    return LoadedModel(source, model, tokenizer, sizes, ends)


def _pretrained_arguments(source: ModelSource) -> tuple[str, dict[str, Any]]:
    kwargs: dict[str, Any] = {"trust_remote_code": False}
    if isinstance(source.location, str):
        return source.location, kwargs | hub_arguments(source.location, source.revision)
    if source.is_gguf:
        return str(source.location.parent), kwargs | {"gguf_file": source.location.name}
    return str(source.location), kwargs


@contextmanager
def _errors_as_pass_error(source: ModelSource) -> Iterator[None]:
    """For damaged files, transformers and other libraries raise errors without a common class."""
    try:
        with _quiet():
            yield
    except PassError:
        raise
    except Exception as error:
        if isinstance(source.location, str):
            check_cached_files(source.location, source.revision)
        raise PassError(_explain(source, error)) from error


def _explain(source: ModelSource, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if "trust_remote_code" in str(error):
        return f"cannot load {source.location}: {NO_REMOTE_CODE}"
    if isinstance(source.location, Path):
        damaged = None if source.is_gguf else damaged_file(source.location)
        advice = f"{damaged} is damaged, get it again: " if damaged else ""
        return f"cannot load {source.location}: {advice}{reason}"
    return (
        f"cannot load {source.location} from the Hugging Face hub: {reason} "
        "(check the name and the network, or give a local directory or .gguf file)"
    )


def _load_tokenizer(
    source: ModelSource,
    gguf_file: GgufReader | None,
    location: str,
    kwargs: dict[str, Any],
    vocab_size: int,
) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(location, **kwargs)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PassError(
            f"{source.name} has no fast tokenizer (tokenizer.json), which the runtime needs"
        )
    id_count = _stored_id_count(gguf_file, location, kwargs)
    removed = _remove_added_tokens(tokenizer, vocab_size)
    # Tokens that are not in the files were added by transformers, so nobody misses them.
    missed = [text for text, id_ in removed.items() if id_count is None or id_ < id_count]
    if missed:
        warnings.warn(
            f"{source.name} has no embeddings for the added tokens {', '.join(missed)}: they "
            "are read as plain text",
            stacklevel=2,
        )
    if gguf_file is not None:
        fix_gguf_tokenizer(tokenizer, Path(source.location).name, gguf_file)
    # A tokenizer.json may switch truncation or padding on, which transformers ignores by default
    # and the runtime would obey.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _stored_id_count(
    gguf_file: GgufReader | None, location: str, kwargs: dict[str, Any]
) -> int | None:
    if gguf_file is not None:
        return len(gguf_file.fields["tokenizer.ggml.tokens"].data)
    path = _path_of(location, kwargs, "tokenizer.json")
    if path is None:
        return None
    return 1 + max(Tokenizer.from_file(path).get_vocab().values(), default=-1)


def _path_of(location: str, kwargs: dict[str, Any], name: str) -> str | None:
    """Return the path of a file of a directory, or of a model of the hub; None if it has none."""
    arguments = {key: kwargs[key] for key in ("revision", "local_files_only") if key in kwargs}
    path: str | None = cached_file(
        location, name, _raise_exceptions_for_missing_entries=False, **arguments
    )
    return path


def _remove_added_tokens(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> dict[str, int]:
    """Remove added tokens without embeddings (Gemma3's image token, or transformers' own), which
    become plain text. Return their ids by text."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    added = content["added_tokens"]
    removed = {token["content"]: token["id"] for token in added if token["id"] >= vocab_size}
    if removed:
        content["added_tokens"] = [token for token in added if token["id"] < vocab_size]
        if isinstance(ids := content["model"]["vocab"], dict):
            content["model"]["vocab"] = {
                text: id_ for text, id_ in ids.items() if text not in removed
            }
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
        for name, text in tokenizer.special_tokens_map.items():
            if isinstance(text, str) and text in removed:
                setattr(tokenizer, name, None)
    return removed


@contextmanager
def _parsed_gguf(source: ModelSource) -> Iterator[GgufReader | None]:
    """Parse a .gguf file, which takes seconds, once: transformers would three times, and compute
    the map of names for every module."""
    if not source.is_gguf:
        yield None
        return
    parsed = read_gguf(Path(source.location))
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = lambda *_: parsed
    gguf.get_tensor_name_map = functools.cache(name_map)
    try:
        yield parsed
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
