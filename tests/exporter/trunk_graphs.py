"""Counts the operators of a graph."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort


def load_graph(file: Path) -> onnx.GraphProto:
    return onnx.load(file, load_external_data=False).graph


def count(graph: onnx.GraphProto, op_type: str) -> int:
    return sum(node.op_type == op_type for node in graph.node)


def optimized_graph(file: Path, directory: Path) -> onnx.GraphProto:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(directory / "optimized.onnx")
    ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return load_graph(directory / "optimized.onnx")
