"""Derives the trunk for CPUs, of the operators in runtime/kernels/operators.cpp: one graph for all
windows and batches. A row's bits depend neither on other rows nor on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from pass_exporter.derived.attention import (
    Layer,
    read_layers,
    replace_attention,
    rotation_tables,
)
from pass_exporter.derived.heads import norm_before_transpose, split_heads_by_constant
from pass_exporter.derived.products import DOMAIN, packed_weight, use_gates, use_products
from pass_exporter.derived.rewrites import (
    LOOKAHEAD_TABLE,
    add_biases_before_split,
    embedding_nodes,
    remove_index_conversions,
    residual_add,
    split_by_one_node,
)
from pass_exporter.model.families import Geometry
from pass_exporter.quantize.weights import QuantizedModel, weight_name
from pass_exporter.trunk.graph import (
    EXTERNAL_DATA_MIN_BYTES,
    WeightParts,
    constant,
    graph_input,
    producer,
    take_place,
)
from pass_runtime.bundle.manifest import DerivedTrunk

CPU_FILE = "trunk.cpu.onnx"


def write_trunk_for_cpu(
    model: ir.Model,
    directory: Path,
    weight_parts: WeightParts,
    quantized: QuantizedModel,
    sizes: Geometry,
    shared: ir.Graph | None,
) -> DerivedTrunk:
    """Rewrite the traced trunk, write it, and return its manifest entry. shared: a graph whose
    weights are written already, or None."""
    graph = model.graph
    split_by_one_node(graph)
    add_biases_before_split(graph)
    norm_before_transpose(graph)
    split_heads_by_constant(graph)
    _use_embed(graph, quantized)
    remove_index_conversions(graph)
    use_products(graph, weight_parts, quantized)
    use_gates(graph)
    layers = read_layers(graph, sizes.windows)
    tables = rotation_tables(model, layers, sizes.max_capacity)
    for layer in layers:
        _use_window_attention(graph, layer, tables[layer.cos_sin])
    _use_add_norms(graph)
    passes.RemoveUnusedNodesPass()(model)
    _write(model, directory, shared)
    return DerivedTrunk(file=CPU_FILE, device="cpu")


def _use_embed(graph: ir.Graph, quantized: QuantizedModel) -> None:
    choice, table, factor = embedding_nodes(graph)
    attributes, number = dict[str, int | float](), constant(factor)
    if number is not None:
        attributes["factor"] = float(number.item())
    codes, op_type = quantized.table, "Embed"
    if codes is not None:
        is_head = codes is quantized.weights.get(weight_name("lm_head"))
        (logits,) = (value for value in graph.outputs if value.name == "logits")
        weight = producer(logits).inputs[1] if is_head else table
        assert weight is not None and weight.name is not None
        op_type, attributes = "EmbedPacked", attributes | {"K": codes.inputs, "N": len(codes.data)}
        table, layout = packed_weight(graph, weight.name, [codes])
        attributes |= layout
    inputs = [graph_input(graph, "input_ids"), table, graph.initializers[LOOKAHEAD_TABLE]]
    node = ir.node(op_type, inputs, attributes, domain=DOMAIN)
    graph.insert_before(choice, node)
    take_place(choice.outputs[0], node.outputs[0])


def _use_window_attention(graph: ir.Graph, layer: Layer, tables: Sequence[ir.Value]) -> None:
    names = ("length", "row_position", "window_mask")
    inputs = [*(graph_input(graph, name) for name in names), *tables]
    attributes = {
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "scale": layer.scale,
        "window": layer.window or 0,
    }
    replace_attention(graph, layer, (DOMAIN, "WindowAttention"), inputs, attributes)


def _use_add_norms(graph: ir.Graph) -> None:
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        rows, scale = norm.inputs
        add, epsilon = residual_add(norm), {"epsilon": norm.attributes["epsilon"].as_float()}
        replaced = [norm] if add is None else [norm, add]
        inputs = [rows, None] if add is None else add.inputs
        node = ir.node(
            "AddNorm", [*inputs, scale], epsilon, domain=DOMAIN, num_outputs=len(replaced)
        )
        graph.insert_before(replaced[-1], node)
        for old, new in zip(replaced, node.outputs, strict=True):
            take_place(old.outputs[0], new)
        graph.remove(replaced, safe=True)


def _write(model: ir.Model, directory: Path, shared: ir.Graph | None) -> None:
    own = []
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        other = None if shared is None else shared.initializers.get(name)
        if other is not None and other.const_value is not None:
            value.const_value = other.const_value
        elif tensor.nbytes > EXTERNAL_DATA_MIN_BYTES:
            own.append(value)
    if own:
        tensors = [value.const_value for value in own if value.const_value is not None]
        written = ir.external_data.convert_tensors_to_external(
            tensors,
            directory,
            f"{CPU_FILE}.data",
            max_workers=1,
            alignment=4096,
            align_threshold=EXTERNAL_DATA_MIN_BYTES,
        )
        for value, tensor in zip(own, written, strict=True):
            value.const_value = tensor
    ir.save(model, directory / CPU_FILE)
