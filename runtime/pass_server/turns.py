"""Chats: messages for the chat template, the constraint of the model's next turn, and how that turn
is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from tokenizers import Tokenizer

from pass_runtime import Constraint, Session
from pass_server.api_error import ApiError, not_supported
from pass_server.call_formats import FORMATS, CallFormat, Function, format_of
from pass_server.fields import (
    AssistantMessage,
    ChatMessage,
    NamedChoice,
    ToolCall,
    ToolMessage,
    UserMessage,
    unsupported_field,
)
from pass_server.schemas import ChatRequest
from pass_server.serve_options import ServeOptions
from pass_server.turn_reader import REASONING_END, REASONING_START, ReasoningReader, TurnReader

RESERVED_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
)
"""Template variables that clients cannot set. They cannot set those of special tokens either."""


def template_messages(request: ChatRequest, *, calls: bool) -> list[dict[str, Any]]:
    """The messages for the chat template. calls: whether it takes tool calls and their results.
    Raises ApiError if a message is invalid."""
    names: dict[str, str] = {}
    found = []
    for i, message in enumerate(request.messages):
        path = f"messages.{i}."
        if (name := unsupported_field(message)) is not None:
            raise not_supported(path + name, getattr(message, name))
        if not calls and (isinstance(message, ToolMessage) or _calls(message)):
            param = path + ("role" if isinstance(message, ToolMessage) else "tool_calls")
            raise ApiError(
                "this model takes no tool calls", param=param, code="unsupported_parameter"
            )
        found.append(_message(message, path, names))
    return found


def chat_texts(request: ChatRequest) -> Iterator[str]:
    """All texts of a chat that its prompt may contain: contents, reasoning, calls and tools."""
    for message in request.messages:
        yield from _content_texts(message)
        if isinstance(message, AssistantMessage):
            yield message.reasoning_content or ""
        yield from (call.function.arguments for call in _calls(message))
    for tool in request.tools or ():
        yield json.dumps(tool.model_dump(), ensure_ascii=False)


def _content_texts(message: ChatMessage) -> list[str]:
    """The text of a message's content, in parts."""
    if isinstance(message.content, list):
        return [part.text or "" for part in message.content]
    return [message.content or ""]


