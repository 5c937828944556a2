"""Compiles constraints with llguidance, first in a child process, because some recurse and multiply
automata without bound. What stays within the child's limits does so in this process, too."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pass_runtime.errors import PassError
from pass_runtime.text.constraint import JSON_FORM, Constraint
from pass_runtime.text.dead_ends import without_dead_ends
from pass_runtime.text.detokenizer import Vocabulary
from pass_runtime.text.neutral_keywords import places, without_neutral_keywords

MAX_FORCED_CHARACTERS = 1024
"""The most characters of a forced text that are encoded at a time."""
MAX_ERROR_CHARACTERS = 300


class PlainTokenizer:
    """What `llguidance.LLTokenizer` reads. (With tokenizer.json, forced text that spells a special
    token would become it.) Added tokens are not text, but for white space and what the other tokens
    cannot write, unless it is special or ends a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """end_tokens: the ids that end a text, at least one."""
        self.eos_token_id = end_tokens[0]
        self.tokens = Vocabulary(tokenizer).all_bytes(vocab_size)
        self._encoder = _without_added_tokens(tokenizer)
        decoder = tokenizer.get_added_tokens_decoder()
        added = {token: info for token, info in decoder.items() if token < vocab_size}
        for token, info in added.items():
            self.tokens[token] = info.content.encode()
        self._no_text = {*added, *end_tokens}
        self._by_bytes: dict[bytes, int] = {}  # the lowest id that is text
        for token, text in enumerate(self.tokens):
            if text and token not in self._no_text:
                self._by_bytes.setdefault(text, token)
        self._longest = max(map(len, self._by_bytes), default=0)
        for token, info in added.items():
            text = self.tokens[token]
            if info.special or token in end_tokens:
                continue
            if text.isspace() or not self._is_writable(text.decode()):
                self._no_text.remove(token)
                self._by_bytes.setdefault(text, token)
                self._longest = max(self._longest, len(text))
        self.special_token_ids = sorted(self._no_text)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens that write the beginning of `text`: the tokenizer's own, or else the
        longest ones."""
        text = text[:MAX_FORCED_CHARACTERS]
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        if self._no_text.isdisjoint(ids) and self._written(ids) == text.encode():
            return ids
        return self._longest_tokens(text.encode())

    def _is_writable(self, text: str) -> bool:
        return self._written(self._longest_tokens(text.encode())) == text.encode()

    def _written(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.tokens[token] for token in ids])

    def _longest_tokens(self, text: bytes) -> list[int]:
        ids: list[int] = []
        place = 0
        while place < len(text):
            for end in range(min(place + self._longest, len(text)), place, -1):
                if (token := self._by_bytes.get(text[place:end])) is not None:
                    ids.append(token)
                    place = end
                    break
            else:
                break
        return ids


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    fields = json.loads(tokenizer.to_str())
    fields |= {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    for name in ("normalizer", "pre_tokenizer"):
        fields[name] = _without_prefix(fields[name])
    return Tokenizer.from_str(json.dumps(fields))


def _without_prefix(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer without what puts a space before a text; None if it does
    nothing else."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        name = "normalizers" if "normalizers" in step else "pretokenizers"
        steps = map(_without_prefix, step[name])
        return step | {name: [each for each in steps if each is not None]}
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    return step | {"add_prefix_space": False} if "add_prefix_space" in step else step


STEP_LIMITS: Mapping[str, Any] = {
    "step_max_items": 10_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""llguidance's limits: two for a mask (about 10 ms), one for lexer states (2 to 7 KB each)."""


class Compiler:
    """Compiles constraints for one model, one at a time."""

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """tokenizer: the text of tokenizer.json. end_tokens: the ids that end a text; not empty."""
        from llguidance import LLParserLimits, LLTokenizer

        plain: Any = PlainTokenizer(Tokenizer.from_str(tokenizer), vocab_size, end_tokens)
        self._tokenizer = LLTokenizer(plain, n_vocab=vocab_size, eos_token=list(end_tokens))
        self._limits = LLParserLimits(**STEP_LIMITS)

    def compile(self, constraint: Constraint) -> Any:
        """Return an `llguidance.LLMatcher`. Raises PassError if the constraint is not valid."""
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(
                self._tokenizer, _grammar(constraint), log_level=0, limits=self._limits
            )
        except (RuntimeError, ValueError) as error:
            raise _refused(constraint, str(error)) from None
        if matcher.is_error():
            raise _refused(constraint, matcher.get_error())
        return matcher


