"""Writes the files of a bundle besides its trunks: tails, tokenizer and manifest."""

from __future__ import annotations

import platform
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx_ir as ir
import torch
from transformers import PreTrainedTokenizerFast

from pass_exporter.model.draft_head import DraftHead
from pass_exporter.model.load import LoadedModel
from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.quantize.spec import WeightScheme
from pass_exporter.quantize.weights import QuantizedModel, layer_name
from pass_exporter.tails.match import build_tail
from pass_exporter.tails.outputs import build_logprobs, build_processors
from pass_exporter.tails.rejection import build_rejection_tail
from pass_runtime.backends.ort import onnxruntime
from pass_runtime.bundle import head as heads
from pass_runtime.bundle import noise
from pass_runtime.bundle.bindings import fed_input
from pass_runtime.bundle.integrity import file_info
from pass_runtime.bundle.manifest import (
    CHAT_TEMPLATE_FILES,
    FILE_NAME,
    TOKENIZER_FILE,
    DerivedTrunk,
    Graph,
    HeadInfo,
    LookaheadInfo,
    Manifest,
    ModelDtype,
    ModelInfo,
    NoiseInfo,
    QuantizationInfo,
    SchemeInfo,
    Tensor,
    WindowConstants,
    WindowInfo,
)
from pass_runtime.bundle.sampling import SAMPLERS, Rule, Sampler
from pass_runtime.bundle.window import COPY_DRAFTS, bundle_windows
from pass_runtime.text.templates import load_chat_template

MODEL_DTYPES: dict[torch.dtype, ModelDtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
RECORDED_TOOLS = ("pass-toolkit", "torch", "transformers", "onnx-ir", "tokenizers")
"""Their versions stand in the manifest."""


def write_tails(
    directory: Path,
    lookahead: int,
    vocab_size: int,
    rule: Rule,
    draft_head: DraftHead | None = None,
) -> tuple[WindowInfo, ...]:
    """Write tail.<window>.<sampler>.onnx for every window, and the files of the noise tables and
    the draft head's arrays, which tails share. Return the windows' entries in the manifest."""
    locations = _write_noise_tables(directory, vocab_size)
    arrays = None
    if draft_head is not None:
        arrays, head_locations = _write_head(directory, draft_head)
        locations |= head_locations
    infos = []
    # By rejection, each draft row takes V probabilities.
    for window in bundle_windows(lookahead, COPY_DRAFTS if rule == "match" else ()):
        tails: dict[Sampler, Graph] = {}
        for sampler in SAMPLERS:
            # By either rule, plain decoding (one row) and greedy decoding write the same tokens.
            by_rejection = rule == "rejection" and sampler != "greedy" and window.width > 1
            build = build_rejection_tail if by_rejection else build_tail
            model = build(window, sampler, vocab_size, arrays)
            _use_external_data(model, directory, locations)
            tails[sampler] = write_graph(model, directory / f"tail.{window.name}.{sampler}.onnx")
        infos.append(
            WindowInfo(
                name=window.name,
                drafts=window.drafts,
                groups=window.groups,
                next=window.next.name,
                constants=WindowConstants.from_window(window, vocab_size),
                tails=tails,
            )
        )
    return tuple(infos)


def _write_noise_tables(directory: Path, vocab_size: int) -> dict[str, tuple[str, int]]:
    """Return the file and the offset in bytes of each table, by its name in the tails."""
    locations, offset = {}, 0
    with (directory / noise.TABLES_FILE).open("wb") as file:
        for name, table in zip(noise.TABLES, noise.noise_tables(vocab_size), strict=True):
            locations[name] = (noise.TABLES_FILE, offset)
            offset += file.write(table.astype("<i4").tobytes())
    return locations


def _write_head(
    directory: Path, draft_head: DraftHead
) -> tuple[heads.HeadArrays, dict[str, tuple[str, int]]]:
    arrays = draft_head.arrays()
    vocab_size, hidden_size = len(arrays.table), len(arrays.hidden)
    regions = heads.head_layout(vocab_size, hidden_size, draft_head.rank, draft_head.width)
    with (directory / heads.HEAD_FILE).open("wb") as file:
        for name, region in regions.items():
            file.seek(region.offset)
            file.write(getattr(arrays, name).astype(region.dtype).tobytes())
    return arrays, {
        f"{heads.HEAD_PREFIX}{name}": (heads.HEAD_FILE, region.offset)
        for name, region in regions.items()
    }


def write_graph(model: ir.Model, path: Path) -> Graph:
    ir.save(model, path)
    return graph_info(model, path.name)


def _use_external_data(
    model: ir.Model, directory: Path, locations: Mapping[str, tuple[str, int]]
) -> None:
    for name, (file, offset) in locations.items():
        if name in model.graph.initializers:
            value = model.graph.initializers[name]
            tensor = value.const_value
            assert tensor is not None
            size, dtype, shape = tensor.nbytes, tensor.dtype, ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                file, offset, size, dtype, shape=shape, name=name, base_dir=directory
            )


def graph_info(model: ir.Model, file: str) -> Graph:
    """Return the manifest entry of a graph."""
    return Graph(
        file=file,
        inputs=tuple(_tensor(value) for value in model.graph.inputs),
        outputs=tuple(_tensor(value) for value in model.graph.outputs),
    )


