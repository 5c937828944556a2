"""Derives faster trunks for one of ONNX Runtime's devices from trunk.onnx, the portable trunk. All
share its weights file."""
