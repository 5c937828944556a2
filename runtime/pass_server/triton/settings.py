"""The parameters of config.pbtxt: which bundle, how it is opened, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pass_runtime.errors import PassError
from pass_runtime.options import LoadOptions
from pass_server.options import ServeOptions

LIMITS = ("max_queue", "max_prompt_tokens", "max_output_tokens", "request_seconds", "reuse_prefix")
"""The fields of `ServeOptions` that apply to a Triton model."""
OPENED = tuple(field.name for field in fields(LoadOptions) if field.name not in ("max_queue", "verify"))
KINDS: Mapping[str, type] = {
    **dict.fromkeys(("max_queue", "max_prompt_tokens", "max_output_tokens"), int),
    **dict.fromkeys(("max_batch_size", "threads", "capacity", "speculative_max_concurrency"), int),
    **dict.fromkeys(("request_seconds", "drain_seconds", "acceptance_threshold"), float),
    **dict.fromkeys(("device", "logprobs_mode"), str),
    **dict.fromkeys(("reuse_prefix", "weight_cache", "prefix_cache"), bool),
}
DRAIN_SECONDS = 20.0
"""Triton waits for 30 s by default, of which unloading takes some."""


@dataclass(frozen=True)
class Settings:
    """bundle: absolute, or relative to the model's directory. tokens: whether the model reads and writes token ids.
    drain_seconds: how long requests under way may take when a signal ends the server."""

    bundle: str
    tokens: bool
    load: LoadOptions
    limits: ServeOptions
    drain_seconds: float = DRAIN_SECONDS

    def path(self, model_directory: Path) -> Path:
        return model_directory / self.bundle


def make_settings(bundle: str, *, tokens: bool, **values: Any) -> Settings:
    """values: by the names in KINDS; those missing or None have their defaults. PassError for invalid ones."""
    given = {name: value for name, value in values.items() if value is not None}
    limits = ServeOptions(**{name: given[name] for name in LIMITS if name in given})
    opened: dict[str, Any] = {"max_batch_size": None} | {name: given[name] for name in OPENED if name in given}
    load = LoadOptions(**opened)
    drain_seconds = given.get("drain_seconds", DRAIN_SECONDS)
    if not 0 <= drain_seconds < float("inf"):
        raise PassError(f"drain-seconds must be at least 0, not {drain_seconds}")
    return Settings(bundle, tokens, load, limits, drain_seconds)


def read_settings(parameters: Mapping[str, str]) -> Settings:
    """The settings of a config.pbtxt. Parameters in capitals are Triton's own and are skipped."""
    own = {name: value for name, value in parameters.items() if not name.isupper()}
    if not own.get("bundle"):
        raise PassError("config.pbtxt has no parameter `bundle`; write it with pass-export triton")
    bundle, tokens = own.pop("bundle"), _read("tokens", own.pop("tokens", "false"), bool)
    for name in own:
        if name not in KINDS:
            raise PassError(f"config.pbtxt: unknown parameter {name!r}; choose of {', '.join(sorted(KINDS))}")
    return make_settings(bundle, tokens=tokens, **{name: _read(name, own[name], KINDS[name]) for name in own})


def _read(name: str, text: str, kind: type) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise PassError(f"config.pbtxt: {name} must be a {kind.__name__}, not {text!r}") from None
