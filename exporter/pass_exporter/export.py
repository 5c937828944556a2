"""`export()`: loads the model, writes the bundle's graphs, and checks them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from pass_exporter.bundle import (
    graph_info,
    model_info,
    write_manifest,
    write_tails,
    write_tokenizer,
)
from pass_exporter.checks.decoding import Decoding, check_decoding
from pass_exporter.checks.perplexity import score_text
from pass_exporter.checks.torch_cases import torch_cases
from pass_exporter.checks.trunks import check_trunks, limits_of
from pass_exporter.config import GROUP_QUERY, ExportConfig
from pass_exporter.derived.attention import UnsupportedAttention
from pass_exporter.derived.cpu import write_trunk_for_cpu
from pass_exporter.derived.cuda import write_trunks_for_cuda
from pass_exporter.model.families import Geometry
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import lookahead_weights
from pass_exporter.model.registry import resolve
from pass_exporter.progress import Progress
from pass_exporter.quantize.rewrite import rewrite
from pass_exporter.quantize.run import quantize
from pass_exporter.quantize.weights import QuantizedModel
from pass_exporter.staging import staged_directory
from pass_exporter.threads import one_thread
from pass_exporter.trunk.graph import WeightParts, move_weights
from pass_exporter.trunk.trace import trace_trunk
from pass_runtime.backends.ort.session import HOW_TO_GET, library
from pass_runtime.bundle.manifest import DerivedTrunk, Graph, Manifest
from pass_runtime.errors import PassError

TRUNK_FILE = "trunk.onnx"


@dataclass(frozen=True)
class ExportReport:
    """The written bundle, and what its checks found. relative_error: of the trunk that is closest
    to its limit."""

    output: Path
    manifest: Manifest
    relative_error: float
    relative_error_limit: float
    decoding: Decoding


def export(config: ExportConfig, progress: Progress) -> ExportReport:
    """Write a bundle and check it. If either fails, raise PassError and leave no files behind."""
    text, calibration = config.verification_text(), config.calibration_text()
    if config.target == "cpu" and library() is None:
        raise PassError(f"--target cpu writes a bundle that needs the kernels: {HOW_TO_GET}")
    progress.phase("finding the model")
    source = resolve(config.model, config.revision)
    output = config.output or Path(f"{source.name}-pass{config.lookahead}")
    with staged_directory(output, force=config.force) as directory:
        progress.phase(f"loading {source.name}")
        loaded = load_model(source, config.dtype)
        drafts = lookahead_weights(config.lookahead_weights, config.lookahead, loaded.model)
        scores = None
        if text is not None:
            progress.phase("running torch on the text")
            scores = score_text(loaded, text)  # before rounding changes the weights in place
        codes = quantize(loaded, drafts, config.spec, calibration, progress)
        progress.phase("running torch for the check")
        cases = torch_cases(loaded.model, drafts)
        progress.phase("tracing the trunk")
        graph, parts = trace_trunk(loaded.model, drafts)
        trunk, derived = _write_trunks(
            directory, graph, parts, codes, loaded.geometry, config, progress
        )
        progress.phase("writing tails, tokenizer and manifest")
        vocab_size = loaded.geometry.vocab_size
        windows = write_tails(directory, config.lookahead, vocab_size, config.rule, drafts.head)
        write_tokenizer(directory, loaded.tokenizer)
        info = model_info(loaded, codes)
        manifest = write_manifest(directory, info, config.rule, drafts, trunk, derived, windows)
        # Frees the memory of the weights, which ONNX Runtime loads again for the checks.
        del loaded, drafts, codes, graph
        gc.collect()
        progress.phase("checking the trunks against torch")
        error, limit = check_trunks(directory, manifest, cases, limits_of(info))
        progress.phase("checking every plan against plain decoding")
        decoding = check_decoding(directory, scores, config.max_perplexity_ratio)
    return ExportReport(output, manifest, error, limit, decoding)


def _write_trunks(
    directory: Path,
    graph: ir.Model,
    parts: WeightParts,
    codes: QuantizedModel,
    sizes: Geometry,
    config: ExportConfig,
    progress: Progress,
) -> tuple[Graph, tuple[DerivedTrunk, ...]]:
    for_cpu = graph.clone() if config.dtype == "fp32" and config.weights != "fp8" else None
    rewrite(graph, parts, codes)
    trunk, is_portable = graph_info(graph, TRUNK_FILE), config.target == "any"
    if is_portable:
        with one_thread():
            move_weights(graph, directory / TRUNK_FILE, progress.phase("writing the trunk"))
        ir.save(graph, directory / TRUNK_FILE)
    if for_cpu is not None:
        progress.phase("writing the trunk for CPUs")
        shared = graph.graph if is_portable else None
        with one_thread():
            derived = write_trunk_for_cpu(for_cpu, directory, parts, codes, sizes, shared)
        return trunk, (derived,)
    if config.dtype == "fp16" and config.cuda_attention in (GROUP_QUERY, None):
        try:
            return trunk, write_trunks_for_cuda(graph, directory, sizes)
        except UnsupportedAttention:
            if config.cuda_attention is not None:
                raise PassError(
                    f"--cuda-attention {GROUP_QUERY} cannot compute this model's attention; leave "
                    "the option out"
                ) from None
    return trunk, ()
