"""A server in the process of the tests, whose model writes a text that the test chooses."""

from __future__ import annotations

from in_process import App
from reciting import EOS, reciting_session
from tool_models import QUESTION

from pass_runtime.text.templates import ChatTemplate

ARGUMENTS = '{"city": "Rome", "days": 2}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_TURN = f"Let me see.\n{HERMES_CALL}"
TURNS = {
    "hermes": HERMES_TURN,
    "llama3_json": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}
"""Turns in which a model calls the function `weather`, by call format."""


class RecitingServer(App):
    """Answers every chat with `text`. messages: of the last chat, as its template got them."""

    def __init__(self, bundle, template, **options):
        self.text, self._prompt_length = "", 0
        session = reciting_session(bundle, self._token, slots=2)
        session.chat_template = ChatTemplate(template, {"bos_token": "<bos>", "eos_token": "<eos>"})
        encode = session.encode_chat

        def encode_and_record(messages, **options):
            ids = encode(messages, **options)
            self._prompt_length, self.messages = len(ids), messages
            return ids

        session.encode_chat = encode_and_record
        super().__init__(session, **options)

    def ids_of(self, text):
        return self.session.tokenizer.encode(text, add_special_tokens=False).ids

    def _token(self, position):
        ids, index = self.ids_of(self.text), position - self._prompt_length
        return ids[index] if 0 <= index < len(ids) else EOS

    def ask(self, text, **fields):
        """Let the model write `text`. Return the choice of the answer, and the deltas of the same
        answer as a stream, whose parts must be those of the whole answer."""
        self.text = text
        body = {"model": "m", "messages": QUESTION, "max_tokens": 200, "seed": 1} | fields
        create = self.client().chat.completions.create
        whole = create(**body).choices[0]
        streamed = [chunk.choices[0] for chunk in create(**body, stream=True)]
        assert streamed[-1].finish_reason == whole.finish_reason
        deltas = [choice.delta for choice in streamed]
        parts = zip(*map(text_parts, deltas), strict=True)
        assert tuple(map("".join, parts)) == text_parts(whole.message)
        calls = [call for delta in deltas for call in delta.tool_calls or () if call.id]
        assert [call.index for call in calls] == [*range(len(whole.message.tool_calls or ()))]
        return whole, deltas

    def respond(self, text, **fields):
        """Let the model write `text` as a response. Return it, and the events of the same response
        as a stream, which must have the same items."""
        self.text = text
        body = {"model": "m", "input": QUESTION, "max_output_tokens": 200} | fields
        create = self.client().responses.create
        whole, events = create(**body), [*create(**body, stream=True)]
        streamed = events[-1].response
        assert events[-1].type == f"response.{whole.status}"
        assert [each.sequence_number for each in events] == [*range(len(events))]
        assert [*map(without_ids, streamed.output)] == [*map(without_ids, whole.output)]
        ended = [event.item for event in events if event.type == "response.output_item.done"]
        assert ended == streamed.output
        return whole, events


def text_parts(message) -> tuple[str, ...]:
    """Return the content, the thoughts, and the names and arguments of all calls, of a message or
    delta."""
    thoughts = (message.model_extra or {}).get("reasoning_content")
    functions = [call.function for call in message.tool_calls or ()]
    names, arguments = (
        [getattr(each, key) or "" for each in functions] for key in ("name", "arguments")
    )
    return message.content or "", thoughts or "", "".join(names), "".join(arguments)


def without_ids(item) -> dict:
    return {key: value for key, value in item.to_dict().items() if not key.endswith("id")}
