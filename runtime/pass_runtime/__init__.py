"""Run PaSS bundles: parallel drafting and verification with one frozen model. Never imports torch."""

from pass_runtime.bundle.manifest import Manifest, read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.scheduler import QueueFull
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError
from pass_runtime.generation import Generation, Piece, TokenStream
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session, load

__version__ = "0.1.0"
__all__ = [
    "GenerateOptions",
    "Generation",
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
