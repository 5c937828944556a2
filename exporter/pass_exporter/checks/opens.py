"""The last check of an export: the finished bundle opens and generates text, from its files alone."""

from __future__ import annotations

from pathlib import Path

from pass_exporter.checks.verify import session_for_checks, weight_bytes
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session, load

PROMPT, TOKENS = "The", 4
ROOM = 1 << 30
"""The most bytes of float32 weights for which ONNX Runtime's packed copies fit into the memory of an export."""
ADVICE = "; export the bundle again"
"""The runtime's advice, which would not help here."""


def check_opens(bundle: Path, runs: Manifest) -> None:
    """PassError if the runtime cannot open the bundle or generate with it. runs: the manifest from `runnable`.

    If `session_for_checks` has no memory to run a large model, only the manifest and all hashes are checked.
    """
    try:
        manifest = read_manifest(bundle)
        verify_files(bundle, manifest)
        session = _open(bundle, manifest, runs)
        if session is not None:
            with session:
                session.generate(PROMPT, GenerateOptions(max_new_tokens=TOKENS)).result()
    except PassError as error:
        reason = str(error).removesuffix(ADVICE)
        raise PassError(f"the runtime refuses the bundle that this export wrote, please report it: {reason}") from None


def _open(bundle: Path, manifest: Manifest, runs: Manifest) -> Session | None:
    """Open it as `load` does on a CPU; a model that is large, or in bf16, which a CPU cannot run, as checks do."""
    model = manifest.model
    if model.dtype == "float32" and model.weights == "full" and weight_bytes(bundle) <= ROOM:
        return load(bundle, "cpu", verify=False)
    return session_for_checks(bundle, runs if model.dtype == "bfloat16" else manifest)
