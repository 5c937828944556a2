"""Run PaSS bundles: parallel drafting and verification with one frozen model. Never imports torch.

A name is imported when it is first used, so that a command can see to Ctrl-C before anything slow is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pass_runtime.bundle.manifest import Manifest
    from pass_runtime.bundle.read import read_manifest
    from pass_runtime.bundle.sampling import SamplingParams
    from pass_runtime.decode.scheduler import QueueFull
    from pass_runtime.decode.sequence import Piece
    from pass_runtime.decode.stats import Stats
    from pass_runtime.errors import PassError
    from pass_runtime.generation import Generation, TokenStream
    from pass_runtime.options import GenerateOptions, LoadOptions
    from pass_runtime.session import Session, load
    from pass_runtime.text.constraint import Constraint

__version__ = "0.1.0"
__all__ = [
    "Constraint",
    "GenerateOptions",
    "Generation",
    "LoadOptions",
    "Manifest",
    "PassError",
    "Piece",
    "QueueFull",
    "SamplingParams",
    "Session",
    "Stats",
    "TokenStream",
    "load",
    "read_manifest",
]
_MODULES = {
    "bundle.manifest": ("Manifest",),
    "bundle.read": ("read_manifest",),
    "bundle.sampling": ("SamplingParams",),
    "text.constraint": ("Constraint",),
    "decode.scheduler": ("QueueFull",),
    "decode.sequence": ("Piece",),
    "decode.stats": ("Stats",),
    "errors": ("PassError",),
    "generation": ("Generation", "TokenStream"),
    "options": ("GenerateOptions", "LoadOptions"),
    "session": ("Session", "load"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
