"""Flags that several commands share, made from the fields of options classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from pass_runtime.bundle.option import Option, options_of
from pass_runtime.bundle.sampling import TAIL_OPTIONS
from pass_runtime.commands.errors import importing
from pass_runtime.errors import PassError
from pass_runtime.files import read_text
from pass_runtime.options import REQUEST_OPTIONS, GenerateOptions, LoadOptions
from pass_runtime.session import Session, load
from pass_runtime.text.constraint import Constraint

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
PATH = click.Path(path_type=Path)
BUNDLE = click.argument("bundle", type=PATH)


def combined(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that applies all of these, in the order of --help."""
    return lambda command: functools.reduce(
        lambda f, decorate: decorate(f), reversed(decorators), command
    )


def _biases(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            problem = f"{value!r} is not a token id, '=' and a number, as in 198=-100"
            raise click.BadParameter(problem, context, option) from None
    return biases


def flag_of(option: Option, *, unset: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds the flag of a field. unset: its default is None instead."""
    assert option.flag is not None
    names, default = (*option.flag.split(), option.name), None if unset else option.default
    if option.type is bool:
        return click.option(
            *names,
            is_flag=True,
            flag_value=not option.default,
            default=default,
            help=option.flag_help or option.help,
        )
    value_type = click.Choice(option.choices) if option.choices else option.type
    if option.shape != "one":
        is_map = option.shape == "map"
        return click.option(
            *names,
            type=str if is_map else value_type,
            multiple=True,
            metavar=option.metavar,
            callback=_biases if is_map else None,
            help=f"{option.help} May be given several times.",
        )
    shown = option.if_none or option.default
    return click.option(
        *names,
        type=PATH if option.type is Path else value_type,
        metavar=option.metavar,
        default=None if option.if_none else default,
        help=option.help + ("" if shown is None else f"  [default: {shown}]"),
    )


def flags_of(options: type, *names: str) -> Callable[[F], F]:
    """Return a decorator that adds the flags of these fields of an options class."""
    return combined(*(flag_of(options_of(options)[name]) for name in names))


def load_flags(*names: str) -> Callable[[F], F]:
    """Return a decorator that adds the flags of these fields of `LoadOptions`, and --device
    --threads --capacity --trust-bundle."""
    return flags_of(LoadOptions, *names, "device", "threads", "capacity", "verify")


SEED, LOGPROBS = flag_of(REQUEST_OPTIONS["seed"]), flag_of(REQUEST_OPTIONS["logprobs"])
"""Flags that some commands lack, or have with another default."""
CONSTRAINT_FIELDS = options_of(Constraint)
IN_FILES = ("json_schema", "grammar")
"""Their flags name files."""
CONSTRAINT_FLAGS = [
    flag_of(replace(each, type=Path) if name in IN_FILES else each)
    for name, each in CONSTRAINT_FIELDS.items()
]


def generation_options(command: F) -> F:
    """Add the flags of requests to a command, but for SEED and LOGPROBS."""
    flagged = (each for each in REQUEST_OPTIONS.values() if each.flag)
    common = (flag_of(each) for each in flagged if each.name not in ("seed", "logprobs"))
    return combined(*common, *CONSTRAINT_FLAGS)(command)


def sampling_options(command: F) -> F:
    """Add --temperature --top-k --top-p --min-p --seed to a command."""
    return combined(*map(flag_of, TAIL_OPTIONS), SEED)(command)


SHOW_DRAFTS = click.option(
    "--show-drafts",
    is_flag=True,
    help="Colour tokens by their source: the model, look-ahead or n-gram drafts.",
)


def parse_sizes(_: click.Context, flag: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Parse `1,2,4,8` to (1, 2, 4, 8), and None to ()."""
    if text is None:
        return ()
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PassError(f"{flag.opts[0]} must list numbers, as in 1,2,5, not {text!r}")
    return sizes


def take(kind: Callable[..., T], options: dict[str, Any], **more: Any) -> T:
    """Make a `kind` of `more` and of the options named like its fields, and remove these."""
    names = [field.name for field in fields(kind) if field.name in options]  # type: ignore[arg-type]
    return kind(**{name: options.pop(name) for name in names}, **more)


def open_bundle(bundle: Path, options: LoadOptions) -> Session:
    with importing():  # ONNX Runtime takes long: a signal then ends the process at once
        import_module("pass_runtime.backends.ort.backend")
    return load(bundle, options)


def refuse_given(why: str, *names: str) -> None:
    """Raise PassError if one of these options was given. why: it would have no effect."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not click.core.ParameterSource.DEFAULT:
            raise PassError(f"{parameter.opts[-1]} has no use here: {why}; leave it out")


def as_constraint(fields: dict[str, Any]) -> Constraint | None:
    """Return the constraint of these fields; None if none is set."""
    given = any(value is not None and value not in (False, ()) for value in fields.values())
    return Constraint(**fields) if given else None


def generate_options(options: dict[str, Any], *, reuse_prefix: bool = False) -> GenerateOptions:
    """Make GenerateOptions of a command's options, and remove these."""
    values = {name: options.pop(name) for name in REQUEST_OPTIONS if name in options}
    if "" in values["stop"]:
        raise PassError("--stop is empty: give it text, or leave it out")
    constraint = {name: options.pop(name) for name in CONSTRAINT_FIELDS}
    for name in IN_FILES:
        constraint[name] = None if constraint[name] is None else read_text(constraint[name])
    values["constraint"] = as_constraint(constraint)
    return GenerateOptions(reuse_prefix=reuse_prefix).with_fields(**values)
