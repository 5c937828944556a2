"""The items of an input as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pass_server.chat_schemas import Content, ContentPart
from pass_server.errors import ApiError, not_supported
from pass_server.fields import unsupported
from pass_server.responses.items import CallItem, InputItem, MessageItem, ReasoningItem, ResultItem

Message = dict[str, Any]
_NAMES = {"tool_call_id": "call_id", "function.arguments": "arguments", "content": "content"}
"""Fields of messages and calls that an item has too, with the names that they have there."""


class Messages:
    """Messages, put together item by item. Thoughts, text and calls of the model that follow one another are one
    message, as chat templates expect them.

    found: the messages so far. places: the path of the item that a message, or a call in one, began with, by its own.
    """

    def __init__(self, instructions: str | None) -> None:
        self.found: list[Message] = []
        self.places: dict[str, str] = {}
        if instructions:
            self._begin({"role": "system", "content": instructions}, "instructions")

    def add(self, items: str | Sequence[InputItem]) -> None:
        """ApiError says what is wrong with an item."""
        if isinstance(items, str):
            self._begin({"role": "user", "content": items}, "input")
            return
        for i, item in enumerate(items):
            where = f"input.{i}"
            if (name := unsupported(item)) is not None:
                raise not_supported(f"{where}.{name}", getattr(item, name))
            self._add(item, where)
        for message in self.found:
            if message["role"] == "assistant" and "tool_calls" not in message:
                message.setdefault("content", "")  # thoughts, and nothing after them

    def own_name(self, param: str) -> str:
        """The path in the request of what has the path `param` in the chat."""
        if param == "messages":
            return "input"
        parts = param.split(".")
        for size in (4, 2):
            if (place := self.places.get(".".join(parts[:size]))) is not None:
                name = _NAMES.get(".".join(parts[size:])) if place.startswith("input.") else None
                return f"{place}.{name}" if name else place
        return param

    def _add(self, item: InputItem, where: str) -> None:
        if isinstance(item, ResultItem):
            content = _text(item.output, f"{where}.output")
            self._begin({"role": "tool", "tool_call_id": item.call_id, "content": content}, where)
        elif isinstance(item, CallItem):
            turn = self._turn(where)
            function = {"name": item.name, "arguments": item.arguments}
            calls = turn.setdefault("tool_calls", [])
            self.places[f"messages.{len(self.found) - 1}.tool_calls.{len(calls)}"] = where
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ReasoningItem):
            thoughts = _text(item.content or [], f"{where}.content")
            turn = self._turn(where, "reasoning_content", "content", "tool_calls")
            turn["reasoning_content"] = "\n".join(part["text"] for part in thoughts)
        else:
            self._add_message(item, where)

    def _add_message(self, item: MessageItem, where: str) -> None:
        content = _text(item.content, f"{where}.content")
        if item.role == "assistant":
            self._turn(where, "content", "tool_calls")["content"] = content
        else:
            self._begin({"role": item.role, "content": content}, where)

    def _turn(self, where: str, *taken: str) -> Message:
        """The message of the model that is the last one, or a new one where there is none or it has one of `taken`."""
        if not self.found or self.found[-1]["role"] != "assistant" or any(name in self.found[-1] for name in taken):
            self._begin({"role": "assistant"}, where)
        return self.found[-1]

    def _begin(self, message: Message, where: str) -> None:
        self.places[f"messages.{len(self.found)}"] = where
        self.found.append(message)


def _text(content: Content, where: str) -> Any:
    """Content as that of a chat's message."""
    if isinstance(content, str):
        return content
    return [_part(part, where) for part in content]


def _part(part: ContentPart, where: str) -> dict[str, str]:
    known = part.type in ("input_text", "output_text", "reasoning_text") and part.text is not None
    if not known or set(part.model_extra or ()) - {"annotations", "logprobs"}:
        raise ApiError(
            f'{where} must be text, in parts such as {{"type": "input_text", "text": ...}}: this model reads text only',
            param=where,
            code="unsupported_content_part",
        )
    return {"type": "text", "text": part.text or ""}
