"""The backend for ONNX Runtime. Importing it raises PassError if ONNX Runtime is not installed."""

from pass_runtime.backends.packages import MISSING
from pass_runtime.errors import PassError

try:
    import onnxruntime  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    raise PassError(MISSING) from None
