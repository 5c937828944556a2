"""Flags that several commands share, and their way into the runtime's dataclasses."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pass_runtime.backends.open import DEVICES
from pass_runtime.bundle.sampling import MAX_CANDIDATES, SamplingParams
from pass_runtime.decode.draft_policy import DRAFTS
from pass_runtime.errors import PassError
from pass_runtime.session import PLANS, GenerateOptions, Session, load

F = TypeVar("F", bound=Callable[..., Any])

DRAFT = click.option(
    "--draft", type=click.Choice(DRAFTS), help="Where drafts come from.  [default: both for auto, else lookahead]"
)
BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""An engine's threads wait by spinning: with hundreds to a core a bundle does not even open."""


def apply(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    return lambda command: functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), command)


def engine_options(command: F) -> F:
    """--device --threads --trust-bundle"""
    return apply(
        click.option("--device", default="auto", show_default=True, help=f"{', '.join(DEVICES)}."),
        click.option("--threads", type=int, default=0, help="CPU threads.  [default: the engine's choice]"),
        click.option("--trust-bundle", is_flag=True, help="Skip the hash check of the bundle's files."),
    )(command)


SEED = click.option("--seed", type=int, help="Same seed, same text, whatever the plan.  [default: random]")


def sampling_options(command: F) -> F:
    """--temperature --top-k --top-p"""
    return apply(
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=int, default=0, show_default=True, help=f"0 is off; at most {MAX_CANDIDATES}."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off."),
    )(command)


def generation_options(command: F) -> F:
    """--max-new-tokens --plan --draft --lookahead --stop --ignore-eos, and the sampling options; the seed is apart."""
    return apply(
        click.option("--max-new-tokens", type=int, default=128, show_default=True),
        sampling_options,
        click.option("--plan", default="auto", show_default=True, help=f"{', '.join(PLANS)}: how, never what."),
        DRAFT,
        click.option("--lookahead", type=int, help="Drafts per round; 0 is plain decoding.  [default: the bundle's L]"),
        click.option("--stop", multiple=True, help="End before this text. May be given several times."),
        click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
    )(command)


def open_bundle(bundle: Path, device: str, threads: int, trust_bundle: bool) -> Session:
    if not 0 <= threads <= MAX_THREADS:
        raise PassError(
            f"--threads must be 0 (the engine's choice) to {MAX_THREADS} on a machine of {os.cpu_count()} cores, "
            f"not {threads}"
        )
    return load(bundle, device, threads=threads, verify=not trust_bundle)


def sampling_params(temperature: float, top_k: int, top_p: float, seed: int | None) -> SamplingParams:
    """Without a seed, sampling takes one from the system; it is reported, so that a run can be repeated."""
    if seed is None:
        seed = int.from_bytes(os.urandom(4)) if temperature > 0 else 0
    return SamplingParams(temperature, top_k, top_p, seed)


def generate_options(options: dict[str, Any], *, reuse_prefix: bool = False) -> GenerateOptions:
    """Takes its own keys out of a command's `options`."""
    sampling = sampling_params(*(options.pop(key) for key in ("temperature", "top_k", "top_p", "seed")))
    own = {key: options.pop(key) for key in ("max_new_tokens", "plan", "lookahead", "draft", "stop", "ignore_eos")}
    return GenerateOptions(sampling=sampling, reuse_prefix=reuse_prefix, **own)
