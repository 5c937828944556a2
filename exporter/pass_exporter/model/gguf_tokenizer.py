"""Corrects the tokenizer that transformers makes of a .gguf file: it ignores some of the keys."""

from __future__ import annotations

import json
import warnings

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import PreTrainedTokenizerFast

from pass_exporter.model.gguf_config import ORIGINAL_ADVICE
from pass_exporter.model.gguf_reader import GgufReader
from pass_runtime.errors import PassError

SUPPORTED_TYPES = ("gpt2", "llama")
"""Byte-level BPE, and BPE with byte fallback."""

TRUSTED_PRE_TOKENIZERS = ("default", "qwen2")
"""Values of `tokenizer.ggml.pre` that transformers reads right. qwen2's gave llama.cpp's tokens in
1,233 texts."""


def fix_gguf_tokenizer(tokenizer: PreTrainedTokenizerFast, name: str, file: GgufReader) -> None:
    """Change `tokenizer` to the one that the file describes. Raises PassError if its type is not
    supported."""
    model, pre = file.key("tokenizer.ggml.model"), file.key("tokenizer.ggml.pre") or "default"
    if model not in SUPPORTED_TYPES:
        raise PassError(f"tokenizer.ggml.model = {model!r} is not supported: {ORIGINAL_ADVICE}")
    if model == "llama":
        prefix_space = file.key("tokenizer.ggml.add_space_prefix")
        _set_prefix_space(tokenizer, prefix_space=prefix_space is None or prefix_space)
    elif pre == "smollm":
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
    elif pre not in TRUSTED_PRE_TOKENIZERS:
        warnings.warn(
            f"the tokenizer was rebuilt from {name} (tokenizer.ggml.pre = {pre!r}); "
            "compare it with the original before trusting it",
            stacklevel=2,
        )


def _set_prefix_space(tokenizer: PreTrainedTokenizerFast, *, prefix_space: bool) -> None:
    """transformers decides by the architecture, not the file, whether texts begin with a space."""
    first_token = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0]
    if first_token.startswith("\u2581") == prefix_space:  # the tokenizer's character for a space
        return
    if prefix_space:
        raise PassError(
            "tokenizer.ggml.add_space_prefix = True is not supported for this architecture (it is "
            f"the default): {ORIGINAL_ADVICE}"
        )
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if (content["pre_tokenizer"] or {}).get("type") == "Metaspace":
        content["pre_tokenizer"]["prepend_scheme"] = "never"
    # The normalizer prepends the space, and the decoder strips it again.
    for part, removed in (("normalizer", "Prepend"), ("decoder", "Strip")):
        steps = (content[part] or {}).get(f"{part}s", [])
        steps[:] = [step for step in steps if step["type"] != removed]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
