"""Reads, checks and writes look-ahead weights. `lookahead.safetensors` has:

    lookahead            [L,H]      inputs of the decoder's first layer (after any embedding scale)
    adapter.<layer>.lora_A, .lora_B [rank,in], [out,rank]   if trained with `--adapter lora`
    head.<name>          the draft head's tensors (`model.draft_head`), if trained with `--head`
    base_sample          [matrices] fingerprint of the base model
    metadata `pass`      JSON: TrainingRecord

Files of others may have the tensor `lookahead` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from pass_exporter.model.adapter import ADAPTER_PREFIX, Adapter, linear_layers
from pass_exporter.model.draft_head import (
    HEAD_PREFIX,
    PROJECTION,
    TABLE,
    TRAINED_TENSORS,
    DraftHead,
)
from pass_exporter.model.registry import models_directory
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

FILE_NAME = "lookahead.safetensors"
BASELINE_NAME = "mean"
"""--lookahead-weights for the untrained baseline."""
EMBEDDINGS_KEY, FINGERPRINT_KEY, RECORD_KEY = "lookahead", "base_sample", "pass"
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 2.0**-8, 2.0**-20
"""Above a copy's rounding: at most 2^-9 in bfloat16, and float16's smallest numbers are 2^-24
apart."""


class TrainingRecord(BaseModel):
    """What was trained, on which text, and how. acceptance: for i = 1..L, how often drafts 1 to i
    are all accepted in greedy decoding; acceptance_sampled: at temperature 0.8."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["pass-lookahead"] = "pass-lookahead"
    version: Literal[1] = 1
    base: str
    lookahead: int
    adapter: Literal["none", "lora"]
    rank: int
    head_rank: int = 0
    head_width: int = 0
    steps: int
    recipe: dict[str, Any]
    tools: dict[str, str]
    acceptance: tuple[float, ...] = ()
    acceptance_sampled: tuple[float, ...] = ()

    @property
    def parts(self) -> str:
        """Adapter and head, such as `, lora rank 64, draft head rank 96`."""
        adapter = f", {self.adapter} rank {self.rank}" if self.adapter != "none" else ""
        return adapter + (f", draft head rank {self.head_rank}" if self.head_rank else "")


@dataclass(frozen=True)
class LookaheadWeights:
    """embeddings: [L,H] float32. trained: False for the baseline. source: for the manifest. record:
    None for weights that pass-train did not write."""

    embeddings: torch.Tensor
    trained: bool
    source: str
    adapter: Adapter | None = None
    record: TrainingRecord | None = None
    head: DraftHead | None = None

    @property
    def lookahead(self) -> int:
        return len(self.embeddings)

    @property
    def needs_lookahead_rows(self) -> bool:
        """Whether the trunk has the input `lookahead_rows`."""
        return self.adapter is not None or self.head is not None


def model_fingerprint(model: PreTrainedModel) -> torch.Tensor:
    """Return one element of every weight matrix, [matrices] float32. Copies in other dtypes match
    within rounding, which no hash would; fine-tuned models do not."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    return torch.stack(
        [w[w.shape[0] // 2, w.shape[1] // 3].detach().float().cpu() for w in matrices]
    )


def same_fingerprint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fingerprints are of the same model, up to its dtype."""
    return a.shape == b.shape and torch.allclose(
        a, b, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE
    )


def shipped_weights(model: PreTrainedModel) -> Path | None:
    """Return the weights file in models/ that was trained for `model`, in any dtype, or None."""
    fingerprint = model_fingerprint(model)
    for file in sorted(models_directory().glob(f"*/{FILE_NAME}")):
        if same_fingerprint(_read_file(file)[0][FINGERPRINT_KEY], fingerprint):
            return file
    return None


def lookahead_weights(
    path: Path | None, lookahead: int, model: PreTrainedModel
) -> LookaheadWeights:
    """Return the weights of the file `path`, or else those shipped for the model, or else the
    untrained baseline."""
    path = path or shipped_weights(model)
    if path is None or str(path) == BASELINE_NAME:
        return mean_embedding(model, lookahead)
    return read_lookahead(path, lookahead, model)


def mean_embedding(model: PreTrainedModel, lookahead: int) -> LookaheadWeights:
    """Return the untrained baseline: every embedding is the mean of the vocabulary's embeddings."""
    embedding = model.get_input_embeddings()
    # Gemma's embedding layer multiplies its results by this number.
    scale = getattr(embedding, "scalar_embed_scale", 1.0)
    mean = embedding.weight.float().mean(0) * scale
    return LookaheadWeights(
        mean.repeat(lookahead, 1), False, "untrained: mean of the vocabulary embeddings"
    )


def write_lookahead(
    path: Path,
    embeddings: torch.Tensor,
    adapter: Adapter | None,
    head: DraftHead | None,
    base_fingerprint: torch.Tensor,
    record: TrainingRecord,
) -> None:
    """Write a weights file atomically, in float16 but for the fingerprint."""
    tensors = {EMBEDDINGS_KEY: embeddings.detach()}
    tensors |= (adapter.tensors() if adapter else {}) | (head.tensors() if head else {})
    tensors = {name: tensor.half().contiguous().cpu() for name, tensor in tensors.items()}
    tensors[FINGERPRINT_KEY] = base_fingerprint
    # safetensors' save_file would make a file that only its owner can read.
    write_whole(path, save(tensors, metadata={RECORD_KEY: record.model_dump_json()}))


def read_record(path: Path) -> TrainingRecord:
    """Return a weights file's record. Raises PassError if pass-train did not write the file."""
    return _read_trained(path)[1]


