"""Chats: messages for the template, the format of the model's turn, and its constraint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import from_json
from tokenizers import Tokenizer

from pass_runtime import Constraint, Session
from pass_server import schemas
from pass_server.api_error import ApiError, not_supported
from pass_server.serve_options import ServeOptions
from pass_server.tool_calls import FORMATS, CallFormat, Function, format_of
from pass_server.turn_reader import REASONING_END, REASONING_START, ReasoningReader, TurnReader

RESERVED_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
)
"""Variables of chat templates that clients cannot set, besides special tokens."""


def template_messages(request: schemas.ChatRequest, *, calls: bool) -> list[dict[str, Any]]:
    """Return the messages for the chat template. calls: whether it takes tool calls. Raises
    ApiError if a message is invalid."""
    names: dict[str, str] = {}  # of functions, by the ids of calls
    messages = []
    for i, message in enumerate(request.messages):
        path = partial(_path, request, i)
        is_result = isinstance(message, schemas.ToolMessage)
        if not calls and (is_result or getattr(message, "tool_calls", None)):
            param = path("role" if is_result else "tool_calls")
            problem = "this model takes no tool calls"
            raise ApiError(problem, param=param, code="unsupported_parameter")
        fields: dict[str, Any] = {"role": message.role}
        if message.content is not None:
            fields["content"] = "\n".join(schemas.texts_of(message.content, path("content")))
        if isinstance(message, schemas.UserMessage):
            fields["role"] = "system" if message.role == "developer" else message.role
        elif isinstance(message, schemas.ToolMessage):
            if message.tool_call_id not in names:
                param = path("tool_call_id")
                problem = f"{param} must be the id of a call in an earlier message"
                raise ApiError(problem, param=param)
            name = names[message.tool_call_id]
            if message.name not in (None, name):
                raise ApiError(
                    f"{path('name')} is {message.name!r}, but the call {message.tool_call_id!r} is "
                    f"of the function {name!r}: leave name out, or correct tool_call_id",
                    param=path("name"),
                )
            fields |= {"tool_call_id": message.tool_call_id, "name": name}
        else:
            if message.content is None and not (message.tool_calls or message.reasoning_content):
                param = path("content")
                problem = f"{param}: a message needs text, reasoning_content or tool_calls"
                raise ApiError(problem, param=param)
            if message.reasoning_content:
                fields["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                fields["tool_calls"] = [_call(call) for call in message.tool_calls]
                names |= {call.id: call.function.name for call in message.tool_calls}
        messages.append(fields)
    return messages


def _path(request: schemas.ChatRequest, index: int, field: str) -> str:
    return request.path(f"messages.{index}.{field}")


def chat_texts(request: schemas.ChatRequest) -> Iterator[str]:
    """Yield all texts of a chat that its prompt may contain."""
    for i, message in enumerate(request.messages):
        yield from schemas.texts_of(message.content, _path(request, i, "content"))
        if isinstance(message, schemas.AssistantMessage):
            yield message.reasoning_content or ""
            yield from (call.function.arguments for call in message.tool_calls or ())
    for tool in request.tools or ():
        yield json.dumps(tool.model_dump(), ensure_ascii=False)


def _call(call: schemas.ToolCall) -> dict[str, Any]:
    """Return a call for the chat template, with `written_arguments` if they are no object: else all
    later requests of the chat would fail."""
    function: dict[str, Any] = {"name": call.function.name}
    try:
        arguments = from_json(call.function.arguments or "{}", allow_inf_nan=False)
    except ValueError:  # no JSON, nested too deep, or with numbers that JSON does not have
        arguments = None
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    else:
        function["written_arguments"] = call.function.arguments
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True)
class TurnFormat:
    """How the model's turn is read.

    in_reasoning: whether the prompt opens the reasoning. calls: None if the turn cannot have any.
    names: the functions that may be called. marker_tokens: the ids of markers that are special
    tokens. only_calls: whether nothing but calls may follow the reasoning."""

    has_reasoning: bool
    in_reasoning: bool
    calls: CallFormat | None
    names: tuple[str, ...]
    marker_tokens: tuple[int, ...]
    only_calls: bool = False

    def reader(self) -> TurnReader:
        reasoning = ReasoningReader(in_reasoning=self.in_reasoning) if self.has_reasoning else None
        calls = None if self.calls is None else self.calls.reader(self.names)
        return TurnReader(reasoning, calls, only_calls=self.only_calls)


class ChatFormat:
    """How the model writes reasoning and tool calls, by the server's options or the chat template.
    calls: None if the model has no format that the server reads."""

    def __init__(self, session: Session, options: ServeOptions) -> None:
        self._session = session
        template = session.chat_template
        sources = [] if template is None else template.sources.values()
        self.has_reasoning = options.reasoning_parser == "think"
        if options.reasoning_parser == "auto":
            self.has_reasoning = any(REASONING_START in source for source in sources)
        self.calls = FORMATS.get(options.tool_call_parser)
        if template is None or not template.reads("tools"):
            self.calls = None  # the model would not see the tools
        elif options.tool_call_parser == "auto":
            self.calls = format_of(template.tool_use_source)

    def variables(self, request: schemas.ChatRequest) -> dict[str, Any]:
        """Return the variables for the chat template besides messages. Raises ApiError if it does
        not read one, or if the tools are invalid."""
        chosen, tools = request.tool_choice, request.tools or []
        names = [tool.function.name for tool in tools]
        if tools and self.calls is None and chosen != "none":
            why = "the model's chat template has no format of tool calls that this server knows"
            raise not_supported("tools", tools, why)
        if not tools and chosen not in (None, "none", "auto"):
            raise not_supported("tool_choice", chosen, "there are no tools to choose from")
        if len(set(names)) < len(names):
            raise ApiError("two tools have the same name", param="tools")
        if isinstance(chosen, schemas.NamedChoice) and chosen.function.name not in names:
            problem = f"tool_choice names {chosen.function.name!r}, which is none of the tools"
            raise ApiError(problem, param="tool_choice")
        variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
        template = self._session.chat_template
        for name, value in variables.items():
            if (
                template is None
                or not (name.isidentifier() and template.reads(name))
                or name in (*RESERVED_VARIABLES, *template.tokens)
            ):
                why = f"the model's chat template has no option {name!r}"
                raise not_supported("chat_template_kwargs", value, why)
        if request.tools and request.tool_choice != "none":
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        return variables

    def turn_format(self, request: schemas.ChatRequest, prompt: Sequence[int]) -> TurnFormat | None:
        chosen = request.tool_choice
        names_one = isinstance(chosen, schemas.NamedChoice)
        calls = self.calls if request.tools and chosen != "none" else None
        if calls is None and not self.has_reasoning:
            return None
        prompt_end = self._session.tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)
        markers = (
            *(calls.markers if calls else ()),
            *((REASONING_START, REASONING_END) if self.has_reasoning else ()),
        )
        added_tokens = self._session.tokenizer.get_added_tokens_decoder()
        return TurnFormat(
            self.has_reasoning,
            self.has_reasoning and prompt_end.rstrip().endswith(REASONING_START),
            calls,
            tuple(tool.function.name for tool in request.tools or ()) if calls else (),
            tuple(i for i, t in added_tokens.items() if t.special and t.content in markers),
            only_calls=calls is not None and (chosen == "required" or names_one),
        )

    def constraint(
        self, request: schemas.ChatRequest, turn: TurnFormat | None, requested: Constraint | None
    ) -> Constraint | None:
        """Return the constraint of the whole turn. requested: that of the content."""
        if turn is None:
            return requested
        terminal = marker_terminals(self._session.tokenizer)
        rules = [] if requested is None else [requested.lark("form")]
        # If neither calls nor a form of the content are required, nothing is constrained.
        if turn.calls is not None and (turn.only_calls or requested is not None):
            parallel = request.parallel_tool_calls is not False and not isinstance(
                request.tool_choice, schemas.NamedChoice
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


def _functions(request: schemas.ChatRequest) -> list[Function]:
    chosen = request.tool_choice
    return [
        Function(tool.function.name, tool.function.parameters or {})
        for tool in request.tools or ()
        if not isinstance(chosen, schemas.NamedChoice) or tool.function.name == chosen.function.name
    ]


def marker_terminals(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Return a function from a marker to its terminal in Lark: the added token, or a string."""
    ids = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    return lambda marker: (
        f"<[{ids[marker]}]>" if marker in ids else json.dumps(marker, ensure_ascii=False)
    )


def turn_grammar(
    *rules: str,
    terminal: Callable[[str], str],
    has_reasoning: bool = False,
    in_reasoning: bool = False,
) -> Constraint:
    """Return the constraint of a turn that matches one of these Lark rules (`name: ...`), after
    reasoning if `has_reasoning`."""
    turn = " | ".join(rule.partition(":")[0] for rule in rules)
    lines = [f"turn: {turn}", *rules]
    if not has_reasoning:
        return Constraint(grammar="\n".join(["start: turn", *lines]))
    opening, closing = terminal(REASONING_START), terminal(REASONING_END)
    start = "reasoning turn" if in_reasoning else f"({opening} reasoning)? turn"
    if closing.startswith("<["):  # a special token, which the text of the reasoning cannot contain
        reasoning = [f"reasoning: thinking {closing} /\\s{{0,4}}/", "thinking: /(.|\\n)*/"]
    else:  # the first closing marker ends the text
        reasoning = ["reasoning: thinking /\\s{0,4}/", f"thinking[suffix={closing}]: /(.|\\n)*/"]
    return Constraint(grammar="\n".join([f"start: {start}", *reasoning, *lines]))
