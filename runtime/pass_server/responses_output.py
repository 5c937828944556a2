"""Writes the answers of /v1/responses as JSON, whole or as the events of a stream.

An answer is a list of output items: reasoning, messages and function calls. The last item grows
while the model writes, and the events of a stream report its growth.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence

from pass_runtime import Piece
from pass_server.answers import Choice, Json, pass_field, sse_event
from pass_server.api_error import ApiError

_TEXT_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
"""The type of an item's text part, which also begins the names of the part's events."""
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """Builds the output items from deltas. A method that changes them returns the events for that,
    without the `sequence_number`, which the formatter adds. items: the output items so far."""

    def __init__(self) -> None:
        self.items: list[Json] = []

    def add(self, delta: Json) -> list[Json]:
        """Add a delta of `ChatAnswer`, and return the events for it."""
        if calls := delta.get("tool_calls"):
            (call,) = calls
            return self._add_call(call)
        kind = "reasoning" if "reasoning_content" in delta else "message"
        text = delta.get("reasoning_content") or delta.get("content")
        return self._add_text(kind, text) if text else []

    def end(self, status: str) -> list[Json]:
        """End the last item, and return the events for it. status: "completed" or "incomplete"."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = [self._event("function_call_arguments.done") | {"arguments": item["arguments"]}]
        else:
            part = item["content"][0]
            text_done = self._part_event(f"{part['type']}.done") | {"text": part["text"]}
            part_done = self._part_event("content_part.done") | {"part": dict(part)}
            done = [text_done | _logprobs_field(item["type"]), part_done]
        return [*done, self._item_event("done")]

    def copy(self) -> list[Json]:
        """Return the items as they are now."""
        return [_copy(item) for item in self.items]

    def _add_call(self, call: Json) -> list[Json]:
        function = call["function"]
        if "id" in call:  # the first delta of a call
            ended = self.end("completed")
            return ended + self.begin("function_call", call_id=call["id"], **function)
        self.items[-1]["arguments"] += function["arguments"]
        return [self._event("function_call_arguments.delta") | {"delta": function["arguments"]}]

    def _add_text(self, kind: str, text: str) -> list[Json]:
        begun: list[Json] = []
        if not self.items or self.items[-1]["type"] != kind:
            begun = self.end("completed") + self.begin(kind)
        part = self.items[-1]["content"][0]
        part["text"] += text
        delta = self._part_event(f"{part['type']}.delta") | {"delta": text}
        return [*begun, delta | _logprobs_field(kind)]

    def begin(self, kind: str, **fields: str) -> list[Json]:
        """Begin an item of a type without text, and return the events for it."""
        item: Json = {
            "type": kind,
            "id": f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}",
            "status": "in_progress",
            **fields,
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        events = [self._item_event("added")]
        if kind in _TEXT_TYPES:
            part: Json = {"type": _TEXT_TYPES[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": []} | _logprobs_field(kind)
            item["content"].append(part)
            events.append(self._part_event("content_part.added") | {"part": dict(part)})
        return events

    def _item_event(self, action: str) -> Json:
        name, index = f"response.output_item.{action}", len(self.items) - 1
        return {"type": name, "output_index": index, "item": _copy(self.items[-1])}

    def _part_event(self, kind: str) -> Json:
        return self._event(kind) | {"content_index": 0}

    def _event(self, kind: str) -> Json:
        """Return an event about the last item."""
        index = len(self.items) - 1
        item_id = self.items[index]["id"]
        return {"type": f"response.{kind}", "item_id": item_id, "output_index": index}


def _logprobs_field(kind: str) -> Json:
    """Return the field `logprobs`, which clients expect in the text of a message alone."""
    return {"logprobs": []} if kind == "message" else {}


def _copy(item: Json) -> Json:
    return item | (
        {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
    )


class ResponsesFormatter:
    """Writes the answer of one request, as `ChoicesFormatter` does for chats. echo: the fields of
    the request that the answer repeats. Each method gets the answer's only choice."""

    done = b""  # These streams end without "[DONE]".

    def __init__(self, model: str, echo: Json) -> None:
        self.id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._model, self._echo = model, echo
        self._output = OutputItems()
        self._event_count = 0

    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        (choice,) = choices
        self._push_text(choice, choice.generation.text)
        self.ending(choice)
        return self._final_response(choice, usage)

    def opening(self, choice: Choice) -> list[Json]:  # noqa: ARG002
        response = self._response("in_progress")
        names = ("response.created", "response.in_progress")
        return [{"type": name, "response": response} for name in names]

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        return self._push_text(choice, piece.text)

    def ending(self, choice: Choice) -> list[Json]:
        """Return the events of the text that was held back, and of the end of the last item. An
        empty answer is a message without text."""
        events = [event for delta in choice.finish_answer() for event in self._output.add(delta)]
        if not self._output.items:
            events += self._output.begin("message")
        return events + self._output.end(_status(choice))

    def event(self, content: Json) -> bytes:
        self._event_count += 1
        return sse_event(content | {"sequence_number": self._event_count - 1}, content["type"])

    def closing(self, choices: Sequence[Choice], usage: Json) -> bytes:
        ended = self._final_response(choices[0], usage)
        return self.event({"type": f"response.{ended['status']}", "response": ended})

    def failure(self, error: ApiError) -> bytes:
        self._output.end("incomplete")
        problem = {"code": "server_error", "message": error.message}
        response = self._response("failed") | {"error": problem}
        return self.event({"type": "response.failed", "response": response})

    def _push_text(self, choice: Choice, text: str) -> list[Json]:
        deltas = [{"content": text}] if choice.answer is None else choice.answer.push(text)
        return [event for delta in deltas for event in self._output.add(delta)]

    def _final_response(self, choice: Choice, usage: Json) -> Json:
        status = _status(choice)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status) | {
            "incomplete_details": details,
            "usage": _usage(usage),
            "pass": pass_field(choice.generation),
        }

    def _response(self, status: str) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": self._output.copy(),
            **self._echo,
            "background": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": None,
        }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.generation.finish_reason == "length" else "completed"


def _usage(usage: Json) -> Json:
    """Return `usage` of /v1/responses. usage: that of a chat."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
