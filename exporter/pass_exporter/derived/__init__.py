"""Derives trunks for one engine from trunk.onnx. They have other nodes and share the weights
file."""
