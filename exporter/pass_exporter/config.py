"""The options of an export and of an engine build, checked when they are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from pass_exporter.quantize.spec import SPECS, QuantSpec
from pass_runtime.backends.trt.library import find_library
from pass_runtime.bundle.option import option, options_class
from pass_runtime.bundle.sampling import Rule
from pass_runtime.bundle.window import MAX_LOOKAHEAD
from pass_runtime.errors import PassError
from pass_runtime.files import read_text

Dtype = Literal["fp32", "fp16", "bf16"]
MAX_BATCH_SIZE = 256
WEIGHTS = tuple(SPECS)
GROUP_QUERY = "group-query"
REPLACED_WEIGHTS = {
    "w8a8": "int8 or int4 (on CPUs both round activations, and need no ranges of them)",
    "source": "int4 or int8 (both keep the codes of a .gguf file)",
}
"""Values of --weights that once existed, and what to choose in their place."""
NO_CALIBRATION = "none"


@options_class
class EngineConfig:
    """Options of an engine build. Raises PassError if one is out of range.

    engine: a name in `backends.trt.library.LIBRARIES`. capacity: of the KV cache in tokens, in
    place of max_seq_len, prompt and output. prefill_widths: of prompt chunks; () lets the build
    choose.
    """

    label_prefix: ClassVar[str] = "--"
    engine: str
    max_batch_size: int = option(1, "Most sequences per pass.", ge=1, le=MAX_BATCH_SIZE)
    max_seq_len: int | None = option(
        None, "Prompt + output tokens.", if_none="4096, if the model allows"
    )
    capacity: int | None = option(None, "KV cache entries per sequence, instead of --max-seq-len.")
    prefill_widths: tuple[int, ...] = ()
    workspace: int | None = option(
        None,
        "Scratch memory of kernels.",
        if_none="all memory",
        metavar="MIB",
        ge=1,
        allowed="at least 1 MiB",
    )
    timing_cache: Path | None = option(None, "File to read and update, for faster rebuilds.")
    compute_capability: tuple[str, ...] = option(
        (), "Target, such as 8.9. Without any: this machine's GPU."
    )
    device_memory: float | None = option(
        None,
        "Memory of the target.",
        if_none="this machine's",
        metavar="GIB",
        gt=0,
        allowed="above 0 GiB",
    )
    verify: bool = option(False, "Compare the engines' logits with ONNX Runtime's (needs the GPU).")
    force: bool = option(False, "Rebuild existing engines.")

    def __post_init__(self) -> None:
        find_library(self.engine)


@options_class
class ExportConfig:
    """Options of an export. Raises PassError if they are out of range or do not fit together.

    model: registry name, hub id, local directory or .gguf file. zero_points: one for every block of
    int4 or int8 weights, and offsets of a .gguf file's codes; None means True for int4 in fp32, and
    offsets in fp32. rule: with "match" the text is that of plain decoding; with "rejection", the
    paper's rule, only its distribution is.
    """

    label_prefix: ClassVar[str] = "--"
    model: str
    lookahead: int = option(4, f"L, drafts per pass, 1 to {MAX_LOOKAHEAD}.", ge=1, le=MAX_LOOKAHEAD)
    lookahead_weights: Path | None = option(
        None,
        "File that pass-train wrote, or `mean` (untrained).",
        if_none="the model's shipped weights, else mean",
    )
    output: Path | None = option(
        None, "Bundle directory.", flag="-o --output", if_none="<model>-pass<L>"
    )
    dtype: Dtype = option(
        "fp32",
        "Dtype of weights and KV cache.",
        if_none="fp32; with --engine the model's own",
    )
    weights: str = option(
        "full",
        "Format of weights. `full` keeps --dtype; int4 and int8 keep the codes of a .gguf file.",
        metavar=f"[{'|'.join(WEIGHTS)}]",
    )
    zero_points: bool | None = None
    calibrate: Path | None = option(
        None,
        "For int4: a text file to calibrate on; `none`: round to the nearest codes, for large "
        "models on few cores.",
        if_none="the model writes some text",
        metavar="TEXT",
    )
    rule: Rule = option(
        "match",
        "Accept a draft if it is the model's own sample (match), or by speculative sampling "
        "(rejection).",
    )
    verify: Path | None = option(None, "Text file to measure perplexity and greedy agreement on.")
    max_perplexity_ratio: float = option(
        1.25,
        "With --verify: fail if the perplexity is more than this times the full-precision model's.",
        gt=0,
    )
    force: bool = option(False, "Replace an existing bundle.")
    target: Literal["any", "cpu"] = option(
        "any",
        "`cpu` leaves out trunk.onnx and its weights, which GPUs, engine builds and CPUs without "
        "the toolkit's kernels need; in fp32 only.",
    )
    revision: str | None = None
    cuda_attention: Literal["attention", "group-query"] | None = option(
        None,
        "For ONNX Runtime on CUDA, one sequence: `group-query` adds trunks of few nodes with "
        "GroupQueryAttention, in fp16 only; `attention` adds none.",
        if_none="group-query in fp16, if the model's attention allows",
    )

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            instead = REPLACED_WEIGHTS.get(self.weights, f"one of {', '.join(WEIGHTS)}")
            raise PassError(f"there is no --weights {self.weights}: choose {instead}")
        if self.cuda_attention == GROUP_QUERY and self.dtype != "fp16":
            raise PassError(
                f"--cuda-attention {GROUP_QUERY} is for --dtype fp16: it has no kernel for others"
            )
        if self.target == "cpu" and (self.dtype != "fp32" or self.weights == "fp8"):
            raise PassError("--target cpu is for --dtype fp32, and --weights full, int8 and int4")
        if self.zero_points and self.weights not in ("int4", "int8"):
            raise PassError(f"--zero-points is for --weights int4 and int8, not {self.weights}")
        if self.calibrate is not None and not SPECS[self.weights].gptq:
            raise PassError(f"--calibrate is for --weights int4: {self.weights} needs no text")
        if self.verify is not None and self.dtype == "bf16":
            raise PassError(
                "--verify runs the bundle on the CPU, which has no kernels for bf16: leave it out, "
                "or choose another --dtype"
            )

    @property
    def spec(self) -> QuantSpec:
        spec, in_fp32 = SPECS[self.weights], self.dtype == "fp32"
        spec = replace(
            spec,
            gptq=spec.gptq and not self._rounds_to_nearest,
            keeps_offsets=in_fp32 if self.zero_points is None else self.zero_points,
        )
        default = self.weights == "int4" and in_fp32
        zero_points = default if self.zero_points is None else self.zero_points
        return spec.with_zero_points() if zero_points else spec

    @property
    def _rounds_to_nearest(self) -> bool:
        return self.calibrate == Path(NO_CALIBRATION)

    def verification_text(self) -> str | None:
        """Return the text of --verify, or None. Raises PassError if it is unreadable or empty."""
        return None if self.verify is None else _read_text(self.verify, "--verify")

    def calibration_text(self) -> str | None:
        """Return the text of --calibrate, or None. Raises PassError if it is unreadable or
        empty."""
        if self.calibrate is None or self._rounds_to_nearest:
            return None
        return _read_text(self.calibrate, "--calibrate")


def _read_text(path: Path, flag: str) -> str:
    text = read_text(path)
    if not text.strip():
        raise PassError(f"{path} is empty; {flag} needs text to measure on")
    return text
