"""Compiles constraints with llguidance, first in a child process with limits of time, memory and
stack.

A constraint can make llguidance recurse, multiply automata and try combinations without bound.
Compilation is deterministic, so a constraint that stays within a child's limits also does so in
this process, in a thread with a larger stack.

llguidance gets its tokens from `PlainTokenizer`. If it read tokenizer.json itself, it would encode
forced text (text to which the grammar has no alternative) with added tokens, so that `{"const":
"<|im_end|>"}` ends the text, and it would refuse tokenizers that are neither byte-level nor
byte-fallback.
"""

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

MAX_FORCED_CHARACTERS = 1024
"""How many characters of a forced text are encoded at a time."""
MAX_ERROR_CHARACTERS = 300


class PlainTokenizer:
    """Has the attributes that `llguidance.LLTokenizer` reads: the bytes of all tokens, and which
    tokens are not text.

    Added tokens are not text: a grammar can only name them by id (`<[7]>`), and text that spells
    one is written with other tokens. Two kinds of added tokens are text, though, unless they are
    special or end a text: those of white space, and those whose text the other tokens cannot write.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """end_tokens: the ids that end a text, at least one."""
        self.eos_token_id = end_tokens[0]
        self.tokens = Vocabulary(tokenizer).all_bytes(vocab_size)
        self._encoder = _without_added_tokens(tokenizer)
        added = {
            n: token for n, token in tokenizer.get_added_tokens_decoder().items() if n < vocab_size
        }
        for n, token in added.items():  # special tokens, too, which `Vocabulary` gives no bytes
            self.tokens[n] = token.content.encode()
        self._no_text = {*added, *end_tokens}
        self._by_bytes = {
            each: n
            for n, each in reversed([*enumerate(self.tokens)])
            if each and n not in self._no_text
        }
        self._longest = max(map(len, self._by_bytes), default=0)
        for n in [n for n, token in added.items() if not token.special and n not in end_tokens]:
            if self.tokens[n].isspace() or not self._is_written(self.tokens[n].decode()):
                self._no_text.remove(n)
                self._by_bytes.setdefault(self.tokens[n], n)
                self._longest = max(self._longest, len(self.tokens[n]))
        self.special_token_ids = sorted(self._no_text)

    def __call__(self, text: str) -> list[int]:
        """The tokens that write `text`: those of the tokenizer if their bytes are the text's, else
        the longest ones from left to right, up to the first byte that no token can write. Only
        MAX_FORCED_CHARACTERS are read, because llguidance has the forced text tokenized again for
        every token."""
        text = text[:MAX_FORCED_CHARACTERS]
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        is_plain = self._no_text.isdisjoint(ids)
        if is_plain and b"".join([self.tokens[i] for i in ids]) == text.encode():
            return ids
        return self._longest_tokens(text.encode())

    def _is_written(self, text: str) -> bool:
        """Whether tokens that are text can write all of `text`."""
        return (
            b"".join(self.tokens[i] for i in self._longest_tokens(text.encode())) == text.encode()
        )

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
    """A tokenizer that adds no tokens and encodes the text of added tokens as plain text."""
    written = json.loads(tokenizer.to_str())
    written |= {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    for name in ("normalizer", "pre_tokenizer"):
        written[name] = _without_prefix(written[name])
    return Tokenizer.from_str(json.dumps(written))


def _without_prefix(step: Any) -> Any:
    """A normalizer or pre-tokenizer that adds no space before a text; None if it does no more."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        name = "normalizers" if "normalizers" in step else "pretokenizers"
        return step | {
            name: [left for each in step[name] if (left := _without_prefix(each)) is not None]
        }
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
NO_TOKEN = "NoExtension"
"""The beginning of llguidance's error if no token can follow and the text is not complete."""


