"""Backends: each runs the graphs of a bundle on one engine, ONNX Runtime or TensorRT."""
