"""The turns of a chat: messages as templates take them, what a model's next turn may be, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from pass_runtime import Constraint, Session, Token
from pass_server.api_error import ApiError, not_supported
from pass_server.call_formats import FORMATS, CallFormat, Function, format_of
from pass_server.fields import (
    AssistantMessage,
    ChatMessage,
    NamedChoice,
    ToolCall,
    ToolMessage,
    UserMessage,
    unsupported,
)
from pass_server.schemas import ChatRequest
from pass_server.serve_options import ServeOptions
from pass_server.turn_reader import CLOSING, OPENING, ReasoningReader, TurnReader

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of a template that clients cannot set, as they cannot set those of special tokens."""


def conversation(request: ChatRequest, *, calls: bool) -> list[dict[str, Any]]:
    """The messages for the template. calls: whether it takes calls of functions and their results. Raises
    ApiError, which says what is wrong with a message."""
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


@dataclass(frozen=True)
class Turn:
    """How the texts of a chat are read.

    thinks: whether thoughts are told apart; open_already: whether the prompt begins them. calls: the format of calls,
    of the functions `names`; None if there are none. shown: special tokens with a meaning, by id.
    """

    thinks: bool
    open_already: bool
    calls: CallFormat | None
    names: tuple[str, ...]
    shown: Mapping[int, str]

    def reader(self) -> TurnReader:
        """For one text."""
        thoughts = ReasoningReader(open_already=self.open_already) if self.thinks else None
        return TurnReader(thoughts, None if self.calls is None else self.calls.reader(self.names))

    def text(self, tokens: Sequence[Token], text: str) -> str:
        """`text`, which became final with `tokens`, and the special tokens among them that the reader needs."""
        if not any(token.id in self.shown for token in tokens):
            return text
        final = "".join(token.text for token in tokens)
        return "".join(token.text + self.shown.get(token.id, "") for token in tokens) + text[len(final) :]


class Turns:
    """What a model's turns may be: by its chat template, or as the server's options say."""

    def __init__(self, session: Session, options: ServeOptions) -> None:
        self._session = session
        template = session.chat_template
        sources = [] if template is None else template.sources.values()
        auto = any(OPENING in source for source in sources)
        self.thinks = auto if options.reasoning_parser == "auto" else options.reasoning_parser == "think"
        with_tools = "" if template is None else template.tool_use_source
        if options.tool_call_parser == "auto":
            self.calls = format_of(with_tools)
        else:
            self.calls = FORMATS.get(options.tool_call_parser)
        if template is None or not template.reads("tools"):
            self.calls = None  # the model would not see the tools

    def variables(self, request: ChatRequest) -> dict[str, Any]:
        """What the template is given besides messages. Raises ApiError if the request has what cannot be honoured."""
        self._check_tools(request)
        found: dict[str, Any] = {}
        template = self._session.chat_template
        reserved = (*RESERVED, *(template.tokens if template is not None else ()))
        for name, value in (request.chat_template_kwargs or {}).items():
            if template is None or not name.isidentifier() or not template.reads(name) or name in reserved:
                raise not_supported("chat_template_kwargs", value, f"the model's chat template has no option {name!r}")
            found[name] = value
        if request.tools and request.tool_choice != "none":
            found["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        return found

    def turn(self, request: ChatRequest, prompt: Sequence[int]) -> Turn | None:
        """How the texts after `prompt` are read; None if they are text only."""
        calls = self.calls if request.tools and request.tool_choice != "none" else None
        if calls is None and not self.thinks:
            return None
        end = self._session.tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)
        marks = (*(calls.marks if calls else ()), *((OPENING, CLOSING) if self.thinks else ()))
        added = self._session.tokenizer.get_added_tokens_decoder()
        shown = {number: token.content for number, token in added.items() if token.special and token.content in marks}
        names = tuple(tool.function.name for tool in request.tools or ()) if calls else ()
        return Turn(self.thinks, self.thinks and end.rstrip().endswith(OPENING), calls, names, shown)

    def constraint(self, request: ChatRequest, turn: Turn | None, form: Constraint | None) -> Constraint | None:
        """What a turn must look like. form: what the request says about its text."""
        if turn is None:
            return form
        spelled = speller(self._session.tokenizer)
        rules = [] if form is None else [form.lark("form")]
        chosen = request.tool_choice
        required = chosen == "required" or isinstance(chosen, NamedChoice)
        if turn.calls is not None and (required or form is not None):
            many = request.parallel_tool_calls is not False and not isinstance(chosen, NamedChoice)
            calls = turn.calls.rules(_functions(request), spelled, many=many)
            rules = [calls] if required else [*rules, calls]
        if not rules:
            return None
        return turn_grammar(*rules, spelled=spelled, thinks=turn.thinks, open_already=turn.open_already)

    def _check_tools(self, request: ChatRequest) -> None:
        chosen, tools = request.tool_choice, request.tools or []
        names = [tool.function.name for tool in tools]
        if tools and self.calls is None and chosen != "none":
            why = "its chat template has no calls of functions in a format that this server knows"
            raise not_supported("tools", tools, why)
        if not tools and chosen not in (None, "none", "auto"):
            raise not_supported("tool_choice", chosen, "there are no tools to choose from")
        if len(set(names)) < len(names):
            raise ApiError("two tools have one name", param="tools")
        if isinstance(chosen, NamedChoice) and chosen.function.name not in names:
            problem = f"tool_choice names {chosen.function.name!r}, which is none of the tools"
            raise ApiError(problem, param="tool_choice")


def _functions(request: ChatRequest) -> list[Function]:
    """Those that may be called."""
    chosen = request.tool_choice
    return [
        Function(tool.function.name, tool.function.parameters or {})
        for tool in request.tools or ()
        if not isinstance(chosen, NamedChoice) or tool.function.name == chosen.function.name
    ]


def speller(tokenizer: Tokenizer) -> Callable[[str], str]:
    """What stands for a mark in a grammar: the added token that it is, or its text."""
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    return lambda mark: f"<[{added[mark]}]>" if mark in added else json.dumps(mark, ensure_ascii=False)


def turn_grammar(
    *rules: str, spelled: Callable[[str], str], thinks: bool = False, open_already: bool = False
) -> Constraint:
    """The constraint of a turn that is one of these rules, whose names are those of their first lines. thinks: whether
    thoughts may come before it; open_already: as in ReasoningReader."""
    turn = " | ".join(rule.partition(":")[0] for rule in rules)
    lines = [f"turn: {turn}", *rules]
    if not thinks:
        return Constraint(grammar="\n".join(["start: turn", *lines]))
    opening, closing = spelled(OPENING), spelled(CLOSING)
    before = "thoughts turn" if open_already else f"({opening} thoughts)? turn"
    if closing.startswith("<["):
        of_thoughts = [f"thoughts: thought {closing} /\\s{{0,4}}/", "thought: /(.|\\n)*/"]
    else:
        of_thoughts = ["thoughts: thought /\\s{0,4}/", f"thought[suffix={closing}]: /(.|\\n)*/"]
    return Constraint(grammar="\n".join([f"start: {before}", *of_thoughts, *lines]))
