"""A server in the process of the tests, whose model writes a text that the test chooses."""

from __future__ import annotations

from openai import OpenAI
from reciting import EOS, reciting_session
from starlette.testclient import TestClient
from tool_models import QUESTION

from pass_runtime.text.templates import ChatTemplate
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions

ARGUMENTS = '{"city": "Rome", "days": 2}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_TURN = f"Let me see.\n{HERMES_CALL}"
TURNS = {
    "hermes": HERMES_TURN,
    "llama3_json": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}
"""Turns in which a model calls the function `weather`, by call format."""


class RecitingServer:
    """Answers every chat with `text`. messages: those of the last chat, as its template got them.
    options: of ServeOptions."""

    def __init__(self, bundle, template, **options):
        self.text, self._prompt_length = "", 0
        self.session = reciting_session(bundle, self._token, slots=2)
        self.session.chat_template = ChatTemplate(
            template, {"bos_token": "<bos>", "eos_token": "<eos>"}
        )
        encode = self.session.encode_chat

        def encode_and_record(messages, **options):
            ids = encode(messages, **options)
            self._prompt_length, self.messages = len(ids), messages
            return ids

        self.session.encode_chat = encode_and_record
        self.http = TestClient(make_app(self.session, ServeOptions(**options)))
        self.client = OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=self.http, max_retries=0
        )

    def _token(self, position):
        ids = self.session.tokenizer.encode(self.text, add_special_tokens=False).ids
        index = position - self._prompt_length
        return ids[index] if 0 <= index < len(ids) else EOS

    def ask(self, text, **fields):
        """Let the model write `text`. Return the choice of the answer, and the deltas of the same
        answer as a stream, whose parts must be those of the whole answer."""
        self.text = text
        name = self.session.manifest.model.name
        body = {"model": name, "messages": QUESTION, "max_tokens": 200, "seed": 1} | fields
        create = self.client.chat.completions.create
        whole = create(**body).choices[0]
        streamed = [chunk.choices[0] for chunk in create(**body, stream=True)]
        assert streamed[-1].finish_reason == whole.finish_reason
        deltas = [choice.delta for choice in streamed]
        parts = zip(*map(text_parts, deltas), strict=True)
        assert tuple(map("".join, parts)) == text_parts(whole.message)
        return whole, deltas


def text_parts(message) -> tuple[str, str, str]:
    """Return the content, the thoughts, and the arguments of all calls, of a message or delta."""
    thoughts = (message.model_extra or {}).get("reasoning_content")
    arguments = [call.function.arguments or "" for call in message.tool_calls or ()]
    return message.content or "", thoughts or "", "".join(arguments)
