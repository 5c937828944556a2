"""The backend for ONNX Runtime."""

from pass_runtime.packages import not_installed

try:
    import onnxruntime
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    raise not_installed("onnxruntime", "cpu") from None

__all__ = ["onnxruntime"]
