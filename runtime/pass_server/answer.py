"""An assistant's turn, read while it is written: thoughts, text and calls apart. And the grammar of a turn."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import Tokenizer

from pass_runtime.text.compiler import choice_rules
from pass_runtime.text.constraint import Constraint
from pass_server.calls.formats import JSON_FORM
from pass_server.calls.reader import CallReader
from pass_server.parts import Part, Said
from pass_server.reasoning import CLOSING, OPENING, ThoughtReader


class AnswerReader:
    """Reads with a reader of thoughts first and a reader of calls after that, where there are such."""

    def __init__(self, thoughts: ThoughtReader | None, calls: CallReader | None) -> None:
        self._thoughts, self._calls = thoughts, calls

    def push(self, text: str) -> list[Part]:
        """-> what became known with `text`"""
        return self._and_calls([Said(text)] if self._thoughts is None else self._thoughts.push(text))

    def finish(self) -> list[Part]:
        """-> what was held back, once no more text comes"""
        parts = self._and_calls([] if self._thoughts is None else self._thoughts.finish())
        return parts + ([] if self._calls is None else self._calls.finish())

    def _and_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._calls.push(part.text) if isinstance(part, Said) else [part]
        return found


def speller(tokenizer: Tokenizer) -> Callable[[str], str]:
    """What stands for a mark in a grammar: the added token that it is, or its text."""
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    return lambda mark: f"<[{added[mark]}]>" if mark in added else json.dumps(mark, ensure_ascii=False)


def form_rules(constraint: Constraint) -> str:
    """A grammar's rule `form`, for what `constraint` allows."""
    if constraint.json_object or constraint.schema:
        schema = json.loads(constraint.schema or '{"type": "object"}')
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        return f"form: %json {json.dumps({**schema, 'x-guidance': JSON_FORM}, ensure_ascii=False)}"
    if constraint.regex is not None:
        return f"form: {_lark_regex(constraint.regex)}"
    if constraint.choice:
        return choice_rules("form", constraint.choice)
    return f"form: %lark {{\n{constraint.grammar}\n}}"


def turn_grammar(
    *rules: str, spelled: Callable[[str], str], thinks: bool = False, open_already: bool = False
) -> Constraint:
    """The constraint of a turn that is one of these rules, whose names are those of their first lines. thinks: whether
    thoughts may come before it; open_already: as in ThoughtReader."""
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


def _lark_regex(pattern: str) -> str:
    """The expression between slashes, with those in it escaped."""
    written, escaped = "", False
    for character in pattern:
        written += "\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character
        escaped = character == "\\" and not escaped
    return f"/(?:{written})/"