def make_checker(setup: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that the child runs. It takes the fields of a `Constraint`, and returns
    {"bytes": the memory that compiling took} or {"refused": why}. setup: of `Compiler`."""
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
    """Begin a text with the forced tokens and one more: llguidance finds some errors only then."""
    matcher.try_consume_tokens(matcher.compute_ff_tokens())
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if not matcher.is_error() and mask:
        lowest = (mask & -mask).bit_length() - 1  # the first token that is allowed
        matcher.try_consume_tokens([lowest])
        matcher.compute_bitmask()


def error_clause(error: str) -> str:
    """Return an error of llguidance as one line, a clause."""
    if error.startswith("NoExtension"):
        return "the model has no token that could follow"
    line = " ".join(error.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[: MAX_ERROR_CHARACTERS - 3] + "..."


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.json_object:
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_FORM))
    if constraint.schema:
        schema = _finite(json.loads(constraint.schema))
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM))
    if constraint.regex is not None:
        return str(LLMatcher.grammar_from_regex(constraint.regex))
    if constraint.choice:
        return str(LLMatcher.grammar_from_lark(constraint.lark("start")))
    return str(
        LLMatcher.grammar_from_lark(_SCHEMA_RULE.sub(_with_finite_schema, constraint.grammar or ""))
    )


_SCHEMA_RULE = re.compile(r"^(\w+: %json )(\{.*\})$", re.MULTILINE)
"""A grammar's rule for a JSON schema, as `Constraint.lark` writes it."""


def _with_finite_schema(rule: re.Match[str]) -> str:
    try:
        return rule[1] + _finite(json.loads(rule[2]))
    except ValueError:  # It is no JSON, of which llguidance will say what is wrong.
        return rule[0]


def _finite(schema: Any) -> str:
    finite = without_dead_ends(without_neutral_keywords(schema))
    if finite is False and schema is not False:
        title = f" of {schema['title']}" if isinstance(schema.get("title"), str) else ""
        raise PassError(
            f"the json_schema{title} is not valid: no value of it ends, because a required part "
            "contains itself by $ref; leave that part out of required"
        )
    return json.dumps(finite, ensure_ascii=False)


def _refused(constraint: Constraint, why: str) -> PassError:
    """Return the error of a constraint that is not valid. Users did not write the grammar that the
    server makes of tools, so the error names the schema by its title, and the part by its path."""
    kind, schema_error = constraint.kind, why.partition("failed to compile JSON schema: ")[2]
    rules = _SCHEMA_RULE.finditer(constraint.grammar or "")
    schemas = [_without_neutral_keywords(rule[2]) for rule in rules]
    if schema_error and schemas:
        errors = {schema: error for schema in schemas if (error := _error_of(schema))}
        kind, why = "json_schema", next(iter(errors.values()), schema_error.partition("\n")[0])
        schemas = list(errors)[:1]
        kind += _title(schemas[0]) if schemas else ""
    if constraint.schema:
        schemas = [_without_neutral_keywords(constraint.schema)]
    for schema in schemas:
        try:
            path = _path(json.loads(schema), why)
        except (ValueError, RecursionError):
            continue
        if path is not None:
            why = f"{error_clause(why)}, at {'.'.join(path) or 'the top'}: leave it out"
            break
    return PassError(f"the {kind} is not valid: {error_clause(why)}")


def _without_neutral_keywords(schema: str) -> str:
    try:
        return json.dumps(without_neutral_keywords(json.loads(schema)))
    except (ValueError, RecursionError):
        return schema


def _error_of(schema: str) -> str:
    from llguidance import LLMatcher, LLTokenizer

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)
        return str(LLMatcher(LLTokenizer("byte"), grammar, log_level=0).get_error())
    except (RuntimeError, ValueError) as error:
        return str(error)


def _title(schema: str) -> str:
    try:
        title = json.loads(schema).get("title")
    except (ValueError, RecursionError):
        return ""
    return f" of {title}" if isinstance(title, str) else ""


def _path(schema: Any, why: str) -> list[str] | None:
    for path, part in places(schema):
        if f"Unknown format: {part.get('format')}" == why.strip():
            return [*path, "format"]
        if why.startswith("Unimplemented keys") and (
            key := next((k for k in part if f'"{k}"' in why), None)
        ):
            return [*path, key]
    return None


def _memory() -> int:
    resident, mapped_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - mapped_files) * resource.getpagesize()
