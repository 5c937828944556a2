"""pass-run chat --server: a chat with a server, `pass-run serve` or another one with OpenAI's API."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from pass_runtime.cli.chat_loop import ChatLoop, Conversation
from pass_runtime.cli.command_errors import Interrupted
from pass_runtime.cli.flags import server_fields
from pass_runtime.errors import PassError
from pass_runtime.files import read_text
from pass_runtime.options import GenerateOptions

SECONDS = 600
"""How long a server may send nothing before the request fails."""


ChoiceEvents = Generator[dict[str, Any], None, None]
"""The choice of each event of a streamed answer, as JSON."""


class ContextFull(PassError):
    """The server says that the conversation is too long."""


@dataclass
class Server:
    """The two requests that a chat needs. url: without /v1. model: the name by which the server knows it."""

    url: str
    key: str = field(default="", repr=False)
    model: str = ""

    def encode_chat(self, _: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Accept any messages: the chat template is the server's, which refuses messages when they are sent."""
        return ()

    def connect(self) -> None:
        """Ask the server for the name of its model. PassError where the server cannot be used."""
        with closing(self._open("/v1/models", None)) as response:
            self.model = str(_json(response.read())["data"][0]["id"])

    def answer(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> ChoiceEvents:
        """Stream the answer. Closing the generator cancels the request. PassError where the answer breaks off."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **options}
        with closing(self._open("/v1/chat/completions", body)) as response:
            for line in response:
                event = line.strip().removeprefix(b"data: ")
                if event == b"[DONE]":
                    return
                if not event:
                    continue
                content = _json(event)
                if "error" in content:
                    raise _error(content)
                yield from content["choices"]
        raise PassError("the server went away in the middle of its answer")

    def _open(self, path: str, content: Any) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        body = None if content is None else json.dumps(content).encode()
        try:
            request = urllib.request.Request(self.url + path, body, headers)
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 401:
                    raise PassError(self._about_key) from None
                raise _error(_json(error.read())) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise PassError(f"{self.url} does not answer: {reason}; start it with pass-run serve BUNDLE") from None
        return response

    @property
    def _about_key(self) -> str:
        if self.key:
            return f"{self.url} does not know the API key: give another --api-key-file"
        return f"{self.url} wants an API key: name a file that has one with --api-key-file"


@dataclass
class RemoteChat(ChatLoop):
    """A chat with a server."""

    template: Server

    def _begin(self) -> None:
        self.template.connect()

    def _answer(self, user: str) -> None:
        text, last = "", None
        try:
            with closing(self._choices(user)) as choices:
                for choice in choices:
                    piece = choice["delta"].get("content") or ""
                    text, last = text + piece, choice
                    click.echo(piece, nl=False)
        except Interrupted:
            click.echo(" [stopped]", nl=False, err=True)
        except (OSError, http.client.HTTPException) as error:
            raise PassError(f"the server went away in the middle of its answer: {error}") from None
        click.echo()
        if last is None:
            return
        self.conversation.add(user, text)
        if sys.stderr is not None and sys.stderr.isatty() and (extension := last.get("pass")):
            finish = f"plan {extension['plan']}, tau {extension['tau']:.2f}, finished by {last['finish_reason']}"
            click.secho(f"[{finish}]", err=True, dim=True)

    def _choices(self, user: str) -> ChoiceEvents:
        """The events of the answer to `user`; the oldest exchanges are dropped until the server's context has room."""
        shortened = Conversation(self.conversation.system, list(self.conversation.turns))
        while True:
            try:
                yield from self.template.answer(shortened.messages(user), as_fields(self.options))
                return
            except ContextFull:
                if not self.drop or not shortened.turns:
                    raise
                shortened.drop_oldest()
                self.conversation.turns = list(shortened.turns)
                click.echo("the context is full: the oldest exchange dropped", err=True)


def as_fields(options: GenerateOptions) -> dict[str, Any]:
    """The options as fields of a request."""
    sampling = options.sampling
    fields: dict[str, Any] = {
        "max_tokens": options.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": list(options.stop_strings),
        "stop_token_ids": list(options.stop_token_ids),
        "ignore_eos": options.ignore_eos,
        "plan": options.plan,
        "lookahead": options.lookahead,
        "draft": options.draft,
        "cache_salt": options.cache_salt or None,
        **server_fields(options),
    }
    return {name: value for name, value in fields.items() if value is not None}


def open_remote(
    url: str, key_file: Path | None, options: GenerateOptions, conversation: Conversation, *, drop: bool
) -> RemoteChat:
    """A chat with the server at `url`. The key is the first line of `key_file` that is not a comment."""
    if not url.startswith(("http://", "https://")):
        raise PassError(f"--server is a URL, as http://127.0.0.1:8000, not {url!r}")
    lines = [] if key_file is None else [line.strip() for line in read_text(key_file).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if key_file is not None and not keys:
        raise PassError(f"{key_file} has no key")
    server = Server(url.rstrip("/").removesuffix("/v1"), keys[0] if keys else "")
    return RemoteChat(server, options, conversation, drop)


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PassError("the server's answer is not one of OpenAI's API")
    return found


def _error(content: dict[str, Any]) -> PassError:
    error = content.get("error")
    error = error if isinstance(error, dict) else {}
    kind = ContextFull if error.get("code") == "context_length_exceeded" else PassError
    return kind(f"the server refuses: {error.get('message', 'it does not say why')}")
