"""pass_config.json as pydantic models; docs/bundle.md explains the fields."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pass_runtime.bundle import noise
from pass_runtime.bundle.sampling import Rule, Sampler
from pass_runtime.bundle.window import MAX_LOOKAHEAD, Window
from pass_runtime.errors import PassError

FILE_NAME = "pass_config.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "chat_template.tool_use.jinja"}
"""Conversations with tools use `tool_use` if it exists."""
ENGINES_DIRECTORY = "engines"
MANIFEST_VERSION = 5


class _Strict(BaseModel):
    """Types are not converted, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(f"{name!r} is not a plain file name, so it could point outside the bundle")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
"""Only engine sets have directories of their own."""

ModelDtype = Literal["float16", "bfloat16", "float32"]
WeightFormat = Literal["full", "int8", "int4", "fp8"]
"""The values of `pass-export --weights`."""


class Tensor(_Strict):
    """A graph's input or output. Sizes that differ between passes have names: batch (slots),
    width (window rows), logit_rows, lookahead_rows, capacity (tokens), positions (with noise),
    max_emitted (tokens a slot), processed_rows and touched (rows and tokens with changed
    logits)."""

    name: str
    dtype: Literal["int64", "int32", "bool", "float16", "bfloat16", "float32"]
    shape: tuple[int | str, ...] = Field(strict=False)


class Graph(_Strict):
    file: str
    inputs: tuple[Tensor, ...] = Field(strict=False)
    outputs: tuple[Tensor, ...] = Field(strict=False)


class DerivedTrunk(_Strict):
    """The trunk for ONNX Runtime on one device; on the CPU with nodes of runtime/kernels. batch:
    null is any. lookahead_rows: whether windows may have them; without, it computes the same
    bits in less time."""

    file: FileName
    device: Literal["cpu", "cuda"]
    batch: Literal[1] | None = None
    lookahead_rows: bool = True


class SchemeInfo(_Strict):
    """A weight [in,out] is code * scale, or (code - zero point) * scale. block_size: the inputs
    of an output with one scale; null is all. zero_points: codes are unsigned. offsets: the graph
    adds a block's offset times the sum of its inputs."""

    numbers: Literal["int8", "int4", "fp8"]
    block_size: int | None = Field(gt=0)
    zero_points: bool
    offsets: bool = False


class QuantizationInfo(_Strict):
    """Layers whose inputs do not divide into blocks are not quantized. grid: of decoder layers
    not in `layers`. lm_head: null is the model's dtype. calibration: the text for rounding."""

    grid: SchemeInfo
    lm_head: SchemeInfo | None
    layers: dict[str, SchemeInfo] = Field(default_factory=dict)
    calibration: str | None = None

    @property
    def zero_points(self) -> bool:
        schemes = (self.grid, self.lm_head, *self.layers.values())
        return any(scheme is not None and scheme.zero_points for scheme in schemes)


class ModelInfo(_Strict):
    """source: such as `file:x.gguf`. family: transformers' `model_type`. dtype: of activations,
    cache and embeddings. weights: "full" is dtype. max_capacity: in tokens. eos_token_ids: end a
    text or turn. special_tokens: by a template's variable, such as `bos_token`."""

    name: str
    source: str
    family: str
    dtype: ModelDtype
    weights: WeightFormat
    quantization: QuantizationInfo | None = None
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    max_capacity: int = Field(ge=4, multiple_of=4)
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...] = Field(strict=False)
    special_tokens: dict[str, str]


def _rounded(share: float) -> float:
    return round(share, 6)  # Python and C++ print so few digits alike, see `digest_of`.


Share = Annotated[float, Field(ge=0, le=1), AfterValidator(_rounded)]
Shares = Annotated[tuple[Share, ...], Field(strict=False)]


class HeadInfo(_Strict):
    """The draft head. rank: of the token table. width: of the state. blocks: it scores so many
    blocks (`NoiseInfo`), the likeliest ones."""

    rank: int = Field(gt=0)
    width: int = Field(gt=0)
    blocks: int = Field(gt=0)


class LookaheadInfo(_Strict):
    """length: L. adapter_rank: 0 without an adapter. acceptance_per_position: the share of
    greedy passes that accepted drafts 1 to i; may be empty. acceptance_per_position_sampled: at
    temperature 0.8. head: null if drafts come from the trunk's logits."""

    length: int = Field(ge=1, le=MAX_LOOKAHEAD)
    trained: bool
    source: str
    adapter_rank: int = Field(ge=0)
    acceptance_per_position: Shares
    acceptance_per_position_sampled: Shares
    head: HeadInfo | None

    @property
    def needs_lookahead_rows(self) -> bool:
        return self.adapter_rank > 0 or self.head is not None


Integers = Annotated[tuple[int, ...], Field(strict=False)]


class WindowConstants(_Strict):
    """Constant inputs, for runtimes in other languages: row_position [Q], window_mask [Q,Q]
    (rows of 0s and 1s), logit_rows [R], lookahead_rows [A], and for fused tails lookahead_ids
    [A] and draft_rows [D+1,L']. Q: window rows, A: look-ahead rows, D: drafts, L': next drafts."""

    row_position: Integers
    window_mask: tuple[str, ...] = Field(strict=False)
    logit_rows: Integers
    lookahead_rows: Integers
    draft_rows: tuple[Integers, ...] = Field(strict=False)
    lookahead_ids: Integers

    @classmethod
    def from_window(cls, window: Window, vocab_size: int) -> WindowConstants:
        draft_rows = window.draft_rows.tolist() if window.is_fused else []
        return cls(
            row_position=tuple(window.row_position.tolist()),
            window_mask=tuple(
                "".join("01"[seen] for seen in row) for row in window.window_mask.tolist()
            ),
            logit_rows=tuple(window.logit_rows.tolist()),
            lookahead_rows=tuple(window.lookahead_rows.tolist()),
            draft_rows=tuple(map(tuple, draft_rows)),
            lookahead_ids=tuple(window.lookahead_ids(vocab_size).tolist()),
        )


