"""The manifest of a bundle, pass_config.json, as pydantic models: what each file of it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pass_runtime.bundle.plan import MAX_LOOKAHEAD, Plan, bundle_plans
from pass_runtime.bundle.sampling import Rule, Sampler
from pass_runtime.errors import PassError

FILE_NAME = "pass_config.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "chat_template.tool_use.jinja"}
"""The files of chat templates, by name. Conversations with tools use `tool_use` if it exists."""
ENGINES_DIRECTORY = "engines"
"""The directory of engine sets in a bundle."""
MANIFEST_VERSION = 4


class _Strict(BaseModel):
    """A part of the manifest: types are not converted, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(f"{name!r} is not a plain file name, so it could point outside the bundle")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
"""The name of a file in the bundle's directory. Only engine sets have directories of their own."""

ModelDtype = Literal["float16", "bfloat16", "float32"]
WeightFormat = Literal["full", "int8", "int4", "fp8"]
"""The values of `pass-export --weights`."""


class Tensor(_Strict):
    """An input or output of a graph.

    Its shape has numbers, and names for the sizes that differ between passes: batch (slots), width
    (window rows), logit_rows, lookahead_rows, capacity (KV capacity in tokens), positions (for
    which there are noise offsets), max_emitted (the most tokens that a pass emits in a slot),
    processed_rows and touched (rows and tokens whose logits the logits processors change).
    """

    name: str
    dtype: Literal["int64", "int32", "bool", "float16", "bfloat16", "float32"]
    shape: tuple[int | str, ...] = Field(strict=False)


class Graph(_Strict):
    """An ONNX graph of the bundle, and its tensors."""

    file: str
    inputs: tuple[Tensor, ...] = Field(strict=False)
    outputs: tuple[Tensor, ...] = Field(strict=False)


class DerivedTrunk(_Strict):
    """The trunk rewritten for ONNX Runtime on one `device`: it has other nodes than `trunk.onnx`,
    and the same inputs and outputs. On the CPU its nodes are those of our own library
    (runtime/kernels), and its weights are packed for them, in a file of its own.

    batch: the only batch size that it runs; null is any. lookahead_rows: whether its windows may
    have look-ahead rows. A trunk without them computes the same bits as the one with them, in less
    time.
    """

    file: FileName
    device: Literal["cpu", "cuda"]
    batch: Literal[1] | None = None
    lookahead_rows: bool = True


class SchemeInfo(_Strict):
    """How the numbers of a weight [in,out] are stored: as code * scale, or as (code - zero point) *
    scale.

    numbers: the type of the codes. block_size: how many inputs of an output make a block, which has
    one scale; null puts all inputs into one. zero_points: whether blocks have zero points; codes
    are then unsigned. offsets: whether blocks have offsets, added to all values of the block: the
    graph adds offset times the sum of the block's inputs to the layer's output.
    """

    numbers: Literal["int8", "int4", "fp8"]
    block_size: int | None = Field(gt=0)
    zero_points: bool
    offsets: bool = False


class QuantizationInfo(_Strict):
    """How linear layers are quantized. Layers whose inputs do not divide into blocks are not.

    grid: the default scheme, for decoder layers that are not in `layers`. lm_head: the LM head's
    scheme; null if it has the model's dtype. layers: by name, other decoder layers' schemes.
    calibration: the text with which weights were rounded; null for none.
    """

    grid: SchemeInfo
    lm_head: SchemeInfo | None
    layers: dict[str, SchemeInfo] = Field(default_factory=dict)
    calibration: str | None = None

    @property
    def zero_points(self) -> bool:
        """Whether any layer has zero points."""
        schemes = (self.grid, self.lm_head, *self.layers.values())
        return any(scheme is not None and scheme.zero_points for scheme in schemes)


class ModelInfo(_Strict):
    """The model's origin, formats, sizes and special tokens.

    source: where the model came from, such as `file:x.gguf`. family: transformers' `model_type`.
    dtype: the type of activations, cache and embeddings. weights: the format of the linear layers;
    "full" is dtype. quantization: how the linear layers are quantized; null for "full" and in older
    bundles. max_capacity: the longest sequence in tokens for which the model has positions.
    bos_token_id: the start token. eos_token_ids: all tokens at which a text or a turn ends.
    special_tokens: the texts of special tokens by the variable that chat templates read, such as
    `bos_token`; null in older bundles.
    """

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
    special_tokens: dict[str, str] | None = None


Shares = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(strict=False)]


