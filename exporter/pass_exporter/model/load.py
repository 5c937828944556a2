"""Loads a frozen torch model and its tokenizer from a ModelSource."""

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
    check_not_quantized,
    check_tokens,
    damaged_file,
    unknown_gguf_tensors,
)
from pass_exporter.model.end_tokens import end_tokens
from pass_exporter.model.families import Geometry, geometry
from pass_exporter.model.gguf_config import check_settings, gguf_settings
from pass_exporter.model.gguf_reader import read_gguf
from pass_exporter.model.gguf_tokenizer import fix_gguf_tokenizer
from pass_exporter.model.hub import check_cached_files, hub_arguments
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

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    geometry: Geometry
    eos_token_ids: tuple[int, ...]
    """The ids of the tokens that end a text or a turn (`end_tokens.py`)."""


def stored_dtype(source: ModelSource) -> Dtype:
    """Return the dtype in the model's config; fp16 for a GGUF file, because its scales are fp16."""
    if source.is_gguf:
        return "fp16"
    location, kwargs = _pretrained_arguments(source)
    with _errors_as_pass_error(source):
        dtype = AutoConfig.from_pretrained(location, **kwargs).dtype
    return next((name for name, known in TORCH_DTYPES.items() if known == dtype), "fp32")


def load_model(source: ModelSource, dtype: Dtype) -> LoadedModel:
    """Load a model with weights in `dtype`.

    Raises PassError if the model is not supported, before its weights are read, or if the
    checkpoint does not have exactly the tensors of its configuration.
    """
    location, kwargs = _pretrained_arguments(source)
    with _errors_as_pass_error(source), _parse_gguf_once():
        settings = gguf_settings(Path(source.location)) if source.is_gguf else {}
        config = AutoConfig.from_pretrained(location, **kwargs)
        config = type(config).from_dict(config.to_dict() | settings) if settings else config
        sizes = geometry(config)
        if not source.is_gguf:
            check_not_quantized(source.name, config)
        tokenizer = _load_tokenizer(source, location, kwargs, sizes.vocab_size)
        model, report = AutoModelForCausalLM.from_pretrained(
            location,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_complete reports them by name
            quantization_config=transformers.GgufConfig(dequantize=True)
            if source.is_gguf
            else None,
            **kwargs,
        )
        # Transformers ignores a generation_config.json that it cannot read.
        if isinstance(source.location, str):
            check_cached_files(source.location, source.revision)
        if source.is_gguf:
            report["unexpected_keys"] |= unknown_gguf_tensors(Path(source.location), model)
            check_settings(source.name, settings, model.config)
        ends = end_tokens(model, tokenizer, location, kwargs)
    check_complete(source.name, report)
    check_finite(source.name, model)
    check_tokens(source.name, model, tokenizer)
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, sizes, ends)


def _pretrained_arguments(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """Return location and keyword arguments for `from_pretrained`, which forbid remote code."""
    kwargs: dict[str, Any] = {"trust_remote_code": False}
    if isinstance(source.location, str):
        return source.location, kwargs | hub_arguments(source.location, source.revision)
    if source.is_gguf:
        return str(source.location.parent), kwargs | {"gguf_file": source.location.name}
    return str(source.location), kwargs


@contextmanager
def _errors_as_pass_error(source: ModelSource) -> Iterator[None]:
    """Within the block, every error becomes a PassError.

    transformers, tokenizers, safetensors, gguf and pickle raise errors without a common class for
    damaged files.
    """
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
        return (
            f"cannot load {source.location}: "
            f"{f'{damaged} is damaged, get it again: ' if damaged else ''}{reason}"
        )
    return (
        f"cannot load {source.location} from the Hugging Face hub: {reason} "
        "(check the name and the network, or give a local directory or .gguf file)"
    )


def _load_tokenizer(
    source: ModelSource, location: str, kwargs: dict[str, Any], vocabulary: int
) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(location, **kwargs)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PassError(
            f"{source.name} has no fast tokenizer (tokenizer.json), which the runtime needs"
        )
    stored = _stored_vocabulary_size(source, location, kwargs)
    dropped = _drop_added_tokens(tokenizer, vocabulary)
    # Tokens that only transformers added are dropped without a warning.
    if noted := [text for text, token in dropped.items() if stored is None or token < stored]:
        warnings.warn(
            f"{source.name} has no embeddings for the added tokens {', '.join(noted)}: they "
            "are read as plain text",
            stacklevel=2,
        )
    if source.is_gguf:
        fix_gguf_tokenizer(tokenizer, Path(source.location))
    # A tokenizer.json may have truncation or padding switched on. transformers ignores both by
    # default.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _stored_vocabulary_size(
    source: ModelSource, location: str, kwargs: dict[str, Any]
) -> int | None:
    """Return the number of token ids in the files; None if there is no tokenizer.json."""
    if source.is_gguf:
        return len(gguf.GGUFReader(str(source.location)).fields["tokenizer.ggml.tokens"].data)
    place = {name: kwargs[name] for name in ("revision", "local_files_only") if name in kwargs}
    path = cached_file(
        location, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **place
    )
    return (
        None
        if path is None
        else 1 + max(Tokenizer.from_file(path).get_vocab().values(), default=-1)
    )


def _drop_added_tokens(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> dict[str, int]:
    """Remove the added tokens that have no embeddings in the model. Return their texts and ids.

    Some published models have such tokens (Gemma3's text models have an image token), and
    transformers adds others, such as <|endoftext|>. Afterwards their texts are tokenized as plain
    text.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    dropped = {
        token["content"]: token["id"]
        for token in content["added_tokens"]
        if token["id"] >= vocabulary
    }
    if dropped:
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["id"] < vocabulary
        ]
        if isinstance(words := content["model"]["vocab"], dict):
            content["model"]["vocab"] = {
                word: token for word, token in words.items() if word not in dropped
            }
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
        for name, text in tokenizer.special_tokens_map.items():
            if isinstance(text, str) and text in dropped:
                setattr(tokenizer, name, None)
    return dropped


@contextmanager
def _parse_gguf_once() -> Iterator[None]:
    """Within the block, `gguf.GGUFReader` is `read_gguf`, and files and maps of names are cached.

    transformers parses the file for the config, the tokenizer and the weights, and computes the map
    for every module. Each takes seconds.
    """
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = functools.cache(lambda path, *_: read_gguf(Path(path)))
    gguf.get_tensor_name_map = functools.cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block, transformers prints nothing, because the toolkit has its own messages."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