def record_acceptance(path: Path, greedy: tuple[float, ...], sampled: tuple[float, ...]) -> None:
    """Replace `acceptance` and `acceptance_sampled` in a weights file's record."""
    tensors, record = _read_trained(path)
    record = record.model_copy(update={"acceptance": greedy, "acceptance_sampled": sampled})
    write_whole(path, save(tensors, metadata={RECORD_KEY: record.model_dump_json()}))


def _read_trained(path: Path) -> tuple[dict[str, torch.Tensor], TrainingRecord]:
    tensors, record = _read_file(path)
    if record is None:
        raise PassError(f"{path} has no training record: give a file that pass-train wrote")
    return tensors, record


def _read_file(path: Path) -> tuple[dict[str, torch.Tensor], TrainingRecord | None]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return tensors, _record(path, file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise PassError(f"cannot read look-ahead weights from {path}: {error}") from None


def read_lookahead(path: Path, lookahead: int, model: PreTrainedModel) -> LookaheadWeights:
    """Return a file's weights, with its first `lookahead` embeddings. Raises PassError if they are
    damaged or do not fit the model."""
    tensors, record = _read_file(path)
    fingerprint = tensors.get(FINGERPRINT_KEY, torch.empty(0))
    if record is not None and not same_fingerprint(fingerprint, model_fingerprint(model)):
        raise PassError(
            f"{path} was trained for another model ({record.base}); train look-ahead weights for "
            "this one with pass-train, or leave --lookahead-weights out"
        )
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise PassError(
                f"{path}: {name} holds values that are not finite: get the file again, or train it "
                "again"
            )
    embeddings = _embeddings(path, tensors, lookahead, model.config.hidden_size)
    adapter, head = _adapter(path, tensors, model), _head(path, tensors, model)
    source = f"file:{path.name}"
    if record is not None:
        source += f" (trained {record.steps} steps{record.parts})"
    return LookaheadWeights(embeddings, True, source, adapter, record, head)


def _record(path: Path, metadata: dict[str, str]) -> TrainingRecord | None:
    if RECORD_KEY not in metadata:
        return None
    try:
        return TrainingRecord.model_validate_json(metadata[RECORD_KEY])
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise PassError(
            f"{path}: {where}: {problem['msg']} (made by another version of pass-train?)"
        ) from None


def _embeddings(
    path: Path, tensors: dict[str, torch.Tensor], lookahead: int, hidden_size: int
) -> torch.Tensor:
    if EMBEDDINGS_KEY not in tensors:
        raise PassError(
            f"cannot read look-ahead weights from {path}: it holds no tensor {EMBEDDINGS_KEY!r}"
        )
    embeddings = tensors[EMBEDDINGS_KEY].float()
    if embeddings.ndim != 2 or embeddings.shape[1] != hidden_size:
        raise PassError(
            f"{path}: {EMBEDDINGS_KEY} has shape {list(embeddings.shape)}, but this model needs "
            f"[{lookahead}, {hidden_size}]; were these weights made for another model?"
        )
    if (count := len(embeddings)) < lookahead:
        raise PassError(
            f"{path} holds {count} look-ahead embeddings; use --lookahead {count} or less"
        )
    return embeddings[:lookahead].clone()


def _adapter(
    path: Path, tensors: dict[str, torch.Tensor], model: PreTrainedModel
) -> Adapter | None:
    names = {
        key.removeprefix(ADAPTER_PREFIX).removesuffix(".lora_A")
        for key in tensors
        if key.endswith(".lora_A")
    }
    if not names:
        return None
    layers, factors = linear_layers(model), {}
    if unknown := sorted(names - layers.keys()):
        raise PassError(
            f"{path}: this model has no layer {unknown[0]!r}; was the adapter made for another one?"
        )
    for name, layer in layers.items():  # in the model's order
        if name in names:
            a, b = (
                tensors.get(f"{ADAPTER_PREFIX}{name}.{part}", torch.empty(0, 0)).float()
                for part in ("lora_A", "lora_B")
            )
            expected = (layer.out_features, layer.in_features)
            if (b.shape[0], a.shape[1]) != expected or a.shape[0] != b.shape[1]:
                raise PassError(
                    f"{path}: the adapter of {name} does not fit [out, in] = {list(expected)}"
                )
            factors[name] = (a, b)
    return Adapter(factors).requires_grad_(False)


def _head(path: Path, tensors: dict[str, torch.Tensor], model: PreTrainedModel) -> DraftHead | None:
    keys = [key for key in tensors if key.startswith(HEAD_PREFIX)]
    head_tensors = {key.removeprefix(HEAD_PREFIX): tensors[key].float() for key in keys}
    if not head_tensors:
        return None
    source = TABLE if TABLE in head_tensors else PROJECTION
    if missing := sorted({source, *TRAINED_TENSORS} - set(head_tensors)):
        raise PassError(
            f"{path}: the draft head lacks {missing[0]}; train it again with pass-train --head"
        )
    vocab_size, hidden_size = int(model.config.vocab_size), int(model.config.hidden_size)
    rank, width = head_tensors[source].shape[-1], head_tensors["bias"].shape[0]
    expected = {
        TABLE: (vocab_size, rank),
        PROJECTION: (hidden_size, rank),
        "hidden": (width, hidden_size),
        "token": (width, rank),
        "state": (width, width),
        "bias": (width,),
        "out": (rank, width),
    }
    for name in (source, *TRAINED_TENSORS):
        tensor = head_tensors[name]
        if tensor.shape != expected[name]:
            raise PassError(
                f"{path}: the draft head's {name} has shape {list(tensor.shape)}, but this model "
                f"needs {list(expected[name])}; was it made for another model?"
            )
    return DraftHead(head_tensors, model.get_output_embeddings().weight).requires_grad_(False)
