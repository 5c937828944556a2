"""The last check of an export: the runtime opens the finished bundle and generates text."""

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
MAX_PACKED_BYTES = 1 << 30
"""The most bytes of float32 weights whose packed copies fit into the memory of an export."""
RUNTIME_ADVICE = "; export the bundle again"
"""The end of some messages of the runtime, removed here because it would not help."""


def check_opens(bundle: Path, checked: Manifest) -> None:
    """Raises PassError if the runtime cannot open the bundle or generate with it.

    checked: the manifest from `runnable_on_cpu`. If `session_for_checks` returns None, only the
    manifest and all hashes are checked.
    """
    try:
        manifest = read_manifest(bundle)
        verify_files(bundle, manifest)
        session = _open(bundle, manifest, checked)
        if session is not None:
            with session:
                session.generate(PROMPT, GenerateOptions(max_new_tokens=TOKENS)).result()
    except PassError as error:
        reason = str(error).removesuffix(RUNTIME_ADVICE)
        raise PassError(
            f"the runtime refuses the bundle that this export wrote, please report it: {reason}"
        ) from None


def _open(bundle: Path, manifest: Manifest, checked: Manifest) -> Session | None:
    """Open the bundle by `load` on the CPU, or by `session_for_checks` if the model is large or
    quantized or in a 16-bit dtype."""
    model = manifest.model
    if (
        model.dtype == "float32"
        and model.weights == "full"
        and weight_bytes(bundle) <= MAX_PACKED_BYTES
    ):
        return load(bundle, "cpu", verify=False)
    return session_for_checks(bundle, checked if model.dtype == "bfloat16" else manifest)