class HeadInfo(_Strict):
    """The draft head of the bundle's tails (`pass_runtime.bundle.head`).

    rank: the size of a token's row in the head's table. width: the size of the head's state.
    blocks: the head scores the tokens of this many blocks (`NoiseInfo`), the likeliest ones.
    """

    rank: int = Field(gt=0)
    width: int = Field(gt=0)
    blocks: int = Field(gt=0)


class LookaheadInfo(_Strict):
    """The look-ahead embeddings and what was trained with them.

    length: L. source: where the embeddings came from. adapter_rank: the rank of the adapter on
    look-ahead rows; 0 if there is none. acceptance_per_position: for i = 1, 2, ..., in which share
    of passes drafts 1 to i were all accepted with greedy sampling, as the weights' metadata states
    it; may be empty. acceptance_per_position_sampled: the same shares at temperature 0.8. head: the
    draft head; null if drafts are sampled from the trunk's logits.
    """

    length: int = Field(ge=1, le=MAX_LOOKAHEAD)
    trained: bool
    source: str
    adapter_rank: int = Field(ge=0)
    acceptance_per_position: Shares
    acceptance_per_position_sampled: Shares = ()
    head: HeadInfo | None = None

    @property
    def needs_lookahead_rows(self) -> bool:
        """Whether the trunk must know which of a window's rows are look-ahead rows."""
        return self.adapter_rank > 0 or self.head is not None


Integers = Annotated[tuple[int, ...], Field(strict=False)]


class PlanConstants(_Strict):
    """The inputs of a plan's graphs that are the same in every pass, for runtimes in other
    languages. `pass_runtime.bundle.plan.Plan` defines them.

    The trunk reads row_position [Q], window_mask [Q,Q] (a string of 0s and 1s for every row),
    logit_rows [R] and lookahead_rows [A]. The tail of a fused plan or a tree reads lookahead_ids
    [A] and draft_rows [D+1,L'], which is empty for other plans. Q is the number of window rows, R
    of rows with logits, A of look-ahead rows, D of drafts; L' is the depth of the next drafts.
    """

    row_position: Integers
    window_mask: tuple[str, ...] = Field(strict=False)
    logit_rows: Integers
    lookahead_rows: Integers
    draft_rows: tuple[Integers, ...] = Field(strict=False)
    lookahead_ids: Integers

    @classmethod
    def from_plan(cls, plan: Plan, vocab_size: int) -> PlanConstants:
        """Return the constants of `plan` in the form in which a manifest lists them."""
        draft_rows = plan.draft_rows.tolist() if plan.is_fused else []
        return cls(
            row_position=tuple(plan.row_position.tolist()),
            window_mask=tuple(
                "".join("01"[seen] for seen in row) for row in plan.window_mask.tolist()
            ),
            logit_rows=tuple(plan.logit_rows.tolist()),
            lookahead_rows=tuple(plan.lookahead_rows.tolist()),
            draft_rows=tuple(map(tuple, draft_rows)),
            lookahead_ids=tuple(plan.lookahead_ids(vocab_size).tolist()),
        )


class PlanInfo(_Strict):
    """A plan (`pass_runtime.bundle.plan`) and its tail graphs.

    groups: how many look-ahead rows follow the root, and then each draft. parents: the row that
    each draft of a tree follows; empty if the drafts are a chain. next: the name of the plan whose
    window the tails lay out. tails: by sampler, the tail graph.
    """

    name: str
    drafts: int = Field(ge=0)
    groups: tuple[int, ...] = Field(strict=False)
    parents: tuple[int, ...] = Field(default=(), strict=False)
    next: str
    constants: PlanConstants
    tails: dict[Sampler, Graph]


class NoiseInfo(_Strict):
    """The random tables of the sampling tails. scheme: the name of the method by which
    `pass_runtime.bundle.noise` makes and reads them. members: how many token ids a block has. row:
    how many entries a row of a table has. bits: how many random bits an entry has."""

    scheme: str
    members: int
    row: int
    bits: int


