"""Flags that several commands share, those of logits processors too, and the dataclasses made of their values."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from pass_runtime.backends.base import DEFAULT_BATCH
from pass_runtime.backends.open import NUMBERED
from pass_runtime.bundle.sampling import MAX_CANDIDATES, MAX_LOGPROBS, SamplingParams
from pass_runtime.cli.command_errors import importing
from pass_runtime.decode.draft_policy import DRAFTS
from pass_runtime.errors import PassError
from pass_runtime.options import LOGPROBS_MODES, PLANS, GenerateOptions, LoadOptions
from pass_runtime.session import Session, load
from pass_runtime.text.constraint import Constraint

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
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


DRAFT = click.option(
    "--draft", type=click.Choice(DRAFTS), help="Where drafts come from.  [default: both for auto, else lookahead]"
)
BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


def apply(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    return lambda command: functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), command)


def engine_options(command: F) -> F:
    """--device --threads --capacity --trust-bundle --no-weight-cache"""
    return apply(
        click.option("--device", default="auto", show_default=True, help=NUMBERED),
        click.option("--threads", type=int, default=0, help="CPU threads.  [default: the engine's choice]"),
        click.option(
            "--capacity",
            type=int,
            help="Longest sequence in tokens: bounds the KV cache.  [default: the model's]",
        ),
        click.option("--trust-bundle", is_flag=True, help="Skip the hash check of the bundle's files."),
        click.option("--no-weight-cache", is_flag=True, help="On the CPU, pack weights anew, into memory of its own."),
    )(command)


SEED = click.option("--seed", type=int, help="Same seed, same text, whatever the plan.  [default: random]")


def sampling_options(command: F) -> F:
    """--temperature --top-k --top-p --min-p"""
    return apply(
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=int, default=0, show_default=True, help=f"0 is off; at most {MAX_CANDIDATES}."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off."),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="0 is off."),
    )(command)


def generation_options(command: F) -> F:
    """--max-new-tokens --plan --draft --lookahead --stop --stop-token-id --ignore-eos, and the options of sampling and
    processors; the seed is apart."""
    return apply(
        click.option("--max-new-tokens", type=int, default=128, show_default=True),
        sampling_options,
        processor_options,
        click.option("--plan", default="auto", show_default=True, help=f"{', '.join(PLANS)}. The text is the same."),
        DRAFT,
        click.option("--lookahead", type=int, help="Drafts per step; 0 is plain decoding.  [default: the bundle's L]"),
        click.option("--stop", multiple=True, help="End before this text. May be given several times."),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token, too."),
        click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
    )(command)


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
LOGPROBS = click.option(
    "--logprobs",
    type=int,
    help=f"Report log-probabilities: each token's, and of 0-{MAX_LOGPROBS} likely ones.",
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
    return SamplingParams(**{key: options.pop(key) for key in ("temperature", "top_k", "top_p", "min_p", "seed")})


def generate_options(options: dict[str, Any], *, reuse_prefix: bool = False) -> GenerateOptions:
    """Takes the keys that it uses out of a command's `options`."""
    more: dict[str, Any] = {}
    processing = take_processing(options, more)
    sampling = replace(sampling_params(options), **more)
    keys = ("max_new_tokens", "plan", "lookahead", "draft", "stop", "stop_token_ids", "ignore_eos")
    own = {key: options.pop(key) for key in keys} | {"logprobs": options.pop("logprobs", None)}
    if "" in own["stop"]:
        raise PassError("--stop is empty: give it text, or leave it out")
    return GenerateOptions(sampling=sampling, reuse_prefix=reuse_prefix, **own, **processing)
