"""The items of an answer's output, put together from the deltas of a chat, and the events that tell how they grow."""

from __future__ import annotations

import uuid

from pass_server.choices import Json

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""What events and parts call the text of an item."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Output:
    """items: those so far, of which the last one grows until it is ended. Events have no sequence number yet."""

    def __init__(self) -> None:
        self.items: list[Json] = []

    def add(self, delta: Json) -> list[Json]:
        """-> the events for a delta, which is one of `ChatAnswer`'s"""
        if calls := delta.get("tool_calls"):
            (call,) = calls
            return self._add_call(call)
        kind = "reasoning" if "reasoning_content" in delta else "message"
        text = delta.get("reasoning_content") or delta.get("content")
        return self._add_text(kind, text) if text else []

    def end(self, status: str) -> list[Json]:
        """-> the events at the end of the last item; status: "completed" or "incomplete" """
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = [self._event("function_call_arguments.done") | {"arguments": item["arguments"]}]
        else:
            part = item["content"][0]
            of_text = self._of_part(f"{part['type']}.done") | {"text": part["text"]}
            done = [of_text | _no_logprobs(item["type"]), self._of_part("content_part.done") | {"part": dict(part)}]
        return [*done, self._of_item("done")]

    def begin_message(self) -> list[Json]:
        """-> the events for a message without text as yet"""
        return self._begin("message")

    def copied(self) -> list[Json]:
        """The items as they are now."""
        return [_copy(item) for item in self.items]

    def _add_call(self, call: Json) -> list[Json]:
        function = call["function"]
        if "id" in call:
            return self.end("completed") + self._begin("function_call", call_id=call["id"], **function)
        self.items[-1]["arguments"] += function["arguments"]
        return [self._event("function_call_arguments.delta") | {"delta": function["arguments"]}]

    def _add_text(self, kind: str, text: str) -> list[Json]:
        begun = self.end("completed") + self._begin(kind) if self._last_kind != kind else []
        part = self.items[-1]["content"][0]
        part["text"] += text
        return [*begun, self._of_part(f"{part['type']}.delta") | {"delta": text} | _no_logprobs(kind)]

    @property
    def _last_kind(self) -> str:
        return self.items[-1]["type"] if self.items else ""

    def _begin(self, kind: str, **fields: str) -> list[Json]:
        item: Json = {"type": kind, "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        events = [self._of_item("added")]
        if kind in _TEXTS:
            part = {"type": _TEXTS[kind], "text": "", **({"annotations": []} if kind == "message" else {})}
            item["content"].append(part | _no_logprobs(kind))
            events.append(self._of_part("content_part.added") | {"part": dict(item["content"][0])})
        return events

    def _of_item(self, what: str) -> Json:
        item = _copy(self.items[-1])
        return {"type": f"response.output_item.{what}", "output_index": len(self.items) - 1, "item": item}

    def _of_part(self, kind: str) -> Json:
        return self._event(kind) | {"content_index": 0}

    def _event(self, kind: str) -> Json:
        """An event about what the last item holds."""
        place = len(self.items) - 1
        return {"type": f"response.{kind}", "item_id": self.items[place]["id"], "output_index": place}


def _no_logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "message" else {}


def _copy(item: Json) -> Json:
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})
