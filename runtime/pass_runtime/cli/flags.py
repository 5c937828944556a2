"""Flags that several commands share, and the dataclasses made of their values."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from pass_runtime.backends.base import DEFAULT_BATCH
from pass_runtime.backends.open import DEVICE_HELP
from pass_runtime.bundle.request_fields import REQUEST_FIELDS, SAMPLER_FIELDS, RequestField
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.command_errors import importing
from pass_runtime.errors import PassError
from pass_runtime.options import LOGPROBS_MODES, GenerateOptions, LoadOptions
from pass_runtime.session import Session, load
from pass_runtime.text.constraint import Constraint

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def apply(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    return lambda command: functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), command)


def _biases(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """TOKEN=BIAS, each as a pair of numbers."""
    found = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            problem = f"{value!r} is not a token id, = and a number, as in 198=-100"
            raise click.BadParameter(problem, context, option) from None
    return found


CONSTRAINT = ("json_schema", "json_object", "regex", "choice", "grammar")
"""The fields of `Constraint` that have flags."""
TYPES = {"number": float, "whole": int, "ids": int, "flag": bool}
"""The type of a flag's value, by the kind of a field; the others are strings."""
SEVERAL = ("texts", "stops", "ids", "biases")
"""Kinds whose flags may be given several times."""


def field_option(field: RequestField) -> Callable[[F], F]:
    """The flag of a field."""
    assert field.flag is not None
    several = field.kind in SEVERAL
    ending = " May be given several times." if several else f"  [default: {field.default}]" if field.default else ""
    return click.option(
        field.flag,
        field.name,
        type=click.Choice(field.choices) if field.choices else TYPES.get(field.kind, str),
        is_flag=field.kind == "flag",
        multiple=several,
        default=None if several else field.neutral,
        show_default=field.neutral is not None and not several and field.kind != "flag",
        metavar="TOKEN=BIAS" if field.kind == "biases" else None,
        callback=_biases if field.kind == "biases" else None,
        help=field.help + ending,
    )


APART = {field.name: field_option(field) for field in REQUEST_FIELDS if field.name in ("seed", "logprobs")}
"""Flags that not every command has, or not with this default."""
SEED, LOGPROBS = APART["seed"], APART["logprobs"]


def field_options(fields: Iterable[RequestField]) -> Callable[[F], F]:
    """The flags of these fields, but for those that are apart."""
    return apply(*(field_option(field) for field in fields if field.flag is not None and field.name not in APART))


def constraint_options(command: F) -> F:
    """--json-schema --json-object --regex --choice --grammar"""
    file = click.Path(path_type=Path)
    return apply(
        click.option("--json-schema", type=file, help="Write JSON of the schema in this file."),
        click.option("--json-object", is_flag=True, help="Write a JSON object."),
        click.option("--regex", help="Write what matches."),
        click.option("--choice", multiple=True, help="Write one of these. May be given several times."),
        click.option("--grammar", type=file, help="Write what the grammar in this file (Lark) allows."),
    )(command)


def as_constraint(fields: dict[str, Any]) -> Constraint | None:
    """The constraint of these fields of `Constraint`; None if none is set. Raises PassError if several are."""
    given = any(value is not None and value not in (False, ()) for value in fields.values())
    return Constraint(**fields) if given else None


def _content(path: Path | None, option: str) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PassError(f"cannot read the file of {option}: {error}") from None


BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


def engine_options(command: F) -> F:
    """--device --threads --capacity --trust-bundle --no-weight-cache"""
    return apply(
        click.option("--device", default="auto", show_default=True, help=DEVICE_HELP),
        click.option("--threads", type=int, default=0, help="CPU threads.  [default: the engine's choice]"),
        click.option(
            "--capacity",
            type=int,
            help="Longest sequence in tokens: bounds the KV cache.  [default: the model's]",
        ),
        click.option("--trust-bundle", is_flag=True, help="Skip the hash check of the bundle's files."),
        click.option("--no-weight-cache", is_flag=True, help="On the CPU, pack weights anew, into memory of its own."),
    )(command)