class FileInfo(_Strict):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Profile(_Strict):
    """By symbolic size, (min, opt, max): an engine runs from min to max, and is tuned for opt."""

    sizes: dict[str, Annotated[tuple[int, int, int], Field(strict=False)]]

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether `sizes` has every size of this profile, and each is in its range."""
        return all(
            name in sizes and low <= sizes[name] <= high
            for name, (low, _, high) in self.sizes.items()
        )


class EngineFile(_Strict):
    """The engine made of the file `graph`. aliases: by output, the input that shares its memory."""

    graph: FileName
    file: FileName
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)
    profiles: tuple[Profile, ...] = Field(strict=False)
    aliases: dict[str, str]


class EngineSet(_Strict):
    """What one `pass-export build` made, in engines/<directory>.

    library, version: the library that built the engines. bundle: `Manifest.content_hash` of the
    bundle from which they were built. targets: the GPUs' compute capabilities, such as `sm89`.
    lookahead: the only L whose plans have engines, with full groups. capacities: how many cache
    entries a pass may read, in rising order; the last is S, the capacity of the cache.
    prefill_widths: rows of prompt chunks, in falling order, without 1, which is always possible.
    """

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
    """All that a runtime in any language needs to drive the bundle's graphs (docs/bundle.md).

    rule: how drafts are accepted. trunk: the portable trunk; without an entry in `files`, the
    bundle has `derived` alone. derived: trunks rewritten for one device each. logprobs: the
    graph of the emitted tokens' log-probabilities, which can run after any tail. processors: the
    graph of constraints, penalties and biases, which can run before any tail; null in older
    bundles. feeds: by output, the input as which the next pass reads it, if it has another name.
    tools: the versions of the software that made the bundle, by name.
    """

    format: Literal["pass-bundle"]
    version: Literal[4]
    model: ModelInfo
    lookahead: LookaheadInfo
    rule: Rule
    trunk: Graph
    derived: tuple[DerivedTrunk, ...] = Field(strict=False)
    plans: tuple[PlanInfo, ...] = Field(strict=False)
    logprobs: Graph
    processors: Graph | None = None
    feeds: dict[str, str]
    noise: NoiseInfo
    files: dict[FileName, FileInfo]
    tools: dict[str, str]
    engines: tuple[EngineSet, ...] = Field(strict=False)

    @property
    def graphs(self) -> Sequence[Graph]:
        """All graphs but the derived trunks."""
        tails = (tail for plan in self.plans for tail in plan.tails.values())
        processors = () if self.processors is None else (self.processors,)
        return (self.trunk, *tails, self.logprobs, *processors)

    @property
    def content_hash(self) -> str:
        """The SHA-256 of the names and hashes of all graphs and weights. An engine set was built
        from this bundle if its `bundle` is the same hash."""
        lines = [
            f"{name} {info.sha256}\n"
            for name, info in sorted(self.files.items())
            if name.endswith((".onnx", ".data"))
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def derived_trunk(
        self, device: str, slots: int, *, lookahead_rows: bool = True
    ) -> DerivedTrunk | None:
        """Return the trunk that ONNX Runtime runs on `device` in a session with so many slots; None
        if that is `trunk`. A session runs the same trunk for every batch size, so that a sequence's
        text does not depend on the batch. lookahead_rows: whether the passes have such rows."""
        fitting = [
            each for each in self.derived if each.device == device and each.batch in (slots, None)
        ]
        if lookahead_rows:
            fitting = [each for each in fitting if each.lookahead_rows]
        # A trunk for this number of slots alone is faster, and so is one without look-ahead rows.
        return max(
            fitting, key=lambda each: (each.batch == slots, not each.lookahead_rows), default=None
        )

    def trunk_file(self, device: str, slots: int = 1, *, lookahead_rows: bool = True) -> str:
        """Return the file of the trunk that ONNX Runtime runs (see `derived_trunk`)."""
        derived = self.derived_trunk(device, slots, lookahead_rows=lookahead_rows)
        return self.trunk.file if derived is None else derived.file

    @property
    def layouts(self) -> Sequence[Plan]:
        """The layout of every entry of `plans`, in the same order."""
        return bundle_plans(self.lookahead.length, trees=any(plan.parents for plan in self.plans))

    def tree_sizes(self, graphs: Collection[str] | None = None) -> tuple[int, ...]:
        """Return how many drafts each of the bundle's trees has. graphs: files of graphs; trees
        with a tail that is not among them are left out."""
        return tuple(
            plan.drafts
            for plan in self.plans
            if plan.parents
            and (graphs is None or {tail.file for tail in plan.tails.values()} <= set(graphs))
        )

    def plan(self, name: str) -> PlanInfo:
        """Return the plan of this name. Raises PassError if the bundle has none."""
        for plan in self.plans:
            if plan.name == name:
                return plan
        raise PassError(
            f"the bundle has no plan {name!r}; it has {', '.join(p.name for p in self.plans)}"
        )
