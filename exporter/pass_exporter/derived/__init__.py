"""Derives faster trunks for the CPU and for CUDA from trunk.onnx, the portable trunk."""
