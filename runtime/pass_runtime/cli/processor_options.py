"""Flags of what is done to logits: constraints, penalties, biases, and tokens that are kept out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.text.constraint import Constraint

F = TypeVar("F", bound=Callable[..., Any])

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


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


def processor_options(command: F) -> F:
    """--json-schema --json-object --regex --choice --grammar, penalties, --logit-bias, --min-tokens, --bad-word and
    --allowed-token-id."""
    file = click.Path(path_type=Path)
    decorators = (
        click.option("--json-schema", type=file, help="Write JSON of the schema in this file."),
        click.option("--json-object", is_flag=True, help="Write a JSON object."),
        click.option("--regex", help="Write what matches."),
        click.option("--choice", multiple=True, help="Write one of these. Give it several times."),
        click.option("--grammar", type=file, help="Write what the grammar in this file (Lark) allows."),
        click.option(
            "--presence-penalty", type=float, default=0.0, show_default=True, help="Off a token written once."
        ),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="Off for every time."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Of prompt and text."),
        click.option(
            "--logit-bias", multiple=True, metavar="TOKEN=BIAS", callback=_biases, help="Added to a token's logit."
        ),
        click.option("--min-tokens", type=int, default=0, show_default=True, help="Do not end before so many tokens."),
        click.option("--bad-word", "bad_words", multiple=True, help="Text that is not written."),
        click.option(
            "--allowed-token-id", "allowed_token_ids", type=int, multiple=True, help="Write only these tokens."
        ),
    )
    return functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), command)


def take_processing(options: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """The fields of GenerateOptions that a command's `options` give, which are taken out; those of SamplingParams are
    put into `sampling`."""
    sampling |= {key: options.pop(key) for key in PENALTIES}
    sampling["logit_bias"] = options.pop("logit_bias")
    fields = {
        "json_schema": _content(options.pop("json_schema"), "--json-schema"),
        "json_object": options.pop("json_object"),
        "regex": options.pop("regex"),
        "choice": options.pop("choice"),
        "grammar": _content(options.pop("grammar"), "--grammar"),
    }
    own = {key: options.pop(key) for key in ("min_tokens", "bad_words", "allowed_token_ids")}
    return own | {"constraint": as_constraint(fields)}


def as_constraint(fields: dict[str, Any]) -> Constraint | None:
    """The constraint of these fields of `Constraint`; None where none is set. PassError where several are."""
    return (
        Constraint(**fields)
        if any(value is not None and value not in (False, ()) for value in fields.values())
        else None
    )


def _content(path: Path | None, option: str) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PassError(f"cannot read the file of {option}: {error}") from None


def server_fields(options: GenerateOptions) -> dict[str, Any]:
    """The fields of a request to a server that say what is done to logits; those that do nothing are None."""
    sampling, constraint = options.sampling, options.constraint
    off = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    fields: dict[str, Any] = {key: value for key in off if (value := getattr(sampling, key)) != off[key]}
    if constraint is not None:
        names = {"json_schema": "json"}
        value = json.loads(constraint.schema) if constraint.schema else getattr(constraint, constraint.kind)
        fields["structured_outputs"] = {names.get(constraint.kind, constraint.kind): value}
    return fields | {
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "min_tokens": options.min_tokens or None,
        "bad_words": list(options.bad_words) or None,
        "allowed_token_ids": list(options.allowed_token_ids) or None,
    }
