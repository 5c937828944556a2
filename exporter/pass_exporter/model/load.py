"""Source -> a frozen torch model and its tokenizer."""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gguf
import torch
import transformers
from safetensors import SafetensorError
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.model.families import Geometry, geometry
from pass_exporter.model.registry import Source
from pass_runtime.errors import PassError

LoadDtype = Literal["fp32", "fp16", "bf16"]
TORCH_DTYPES: dict[LoadDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, IndexError, struct.error, SafetensorError)
"""What damaged or foreign files make transformers, safetensors and gguf raise."""


@dataclass
class LoadedModel:
    """`model` is in evaluation mode, frozen, on the CPU."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    geometry: Geometry

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids: the generation config's, else the tokenizer's."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def stored_dtype(source: Source) -> LoadDtype:
    """What a model's config says its weights are in; fp16 for a GGUF, whose scales are."""
    if source.is_gguf:
        return "fp16"
    try:
        with _quiet():
            dtype = AutoConfig.from_pretrained(str(source.location)).dtype
    except LOAD_ERRORS as error:
        raise PassError(_explain(source, error)) from None
    return next((name for name, known in TORCH_DTYPES.items() if known == dtype), "fp32")


def load_model(source: Source, dtype: LoadDtype) -> LoadedModel:
    """Load weights as `dtype`. An unsupported architecture is refused before its weights are read."""
    location, kwargs = str(source.location), {}
    if source.is_gguf:
        assert isinstance(source.location, Path)
        location, kwargs = str(source.location.parent), {"gguf_file": source.location.name}
    try:
        with _quiet(), _parse_gguf_once():
            sizes = geometry(AutoConfig.from_pretrained(location, **kwargs))
            tokenizer = _load_tokenizer(source, location, kwargs)
            if source.is_gguf:
                kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(location, dtype=TORCH_DTYPES[dtype], **kwargs)
    except LOAD_ERRORS as error:
        raise PassError(_explain(source, error)) from None
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, sizes)


def _explain(source: Source, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    if isinstance(source.location, Path):
        return f"cannot load {source.location}: {reason}"
    return (
        f"cannot load {source.location} from the Hugging Face hub: {reason} "
        "(check the name and the network, or give a local directory or .gguf file)"
    )


def _load_tokenizer(source: Source, location: str, kwargs: dict[str, str]) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(location, **kwargs)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PassError(f"{source.name} has no fast tokenizer (tokenizer.json), which the runtime needs")
    if source.is_gguf:
        _fix_gguf_tokenizer(tokenizer, Path(location) / kwargs["gguf_file"])
    return tokenizer


def _gguf_pre_tokenizers() -> dict[str, PreTokenizer]:
    """By `tokenizer.ggml.pre`: splits that transformers loses when it rebuilds a tokenizer from a GGUF file."""
    return {"smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])}


def _fix_gguf_tokenizer(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    field = gguf.GGUFReader(path).fields.get("tokenizer.ggml.pre")
    pre = field.contents() if field is not None else "default"
    known = _gguf_pre_tokenizers()
    if pre in known:
        tokenizer.backend_tokenizer.pre_tokenizer = known[pre]
    elif pre != "default":
        warnings.warn(
            f"the tokenizer was rebuilt from {path.name} ({pre}); compare it with the original before trusting it",
            stacklevel=2,
        )


@contextmanager
def _parse_gguf_once() -> Iterator[None]:
    """transformers reads the file anew for the config, the tokenizer and the weights: seconds each time."""
    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(lambda path, *_: reader(path))
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@contextmanager
def _quiet() -> Iterator[None]:
    """Our own progress bars are the only ones on the terminal."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
