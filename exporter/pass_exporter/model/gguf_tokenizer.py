"""What transformers leaves out when it restores a tokenizer from a .gguf file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import PreTrainedTokenizerFast

from pass_exporter.model.gguf_config import ORIGINAL
from pass_runtime.errors import PassError

MODELS = ("gpt2", "llama")
"""The values of `tokenizer.ggml.model`, byte-level and with byte fallback, for which the tokenizer is that of the file.
Others depend on tables (t5) or rules that transformers does not read."""

RESTORED = ("default", "qwen2")
"""The values of `tokenizer.ggml.pre` for which transformers restores the tokenizer: that of qwen2 gave the tokens of
llama.cpp for 1,233 texts (HumanEval, Wikipedia, Python, documentation)."""


def _pre_tokenizers() -> dict[str, PreTokenizer]:
    """Return pre-tokenizers by `tokenizer.ggml.pre`: transformers does not restore these from a GGUF file."""
    return {"smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])}


def fix_gguf_tokenizer(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Make `tokenizer` the one that the file describes. Raises PassError for kinds that cannot be restored."""
    fields = gguf.GGUFReader(str(path)).fields

    def stated(key: str, default: Any) -> Any:
        field = fields.get(f"tokenizer.ggml.{key}")
        return default if field is None else field.contents()

    if (model := stated("model", None)) not in MODELS:
        raise PassError(f"tokenizer.ggml.model = {model!r} is not supported: {ORIGINAL}")
    pre, known = stated("pre", "default"), _pre_tokenizers()
    if model == "llama":
        _prefix_space(tokenizer, wanted=stated("add_space_prefix", True))
    elif pre in known:
        tokenizer.backend_tokenizer.pre_tokenizer = known[pre]
    elif pre not in RESTORED:
        warnings.warn(
            f"the tokenizer was rebuilt from {path.name} ({pre}); compare it with the original before trusting it",
            stacklevel=2,
        )


def _prefix_space(tokenizer: PreTrainedTokenizerFast, *, wanted: bool) -> None:
    """Leave out the space before a text if the file does not want it. transformers goes by the architecture alone."""
    if tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith("\u2581") == wanted:
        return
    if wanted:
        raise PassError(
            f"tokenizer.ggml.add_space_prefix is not False, which is not supported for this architecture: {ORIGINAL}"
        )
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if (content["pre_tokenizer"] or {}).get("type") == "Metaspace":
        content["pre_tokenizer"]["prepend_scheme"] = "never"
    for part, dropped in (("normalizer", "Prepend"), ("decoder", "Strip")):
        steps = (content[part] or {}).get(f"{part}s", [])
        steps[:] = [step for step in steps if step["type"] != dropped]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