def _message(message: ChatMessage, path: str, names: dict[str, str]) -> dict[str, Any]:
    """The message for the chat template. names: the functions called so far, by call id; this
    message's are added."""
    for part in message.content if isinstance(message.content, list) else ():
        if part.type != "text" or part.text is None or part.model_extra:
            raise ApiError(
                'content parts must be {"type": "text", "text": ...}: this model reads text only',
                param=path + "content",
                code="unsupported_content_part",
            )
    found: dict[str, Any] = {"role": message.role}
    if message.content is not None:
        found["content"] = "\n".join(_content_texts(message))
    if isinstance(message, UserMessage):
        found["role"] = "system" if message.role == "developer" else message.role
    elif isinstance(message, ToolMessage):
        if message.tool_call_id not in names:
            problem = f"{path}tool_call_id must be the id of a call in an earlier message"
            raise ApiError(problem, param=path + "tool_call_id")
        name = names[message.tool_call_id]
        if message.name not in (None, name):
            problem = (
                f"{path}name is {message.name!r}, but the call {message.tool_call_id!r} "
                f"is one of {name!r}"
            )
            raise ApiError(
                f"{problem}: leave name out, or correct tool_call_id", param=path + "name"
            )
        found |= {"tool_call_id": message.tool_call_id, "name": name}
    else:
        if message.content is None and not message.tool_calls:
            raise ApiError(
                f"{path}content: a message needs text or tool_calls", param=path + "content"
            )
        if message.reasoning_content:
            found["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            found["tool_calls"] = [_call(call) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
    return found


def _calls(message: ChatMessage) -> list[ToolCall]:
    return message.tool_calls or [] if isinstance(message, AssistantMessage) else []


def _call(call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates expect. Arguments that are
    none, such as those of a call that was cut off, stay the text that they are: history never ends
    a conversation."""
    given: dict[str, Any]
    try:
        given = {"arguments": from_json(call.function.arguments or "{}", allow_inf_nan=False)}
    except (
        ValueError
    ):  # also if it is nested too deep, or has a number or a character that no template can write
        given = {"arguments": None}
    if not isinstance(given["arguments"], dict):
        given = {"written_arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, **given}}


@dataclass(frozen=True)
class TurnFormat:
    """How the model's turn is read.

    has_reasoning: whether it may begin with reasoning. in_reasoning: whether the prompt ends with
    the opening marker.
    calls: the format of calls of the functions `names`; None if the turn has no calls.
    marker_tokens: special tokens that are markers. only_calls: whether the turn has nothing but
    calls after its reasoning.
    """

    has_reasoning: bool
    in_reasoning: bool
    calls: CallFormat | None
    names: tuple[str, ...]
    marker_tokens: tuple[int, ...]
    only_calls: bool = False

    def reader(self) -> TurnReader:
        """A reader for one turn."""
        reasoning = ReasoningReader(in_reasoning=self.in_reasoning) if self.has_reasoning else None
        calls = None if self.calls is None else self.calls.reader(self.names)
        return TurnReader(reasoning, calls, only_calls=self.only_calls)


class ChatFormat:
    """How a model writes reasoning and tool calls, by its chat template or the server's options."""

    def __init__(self, session: Session, options: ServeOptions) -> None:
        self._session = session
        template = session.chat_template
        sources = [] if template is None else template.sources.values()
        auto = any(REASONING_START in source for source in sources)
        self.has_reasoning = (
            auto if options.reasoning_parser == "auto" else options.reasoning_parser == "think"
        )
        with_tools = "" if template is None else template.tool_use_source
        if options.tool_call_parser == "auto":
            self.calls = format_of(with_tools)
        else:
            self.calls = FORMATS.get(options.tool_call_parser)
        if template is None or not template.reads("tools"):
            self.calls = None  # the model would not see the tools

    def variables(self, request: ChatRequest) -> dict[str, Any]:
        """The variables of the chat template besides messages. Raises ApiError if one is not
        supported."""
        self._check_tools(request)
        found: dict[str, Any] = {}
        template = self._session.chat_template
        reserved = (*RESERVED_VARIABLES, *(template.tokens if template is not None else ()))
        for name, value in (request.chat_template_kwargs or {}).items():
            if (
                template is None
                or not name.isidentifier()
                or not template.reads(name)
                or name in reserved
            ):
                raise not_supported(
                    "chat_template_kwargs",
                    value,
                    f"the model's chat template has no option {name!r}",
                )
            found[name] = value
        if request.tools and request.tool_choice != "none":
            found["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        return found

    def turn_format(self, request: ChatRequest, prompt: Sequence[int]) -> TurnFormat | None:
        """How the turn after `prompt` is read; None if it is only text."""
        calls = self.calls if request.tools and request.tool_choice != "none" else None
        if calls is None and not self.has_reasoning:
            return None
        end = self._session.tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)
        markers = (
            *(calls.markers if calls else ()),
            *((REASONING_START, REASONING_END) if self.has_reasoning else ()),
        )
        added = self._session.tokenizer.get_added_tokens_decoder()
        shown = tuple(
            number for number, token in added.items() if token.special and token.content in markers
        )
        names = tuple(tool.function.name for tool in request.tools or ()) if calls else ()
        in_reasoning = self.has_reasoning and end.rstrip().endswith(REASONING_START)
        only_calls = calls is not None and _requires_call(request)
        return TurnFormat(self.has_reasoning, in_reasoning, calls, names, shown, only_calls)

    def constraint(
        self, request: ChatRequest, turn: TurnFormat | None, wanted: Constraint | None
    ) -> Constraint | None:
        """The constraint of the whole turn. wanted: that of its content, by the fields for
        structured outputs."""
        if turn is None:
            return wanted
        terminal = marker_terminals(self._session.tokenizer)
        rules = [] if wanted is None else [wanted.lark("form")]
        if turn.calls is not None and (turn.only_calls or wanted is not None):
            parallel = request.parallel_tool_calls is not False and not isinstance(
                request.tool_choice, NamedChoice
            )
            calls = turn.calls.rules(_functions(request), terminal, parallel=parallel)
            rules = [calls] if turn.only_calls else [*rules, calls]
        if not rules:
            return None
        return turn_grammar(
            *rules,
            terminal=terminal,
            has_reasoning=turn.has_reasoning,
            in_reasoning=turn.in_reasoning,
        )

    def _check_tools(self, request: ChatRequest) -> None:
        chosen, tools = request.tool_choice, request.tools or []
        names = [tool.function.name for tool in tools]
        if tools and self.calls is None and chosen != "none":
            why = "the model's chat template has no format of tool calls that this server knows"
            raise not_supported("tools", tools, why)
        if not tools and chosen not in (None, "none", "auto"):
            raise not_supported("tool_choice", chosen, "there are no tools to choose from")
        if len(set(names)) < len(names):
            raise ApiError("two tools have the same name", param="tools")
        if isinstance(chosen, NamedChoice) and chosen.function.name not in names:
            problem = f"tool_choice names {chosen.function.name!r}, which is none of the tools"
            raise ApiError(problem, param="tool_choice")


def _requires_call(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedChoice)


def _functions(request: ChatRequest) -> list[Function]:
    """The functions that may be called."""
    chosen = request.tool_choice
    return [
        Function(tool.function.name, tool.function.parameters or {})
        for tool in request.tools or ()
        if not isinstance(chosen, NamedChoice) or tool.function.name == chosen.function.name
    ]


def marker_terminals(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Maps a marker to its terminal in a Lark grammar: the added token with this text if there is
    one, or a string."""
    added = {
        token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    return lambda marker: (
        f"<[{added[marker]}]>" if marker in added else json.dumps(marker, ensure_ascii=False)
    )


def turn_grammar(
    *rules: str,
    terminal: Callable[[str], str],
    has_reasoning: bool = False,
    in_reasoning: bool = False,
) -> Constraint:
    """The constraint of a turn that matches one of these Lark rules, after reasoning if
    has_reasoning. A rule's name is at the beginning of its text. in_reasoning: as in
    ReasoningReader."""
    turn = " | ".join(rule.partition(":")[0] for rule in rules)
    lines = [f"turn: {turn}", *rules]
    if not has_reasoning:
        return Constraint(grammar="\n".join(["start: turn", *lines]))
    opening, closing = terminal(REASONING_START), terminal(REASONING_END)
    start = "reasoning turn" if in_reasoning else f"({opening} reasoning)? turn"
    if closing.startswith("<["):
        reasoning = [f"reasoning: thinking {closing} /\\s{{0,4}}/", "thinking: /(.|\\n)*/"]
    else:
        reasoning = ["reasoning: thinking /\\s{0,4}/", f"thinking[suffix={closing}]: /(.|\\n)*/"]
    return Constraint(grammar="\n".join([f"start: {start}", *reasoning, *lines]))
