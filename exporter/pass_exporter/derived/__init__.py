"""Graphs for one engine, derived from trunk.onnx: other nodes over the same weights."""
