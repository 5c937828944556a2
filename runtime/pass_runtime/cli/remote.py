"""pass-run chat --server: the same conversation, answered by a server (`pass-run serve`, or one of its kind)."""

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

from pass_runtime.cli.chat import Talk
from pass_runtime.cli.conversation import Conversation
from pass_runtime.cli.errors import Interrupted
from pass_runtime.errors import PassError
from pass_runtime.files import read_text
from pass_runtime.options import GenerateOptions

SECONDS = 600
"""Of silence, after which a server is given up."""


Choices = Generator[dict[str, Any], None, None]


class ContextFull(PassError):
    """The server says that the conversation is too long."""


@dataclass
class Server:
    """The two requests that a chat needs. url: without /v1. model: what the server calls it."""

    url: str
    key: str = field(default="", repr=False)
    model: str = ""

    def encode_chat(self, _: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """The template is the server's: it refuses messages when they are sent."""
        return ()

    def connect(self) -> None:
        """Learn the model's name. PassError where the server cannot be used."""
        with closing(self._open("/v1/models", None)) as response:
            self.model = str(_json(response.read())["data"][0]["id"])

    def answer(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> Generator[dict[str, Any], None, None]:
        """The choice of each event of a streamed answer. Closing it tells the server to stop. PassError where it breaks
        off."""
        asked = {"model": self.model, "messages": list(messages), "stream": True, **options}
        with closing(self._open("/v1/chat/completions", asked)) as response:
            for line in response:
                event = line.strip().removeprefix(b"data: ")
                if event == b"[DONE]":
                    return
                if not event:
                    continue
                told = _json(event)
                if "error" in told:
                    raise _error(told)
                yield from told["choices"]
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
            told = getattr(error, "reason", error)
            raise PassError(f"{self.url} does not answer: {told}; start it with pass-run serve BUNDLE") from None
        return response

    @property
    def _about_key(self) -> str:
        if self.key:
            return f"{self.url} does not know the API key: give another --api-key-file"
        return f"{self.url} wants an API key: name a file that has one with --api-key-file"


@dataclass
class RemoteChat(Talk):
    """A server answers."""

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
        if sys.stderr.isatty() and (told := last.get("pass")):
            finish = f"plan {told['plan']}, tau {told['tau']:.2f}, finished by {last['finish_reason']}"
            click.secho(f"[{finish}]", err=True, dim=True)

    def _choices(self, user: str) -> Choices:
        """Of the answer, once the conversation fits the server's context."""
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
    """In the API's words."""
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
    }
    return {name: value for name, value in fields.items() if value is not None}


def open_remote(
    url: str, key_file: Path | None, options: GenerateOptions, conversation: Conversation, *, drop: bool
) -> RemoteChat:
    """key_file: its first line that is not a comment is the key."""
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


def _error(told: dict[str, Any]) -> PassError:
    error = told.get("error")
    error = error if isinstance(error, dict) else {}
    kind = ContextFull if error.get("code") == "context_length_exceeded" else PassError
    return kind(f"the server refuses: {error.get('message', 'it does not say why')}")
