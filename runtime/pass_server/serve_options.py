"""The limits of a server, and its API keys."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from pass_runtime import PassError
from pass_server.call_formats import FORMATS

TOOL_CALL_PARSERS = ("auto", "none", *FORMATS)
REASONING_PARSERS = ("auto", "none", "think")


@dataclass(frozen=True)
class ServeOptions:
    """The limits that every request is held to.

    model_name: what clients call the model (None: its name in the bundle). keys: the valid API keys; if there are none,
    requests need no key. max_queue: how many sequences may wait for a slot before requests are refused with 429.
    max_prompt_tokens and max_output_tokens: of one sequence (None: as many as the KV cache holds). max_body_bytes: of
    one request's JSON. max_sequences: the prompts of one request times its n or best_of. request_seconds: from the
    arrival of a request to the last byte of its answer. client_seconds: how long a client may take to send the head of
    a request, to send its JSON, or to read server.MIN_READ_BYTES. reuse_prefix: reuse the K/V of an earlier request for
    the common prefix of both prompts. client_plans: whether requests may name a plan, which the whole batch is then
    decoded with (see GenerateOptions). special_tokens: whether the text of a special token in a chat message is encoded
    as that token (see Session.encode_chat). tool_call_parser and reasoning_parser: the format of tool calls and of
    reasoning ("auto": that of the model's chat template). page: whether `/` is answered with the page. cors_origins:
    the origins whose pages may use the server from a browser; "*" is any. keep_alive_seconds: how long a stream may be
    silent before it gets a comment.
    """

    model_name: str | None = None
    keys: tuple[str, ...] = ()
    max_queue: int = 64
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_body_bytes: int = 1 << 20
    max_sequences: int = 128
    request_seconds: float = 600.0
    client_seconds: float = 20.0
    reuse_prefix: bool = False
    client_plans: bool = True
    special_tokens: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    page: bool = True
    cors_origins: tuple[str, ...] = ()
    keep_alive_seconds: float = 15.0

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_output_tokens", "max_body_bytes", "max_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PassError(f"{name.replace('_', '-')} must be at least 1, not {value}")
        for name, values in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if (value := getattr(self, name)) not in values:
                raise PassError(f"{name.replace('_', '-')} must be {', '.join(values)}, not {value!r}")
        if self.max_queue < 0:
            raise PassError(f"max-queue must be at least 0, not {self.max_queue}")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise PassError(
                    f"cors-origin must be * or like https://chat.example.org, without a path, not {origin!r}"
                )
        for name in ("request_seconds", "client_seconds", "keep_alive_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise PassError(f"{name.replace('_', '-')} must be a finite number above 0, not {getattr(self, name)}")


def read_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file, one a line; blank lines and lines that begin with # are skipped."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise PassError(f"{path} has no key; write one on each line")
    return keys


def check_exposure(host: str, keys: tuple[str, ...], *, allow_no_key: bool) -> None:
    """Raises PassError if other machines reach `host` and there are neither keys nor `allow_no_key`."""
    if not keys and not allow_no_key and not _is_loopback(host):
        raise PassError(
            f"anybody who reaches {host} could use the server: pass --api-key-file, or --allow-no-key to allow that"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
