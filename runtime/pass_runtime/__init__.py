"""Runs PaSS bundles: one frozen model drafts and verifies tokens in parallel. Never imports torch.

The names in `__all__` are all that is public; `pass_server` uses no others. A name's module is
imported at the first use of the name, so that a command can set up its handling of Ctrl-C before
anything slow is imported.
"""
# ruff: noqa: F401, PLE0604 - ruff does not see that `__all__` has the names

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pass_runtime.bundle.manifest import Manifest
    from pass_runtime.bundle.option import Option, option, options_class, options_of
    from pass_runtime.bundle.read import read_manifest
    from pass_runtime.bundle.sampling import MAX_BIASES, MAX_LOGPROBS, SamplingParams
    from pass_runtime.decode.engine import QueueFull
    from pass_runtime.decode.sequence import Piece, Request, Token
    from pass_runtime.decode.stats import Stats
    from pass_runtime.decode.worker import Places
    from pass_runtime.errors import PassError
    from pass_runtime.generation import Generation, TokenStream, merged
    from pass_runtime.options import MAX_BAD_WORDS, REQUEST_OPTIONS, GenerateOptions, LoadOptions
    from pass_runtime.session import Session, load
    from pass_runtime.text.constraint import Constraint
    from pass_runtime.text.detokenizer import Detokenizer, Vocabulary
    from pass_runtime.text.grammar import ConstraintStopped, TooManyConstraints

# ONNX Runtime and onnxruntime-genai report their use to their maker, unless this says 1 when they
# are loaded: their own functions that turn it off come too late. 0 in the environment is kept.
os.environ["ORT_DISABLE_TELEMETRY"] = os.environ.get("ORT_DISABLE_TELEMETRY") or "1"
__version__ = "0.1.0"
_NAMES_BY_MODULE = {
    "bundle.manifest": ("Manifest",),
    "bundle.option": ("Option", "option", "options_class", "options_of"),
    "bundle.read": ("read_manifest",),
    "bundle.sampling": ("MAX_BIASES", "MAX_LOGPROBS", "SamplingParams"),
    "decode.engine": ("QueueFull",),
    "decode.sequence": ("Piece", "Request", "Token"),
    "decode.stats": ("Stats",),
    "decode.worker": ("Places",),
    "errors": ("PassError",),
    "generation": ("Generation", "TokenStream", "merged"),
    "options": ("MAX_BAD_WORDS", "REQUEST_OPTIONS", "GenerateOptions", "LoadOptions"),
    "session": ("Session", "load"),
    "text.constraint": ("Constraint",),
    "text.detokenizer": ("Detokenizer", "Vocabulary"),
    "text.grammar": ("ConstraintStopped", "TooManyConstraints"),
}
__all__ = ["__version__", *(name for names in _NAMES_BY_MODULE.values() for name in names)]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
