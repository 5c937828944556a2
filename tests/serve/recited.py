"""A server whose model answers with a text that a test wrote."""

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
    """A server of one model that answers any chat with `text`."""

    def __init__(self, bundle, template, **options):
        self.text, self._start = "", 0
        self.session = reciting_session(bundle, self._token, slots=2)
        self.session.chat_template = ChatTemplate(
            template, {"bos_token": "<bos>", "eos_token": "<eos>"}
        )
        encode = self.session.encode_chat

        def noted(*args, **more):
            ids = encode(*args, **more)
            self._start, self.messages = len(ids), args[0]
            return ids

        self.session.encode_chat = noted
        self.http = TestClient(make_app(self.session, ServeOptions(**options)))
        self.client = OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=self.http, max_retries=0
        )

    def _token(self, position):
        ids = self.session.tokenizer.encode(self.text, add_special_tokens=False).ids
        return ids[position - self._start] if 0 <= position - self._start < len(ids) else EOS

    def ask(self, text, **fields):
        """-> the only choice of the answer, and the deltas of the same answer streamed"""
        self.text = text
        own = {
            "model": self.session.manifest.model.name,
            "messages": ASKED,
            "max_tokens": 200,
            "seed": 1,
        } | fields
        whole = self.client.chat.completions.create(**own).choices[0]
        chunks = [
            chunk.choices[0] for chunk in self.client.chat.completions.create(**own, stream=True)
        ]
        assert chunks[-1].finish_reason == whole.finish_reason
        deltas = [chunk.delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == (whole.message.content or "")
        thoughts = "".join(
            (delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas
        )
        assert thoughts == (whole.message.model_extra.get("reasoning_content") or "")
        calls = [part for delta in deltas for part in delta.tool_calls or ()]
        assert "".join(part.function.arguments for part in calls) == "".join(
            call.function.arguments for call in whole.message.tool_calls or ()
        )
        return whole, deltas
