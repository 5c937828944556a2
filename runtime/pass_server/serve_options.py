"""The options of a server: tables of its limits and its address, and its API keys."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from pass_runtime import Options, PassError, option
from pass_server.call_formats import FORMATS

TOOL_CALL_PARSERS = ("auto", "none", *FORMATS)
REASONING_PARSERS = ("auto", "none", "think")
SECONDS = {"allowed": "a finite number above 0", "bounds": {"gt": 0, "lt": float("inf")}}
"""Attributes of the options that are durations."""


@dataclass(frozen=True)
class ServeOptions(Options):
    """The limits that every request is held to: the table from which the flags of servers are made.

    keys: the valid API keys; if there are none, requests need no key. max_prompt_tokens and
    max_output_tokens: of one sequence. max_sequences: the prompts of one request times its n or
    best_of. request_seconds: from the arrival of a request to the last byte of its answer.
    client_seconds: how long a client may take to send the head of a request, to send its JSON, or
    to read server.MIN_READ_BYTES. client_plans: whether requests may name a plan, which the whole
    batch is then decoded with (see GenerateOptions). special_tokens: whether the text of a special
    token in a chat message is encoded as that token (see Session.encode_chat). tool_call_parser and
    reasoning_parser: the format of tool calls and of reasoning ("auto": that of the model's chat
    template).
    """

    model_name: str | None = option(
        None,
        "What clients call the model.",
        flag="--served-model-name",
        if_none="the bundle's name",
    )
    keys: tuple[str, ...] = ()
    max_queue: int = option(64, "Sequences that may wait; more get status 429.", bounds={"ge": 0})
    max_prompt_tokens: int | None = option(
        None, "Most tokens of a prompt.", if_none="the KV capacity", bounds={"ge": 1}
    )
    max_output_tokens: int | None = option(
        None, "Most tokens of an answer.", if_none="the KV capacity", bounds={"ge": 1}
    )
    max_body_bytes: int = option(1 << 20, "Largest request body.", bounds={"ge": 1})
    max_sequences: int = option(
        128, "Most prompts of a request times its n or best_of.", bounds={"ge": 1}, flag=None
    )
    request_seconds: float = option(600, "Limit for request and answer.", **SECONDS)
    client_seconds: float = option(20, "Limit for a client to send or read.", **SECONDS)
    keep_alive_seconds: float = option(
        15, "Silence after which a stream sends a comment, to keep the connection.", **SECONDS
    )
    cors_origins: tuple[str, ...] = option(
        (), "Origin of web pages that may use the server; or *.", flag="--cors-origin"
    )
    reuse_prefix: bool = option(
        False, "Share K/V of prompts' common prefixes on GPUs, as on CPUs; this changes rounding."
    )
    # The help of a flag such as --no-page says what the flag does: it sets the field to False.
    client_plans: bool = option(
        True,
        "Refuse requests that name a plan or set speculative to false.",
        flag="--no-client-plan",
    )
    page: bool = option(True, "Do not serve the web page at /.", flag="--no-page")
    special_tokens: bool = option(
        False, "Let messages contain special tokens.", flag="--allow-special-tokens"
    )
    tool_call_parser: str = option("auto", "Format of tool calls.", choices=TOOL_CALL_PARSERS)
    reasoning_parser: str = option(
        "auto", "Format of reasoning; think is <think>...</think>.", choices=REASONING_PARSERS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise PassError(
                    "cors-origin must be * or like https://chat.example.org, without a path, "
                    f"not {origin!r}"
                )


@dataclass(frozen=True)
class ListenOptions(Options):
    """Address and connections of a server. allow_no_key: serve without keys even if other machines
    reach `host`. drain_seconds: how long requests may go on after a signal. Raises PassError if a
    number is out of range."""

    host: str = option("127.0.0.1", "The address to listen on.")
    port: int = option(8000, "The port. 0: any free one.")
    allow_no_key: bool = option(False, "Allow a --host that other machines reach, without keys.")
    max_connections: int = option(512, "Further connections close idle ones.", bounds={"ge": 1})
    drain_seconds: float = option(
        30,
        "Seconds to finish requests after SIGTERM.",
        allowed="a finite number of at least 0",
        bounds={"ge": 0, "lt": float("inf")},
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
