"""The backend for TensorRT and TensorRT-RTX."""
