"""Run PaSS bundles: parallel drafting and verification with one frozen model. Never imports torch."""

from pass_runtime.errors import PassError
from pass_runtime.loop import TokenStream
from pass_runtime.manifest import Manifest, read_manifest
from pass_runtime.sampling import SamplingParams
from pass_runtime.session import GenerateOptions, Session, load
from pass_runtime.stats import Stats
from pass_runtime.text import Generation, Piece

__version__ = "0.1.0"
__all__ = [
    "GenerateOptions",
    "Generation",
    "Manifest",
    "PassError",
    "Piece",
    "SamplingParams",
    "Session",
    "Stats",
    "TokenStream",
    "load",
    "read_manifest",
]
