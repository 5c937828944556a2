"""Loads a frozen torch model and its tokenizer from a ModelSource."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import cached_file

from pass_exporter.model.checkpoint import (
    check_complete,
    check_finite,
    check_not_quantized,
    check_tokens,
    damaged_file,
    end_of_text,
    unknown_gguf_tensors,
)
from pass_exporter.model.families import Geometry, geometry
from pass_exporter.model.hub import look_up
from pass_exporter.model.registry import NO_REMOTE_CODE, ModelSource
from pass_runtime.errors import PassError

LoadDtype = Literal["fp32", "fp16", "bf16"]
TORCH_DTYPES: dict[LoadDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class LoadedModel:
    """A model in evaluation mode, frozen, on the CPU."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    geometry: Geometry

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids: the generation config's, or else the tokenizer's."""
        ids = end_of_text(self.model)
        own = self.tokenizer.eos_token_id
        return ids if ids is not None else () if own is None else (int(own),)


def stored_dtype(source: ModelSource) -> LoadDtype:
    """Return the dtype that the model's config states; fp16 for a GGUF file, whose scales are fp16."""
    if source.is_gguf:
        return "fp16"
    location, kwargs = _place(source)
    with _refusing(source):
        dtype = AutoConfig.from_pretrained(location, **kwargs).dtype
    return next((name for name, known in TORCH_DTYPES.items() if known == dtype), "fp32")


def load_model(source: ModelSource, dtype: LoadDtype) -> LoadedModel:
    """Load a model with weights in `dtype`.

    An unsupported model is refused before its weights are read. Afterwards the checkpoint is refused unless it has
    exactly the tensors of its configuration.
    """
    location, kwargs = _place(source)
    with _refusing(source), _parse_gguf_once():
        config = AutoConfig.from_pretrained(location, **kwargs)
        sizes = geometry(config)
        if not source.is_gguf:
            check_not_quantized(source.name, config)
        tokenizer = _load_tokenizer(source, location, kwargs, sizes.vocab_size)
        model, report = AutoModelForCausalLM.from_pretrained(
            location,
            dtype=TORCH_DTYPES[dtype],
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_complete refuses them, by name
            quantization_config=transformers.GgufConfig(dequantize=True) if source.is_gguf else None,
            **kwargs,
        )
        if source.is_gguf:
            report["unexpected_keys"] |= unknown_gguf_tensors(Path(source.location), model)
    check_complete(source.name, report)
    check_finite(source.name, model)
    check_tokens(source.name, model, tokenizer)
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, sizes)


def _place(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """Return the directory or hub id, and the arguments, for `from_pretrained`, which never run a checkpoint's code."""
    kwargs: dict[str, Any] = {"trust_remote_code": False}
    if isinstance(source.location, str):
        return source.location, kwargs | look_up(source.location, source.revision)
    if source.is_gguf:
        return str(source.location.parent), kwargs | {"gguf_file": source.location.name}
    return str(source.location), kwargs


@contextmanager
def _refusing(source: ModelSource) -> Iterator[None]:
    """Turn every error into a PassError: for damaged files transformers, tokenizers, safetensors, gguf and pickle raise
    errors that have no common class."""
    try:
        with _quiet():
            yield
    except PassError:
        raise
    except Exception as error:
        raise PassError(_explain(source, error)) from error


def _explain(source: ModelSource, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if "trust_remote_code" in str(error):
        return f"cannot load {source.location}: {NO_REMOTE_CODE}"
    if isinstance(source.location, Path):
        damaged = None if source.is_gguf else damaged_file(source.location)
        return f"cannot load {source.location}: {f'{damaged} is damaged, get it again: ' if damaged else ''}{reason}"
    return (
        f"cannot load {source.location} from the Hugging Face hub: {reason} "
        "(check the name and the network, or give a local directory or .gguf file)"
    )


def _load_tokenizer(
    source: ModelSource, location: str, kwargs: dict[str, Any], vocabulary: int
) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(location, **kwargs)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PassError(f"{source.name} has no fast tokenizer (tokenizer.json), which the runtime needs")
    own = _own_tokens(source, location, kwargs)
    if own is not None:
        _drop_added_tokens(tokenizer, max(own, vocabulary))
    if source.is_gguf:
        _fix_gguf_tokenizer(tokenizer, Path(location) / kwargs["gguf_file"])
    return tokenizer


def _own_tokens(source: ModelSource, location: str, kwargs: dict[str, Any]) -> int | None:
    """Return the number of ids in the checkpoint's own files, or None without a tokenizer.json."""
    if source.is_gguf:
        return len(gguf.GGUFReader(Path(location) / kwargs["gguf_file"]).fields["tokenizer.ggml.tokens"].data)
    place = {name: kwargs[name] for name in ("revision", "local_files_only") if name in kwargs}
    path = cached_file(location, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **place)
    return None if path is None else 1 + max(Tokenizer.from_file(path).get_vocab().values(), default=-1)


RESTORED = ("default", "qwen2")
"""The values of `tokenizer.ggml.pre` for which transformers restores the tokenizer: that of qwen2 gave the tokens of
llama.cpp for 1,233 texts (HumanEval, Wikipedia, Python, documentation)."""


def _gguf_pre_tokenizers() -> dict[str, PreTokenizer]:
    """Return pre-tokenizers by `tokenizer.ggml.pre`: transformers does not restore these from a GGUF file."""
    return {"smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])}


def _fix_gguf_tokenizer(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    fields = gguf.GGUFReader(path).fields
    field = fields.get("tokenizer.ggml.pre")
    pre = field.contents() if field is not None else "default"
    known = _gguf_pre_tokenizers()
    if pre in known:
        tokenizer.backend_tokenizer.pre_tokenizer = known[pre]
    elif pre not in RESTORED:
        warnings.warn(
            f"the tokenizer was rebuilt from {path.name} ({pre}); compare it with the original before trusting it",
            stacklevel=2,
        )


def _drop_added_tokens(tokenizer: PreTrainedTokenizerFast, count: int) -> None:
    """Remove the added tokens whose id is `count` or more.

    transformers appends tokens of its own, such as <|endoftext|>, to vocabularies without them. A prompt that contains
    their text would read an embedding that does not exist.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [token for token in content["added_tokens"] if token["id"] < count]
    if len(kept) < len(content["added_tokens"]):
        content["added_tokens"] = kept
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))


@contextmanager
def _parse_gguf_once() -> Iterator[None]:
    """Cache the parsed GGUF file: transformers parses it for the config, the tokenizer and the weights, seconds
    each."""
    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(lambda path, *_: reader(path))
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the messages and progress bars of transformers: the toolkit shows its own."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
