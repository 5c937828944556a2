from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pass_runtime.errors import PassError
from pass_runtime.text import grammar
from pass_runtime.text.child import Child
from pass_runtime.text.constraint import Constraint
from pass_runtime.text.grammar import ConstraintStopped, Grammars, TooManyConstraints

END = 0


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    runs = ["x" * count for count in (2, 4, 8, 16)]
    merges = [(run[: len(run) // 2],) * 2 for run in runs]
    vocabulary = {word: i for i, word in enumerate(["<eos>", *alphabet, *runs])}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


TOKENIZER = make_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()


@pytest.fixture
def grammars():
    made = Grammars(TOKENIZER, VOCAB_SIZE, [END])
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared():
    made = Grammars(TOKENIZER, VOCAB_SIZE, [END])
    yield made
    made.close()


@pytest.fixture
def calls(monkeypatch):
    values: list[dict] = []
    call = Child.call

    def record_and_call(pool, value):
        values.append(value)
        return call(pool, value)

    monkeypatch.setattr(Child, "call", record_and_call)
    return values


def chain(count: int, of) -> dict:
    definitions = {f"a{i}": of({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$defs": definitions | {f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def rules(letter: str, count: int) -> str:
    lines = [f"{letter}{i}: {letter}{i + 1}" for i in range(count)]
    return "\n".join([f"start: {letter}0", *lines, f'{letter}{count}: "x"'])


def patterns(count: int) -> dict:
    """Return a schema of strings that match so many patterns, which is slow to compile."""
    return {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(count)]}


NESTED_TOO_DEEPLY = "is too complex to compile: it is nested too deeply; simplify it"
TOO_LARGE = (
    r"is too complex to compile: it (takes more than 2 seconds|needs more than 256 MiB of "
    r"memory); simplify it"
)
NO_TOKEN = "is not valid: the model has no token that could follow"
NULL = {"type": "null"}
MANY_PROPERTIES = {"type": "object", "properties": {f"p{i}": NULL for i in range(2000)}}
MANY_WORDS = " | ".join(f'"w{i}"' for i in range(2500))
REFUSED = {
    "regex": ({"regex": "("}, "the regex is not valid"),
    "look-around": ({"regex": "(?=a)b"}, "the regex is not valid"),
    "missing rule": ({"grammar": "start: missing"}, "the grammar is not valid"),
    "unique items": ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "references": ({"json_schema": chain(3000, lambda of: of)}, NESTED_TOO_DEEPLY),
    "chain of allOf": ({"json_schema": chain(1500, lambda of: {"allOf": [of]})}, NESTED_TOO_DEEPLY),
    "rules": ({"grammar": rules("r", 9000)}, NESTED_TOO_DEEPLY),
    "terminals": ({"grammar": rules("T", 9000)}, NESTED_TOO_DEEPLY),
    "patterns": ({"json_schema": patterns(23)}, TOO_LARGE),
    "left recursion": ({"grammar": "start: start"}, NO_TOKEN),
    "properties": ({"json_schema": MANY_PROPERTIES}, "max is 2000"),
    "alternatives": ({"grammar": f"start: {MANY_WORDS}"}, "max is 2000"),
    "alternatives later": ({"grammar": f'start: "a" rest\nrest: {MANY_WORDS}'}, "max is 2000"),
    "groups": ({"regex": "(" * 5000 + "a" + ")" * 5000}, "is not valid"),
    "parentheses": (
        {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
        "too deeply nested",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "why"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_or_huge_constraint_is_refused_in_one_line_and_compiled_once(
    shared, calls, fields, why
):
    for _ in range(2):
        with pytest.raises(PassError, match=why) as refusal:
            shared.start(Constraint(**fields))
        assert len(str(refusal.value).splitlines()) == 1
        assert len(str(refusal.value)) < 400
    assert len(calls) == 1
    assert shared.start(Constraint(regex="[ab]+")).forced() == ()


def test_large_but_simple_constraints_are_compiled(shared):
    shared.start(Constraint(choice=[f"w{i}" for i in range(3000)]))
    shared.start(Constraint(json_schema={"properties": {f"p{i}": NULL for i in range(300)}}))
    shared.start(Constraint(json_schema=chain(100, lambda of: of)))
    shared.start(Constraint(regex="a{1,100000}" * 50))
    shared.start(Constraint(regex="((a|b)*c(d|e)*){30,3000}" * 10))


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a\ud800"},
        {"grammar": 'start: "\udfff"'},
        {"choice": ["a", "\ud800b"]},
        {"json_schema": {"const": "\ud800"}},
        {"json_schema": {"properties": {"\ud800": {}}}},
        {"json_schema": '{"const": "\\ud800"}'},
    ],
    ids=str,
)
def test_a_lone_surrogate_is_refused(fields):
    with pytest.raises(PassError, match=f"^{next(iter(fields))} is not valid Unicode text$"):
        Constraint(**fields)


def test_a_constraint_is_limited_in_size():
    with pytest.raises(PassError, match="at most 1048576 are allowed"):
        Constraint(regex="a" * (1 << 21))


def test_equal_constraints_at_once_are_compiled_once(grammars, calls):
    good, bad = Constraint(regex="[ab]+c"), Constraint(regex="(")
    with ThreadPoolExecutor(8) as threads:
        states = [*threads.map(lambda _: grammars.start(good), range(24))]
        futures = [grammars.prepare(bad) for _ in range(8)]
    assert len({id(state) for state in states}) == 24
    assert {str(future.exception()) for future in futures} == {str(futures[0].exception())}
    assert len(calls) == 2


def test_a_compilation_delays_no_constraint_that_is_compiled_already(grammars, monkeypatch):
    compiled = Constraint(regex="compiled")
    grammars.start(compiled)
    released, call = threading.Event(), Child.call
    monkeypatch.setattr(
        Child, "call", lambda child, value: released.wait(60) and call(child, value)
    )
    waiting = [grammars.prepare(Constraint(regex="long")) for _ in range(5)]
    grammars.start(compiled)
    assert not any(future.done() for future in waiting)
    released.set()
    assert len({id(future.result(60)) for future in waiting}) == 1


def test_the_queue_is_bounded(grammars, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(Child, "call", lambda *_: released.wait(60) and {"refused": "no"})
    held = [grammars.prepare(Constraint(regex=f"a{i}")) for i in range(grammar.MAX_JOBS)]
    with pytest.raises(TooManyConstraints, match="try again later"):
        grammars.prepare(Constraint(regex="b"))
    assert grammars.prepare(Constraint(regex="a1")) is held[1]
    released.set()
    assert {str(future.exception(60)) for future in held} == {"no"}


def test_cached_grammars_are_bounded_in_bytes_and_number(grammars, monkeypatch):
    states = [grammars.prepare(Constraint(regex=f"a{i}")).result() for i in range(4)]
    assert len(grammars._cached) == 4
    assert sum(kept.bytes for kept in grammars._cached.values()) >= 4 * grammar.MIN_GRAMMAR_BYTES
    grown = next(kept for kept in grammars._cached.values() if kept.future.result() is states[3])
    grown.usage.seconds = grammar.MAX_CACHE_BYTES / grammar.BYTES_PER_SECOND - 0.001
    grammars.start(Constraint(regex="b"))
    assert next(iter(grammars._cached.values())).future.result() is not states[0]
    assert sum(kept.bytes for kept in grammars._cached.values()) <= grammar.MAX_CACHE_BYTES
    monkeypatch.setattr(grammar, "MAX_GRAMMARS", 2)
    for i in range(4):
        grammars.start(Constraint(regex=f"c{i}"))
    assert len(grammars._cached) == 2


def test_remembered_refusals_are_bounded(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_REFUSALS", 3)
    for i in range(6):
        with pytest.raises(PassError):
            grammars.start(Constraint(regex="(" * (i + 1)))
    assert len(grammars._refused) == 3


def test_a_future_in_use_needs_no_second_compilation(grammars, calls):
    constraint = Constraint(regex="held")
    future = grammars.prepare(constraint)
    future.result()
    grammars._cached.clear()
    assert grammars.prepare(constraint) is future
    assert len(calls) == 1


def test_computing_masks_makes_a_cached_grammar_larger(grammars):
    state = grammars.start(Constraint(regex="([ab]*a[ab]{60})+"))
    (kept,) = grammars._cached.values()
    before = kept.bytes
    write_tokens(state, itertools.cycle("ab"), 30)
    assert kept.bytes > before


def test_close_ends_running_compilations(grammars, calls):
    constraints = Constraint(json_schema=patterns(23)), Constraint(regex="a")
    futures = [grammars.prepare(constraint) for constraint in constraints]
    while not calls:
        time.sleep(0.01)
    grammars.close()
    for future in futures:
        with pytest.raises(PassError, match="the session is closed"):
            future.result(60)
    with pytest.raises(PassError, match="the session is closed"):
        grammars.prepare(Constraint(regex="b"))


def test_a_model_without_an_end_is_refused():
    with pytest.raises(PassError, match="no token that ends a text"):
        Grammars(TOKENIZER, VOCAB_SIZE, []).start(Constraint(regex="a"))


def write_tokens(state, texts, count: int) -> None:
    allowed = np.zeros((1, -(-VOCAB_SIZE // 32)), np.uint32)
    for text in itertools.islice(texts, count):
        state.forced()
        state.fill(allowed, ())
        state.advance(TOKENIZER.token_to_id(text))


AMBIGUOUS = [
    'start: a\na: a a | "x"',
    'start: a\na: a a a | a a | "x"',
    'start: a b\na: a a | "x"\nb: b b | a b | "x"',
    'start: a\na: a a | "x" a | a "x" | "x" "x" | "x"',
]


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_own_text(shared, text):
    """By the limit of one token or the budget of its text; other texts have their own budgets."""
    state = shared.start(Constraint(grammar=text))
    started, message = time.thread_time(), "cannot be followed further|takes more than 2 ms a token"
    with pytest.raises(ConstraintStopped, match=message):
        write_tokens(state, itertools.repeat("x" * 16), 400)
    assert time.thread_time() - started < 20 * grammar.START_CPU_SECONDS
    write_tokens(shared.start(Constraint(grammar=text)), itertools.repeat("x"), 3)


def test_the_budget_counts_every_call_and_grows_with_the_rows(shared, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(grammar.time, "thread_time", lambda: 0.001 * next(clock))  # 1 ms a call
    monkeypatch.setattr(grammar, "START_CPU_SECONDS", 0.1)
    state = shared.start(Constraint(regex="x*"))
    allowed = np.zeros((3, -(-VOCAB_SIZE // 32)), np.uint32)
    drafts = [TOKENIZER.token_to_id("x")] * 2
    for _ in range(200):
        state.fill(allowed, drafts)  # three rows in 1 ms
    other = state.copy()
    with pytest.raises(ConstraintStopped, match="takes more than 2 ms a token"):
        for _ in range(200):
            other.advance(drafts[0])  # no rows
    with pytest.raises(ConstraintStopped, match="takes more than 2 ms a token"):
        other.forced()
    state.fill(allowed, drafts)


def test_the_mask_of_a_row_does_not_depend_on_a_later_row_that_is_stopped(shared):
    """Otherwise the budget, which drafts use up too, would change a text."""
    state = shared.start(Constraint(grammar=AMBIGUOUS[0]))
    allowed = np.zeros((2, -(-VOCAB_SIZE // 32)), np.uint32)
    state.fill(allowed, [TOKENIZER.token_to_id("x")])
    first = allowed[0].copy()
    allowed[:] = 0
    state.fill(allowed, ())
    assert (allowed[0] == first).all()


FLAG = {"type": "boolean"}
ENDLESS_REF = {"$ref": "#/$defs/E"}
ENDLESS = {"type": "object", "properties": {"n": ENDLESS_REF}, "required": ["n"]}


def closed(**properties: dict) -> dict:
    """A schema of objects with these properties alone. #/$defs/E has no finite value."""
    objects = {"type": "object", "properties": properties, "additionalProperties": False}
    return objects | {"$defs": {"E": ENDLESS}}


def matching(*patterns: str) -> dict:
    """A schema of objects with the property `a`, and others whose names match a pattern."""
    return closed(a=FLAG) | {"patternProperties": dict.fromkeys(patterns, FLAG)}


def referring(reference: str, **definition: dict) -> dict:
    """A schema of objects whose property `b` refers to a definition, which refers to itself."""
    return closed(a=FLAG, b={"$ref": reference}) | {"$defs": definition}


WITH_DEAD_ENDS = {
    "a pattern of a property": (matching("^a$"), {"a"}),
    "a pattern of two names": (matching("^(a|b)$"), {"a", "b"}),
    "a pattern of few names": (matching("^[a-c]d?$"), {"a", "ad", "b", "bd", "c", "cd"}),
    "alternatives with ends of their own": (matching("^a$|^b$"), {"a", "b"}),
    "either case": (matching("^(?i:ab)$"), {"a", "AB", "Ab", "aB", "ab"}),
    "no Latin letter": (matching('^[\u00e9"]$'), {"a", "\u00e9", '"'}),
    "a pattern of nothing": (matching(r"^[^\s\S]$"), {"a"}),
    "two patterns": (matching("^a$", "^(?:b)$"), {"a", "b"}),
    "an endless object": (closed(a=FLAG, b=ENDLESS_REF), {"a"}),
    "an endless alternative": (closed(a={"anyOf": [ENDLESS_REF, FLAG]}), {"a"}),
    "an endless pattern": (closed(a=FLAG) | {"patternProperties": {"^x": ENDLESS_REF}}, {"a"}),
    "endless others": (closed(a=FLAG) | {"additionalProperties": ENDLESS_REF}, {"a"}),
    "endless items": (closed(a={"type": "array", "items": ENDLESS_REF}), {"a"}),
    "an endless second item": (closed(a={"prefixItems": [FLAG, ENDLESS_REF]}), {"a"}),
    "a list of items": (closed(a={"items": [FLAG, ENDLESS_REF]}), {"a"}),
    "additionalItems": (closed(a={"items": [FLAG], "additionalItems": ENDLESS_REF}), {"a"}),
    "a loop": (referring("#/$defs/L", L={"$ref": "#/$defs/L"}), {"a"}),
    "by $anchor": (referring("#l", L={"$anchor": "l", "$ref": "#l"}), {"a"}),
    "by $id": (
        closed(a=FLAG, b={"$ref": "l"}, c={"$ref": "http://example.org/s#/$defs/L"})
        | {"$id": "http://example.org/s", "$defs": {"L": {"$id": "l", "$ref": "l"}}},
        {"a"},
    ),
    "by an escaped path": (
        referring("#/$defs/L%20~1", **{"L /": {"$ref": "#/$defs/L%20~1"}}),
        {"a"},
    ),
    "by a property": (referring("#/properties/b"), {"a"}),
    "inside": (closed(o=matching("^a$")), {"o"}),
}


@pytest.mark.parametrize(("schema", "names"), WITH_DEAD_ENDS.values(), ids=WITH_DEAD_ENDS)
def test_no_text_of_a_schema_comes_to_a_dead_end(schema, names):
    """After every text that the grammar allows, it allows another byte or the end; and only these
    `names` of properties appear. Up to 400 texts are followed, byte by byte."""
    from llguidance import LLMatcher, LLTokenizer

    from pass_runtime.text.constraint import JSON_FORM
    from pass_runtime.text.dead_ends import without_dead_ends

    schema = json.loads(json.dumps(schema))
    text = json.dumps(without_dead_ends(schema))
    grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_FORM)
    tokenizer, pending, seen, values = LLTokenizer("byte"), [b""], set(), []
    while pending:
        text = pending.pop()
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert matcher.try_consume_tokens(list(text)) == len(text)
        if matcher.is_accepting():
            values.append(json.loads(text))
        mask = matcher.compute_bitmask()
        bits = [(8 * i + bit, byte >> bit & 1) for i, byte in enumerate(mask) for bit in range(8)]
        allowed = [token for token, is_set in bits if is_set]
        assert allowed or matcher.is_accepting(), text
        # A comma is followed first, as the last text of the list: it leads to more names.
        for token in sorted(allowed, key=lambda token: token == ord(",")):
            longer = text + bytes([token]) if token < 256 else text  # others are no bytes
            if token < 256 and len(longer) < 60 and longer not in seen and len(seen) < 400:
                seen.add(longer)
                pending.append(longer)
    assert {name for value in values for name in value} <= names


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        closed(a={"$ref": "#"}) | {"required": ["a"]},
        {"$defs": {"E": ENDLESS}} | ENDLESS,
    ],
)
def test_a_schema_without_a_finite_value_is_refused(shared, schema):
    with pytest.raises(PassError, match="json_schema is not valid: no value of it ends"):
        shared.start(Constraint(json_schema=schema))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "string", "pattern": "(?=x)"}, "look-around"),
        ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"),
        ({"type": "string", "format": "regex"}, "Unknown format: regex, at properties.a.format"),
        ({"not": {}}, '"not"], at properties.a.not'),
        ({"type": "nope"}, "Invalid type: nope"),
    ],
)
def test_the_error_names_the_schema_of_a_grammar_by_its_title(shared, part, why):
    schemas = [{"title": "first"}, {"title": "second", "properties": {"a": part}}]
    rules = [
        f"r{i}: %json {json.dumps({'type': 'object'} | schema)}" for i, schema in enumerate(schemas)
    ]
    with pytest.raises(PassError) as refusal:
        shared.start(Constraint(grammar="\n".join(["start: r0 | r1", *rules])))
    assert str(refusal.value).startswith("the json_schema of second is not valid: ")
    assert why in str(refusal.value) and "\n" not in str(refusal.value)


def test_schemas_whose_recursion_can_end_are_unchanged():
    from pass_runtime.text.dead_ends import without_dead_ends

    reference = {"$ref": "#/$defs/T"}
    tree = {"type": "object", "properties": {"t": reference, "l": {"items": reference}}}
    values = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/V"}}]}
    for schema in (reference | {"$defs": {"T": tree}}, {"$defs": {"V": values}} | FLAG):
        assert without_dead_ends(schema) == schema
