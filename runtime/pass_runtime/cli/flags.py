"""Flags that several commands share, and functions that make option dataclasses of their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from pass_runtime.bundle.request_fields import REQUEST_FIELDS, SAMPLER_FIELDS
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.values import OptionField, Options
from pass_runtime.commands.errors import importing
from pass_runtime.errors import PassError
from pass_runtime.files import read_text
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_runtime.session import Session, load
from pass_runtime.text.constraint import Constraint

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def combined(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that applies all of these. --help lists their flags in this order."""
    return lambda command: functools.reduce(
        lambda f, decorate: decorate(f), reversed(decorators), command
    )


def _biases(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    """Parse TOKEN=BIAS values to biases by token id."""
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            problem = f"{value!r} is not a token id, '=' and a number, as in 198=-100"
            raise click.BadParameter(problem, context, option) from None
    return biases


PATH = click.Path(path_type=Path)
CONSTRAINT_FIELDS = ("json_schema", "json_object", "regex", "choice", "grammar")
"""The fields of `Constraint` that have flags."""
FLAG_TYPES = {"number": float, "whole": int, "ids": int, "path": PATH}
"""The type of a flag's value, by `OptionField.kind`. Flags of other kinds are strings."""
REPEATABLE_KINDS = ("texts", "stops", "ids", "biases")
"""The values of `OptionField.kind` whose flags may be given several times."""


def field_option(field: OptionField, *, unset: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds the flag of a field. unset: its default is None instead."""
    assert field.flag is not None
    default = None if unset else field.default
    if field.kind == "flag":
        return click.option(
            *(*field.flag.split(), field.name),
            is_flag=True,
            flag_value=not field.default,
            default=default,
            help=field.help,
        )
    value_type = click.Choice(field.choices) if field.choices else FLAG_TYPES.get(field.kind, str)
    if field.kind in REPEATABLE_KINDS:
        return click.option(
            *(*field.flag.split(), field.name),
            type=value_type,
            multiple=True,
            metavar=field.metavar,
            callback=_biases if field.kind == "biases" else None,
            help=f"{field.help} May be given several times.",
        )
    shown = field.if_none or field.default
    return click.option(
        *(*field.flag.split(), field.name),
        type=value_type,
        metavar=field.metavar,
        default=None if field.if_none else default,
        help=field.help + ("" if shown is None else f"  [default: {shown}]"),
    )


SEPARATE_OPTIONS = {
    field.name: field_option(field)
    for field in REQUEST_FIELDS
    if field.name in ("seed", "logprobs")
}
"""Flags that some commands do not have, or have with another default."""
SEED, LOGPROBS = SEPARATE_OPTIONS["seed"], SEPARATE_OPTIONS["logprobs"]


def field_options(fields: Iterable[OptionField]) -> Callable[[F], F]:
    """Return a decorator that adds the flags of these fields, except SEPARATE_OPTIONS."""
    flagged = (field for field in fields if field.flag and field.name not in SEPARATE_OPTIONS)
    return combined(*map(field_option, flagged))


def constraint_options(command: F) -> F:
    """Add --json-schema --json-object --regex --choice --grammar to a command."""
    return combined(
        click.option(
            "--json-schema",
            type=PATH,
            help="Write JSON that is valid by the JSON schema in this file.",
        ),
        click.option("--json-object", is_flag=True, help="Write a JSON object."),
        click.option("--regex", help="Write text that matches this regular expression as a whole."),
        click.option(
            "--choice", multiple=True, help="Write one of these texts. May be given several times."
        ),
        click.option(
            "--grammar", type=PATH, help="Write text that the Lark grammar in this file allows."
        ),
    )(command)


def as_constraint(fields: dict[str, Any]) -> Constraint | None:
    """Return the constraint of these fields, or None if none is set. Raises PassError if several
    are set."""
    given = any(value is not None and value not in (False, ()) for value in fields.values())
    return Constraint(**fields) if given else None


BUNDLE = click.argument("bundle", type=PATH)


def flags_of(options: type[Options], *names: str) -> Callable[[F], F]:
    """Return a decorator that adds the flags of these fields of an options class."""
    return combined(*(field_option(options.option_fields()[name]) for name in names))


def load_flags(*names: str) -> Callable[[F], F]:
    """Return a decorator that adds --device --threads --capacity --trust-bundle, and the flags of
    these fields of `LoadOptions`."""
    always = ("device", "threads", "capacity", "verify")
    return flags_of(LoadOptions, *names, *always)


def generation_options(command: F) -> F:
    """Add the flags of REQUEST_FIELDS and of constraints to a command, except SEPARATE_OPTIONS."""
    return combined(field_options(REQUEST_FIELDS), constraint_options)(command)


def sampling_options(command: F) -> F:
    """Add --temperature --top-k --top-p --min-p --seed to a command."""
    return combined(field_options(SAMPLER_FIELDS), SEED)(command)


SHOW_DRAFTS = click.option(
    "--show-drafts",
    is_flag=True,
    help="Colour tokens by their source: the model, look-ahead or n-gram drafts.",
)


def take(kind: type[T], options: dict[str, Any], **more: Any) -> T:
    """Make a dataclass `kind` of `more` and of the options named like its fields, which are removed
    from `options`."""
    names = [field.name for field in fields(kind) if field.name in options]  # type: ignore[arg-type]
    return kind(**{name: options.pop(name) for name in names}, **more)


def open_bundle(bundle: Path, options: LoadOptions) -> Session:
    with importing():  # ONNX Runtime takes long: a signal then ends the process at once
        import_module("pass_runtime.backends.ort.backend")
    return load(bundle, options)


def refuse_given(why: str, *names: str) -> None:
    """Raise PassError if one of these options of the running command was given. why: the reason why
    it would have no effect."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise PassError(f"--{name.replace('_', '-')} has no use here: {why}; leave it out")


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Make SamplingParams of a command's options, and remove these from `options`."""
    return SamplingParams(**{field.name: options.pop(field.name) for field in SAMPLER_FIELDS})


def generate_options(options: dict[str, Any], *, reuse_prefix: bool = False) -> GenerateOptions:
    """Make GenerateOptions of a command's options, and remove these from `options`."""
    fields = {
        field.name: options.pop(field.name) for field in REQUEST_FIELDS if field.name in options
    }
    if "" in fields["stop"]:
        raise PassError("--stop is empty: give it text, or leave it out")
    constraint = {name: options.pop(name) for name in CONSTRAINT_FIELDS}
    for name in ("json_schema", "grammar"):
        constraint[name] = None if constraint[name] is None else read_text(constraint[name])
    fields["constraint"] = as_constraint(constraint)
    return GenerateOptions(reuse_prefix=reuse_prefix).with_fields(**fields)
