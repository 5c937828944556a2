"""The backend for ONNX Runtime. Importing it raises PassError if ONNX Runtime is not installed."""

from pass_runtime.errors import PassError
from pass_runtime.packages import MISSING_MESSAGE

try:
    import onnxruntime
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    raise PassError(MISSING_MESSAGE) from None

__all__ = ["onnxruntime"]