class Compiler:
    """Compiles constraints for one model. Any thread may call it, but only one at a time."""

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """tokenizer: the content of tokenizer.json. end_tokens: the ids that end a text, at least
        one."""
        from llguidance import LLParserLimits, LLTokenizer

        plain: Any = PlainTokenizer(Tokenizer.from_str(tokenizer), vocab_size, end_tokens)
        self._tokenizer = LLTokenizer(plain, n_vocab=vocab_size, eos_token=list(end_tokens))
        self._limits = LLParserLimits(**STEP_LIMITS)

    def compile(self, constraint: Constraint) -> Any:
        """An `llguidance.LLMatcher` in its first state. Raises PassError if the constraint is not
        valid."""
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
    """The function that child processes run. setup: the arguments of `Compiler`. It takes the
    fields of a `Constraint`, and returns {"bytes": the memory that compiling took}, or {"refused":
    why it is not valid or cannot be followed}."""
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
    """Take the first forced tokens and one more token. The caller checks `is_error`."""
    matcher.try_consume_tokens(matcher.compute_ff_tokens())
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if not matcher.is_error() and mask:
        matcher.try_consume_tokens([(mask & -mask).bit_length() - 1])
        matcher.compute_bitmask()


def problem(error: str) -> str:
    """An error of llguidance as a clause in one line, of at most MAX_ERROR_CHARACTERS."""
    if error.startswith(NO_TOKEN):
        return "the model has no token that could follow"
    line = " ".join(error.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[: MAX_ERROR_CHARACTERS - 3] + "..."


def _grammar(constraint: Constraint) -> str:
    """The constraint as a grammar in llguidance's own format."""
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
        LLMatcher.grammar_from_lark(_SCHEMA_RULE.sub(_without_dead_ends, constraint.grammar or ""))
    )


_SCHEMA_RULE = re.compile(r"^(\w+: %json )(\{.*\})$", re.MULTILINE)
"""A rule of `Constraint.lark` with a JSON schema."""


def _without_dead_ends(rule: re.Match[str]) -> str:
    try:
        return rule[1] + _finite(json.loads(rule[2]))
    except ValueError:  # llguidance says what is wrong
        return rule[0]


def _finite(schema: Any) -> str:
    """A schema without dead ends. Raises PassError if it has no finite value."""
    if (found := without_dead_ends(schema)) is False and schema is not False:
        title = f" of {schema['title']}" if isinstance(schema.get("title"), str) else ""
        raise PassError(
            f"the json_schema{title} is not valid: no value of it ends, because a required part "
            "contains itself by $ref; leave that part out of required"
        )
    return json.dumps(found, ensure_ascii=False)


def _refused(constraint: Constraint, why: str) -> PassError:
    """The error of a constraint. A schema in a grammar is named by its title, and the place in it
    by its path: users did not write the grammar."""
    kind, of_schema = constraint.kind, why.partition("failed to compile JSON schema: ")[2]
    texts = [rule[2] for rule in _SCHEMA_RULE.finditer(constraint.grammar or "")]
    if of_schema and texts:
        alone = {text: error for text in texts if (error := _error_of(text))}
        kind, why = "json_schema", next(iter(alone.values()), of_schema.partition("\n")[0])
        texts = list(alone)[:1]
        kind += _title(texts[0]) if texts else ""
    for text in [constraint.schema] if constraint.schema else texts:
        try:
            schema = json.loads(text)
            path = _place(schema, why)
        except (ValueError, RecursionError):
            continue
        if path is not None:
            why = f"{problem(why)}, at {'.'.join(path) or 'the top'}: leave it out"
            break
    return PassError(f"the {kind} is not valid: {problem(why)}")


def _error_of(schema: str) -> str:
    """llguidance's error for a JSON schema by itself; empty if it compiles."""
    from llguidance import LLMatcher, LLTokenizer

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)
        return str(LLMatcher(LLTokenizer("byte"), grammar, log_level=0).get_error())
    except (RuntimeError, ValueError) as error:
        return str(error)


def _title(schema: str) -> str:
    """The words that name a schema by its title, which is the tool's name for a tool."""
    try:
        title = json.loads(schema).get("title")
    except (ValueError, RecursionError):
        return ""
    return f" of {title}" if isinstance(title, str) else ""


def _place(schema: Any, why: str) -> list[str] | None:
    """The path to the keyword that llguidance's error names; None if it names none."""
    if isinstance(schema, dict):
        if f"Unknown format: {schema.get('format')}" == why.strip():
            return ["format"]
        if why.startswith("Unimplemented keys") and (
            key := next((k for k in schema if f'"{k}"' in why), None)
        ):
            return [key]
    if not isinstance(schema, dict | list):
        return None
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema)
    for key, part in parts:
        if (path := _place(part, why)) is not None:
            return [str(key), *path]
    return None


def _memory() -> int:
    """The resident memory of this process in bytes, without mapped files."""
    resident, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - of_files) * resource.getpagesize()
