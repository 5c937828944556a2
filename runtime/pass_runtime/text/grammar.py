"""Grammars: which tokens may follow, by llguidance. A grammar is compiled once, and every text has a state of its own.

JSON is written in one form: on one line, with ", " and ": " between values. Otherwise the model could write white space
for ever, and nothing between two values would be certain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pass_runtime.errors import PassError
from pass_runtime.text.constraint import Constraint

JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KEPT = 64
"""How many compiled grammars are kept."""


class Grammars:
    """Compiles the constraints of one model's texts. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """end_tokens: they end a text, and are allowed where the grammar is complete."""
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._lock = Lock()
        self._library_tokenizer: Any = None
        self._compiled: dict[Constraint | tuple[object, ...], GrammarState] = {}

    def start(self, constraint: Constraint) -> GrammarState:
        """The state of a text that has no token yet. PassError where the constraint is not valid or too complex."""
        with self._lock:
            if constraint not in self._compiled:
                self._compiled[constraint] = self._compile(constraint)
                if len(self._compiled) > KEPT:
                    del self._compiled[next(iter(self._compiled))]
            else:
                self._compiled[constraint] = self._compiled.pop(constraint)  # the newest one is last
            return self._compiled[constraint].copy()

    def _compile(self, constraint: Constraint) -> GrammarState:
        from llguidance import LLMatcher, LLTokenizer

        if not self._end_tokens:
            raise PassError("the model has no token that ends a text, which a constraint needs")
        if self._library_tokenizer is None:
            self._library_tokenizer = LLTokenizer(
                self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._end_tokens
            )
        try:
            matcher = LLMatcher(self._library_tokenizer, _grammar(constraint), log_level=0)
        except (RuntimeError, ValueError) as error:
            raise _refused(constraint, str(error)) from None
        if matcher.is_error():
            raise _refused(constraint, matcher.get_error())
        return GrammarState(matcher, self._end_tokens)


class GrammarState:
    """Where a text stands in its grammar."""

    def __init__(self, matcher: Any, end_tokens: Sequence[int]) -> None:
        self._matcher, self._end_tokens = matcher, end_tokens

    def copy(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._end_tokens)

    def advance(self, token: int) -> None:
        """Take the next token of the text. PassError where the grammar is too complex to go on."""
        if not self._matcher.consume_token(token):
            raise PassError(f"the constraint cannot be followed further: {_in_one_line(self._matcher.get_error())}")

    def fill(self, allowed: npt.NDArray[np.uint32], drafts: Sequence[int]) -> None:
        """allowed [P,V/32]: set the bits of the tokens that may follow the text, and the drafts before each row. Rows
        after a draft that the grammar forbids, or that ends the text, are left as they are."""
        taken = 0
        try:
            for row in range(len(allowed)):
                self._matcher.unsafe_compute_mask_ptr(allowed[row].ctypes.data, allowed[row].nbytes)
                if self._matcher.is_error():
                    raise PassError(f"the constraint is too complex: {_in_one_line(self._matcher.get_error())}")
                if row == len(drafts) or drafts[row] in self._end_tokens:
                    return
                if not self._matcher.try_consume_tokens([drafts[row]]):
                    return
                taken += 1
        finally:
            if taken:
                self._matcher.rollback(taken)

    def forced(self) -> tuple[int, ...]:
        """The only tokens that may follow now, () where there is a choice."""
        return tuple(self._matcher.compute_ff_tokens())


def _grammar(constraint: Constraint) -> str:
    """The grammar in llguidance's form."""
    from llguidance import LLMatcher

    if constraint.json_object:
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_FORM))
    if constraint.schema:
        return str(LLMatcher.grammar_from_json_schema(constraint.schema, overrides=JSON_FORM))
    if constraint.regex is not None:
        return str(LLMatcher.grammar_from_regex(constraint.regex))
    if constraint.choice:
        return str(
            LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in constraint.choice)
            )
        )
    return str(LLMatcher.grammar_from_lark(constraint.grammar or ""))


def _refused(constraint: Constraint, why: str) -> PassError:
    return PassError(f"the {constraint.kind} is not valid: {_in_one_line(why)}")


def _in_one_line(message: str, most: int = 300) -> str:
    line = " ".join(message.split())
    return line if len(line) <= most else line[: most - 3] + "..."
