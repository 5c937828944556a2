"""Derives the trunk for CPUs, of the operators in runtime/kernels/operators.cpp: one graph for all
windows and batches. The bits of a row depend neither on other rows nor on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from pass_exporter.derived.attention import (
    Layer,
    qkv_rows,
    read_layers,
    replace_value,
    rotation_tables,
)
from pass_exporter.derived.embeddings import LOOKAHEAD_TABLE, remove_index_conversions
from pass_exporter.derived.heads import norm_before_transpose, split_heads_by_constant
from pass_exporter.derived.products import DOMAIN, packed_weight, use_gates, use_products
from pass_exporter.derived.projections import add_biases_before_split, split_by_one_node
from pass_exporter.quantize.weights import QuantizedModel, weight_name
from pass_exporter.trunk.graph import EXTERNAL_DATA_MIN_BYTES, WeightParts, take_place
from pass_runtime.bundle.manifest import DerivedTrunk

CPU_FILE = "trunk.cpu.onnx"


def write_trunk_for_cpu(
    model: ir.Model,
    directory: Path,
    weight_parts: WeightParts,
    quantized: QuantizedModel,
    max_capacity: int,
    windows: Sequence[int | None],
    shared: ir.Graph | None,
) -> DerivedTrunk:
    """Rewrite the traced trunk `model`, write it to `directory`, and return its manifest entry.

    weight_parts: as `trace_trunk` returns them. windows: each layer's sliding window in positions,
    None if the layer has none. shared: a graph whose weights are written already, which this trunk
    reads where they are the same; None if it gets a file of all its weights.
    """
    graph = model.graph
    split_by_one_node(graph)
    add_biases_before_split(graph)
    norm_before_transpose(graph)
    split_heads_by_constant(graph)
    _use_embed(graph, quantized)
    remove_index_conversions(graph)
    use_products(graph, weight_parts, quantized)
    use_gates(graph)
    layers = read_layers(graph, windows)
    tables = rotation_tables(model, layers, max_capacity)
    for layer in layers:
        _use_window_attention(graph, layer, tables[layer.cos_sin])
    _use_add_norms(graph)
    passes.RemoveUnusedNodesPass()(model)
    _write(model, directory, shared)
    return DerivedTrunk(file=CPU_FILE, device="cpu")


def _use_embed(graph: ir.Graph, quantized: QuantizedModel) -> None:
    """Replace the look-ups in two tables and the choice between their results."""
    lookahead_table = graph.initializers[LOOKAHEAD_TABLE]
    (use,) = lookahead_table.uses()
    (choice,) = (each.node for each in use.node.outputs[0].uses())
    look_up, attributes = _producer(choice.inputs[2]), dict[str, int | float]()
    if look_up.op_type == "Mul":
        factor = look_up.inputs[1]
        assert factor is not None and factor.const_value is not None
        attributes["factor"] = float(factor.const_value.numpy().item())
        look_up = _producer(look_up.inputs[0])
    table, codes, op_type = look_up.inputs[0], quantized.table, "Embed"
    assert table is not None and table.name is not None
    if codes is not None:
        is_head = codes is quantized.weights.get(weight_name("lm_head"))
        name = _head_name(graph) if is_head else table.name
        op_type, attributes = "EmbedPacked", attributes | {"K": codes.inputs, "N": len(codes.data)}
        table, layout = packed_weight(graph, name, [codes])
        attributes |= layout
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    node = ir.node(op_type, [ids, table, lookahead_table], attributes, domain=DOMAIN)
    graph.insert_before(choice, node)
    take_place(choice.outputs[0], node.outputs[0])


def _head_name(graph: ir.Graph) -> str:
    logits = next(value for value in graph.outputs if value.name == "logits")
    weight = _producer(logits).inputs[1]
    assert weight is not None and weight.name is not None
    return weight.name


def _use_window_attention(graph: ir.Graph, layer: Layer, tables: Sequence[ir.Value]) -> None:
    inputs: list[ir.Value | None] = [*qkv_rows(graph, layer)]
    inputs += [*[None] * (3 - len(inputs)), *layer.past]
    by_name = {str(value.name): value for value in graph.inputs}
    inputs += [by_name[name] for name in ("length", "row_position", "window_mask")]
    attributes: dict[str, int | float] = {
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "scale": layer.scale,
        "window": layer.window or 0,
    }
    node = ir.node("WindowAttention", [*inputs, *tables], attributes, domain=DOMAIN, num_outputs=3)
    graph.insert_before(layer.attention, node)
    for old, new in zip((layer.result, *layer.present), node.outputs, strict=True):
        replace_value(graph, old, new)


def _use_add_norms(graph: ir.Graph) -> None:
    """Replace RMSNormalization, with the Add before it if that adds two tensors of its shape."""
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        rows, scale = norm.inputs
        add = None if rows is None else rows.producer()
        epsilon = {"epsilon": norm.attributes["epsilon"].as_float()}
        if add is not None and add.op_type == "Add" and all(map(_is_activation, add.inputs)):
            node = ir.node("AddNorm", [*add.inputs, scale], epsilon, domain=DOMAIN, num_outputs=2)
            graph.insert_before(add, node)
            replaced = [(norm, node.outputs[0]), (add, node.outputs[1])]
        else:
            node = ir.node("AddNorm", [rows, None, scale], epsilon, domain=DOMAIN)
            graph.insert_before(norm, node)
            replaced = [(norm, node.outputs[0])]
        for old, new in replaced:
            take_place(old.outputs[0], new)
        graph.remove([old for old, _ in replaced], safe=True)


def _is_activation(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == 3


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


def _producer(value: ir.Value | None) -> ir.Node:
    node = None if value is None else value.producer()
    assert node is not None
    return node
