"""The options of a server, and its API keys."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

from pass_runtime import PassError, option, options_class
from pass_server.tool_calls import FORMATS

TOOL_CALL_PARSERS = ("auto", "none", *FORMATS)
SECONDS = {"allowed": "a finite number above 0", "gt": 0}


@options_class
class ServeOptions:
    """The limits of requests, and what a server does. What the help of flags does not say:

    keys: without any, requests need no key. max_prompt_tokens, max_output_tokens: of one sequence.
    request_seconds: from the arrival of a request to the last byte of its answer. client_plans: a
    plan is that of the whole batch. special_tokens: the text of a special token in a message is
    encoded as that token. tool_call_parser, reasoning_parser: "auto" is that of the template.
    """

    model_name: str | None = option(
        None,
        "What clients call the model.",
        flag="--served-model-name",
        if_none="the bundle's name",
    )
    keys: tuple[str, ...] = ()
    max_queue: int = option(64, "Sequences that may wait; more get status 429.", ge=0)
    max_prompt_tokens: int | None = option(
        None, "Most tokens of a prompt.", if_none="the KV capacity", ge=1
    )
    max_output_tokens: int | None = option(
        None, "Most tokens of an answer.", if_none="the KV capacity", ge=1
    )
    max_body_bytes: int = option(1 << 20, "Largest request body.", ge=1)
    max_sequences: int = option(
        128, "Most prompts of a request times its n or best_of.", ge=1, flag=None
    )
    request_seconds: float = option(600, "Limit for request and answer.", **SECONDS)
    client_seconds: float = option(20, "Limit for a client to send a body.", **SECONDS)
    keep_alive_seconds: float = option(
        15, "Silence after which a stream sends a comment, to keep the connection.", **SECONDS
    )
    cors_origins: tuple[str, ...] = option(
        (), "Origin of web pages that may use the server; or *.", flag="--cors-origin"
    )
    reuse_prefix: bool = option(
        False, "Share K/V of prompts' common prefixes on GPUs, as on CPUs; this changes rounding."
    )
    client_plans: bool = option(
        True,
        "Requests may name a plan, or set speculative to false.",
        flag="--no-client-plan",
        flag_help="Refuse requests that name a plan or set speculative to false.",
    )
    page: bool = option(
        True,
        "Serve the web page at /.",
        flag="--no-page",
        flag_help="Do not serve the web page at /.",
    )
    special_tokens: bool = option(
        False, "Let messages contain special tokens.", flag="--allow-special-tokens"
    )
    tool_call_parser: Literal[TOOL_CALL_PARSERS] = option(  # type: ignore[valid-type]
        "auto", "Format of tool calls."
    )
    reasoning_parser: Literal["auto", "none", "think"] = option(
        "auto", "Format of reasoning; think is <think>...</think>."
    )

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise PassError(
                    "cors-origin must be * or like https://chat.example.org, without a path, "
                    f"not {origin!r}"
                )


@options_class
class ListenOptions:
    """Address and connections of a server."""

    host: str = option("127.0.0.1", "The address to listen on.")
    port: int = option(8000, "The port. 0: any free one.")
    allow_no_key: bool = option(False, "Allow a --host that other machines reach, without keys.")
    max_connections: int = option(512, "Requests on further connections get status 503.", ge=1)
    drain_seconds: float = option(
        30,
        "Seconds to finish requests after SIGTERM.",
        allowed="a finite number of at least 0",
        ge=0,
    )


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys in a file: its lines, except blank ones and those that begin with #."""
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
    """Raise PassError if other machines reach `host` without a key, unless `allow_no_key`."""
    if not keys and not allow_no_key and not _is_loopback(host):
        raise PassError(
            f"anybody who reaches {host} could use the server: pass --api-key-file, or "
            "--allow-no-key to allow that"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
