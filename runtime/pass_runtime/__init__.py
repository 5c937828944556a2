"""Run PaSS bundles: parallel drafting and verification with one frozen model. Never imports torch."""

from pass_runtime.bundle.manifest import Manifest, read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.loop import TokenStream
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError
from pass_runtime.session import GenerateOptions, Session, load
from pass_runtime.text.stream import Generation, Piece

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
