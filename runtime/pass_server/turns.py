"""The turns that a model writes in a chat: with thoughts, with calls of functions, and what a request wants of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pass_runtime.decode.sequence import Token
from pass_runtime.session import Session
from pass_runtime.text.chat import ChatTemplate
from pass_runtime.text.constraint import Constraint
from pass_server.answer import AnswerReader, form_rules, speller, turn_grammar
from pass_server.calls.formats import FORMATS, CallFormat, Function, format_of
from pass_server.chat_schemas import NamedChoice
from pass_server.conversation import RESERVED
from pass_server.errors import ApiError, not_supported
from pass_server.options import ServeOptions
from pass_server.reasoning import CLOSING, OPENING, ThoughtReader
from pass_server.schemas import ChatRequest


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

    def reader(self) -> AnswerReader:
        """For one text."""
        thoughts = ThoughtReader(open_already=self.open_already) if self.thinks else None
        return AnswerReader(thoughts, None if self.calls is None else self.calls.reader(self.names))

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
        for name, value in (request.chat_template_kwargs or {}).items():
            if template is None or not name.isidentifier() or not template.names(name) or _reserved(template, name):
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
        rules = [] if form is None else [form_rules(form)]
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


def _reserved(template: ChatTemplate, name: str) -> bool:
    return name in RESERVED or name in template.tokens


def _functions(request: ChatRequest) -> list[Function]:
    """Those that may be called."""
    chosen = request.tool_choice
    return [
        Function(tool.function.name, tool.function.parameters or {})
        for tool in request.tools or ()
        if not isinstance(chosen, NamedChoice) or tool.function.name == chosen.function.name
    ]