def generation_options(command: F) -> F:
    """The flags of requests, and those of constraints."""
    return apply(field_options(REQUEST_FIELDS), constraint_options)(command)


def sampling_options(command: F) -> F:
    """--temperature --top-k --top-p --min-p --seed"""
    return apply(field_options(SAMPLER_FIELDS), SEED)(command)


MAX_BATCH_SIZE = click.option(
    "--max-batch-size", type=int, help=f"Sequences at a time.  [default: {DEFAULT_BATCH}, or the engines']"
)
NO_PREFIX_CACHE = click.option(
    "--no-prefix-cache",
    is_flag=True,
    help="Read every prompt anew. Otherwise, on the CPU, what prompts have in common is read once.",
)
MAX_DRAFTING = click.option(
    "--speculative-max-concurrency",
    type=int,
    help="With more sequences than this decoding at a time, none drafts.  [default: auto decides]",
)
LOGPROBS_MODE = click.option(
    "--logprobs-mode",
    type=click.Choice(LOGPROBS_MODES),
    default="raw",
    show_default=True,
    help="Log-probabilities are the model's own, or those after constraints, biases and penalties.",
)
SHOW_DRAFTS = click.option(
    "--show-drafts", is_flag=True, help="Colour tokens by source: the model, look-ahead or n-gram drafts."
)


def take(kind: type[T], options: dict[str, Any], **more: Any) -> T:
    """A dataclass of the options that have the names of its fields, which are taken out of `options`, and of `more`."""
    names = [field.name for field in fields(kind) if field.name in options]  # type: ignore[arg-type]
    return kind(**{name: options.pop(name) for name in names}, **more)


def load_options(options: dict[str, Any], **more: Any) -> LoadOptions:
    """The fields of LoadOptions that a command's `options` are, which must hold nothing else, and `more`."""
    flags = {"trust_bundle": "verify", "no_weight_cache": "weight_cache", "no_prefix_cache": "prefix_cache"}
    named: dict[str, Any] = {
        flags.get(name, name): not value if name in flags else value for name, value in options.items()
    }
    return LoadOptions(**named, **more)


def open_bundle(bundle: Path, options: LoadOptions) -> Session:
    """`load`, which may be interrupted while it imports, and tells a terminal what takes long."""
    with importing():
        import_module("pass_runtime.backends.ort.backend")  # and ONNX Runtime, which `load` imports otherwise
    announce_packing()
    return load(bundle, options)


def announce_packing() -> None:
    """Let a terminal say that weights are being packed, as the first opening takes longer than later ones."""
    from pass_runtime.backends.ort.packed_weights import PACKING, log

    if sys.stderr is None or not sys.stderr.isatty() or logging.getLogger().handlers or log.handlers:
        return
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.msg == PACKING)
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def refuse_given(why: str, *names: str) -> None:
    """PassError where one of these options of the running command was given."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise PassError(f"--{name.replace('_', '-')} has no use here: {why}; leave it out")


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Takes the keys that it uses out of a command's `options`."""
    return SamplingParams(**{field.name: options.pop(field.name) for field in SAMPLER_FIELDS})


def generate_options(options: dict[str, Any], *, reuse_prefix: bool = False) -> GenerateOptions:
    """Takes the keys that it uses out of a command's `options`."""
    fields = {field.name: options.pop(field.name) for field in REQUEST_FIELDS if field.name in options}
    if "" in fields["stop"]:
        raise PassError("--stop is empty: give it text, or leave it out")
    constraint = {name: options.pop(name) for name in CONSTRAINT}
    for name in ("json_schema", "grammar"):
        constraint[name] = _content(constraint[name], f"--{name.replace('_', '-')}")
    fields["constraint"] = as_constraint(constraint)
    return GenerateOptions(reuse_prefix=reuse_prefix).with_fields(**fields)
