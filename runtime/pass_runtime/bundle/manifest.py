"""pass_config.json: the contract between exporter, runtimes and servers. Versioned, validated, hashed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pass_runtime.backends.trt.library import FlavourName
from pass_runtime.bundle import noise
from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.bundle.sampling import Rule, Sampler
from pass_runtime.errors import PassError

FILE_NAME = "pass_config.json"
TOKENIZER_FILE = "tokenizer.json"
ENGINES = "engines"
"""The directory of engine sets in a bundle."""
VERSION = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(f"{name!r} is not a plain file name, so it could point outside the bundle")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
"""A bundle is flat, engine sets apart."""


ModelDtype = Literal["float16", "bfloat16", "float32"]


class Tensor(_Strict):
    """A graph input or output. Named dimensions are symbolic: batch, width, logit_rows, capacity, positions."""

    name: str
    dtype: Literal["int64", "bool", "float16", "bfloat16", "float32"]
    shape: tuple[int | str, ...] = Field(strict=False)


class Graph(_Strict):
    file: str
    inputs: tuple[Tensor, ...] = Field(strict=False)
    outputs: tuple[Tensor, ...] = Field(strict=False)


class ModelInfo(_Strict):
    """The frozen model. `max_capacity` is the longest sequence it can attend to (positions, sliding window).

    dtype: of activations, cache and embeddings. weights: of the linear layers; "full" is dtype.
    """

    name: str
    source: str
    family: str
    dtype: ModelDtype
    weights: Literal["full", "int8", "int4", "fp8"]
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    max_capacity: int = Field(ge=4, multiple_of=4)
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...] = Field(strict=False)


class LookaheadInfo(_Strict):
    """L, where the look-ahead embeddings came from, and the rank of the adapter on look-ahead rows (0: none).

    acceptance_per_position: the share of steps in which drafts 1..i were all right, measured in training; or empty.
    """

    length: int = Field(ge=1, le=MAX_LOOKAHEAD)
    trained: bool
    source: str
    adapter_rank: int = Field(ge=0)
    acceptance_per_position: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(strict=False)


class PlanInfo(_Strict):
    """A window layout (see pass_runtime.bundle.plan), the plan its tails prepare the window of, and its tail graphs."""

    name: str
    drafts: int = Field(ge=0)
    groups: tuple[int, ...] = Field(strict=False)
    next: str
    tails: dict[Sampler, Graph]


class NoiseInfo(_Strict):
    """The random tables baked into the sampling tails: pass_runtime.bundle.noise must know the scheme."""

    scheme: str
    members: int
    row: int
    bits: int


class FileInfo(_Strict):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Profile(_Strict):
    """(min, opt, max) by symbolic dimension: the shapes an engine was tuned for."""

    sizes: dict[str, Annotated[tuple[int, int, int], Field(strict=False)]]

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether every dimension lies in its range."""
        return all(low <= sizes[name] <= high for name, (low, _, high) in self.sizes.items())


class EngineFile(_Strict):
    """`graph`, built into `file` of the set's directory. aliases: output -> the input whose memory it shares."""

    graph: FileName
    file: FileName
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)
    profiles: tuple[Profile, ...] = Field(strict=False)
    aliases: dict[str, str]


class EngineSet(_Strict):
    """What one `pass-export build` made, in engines/<directory>.

    bundle: `Manifest.content` of what it was built from. targets: compute capabilities, as `sm89`. lookahead: drafts of
    its plans, which have full groups. capacities: cache columns that a pass may read, in rising order; the last is S,
    the cache's own. prefill_widths: chunks of a prompt, besides single tokens, in falling order.
    """

    directory: FileName
    flavour: FlavourName
    version: str
    targets: tuple[str, ...] = Field(strict=False)
    bundle: str
    lookahead: int = Field(ge=1, le=MAX_LOOKAHEAD)
    max_batch_size: int = Field(ge=1)
    capacities: tuple[int, ...] = Field(strict=False, min_length=1)
    prefill_widths: tuple[int, ...] = Field(strict=False)
    engines: tuple[EngineFile, ...] = Field(strict=False)

    def path(self, bundle: Path) -> Path:
        return bundle / ENGINES / self.directory


class Manifest(_Strict):
    format: Literal["pass-bundle"]
    version: Literal[1]
    opset: int
    model: ModelInfo
    lookahead: LookaheadInfo
    rule: Rule
    trunk: Graph
    plans: tuple[PlanInfo, ...] = Field(strict=False)
    noise: NoiseInfo
    files: dict[FileName, FileInfo]
    tools: dict[str, str]
    engines: tuple[EngineSet, ...] = Field(strict=False)

    @property
    def content(self) -> str:
        """A hash over the hashes of all files: engines built from other files do not fit."""
        listed = "".join(f"{name} {info.sha256}\n" for name, info in sorted(self.files.items()))
        return hashlib.sha256(listed.encode()).hexdigest()

    def plan(self, name: str) -> PlanInfo:
        for plan in self.plans:
            if plan.name == name:
                return plan
        raise PassError(f"the bundle has no plan {name!r}; it has {', '.join(p.name for p in self.plans)}")


def read_manifest(bundle: Path) -> Manifest:
    """Parse and validate `bundle`/pass_config.json."""
    path = bundle / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise PassError(f"{bundle} is not a bundle: it has no {FILE_NAME} (make one with pass-export)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PassError(f"cannot read {path}: {error}") from None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise PassError(f"{path}: {_first_problem(error)}") from None
    expected = NoiseInfo(scheme=noise.SCHEME, members=noise.MEMBERS, row=noise.ROW, bits=noise.BITS)
    if manifest.noise != expected:
        raise PassError(
            f"{path}: noise scheme {manifest.noise.scheme!r} is not this version's {noise.SCHEME!r}; export again"
        )
    return manifest


def verify_files(bundle: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Check that every file of the bundle is there, whole and the one that was exported."""
    for name, info in manifest.files.items():
        path = bundle / name
        if not path.is_file():
            raise PassError(f"{path} is missing; export the bundle again")
        if path.stat().st_size != info.bytes:
            raise PassError(
                f"{path} has {path.stat().st_size} bytes instead of {info.bytes}; copy or export the bundle again"
            )
        if hashes and file_info(path) != info:
            raise PassError(f"{path} does not match its SHA-256 in {FILE_NAME}; copy or export the bundle again")
    listed = {TOKENIZER_FILE, *(graph.file for graph in _graphs(manifest))}
    if missing := sorted(listed - set(manifest.files)):
        raise PassError(f"{bundle / FILE_NAME}: {missing[0]} is used but not listed under files")


def file_info(path: Path, progress: Callable[[int], None] | None = None) -> FileInfo:
    """Size and SHA-256, read in 4 MiB pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size += len(piece)
            if progress is not None:
                progress(len(piece))
    return FileInfo(sha256=digest.hexdigest(), bytes=size)


def _graphs(manifest: Manifest) -> Iterable[Graph]:
    yield manifest.trunk
    for plan in manifest.plans:
        yield from plan.tails.values()


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = " ".join(".".join(str(part) for part in problem["loc"]).split())
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r} (made by a newer pass-export? upgrade, or export again)"
    if where == "version":
        return f"manifest version {problem['input']!r} is not {VERSION} (export again with this version)"
    more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{where or 'file'}: {problem['msg']}{more}"
