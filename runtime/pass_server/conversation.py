"""A chat's messages in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from pass_server.api_error import ApiError, not_supported
from pass_server.fields import AssistantMessage, ChatMessage, ToolCall, ToolMessage, UserMessage, unsupported
from pass_server.schemas import ChatRequest

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of a template that clients cannot set, as they cannot set those of special tokens."""


def conversation(request: ChatRequest, *, calls: bool) -> list[dict[str, Any]]:
    """The messages for the template. calls: whether it takes calls of functions and their results. ApiError says what
    is wrong with a message."""
    names: dict[str, str] = {}
    found = []
    for i, message in enumerate(request.messages):
        where = f"messages.{i}."
        if (name := unsupported(message)) is not None:
            raise not_supported(where + name, getattr(message, name))
        if not calls and (isinstance(message, ToolMessage) or _calls(message)):
            param = where + ("role" if isinstance(message, ToolMessage) else "tool_calls")
            raise ApiError("this model takes no calls of functions", param=param, code="unsupported_parameter")
        found.append(_message(message, where, names))
    return found


def other_texts(message: ChatMessage) -> list[str]:
    """What a message holds for the prompt besides its content."""
    thoughts = message.reasoning_content or "" if isinstance(message, AssistantMessage) else ""
    return [thoughts, *(call.function.arguments for call in _calls(message))]


def texts(message: ChatMessage) -> list[str]:
    """The text of a message's content, in parts."""
    if isinstance(message.content, list):
        return [part.text or "" for part in message.content]
    return [message.content or ""]


def _message(message: ChatMessage, where: str, names: dict[str, str]) -> dict[str, Any]:
    """names: the functions that were called so far, by the id of the call; those of this message are added."""
    for part in message.content if isinstance(message.content, list) else ():
        if part.type != "text" or part.text is None or part.model_extra:
            raise ApiError(
                'content parts must be {"type": "text", "text": ...}: this model reads text only',
                param=where + "content",
                code="unsupported_content_part",
            )
    found: dict[str, Any] = {"role": message.role}
    if message.content is not None:
        found["content"] = "\n".join(texts(message))
    if isinstance(message, UserMessage):
        found["role"] = "system" if message.role == "developer" else message.role
    elif isinstance(message, ToolMessage):
        if message.tool_call_id not in names:
            problem = f"{where}tool_call_id must be the id of a call in a message before"
            raise ApiError(problem, param=where + "tool_call_id")
        found |= {"tool_call_id": message.tool_call_id, "name": names[message.tool_call_id]}
    else:
        if message.content is None and not message.tool_calls:
            raise ApiError(f"{where}content: a message needs text", param=where + "content")
        if message.reasoning_content:
            found["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            found["tool_calls"] = [_call(call, f"{where}tool_calls.{i}.") for i, call in enumerate(message.tool_calls)]
            names |= {call.id: call.function.name for call in message.tool_calls}
    return found


def _calls(message: ChatMessage) -> list[ToolCall]:
    return message.tool_calls or [] if isinstance(message, AssistantMessage) else []


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates expect."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param = where + "function.arguments"
        raise ApiError(f"{param} must be a JSON object, as text", param=param)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