def _tensor(value: ir.Value) -> Tensor:
    assert value.name is not None and value.dtype is not None and value.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return Tensor.model_validate(
        {"name": value.name, "dtype": value.dtype.numpy().name, "shape": shape}
    )


def write_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write tokenizer.json and the chat templates. Raises PassError if one does not compile."""
    tokenizer.backend_tokenizer.save(str(directory / TOKENIZER_FILE))
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    for name, file in CHAT_TEMPLATE_FILES.items():
        if name in templates:
            (directory / file).write_text(templates[name], encoding="utf-8")
    if unused := sorted(set(templates) - set(CHAT_TEMPLATE_FILES)):
        used = " and ".join(CHAT_TEMPLATE_FILES)
        warnings.warn(
            f"left out the chat templates {', '.join(unused)}: only {used} are used", stacklevel=2
        )
    if (template := load_chat_template(directory, tokenizer.special_tokens_map)) is not None:
        template.check()


def write_manifest(
    directory: Path,
    model: ModelInfo,
    rule: Rule,
    lookahead_weights: LookaheadWeights,
    trunk: Graph,
    derived: tuple[DerivedTrunk, ...],
    windows: tuple[WindowInfo, ...],
) -> Manifest:
    """Write tail.logprobs.onnx and tail.processors.onnx, and at last pass_config.json, with the
    hashes of all other files."""
    vocab_size = model.vocab_size
    logprobs = write_graph(build_logprobs(vocab_size), directory / "tail.logprobs.onnx")
    processors = write_graph(build_processors(vocab_size), directory / "tail.processors.onnx")
    adapter, head = lookahead_weights.adapter, lookahead_weights.head
    length, record = lookahead_weights.lookahead, lookahead_weights.record
    manifest = Manifest(
        format="pass-bundle",
        version=5,
        model=model,
        rule=rule,
        lookahead=LookaheadInfo(
            length=length,
            trained=lookahead_weights.trained,
            source=lookahead_weights.source,
            adapter_rank=adapter.rank if adapter else 0,
            acceptance_per_position=record.acceptance[:length] if record else (),
            acceptance_per_position_sampled=record.acceptance_sampled[:length] if record else (),
            head=None
            if head is None
            else HeadInfo(rank=head.rank, width=head.width, blocks=heads.CANDIDATE_BLOCKS),
        ),
        trunk=trunk,
        derived=derived,
        windows=windows,
        logprobs=logprobs,
        processors=processors,
        feeds=feeds(trunk, windows),
        noise=NoiseInfo.of_this_version(),
        files={path.name: file_info(path) for path in sorted(directory.iterdir())},
        tools=_tools(),
        engines=(),
        digest="",
    )
    (directory / FILE_NAME).write_text(manifest.text(), encoding="utf-8")
    return manifest


def feeds(trunk: Graph, windows: Sequence[WindowInfo]) -> dict[str, str]:
    """Map the name of each output to that of the next graph's input, which has the same memory."""
    graphs = [trunk, *(tail for window in windows for tail in window.tails.values())]
    outputs = dict.fromkeys(tensor.name for graph in graphs for tensor in graph.outputs)
    return {output: fed for output in outputs if (fed := fed_input(output)) is not None}


def _tools() -> dict[str, str]:
    """onnxruntime itself is asked, because on GPU machines its package has another name."""
    versions = {"python": platform.python_version(), "onnxruntime": onnxruntime.__version__}
    for name in RECORDED_TOOLS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def model_info(loaded: LoadedModel, quantized: QuantizedModel) -> ModelInfo:
    """Return the manifest's description of the model."""
    sizes = asdict(loaded.geometry)
    del sizes["windows"]
    return ModelInfo(
        name=loaded.source.name,
        source=loaded.source.description,
        family=loaded.model.config.model_type,
        dtype=MODEL_DTYPES[loaded.model.dtype],
        weights=quantized.spec.name,
        quantization=_quantization(quantized),
        bos_token_id=loaded.tokenizer.bos_token_id,
        eos_token_ids=loaded.eos_token_ids,
        special_tokens=dict(loaded.tokenizer.special_tokens_map),
        **sizes,
    )


def _quantization(quantized: QuantizedModel) -> QuantizationInfo | None:
    """`grid` is the scheme that most decoder layers have; `layers` lists the others' schemes."""
    spec = quantized.spec
    if spec.scheme is None:
        return None
    schemes = {
        layer_name(name): _scheme_info(packed.scheme, packed.offsets is not None)
        for name, packed in quantized.weights.items()
    }
    lm_head = schemes.pop("lm_head", None if spec.lm_head is None else _scheme_info(spec.lm_head))
    # The name is None for an adapter's matrices, which the manifest does not list.
    decoder = {name: scheme for name, scheme in schemes.items() if name is not None}
    usual = Counter(decoder.values()).most_common(1)[0][0] if decoder else _scheme_info(spec.scheme)
    return QuantizationInfo(
        grid=usual,
        lm_head=lm_head,
        layers={name: scheme for name, scheme in decoder.items() if scheme != usual},
        calibration=quantized.calibration,
    )


def _scheme_info(scheme: WeightScheme, offsets: bool = False) -> SchemeInfo:
    assert scheme.code_type != "int5"  # see WeightScheme.stored
    return SchemeInfo(
        numbers=scheme.code_type,
        block_size=scheme.block_size,
        zero_points=scheme.zero_points,
        offsets=offsets,
    )
