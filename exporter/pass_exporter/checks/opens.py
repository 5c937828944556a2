"""Opens the finished bundle with the runtime and generates text, as the last check of an export."""

from __future__ import annotations

from pathlib import Path

from pass_exporter.checks.verify import runs_own_kernels, session_for_checks, weight_bytes
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session, load

PROMPT, NEW_TOKENS = "The", 4
MAX_PACKED_BYTES = 1 << 30
"""The largest size of float32 weights whose packed copies, which ONNX Runtime makes, fit into the
memory that an export may take."""
RUNTIME_ADVICE = "; export the bundle again"
"""The end of some messages of the runtime. It is cut off here, because another export would write
the same bundle."""


def check_opens(bundle: Path, runnable: Manifest) -> None:
    """Raise PassError if the runtime cannot open the bundle or generate text with it.

    runnable: the manifest that `runnable_on_cpu` yields. Of a bundle that cannot run here
    (`session_for_checks` returns None), only the manifest and the hashes of all files are checked.
    """
    try:
        manifest = read_manifest(bundle)
        verify_files(bundle, manifest)
        session = _open(bundle, manifest, runnable)
        if session is not None:
            with session:
                session.generate(PROMPT, GenerateOptions(max_new_tokens=NEW_TOKENS)).result()
    except PassError as error:
        reason = str(error).removesuffix(RUNTIME_ADVICE)
        raise PassError(
            f"the runtime refuses the bundle that this export wrote, please report it: {reason}"
        ) from None


def _open(bundle: Path, manifest: Manifest, runnable: Manifest) -> Session | None:
    """Open the bundle on the CPU: as users do (`load`) if the toolkit's kernels run it, or the
    weights are float32 and few enough, and else by `session_for_checks`."""
    model = manifest.model
    few = (
        model.dtype == "float32"
        and model.weights == "full"
        and weight_bytes(bundle) <= MAX_PACKED_BYTES
    )
    if few or runs_own_kernels(manifest):
        return load(bundle, "cpu", verify=False)
    # The CPU provider has no bf16 kernels, so the bundle's own trunk cannot run in bf16.
    return session_for_checks(bundle, runnable if model.dtype == "bfloat16" else manifest)
