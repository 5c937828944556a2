"""The turns that a model writes in a chat: with thoughts, with calls of functions, and what a request wants of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from pass_runtime import Constraint, Session, Token
from pass_server.api_error import ApiError, not_supported
from pass_server.call_formats import FORMATS, CallFormat, Function, format_of
from pass_server.conversation import RESERVED
from pass_server.fields import NamedChoice
from pass_server.schemas import ChatRequest
from pass_server.serve_options import ServeOptions
from pass_server.turn_reader import CLOSING, OPENING, ReasoningReader, TurnReader


@dataclass(frozen=True)
class Turn:
    """How the texts of a chat are read.

    thinks: whether thoughts are told apart; open_already: whether the prompt begins them. calls: the format of calls,
    of the functions `names`; None where there are none. shown: special tokens with a meaning, by id.
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
        with_tools = "" if template is None else template.with_tools
        if options.tool_call_parser == "auto":
            self.calls = format_of(with_tools)
        else:
            self.calls = FORMATS.get(options.tool_call_parser)
        if template is None or not template.names("tools"):
            self.calls = None  # the model would not see the tools

    def variables(self, request: ChatRequest) -> dict[str, Any]:
        """What the template is given besides messages. ApiError where the request has what cannot be honoured."""
        self._check_tools(request)
        found: dict[str, Any] = {}
        template = self._session.chat_template
        reserved = (*RESERVED, *(template.tokens if template is not None else ()))
        for name, value in (request.chat_template_kwargs or {}).items():
            if template is None or not name.isidentifier() or not template.names(name) or name in reserved:
                raise not_supported("chat_template_kwargs", value, f"the model's chat template has no option {name!r}")
            found[name] = value
        if request.tools and request.tool_choice != "none":
            found["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        return found

    def turn(self, request: ChatRequest, prompt: Sequence[int]) -> Turn | None:
        """How the texts after `prompt` are read; None where they are text only."""
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