class WindowInfo(_Strict):
    """groups: look-ahead rows after the root and each draft. next: the window that the tails lay
    out."""

    name: str
    drafts: int = Field(ge=0)
    groups: tuple[int, ...] = Field(strict=False)
    next: str
    constants: WindowConstants
    tails: dict[Sampler, Graph]


class NoiseInfo(_Strict):
    """members: token ids in a block. row: entries in a table's row. bits: random bits in an
    entry."""

    scheme: str
    members: int
    row: int
    bits: int

    @classmethod
    def of_this_version(cls) -> NoiseInfo:
        return cls(
            scheme=noise.SCHEME, members=noise.BLOCK_SIZE, row=noise.ROW_SIZE, bits=noise.BITS
        )


class FileInfo(_Strict):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Profile(_Strict):
    """By symbolic size, (min, opt, max): an engine is tuned for opt."""

    sizes: dict[str, Annotated[tuple[int, int, int], Field(strict=False)]]

    def admits(self, sizes: Mapping[str, int]) -> bool:
        return all(
            name in sizes and low <= sizes[name] <= high
            for name, (low, _, high) in self.sizes.items()
        )


class EngineFile(_Strict):
    """The engine made of `graph`. aliases: output -> input with the same memory."""

    graph: FileName
    file: FileName
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)
    profiles: tuple[Profile, ...] = Field(strict=False)
    aliases: dict[str, str]


class EngineSet(_Strict):
    """What one `pass-export build` made. version: the library's. bundle:
    `Manifest.content_hash`. targets: such as `sm89`. lookahead: the only L, full groups.
    capacities: entries that a pass may read, rising; the last is the cache's S. prefill_widths:
    falling, without 1."""

    directory: FileName
    library: FileName
    version: str
    targets: tuple[str, ...] = Field(strict=False)
    bundle: str
    lookahead: int = Field(ge=1, le=MAX_LOOKAHEAD)
    max_batch_size: int = Field(ge=1)
    capacities: tuple[Annotated[int, Field(ge=1)], ...] = Field(strict=False, min_length=1)
    prefill_widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(strict=False)
    engines: tuple[EngineFile, ...] = Field(strict=False)

    def path(self, bundle: Path) -> Path:
        return bundle / ENGINES_DIRECTORY / self.directory


class Manifest(_Strict):
    """What a runtime in any language needs. trunk: if not in `files`, there is only `derived`.
    logprobs: runs after any tail. processors: runs before any tail. feeds: output -> the input
    of another name that reads it next. digest: `digest_of` the rest."""

    format: Literal["pass-bundle"]
    version: Literal[5]
    model: ModelInfo
    lookahead: LookaheadInfo
    rule: Rule
    trunk: Graph
    derived: tuple[DerivedTrunk, ...] = Field(strict=False)
    windows: tuple[WindowInfo, ...] = Field(strict=False)
    logprobs: Graph
    processors: Graph
    feeds: dict[str, str]
    noise: NoiseInfo
    files: dict[FileName, FileInfo]
    tools: dict[str, str]
    engines: tuple[EngineSet, ...] = Field(strict=False)
    digest: str

    def text(self) -> str:
        document = self.model_dump(mode="json")
        document["digest"] = digest_of(document)
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    @property
    def graphs(self) -> Sequence[Graph]:
        """Without derived trunks."""
        tails = (tail for window in self.windows for tail in window.tails.values())
        return (self.trunk, *tails, self.logprobs, self.processors)

    @property
    def content_hash(self) -> str:
        """The SHA-256 of graphs' and weights' names and hashes; engine sets refer to it."""
        lines = [
            f"{name} {info.sha256}\n"
            for name, info in sorted(self.files.items())
            if name.endswith((".onnx", ".data"))
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def derived_trunk(
        self, device: str, slots: int, *, lookahead_rows: bool = True
    ) -> DerivedTrunk | None:
        """Return None for `trunk`. One trunk runs all batch sizes, so that a text does not
        depend on the batch."""
        fitting = [
            each for each in self.derived if each.device == device and each.batch in (slots, None)
        ]
        if lookahead_rows:
            fitting = [each for each in fitting if each.lookahead_rows]
        # The more special trunk is faster.
        return max(
            fitting, key=lambda each: (each.batch == slots, not each.lookahead_rows), default=None
        )

    def trunk_file(self, device: str, slots: int = 1, *, lookahead_rows: bool = True) -> str:
        derived = self.derived_trunk(device, slots, lookahead_rows=lookahead_rows)
        return self.trunk.file if derived is None else derived.file

    @property
    def layouts(self) -> Sequence[Window]:
        return [Window(each.name, each.drafts, each.groups) for each in self.windows]

    @property
    def verifying(self) -> tuple[Window, ...]:
        """The windows that only verify drafts, by rising numbers."""
        windows = [window for window in self.layouts if window.drafts and not window.groups]
        return tuple(sorted(windows, key=lambda window: window.drafts))

    def window(self, name: str) -> WindowInfo:
        """Raises PassError if the bundle has no such window."""
        for window in self.windows:
            if window.name == name:
                return window
        names = ", ".join(window.name for window in self.windows)
        raise PassError(f"the bundle has no window {name!r}; it has {names}")


def digest_of(document: Mapping[str, Any]) -> str:
    """The SHA-256 of canonical JSON (sorted keys, no spaces, UTF-8) without `engines`, which
    come later, and `digest`."""
    content = {key: value for key, value in document.items() if key not in ("engines", "digest")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
