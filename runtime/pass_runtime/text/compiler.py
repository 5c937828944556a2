"""Compiles constraints by llguidance, in a child process first, where limits of time, memory and stack can end that.

llguidance recurses, multiplies automata and tries combinations as far as a constraint asks for it. Compilation is
deterministic, so what stays within a child's limits does so here, in a thread with a larger stack.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pass_runtime.errors import PassError
from pass_runtime.text.constraint import JSON_FORM, Constraint
from pass_runtime.text.plain_tokenizer import PlainTokenizer

STEP_LIMITS: Mapping[str, Any] = {
    "step_max_items": 10_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""What one mask may cost, about 10 ms, and the states of a grammar's lexer, about 2 to 7 KB each."""
NO_TOKEN = "NoExtension"
"""How llguidance says that no token can follow, and that the text is not complete."""


class Compiler:
    """Makes matchers of constraints for one model's texts. Any thread may call it; one at a time."""

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """tokenizer: the content of its tokenizer.json. end_tokens: at least one."""
        from llguidance import LLParserLimits, LLTokenizer

        plain: Any = PlainTokenizer(Tokenizer.from_str(tokenizer), vocab_size, end_tokens)
        self._tokenizer = LLTokenizer(plain, n_vocab=vocab_size, eos_token=list(end_tokens))
        self._limits = LLParserLimits(**STEP_LIMITS)

    def compile(self, constraint: Constraint) -> Any:
        """An `llguidance.LLMatcher` at the beginning of a text. Raises PassError if the constraint is not valid."""
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0, limits=self._limits)
        except (RuntimeError, ValueError) as error:
            raise _refused(constraint, str(error)) from None
        if matcher.is_error():
            raise _refused(constraint, matcher.get_error())
        return matcher


def checker(setup: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What child processes run. setup: the arguments of `Compiler`. The function takes the fields of a `Constraint`. It
    returns {"bytes": the memory that compiling it took}, or {"refused": why it is not valid, or nothing can be written
    for it}."""
    compiler = Compiler(**setup)

    def check(fields: dict[str, Any]) -> dict[str, Any]:
        constraint, before = Constraint(**fields), _memory()
        try:
            matcher = compiler.compile(constraint)
            _try(matcher)
            if matcher.is_error():
                raise _refused(constraint, matcher.get_error())
        except PassError as error:
            return {"refused": str(error)}
        return {"bytes": max(_memory() - before, 0)}

    return check


def _try(matcher: Any) -> None:
    """Write what is forced at the beginning of a text, and a token more, as far as there is no error."""
    matcher.try_consume_tokens(matcher.compute_ff_tokens())
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if not matcher.is_error() and mask:
        matcher.try_consume_tokens([(mask & -mask).bit_length() - 1])
        matcher.compute_bitmask()


def fields_of(constraint: Constraint) -> dict[str, Any]:
    """What `checker` takes."""
    return asdict(constraint)


def problem(error: str) -> str:
    """An error of llguidance as a clause in one line."""
    if error.startswith(NO_TOKEN):
        return "the model has no token that could follow"
    line = " ".join(error.replace("<non-verbose/>", "").split())
    return line if len(line) <= MOST_SHOWN else line[: MOST_SHOWN - 3] + "..."


MOST_SHOWN = 300
"""Characters of an error."""


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
        return str(LLMatcher.grammar_from_lark(constraint.lark("start")))
    return str(LLMatcher.grammar_from_lark(constraint.grammar or ""))


def _refused(constraint: Constraint, why: str) -> PassError:
    return PassError(f"the {constraint.kind} is not valid: {problem(why)}")


def _memory() -> int:
    """Bytes of memory that this process has in use, files not counted."""
    resident, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - of_files) * resource.getpagesize()
