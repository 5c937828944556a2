"""The backend for ONNX Runtime."""
