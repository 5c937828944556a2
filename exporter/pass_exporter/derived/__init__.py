"""Derives trunks for one engine from trunk.onnx. They share its weights file."""
