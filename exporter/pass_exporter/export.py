"""Runs an export: loads the model, traces and writes its graphs, and checks the bundle."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from transformers import PreTrainedModel

from pass_exporter import bundle
from pass_exporter.checks.cases import torch_cases
from pass_exporter.checks.opens import check_opens
from pass_exporter.checks.perplexity import Quality, measure_quality, score_text
from pass_exporter.checks.verify import check_greedy, check_trunk, limits_of
from pass_exporter.checks.widen import runnable_on_cpu
from pass_exporter.config import GROUP_QUERY, ExportConfig
from pass_exporter.derived.attention import UnsupportedAttention
from pass_exporter.derived.cpu import write_trunk_for_cpu
from pass_exporter.derived.cuda import write_trunks_for_cuda
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import (
    BASELINE_NAME,
    LookaheadWeights,
    mean_embedding,
    read_lookahead,
)
from pass_exporter.model.registry import resolve
from pass_exporter.model.shipped import shipped_weights
from pass_exporter.progress import Progress
from pass_exporter.quantize.rewrite import rewrite
from pass_exporter.quantize.run import quantize
from pass_exporter.staging import staged_directory
from pass_exporter.threads import one_thread
from pass_exporter.trunk.graph import move_weights
from pass_exporter.trunk.trace import trace_trunk
from pass_runtime.backends.ort.kernels import HOW_TO_GET, library
from pass_runtime.bundle.manifest import DerivedTrunk, Manifest, ModelInfo
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import Difference

TRUNK_FILE = "trunk.onnx"


@dataclass(frozen=True)
class ExportReport:
    """The written bundle, and the results of its checks.

    output: the bundle's directory.
    relative_error, relative_error_limit: what `check_trunk` returned.
    greedy_tokens, near_tie: what `check_greedy` returned.
    quality: None without a text to verify on.
    """

    output: Path
    manifest: Manifest
    relative_error: float
    relative_error_limit: float
    greedy_tokens: int
    near_tie: Difference | None
    quality: Quality | None


def export(config: ExportConfig, progress: Progress) -> ExportReport:
    """Write a bundle and check it. If either fails, raise PassError and leave no files behind."""
    text, calibration = config.verification_text(), config.calibration_text()
    progress.phase("finding the model")
    if config.target == "cpu" and library() is None:
        raise PassError(f"--target cpu writes a bundle that needs the kernels: {HOW_TO_GET}")
    source = resolve(config.model, config.revision)
    output = config.output or Path(f"{source.name}-pass{config.lookahead}")
    with staged_directory(output, force=config.force) as directory:
        progress.phase(f"loading {source.name}")
        loaded = load_model(source, config.dtype)
        lookahead_weights = _lookahead_weights(
            config.lookahead_weights, config.lookahead, loaded.model
        )
        scores = None
        if text is not None:
            progress.phase("running torch on the text")
            # Before `quantize`, which changes the model's weights in place.
            scores = score_text(loaded.model, loaded.tokenizer, text)
        quantized = quantize(loaded, lookahead_weights, config.spec, source, calibration, progress)
        progress.phase("running torch for the check")
        cases = torch_cases(loaded.model, lookahead_weights)
        progress.phase("tracing the trunk")
        graph, weight_parts = trace_trunk(loaded.model, lookahead_weights)
        info = bundle.model_info(source, loaded, quantized)
        bundle.write_metadata(graph, info, config.lookahead, config.rule)
        has_cpu_trunk = config.dtype == "fp32" and config.weights != "fp8"
        for_cpu = graph.clone() if has_cpu_trunk else None
        rewrite(graph, weight_parts, quantized)
        path, windows = directory / TRUNK_FILE, loaded.geometry.windows
        trunk = bundle.graph_info(graph, TRUNK_FILE)
        is_portable = config.target == "any"
        if is_portable:
            with one_thread():
                move_weights(graph, path, progress.phase("writing the trunk"))
            ir.save(graph, path)
        derived: tuple[DerivedTrunk, ...] = ()
        if for_cpu is not None:
            progress.phase("writing the trunk for CPUs")
            with one_thread():
                derived = (
                    write_trunk_for_cpu(
                        for_cpu,
                        directory,
                        weight_parts,
                        quantized,
                        info.max_capacity,
                        windows,
                        graph.graph if is_portable else None,
                    ),
                )
        elif config.dtype == "fp16" and config.cuda_attention in (GROUP_QUERY, None):
            required = config.cuda_attention is not None
            derived = _trunks_for_cuda(graph, directory, info, windows, required=required)
        progress.phase("writing tails, tokenizer and manifest")
        plans = bundle.write_tails(
            directory, config.lookahead, info.vocab_size, config.rule, lookahead_weights.head
        )
        bundle.write_tokenizer(directory, loaded.tokenizer)
        manifest = bundle.write_manifest(
            directory, info, config.rule, lookahead_weights, trunk, derived, plans
        )
        # Frees the memory of the weights, which ONNX Runtime loads again for the checks.
        del loaded, graph, for_cpu, quantized
        gc.collect()
        quality, limits = None, limits_of(manifest.model)
        with runnable_on_cpu(directory, manifest) as runnable:
            progress.phase("checking the trunk against torch")
            error, limit = check_trunk(directory, runnable, cases, limits)
            progress.phase("checking every plan against plain decoding")
            greedy_tokens, near_tie = check_greedy(directory, runnable)
            if scores is not None:
                progress.phase("running the bundle on the text")
                quality = measure_quality(directory, runnable, scores)
                quality.check(config.max_perplexity_ratio)
            progress.phase("opening the bundle")
            check_opens(directory, runnable)
    return ExportReport(output, manifest, error, limit, greedy_tokens, near_tie, quality)


def _trunks_for_cuda(
    trunk: ir.Model,
    directory: Path,
    info: ModelInfo,
    windows: Sequence[int | None],
    *,
    required: bool,
) -> tuple[DerivedTrunk, ...]:
    """Write the trunks for ONNX Runtime on CUDA. If they cannot compute the model's attention,
    return (), or raise PassError if they are `required` by an option."""
    try:
        return write_trunks_for_cuda(trunk, directory, info.vocab_size, info.max_capacity, windows)
    except UnsupportedAttention:
        if not required:
            return ()
        reason = "cannot compute this model's attention; leave the option out"
        raise PassError(f"--cuda-attention {GROUP_QUERY} {reason}") from None


def _lookahead_weights(
    path: Path | None, lookahead: int, model: PreTrainedModel
) -> LookaheadWeights:
    """Return the look-ahead weights of the user's file `path`, or else those that are shipped for
    the model, or else the untrained baseline."""
    path = path or shipped_weights(model)
    if path is None or str(path) == BASELINE_NAME:
        return mean_embedding(model, lookahead)
    return read_lookahead(path, lookahead, model)
