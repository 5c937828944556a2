"""A server whose model writes a text that the test chooses."""

from __future__ import annotations

from openai import OpenAI
from reciting import reciting_session
from starlette.testclient import TestClient

from pass_runtime.text.chat_template import ChatTemplate
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions

EOS = 1
ASKED = [{"role": "user", "content": "How warm is it?"}]
WEATHER = '{"city": "Rome", "days": 2}'
HERMES = f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>'
TEXTS = {
    "hermes": HERMES,
    "llama3_json": f'<|python_tag|>{{"name": "weather", "parameters": {WEATHER}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}}}]',
}


class Reciter:
    """A server in this process that answers every chat with `text`."""

    def __init__(self, bundle, template, **options):
        self.text, self._start = "", 0
        self.session = reciting_session(bundle, self._token, slots=2)
        self.session.chat_template = ChatTemplate(
            template, {"bos_token": "<bos>", "eos_token": "<eos>"}
        )
        encode = self.session.encode_chat

        def recorded(*args, **more):
            ids = encode(*args, **more)
            self._start, self.messages = len(ids), args[0]
            return ids

        self.session.encode_chat = recorded
        self.http = TestClient(make_app(self.session, ServeOptions(**options)))
        self.client = OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=self.http, max_retries=0
        )

    def _token(self, position):
        ids = self.session.tokenizer.encode(self.text, add_special_tokens=False).ids
        return ids[position - self._start] if 0 <= position - self._start < len(ids) else EOS

    def ask(self, text, **fields):
        """Return the choice of the answer, and the deltas of the same answer as a stream."""
        self.text = text
        name = self.session.manifest.model.name
        body = {"model": name, "messages": ASKED, "max_tokens": 200, "seed": 1} | fields
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
