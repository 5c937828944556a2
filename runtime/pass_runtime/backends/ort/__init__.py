"""The backend for ONNX Runtime. Importing it raises PassError if ONNX Runtime is not installed."""

from pass_runtime.errors import PassError
from pass_runtime.packages import MISSING

try:
    import onnxruntime
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    raise PassError(MISSING) from None

__all__ = ["onnxruntime"]
