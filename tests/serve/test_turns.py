"""A turn of a model is read in pieces: its thoughts, content and calls do not depend on the pieces,
and text that is no call stays content. Grammars of turns allow what is read as calls."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_grammars import TOKENIZER, VOCAB_SIZE

from pass_runtime.text.constraint import Constraint
from pass_runtime.text.grammar import Grammars
from pass_server.tool_calls import FORMATS, Function, format_of
from pass_server.turn_reader import (
    ContentDelta,
    ReasoningDelta,
    ReasoningReader,
    ToolCallStart,
    TurnReader,
)
from pass_server.turns import turn_grammar

NAMES = ("f", "g.h")
CALL = '{"name": "f", "arguments": {"a": "x}\\"{", "b": [1, {"c": null}]}}'
ARGUMENTS = '{"a": "x}\\"{", "b": [1, {"c": null}]}'
# Texts that a model writes, and their parts: content as text, calls as (name, arguments).
HERMES = [
    (f"Hi there\n<tool_call>\n{CALL}\n</tool_call>\n", ["Hi there", ("f", ARGUMENTS)]),
    (
        f'<tool_call>{CALL}</tool_call> <tool_call>{{"arguments": {{}}, "name": '
        f'"g.h"}}</tool_call> bye',
        [("f", ARGUMENTS), ("g.h", "{}"), "bye"],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', [("f", '{"a": 1}')]),
    ('<tool_call>{"id": 7, "name": "f"}', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a', [("f", '{"a')]),
    ('<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
    (
        'a < b <tool_call>{"name": "other"}</tool_call> c\n',
        ['a < b <tool_call>{"name": "other"}</tool_call> c\n'],
    ),
    ('<tool_call>{"name": 5}', ['<tool_call>{"name": 5}']),
    ('<tool_call>{"name": "f", "arguments": "x"}', ['<tool_call>{"name": "f", "arguments": "x"}']),
    ("<tool_call>no<tool_call>" + CALL, ["<tool_call>no", ("f", ARGUMENTS)]),
    ("1 < 2 <tool_", ["1 < 2 <tool_"]),
    (f"\n{CALL}\n{CALL}\n", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
    (f"{CALL} is it <tool_call>{CALL}</tool_call>", [("f", ARGUMENTS), "is it", ("f", ARGUMENTS)]),
    (f'{{"answer": 3}} <tool_call>{CALL}</tool_call>', ['{"answer": 3}', ("f", ARGUMENTS)]),
    (
        f'{{"name": "other", "arguments": {{}}}}\n{CALL}',
        [f'{{"name": "other", "arguments": {{}}}}\n{CALL}'],
    ),
    (f"So: {CALL}", [f"So: {CALL}"]),
    ('{"name": "f", "ar', ['{"name": "f", "ar']),
    ("  {", ["  {"]),
    (" \n", [" \n"]),
]
MISTRAL = [
    (f"[TOOL_CALLS] [{CALL}, {CALL}]", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
    (f"So: [TOOL_CALLS][{CALL}]\n", ["So:", ("f", ARGUMENTS)]),
    ("[TOOL_CALLS] oops", ["[TOOL_CALLS] oops"]),
    ('[TOOL_CALLS] [{"x": 1}] z', ['[TOOL_CALLS] [{"x": 1}] z']),
    ("[TOOL_CALLS", ["[TOOL_CALLS"]),
    ("[TOOL_CALLS]", ["[TOOL_CALLS]"]),
]
LLAMA = [
    (
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g.h", "parameters": {}}',
        [("f", '{"a": 1}'), ("g.h", "{}")],
    ),
    ('\n<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
    ('{"answer": 3}', ['{"answer": 3}']),
    ('See {"name": "f", "parameters": {}}', ['See {"name": "f", "parameters": {}}']),
    ('{"name": "f", "parameters": {}} is it', [("f", "{}"), "is it"]),
]
CASES = [
    (call_format, *case)
    for call_format, cases in (("hermes", HERMES), ("mistral", MISTRAL), ("llama3_json", LLAMA))
    for case in cases
]
"""Call format, text and parts."""
THINKING = [
    (False, "<think>\nhm <x> \n</think>\n\nyes ", [("thought", "hm <x>"), "yes "]),
    (True, "hm\n</think>\n\nyes", [("thought", "hm"), "yes"]),
    (True, "hm  ", [("thought", "hm")]),
    (True, " </think>yes", ["yes"]),
    (False, " <thin", [" <thin"]),
    (False, "so <think>", ["so <think>"]),
    (False, "<think>a</thi", [("thought", "a</thi")]),
]
"""Whether the prompt has opened the thoughts, the text, and its parts."""


def read(reader, text, cuts):
    """Read a text that is cut into pieces at these positions. Return its parts: content as texts,
    calls as (name, arguments), thoughts as ("thought", text)."""
    read_parts: list = []
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *ends])]
    parts = [part for piece in pieces for part in reader.push(piece)]
    for part in [*parts, *reader.finish()]:
        last = read_parts[-1] if read_parts else None
        if isinstance(part, ToolCallStart):
            read_parts.append((part.name, ""))
        elif isinstance(part, ContentDelta):
            if isinstance(last, str):
                read_parts[-1] += part.text
            else:
                read_parts.append(part.text)
        elif isinstance(part, ReasoningDelta):
            if last is not None and last[0] == "thought":
                read_parts[-1] = ("thought", last[1] + part.text)
            else:
                read_parts.append(("thought", part.text))
        else:
            assert type(part).__name__ == "ArgumentsDelta"
            read_parts[-1] = (last[0], last[1] + part.text)
    return read_parts


CUT_OFF = [
    *(("hermes", f"Hi\n<tool_call>\n{CALL}\n</tool_call>"[:end], "Hi") for end in range(5, 40)),
    *(
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}"[:end], "")
        for end in range(2, 140)
    ),
    *(("hermes", CALL[:end], "") for end in range(1, len(CALL))),
    *(("mistral", f"So: [TOOL_CALLS] [{CALL}, {CALL}]"[:end], "So:") for end in range(6, 150)),
    *(("llama3_json", f"<|python_tag|>{CALL};{CALL}"[:end], "") for end in range(2, 140)),
    ("hermes", '{"city": "Rome", "na', '{"city": "Rome", "na'),
    ("hermes", '{"name": "Anna", "a', '{"name": "Anna", "a'),
    ("hermes", '{"names": ["f"', '{"names": ["f"'),
    ("hermes", "1 <", "1 <"),
    ("hermes", "a <table", "a <table"),
    ("mistral", "see [T]", "see [T]"),
]
"""Call format, a text that `max_tokens` cut off, and its content."""


@pytest.mark.parametrize(("call_format", "text", "content"), CUT_OFF)
def test_a_call_that_is_cut_off_is_no_content(call_format, text, content):
    reader = TurnReader(None, FORMATS[call_format].reader(NAMES))
    parts = [*reader.push(text), *reader.finish(cut=True)]
    assert "".join(part.text for part in parts if isinstance(part, ContentDelta)) == content


def test_a_think_tag_that_is_cut_off_is_no_content():
    for end in range(2, 7):
        reader = TurnReader(ReasoningReader(in_reasoning=False), FORMATS["hermes"].reader(NAMES))
        assert [*reader.push("<think>"[:end]), *reader.finish(cut=True)] == []


CUTS = st.lists(st.integers(0, 120), max_size=40)


@pytest.mark.parametrize(("call_format", "text", "expected"), CASES)
@given(cuts=CUTS)
@example(cuts=range(200))
def test_a_text_is_read_the_same_in_any_pieces(call_format, text, expected, cuts):
    assert read(TurnReader(None, FORMATS[call_format].reader(NAMES)), text, cuts) == expected


@given(
    st.sampled_from(list(FORMATS)),
    st.text(alphabet='<tool_ca>/{}":, []TOOL_CALLSnamef\\arguments\n;'),
    CUTS,
)
def test_a_random_text_is_read_the_same_in_any_pieces(call_format, text, cuts):
    whole = read(TurnReader(None, FORMATS[call_format].reader(NAMES)), text, [])
    assert read(TurnReader(None, FORMATS[call_format].reader(NAMES)), text, cuts) == whole
    if not any(isinstance(part, tuple) for part in whole):
        assert "".join(whole) == text


@pytest.mark.parametrize(("in_reasoning", "text", "expected"), THINKING)
@given(cuts=CUTS)
def test_thoughts_are_read_the_same_in_any_pieces(in_reasoning, text, expected, cuts):
    reader = TurnReader(ReasoningReader(in_reasoning=in_reasoning), None)
    assert read(reader, text, cuts) == expected


def test_a_marker_that_ends_thoughts_may_be_cut_off():
    for text, expected in (("so 1 < 2 </thi", "so 1 < 2"), ("so 1 <", "so 1 <")):
        reader = ReasoningReader(in_reasoning=True)
        deltas = [*reader.push(text), *reader.finish(cut=True)]
        assert "".join(delta.text for delta in deltas).strip() == expected


def test_a_call_in_thoughts_is_a_thought():
    text = f"<think>I could <tool_call>{CALL}</tool_call></think>\n<tool_call>{CALL}</tool_call>"
    reader = TurnReader(ReasoningReader(in_reasoning=False), FORMATS["hermes"].reader(NAMES))
    expected = [("thought", f"I could <tool_call>{CALL}</tool_call>"), ("f", ARGUMENTS)]
    assert read(reader, text, range(0, len(text), 3)) == expected


def test_arguments_come_while_they_are_written():
    """The reader gives the start of the call, and each character of the arguments by itself."""
    reader = FORMATS["hermes"].reader(NAMES)
    counts = [len(reader.push(character)) for character in f"<tool_call>{CALL}"]
    assert sum(counts) == 1 + len(ARGUMENTS)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>\n{{ call | tojson }}", "hermes"),
        ('{"name": "f", "parameters": {}} <|start_header_id|>', "llama3_json"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("<tool_call><function=f><parameter=a>", None),
        ("<tool_call>f<arg_key>a</arg_key>", None),
        ("[TOOL_CALLS]f[ARGS]{}", None),
        ("{{ message.content }}", None),
    ],
)
def test_the_call_format_of_a_template(template, name):
    call_format = format_of(template)
    assert (call_format and call_format.name) == name


CONSTRAINTS = [
    (Constraint(json_schema={"enum": [1, 22]}), ["1", "22"], ["3", "1 ", ""]),
    (Constraint(json_object=True), ["{}", '{"a": [1, 2]}'], ["[]", '{"a":1}']),
    (Constraint(json_schema=True), ["7", '"a"', "{}"], ["a"]),
    (Constraint(regex="a/b|c\\/d"), ["a/b", "c/d"], ["a", "b", "c"]),
    (Constraint(choice=['"', "b\\"]), ['"', "b\\"], ["b"]),
    (Constraint(grammar='start: "x" y\ny: "z"+'), ["xz", "xzz"], ["x"]),
]
"""Constraints, texts that follow each, and texts that do not."""
TOOLS = [
    Function(
        "f", {"properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    )
]


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(TOKENIZER, VOCAB_SIZE, [0])
    yield made
    made.close()


def follows(grammars, constraint, text):
    """Return whether a constraint allows a text, and its end."""
    state = grammars.start(constraint)
    for token in [*TOKENIZER.encode(text).ids, 0]:
        allowed = np.zeros((1, -(-VOCAB_SIZE // 32)), np.uint32)  # a bit for each token
        state.fill(allowed, [])
        if not allowed[0, token // 32] >> (token % 32) & 1:
            return False
        if token:
            state.advance(token)
    return True


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"), CONSTRAINTS, ids=lambda value: str(value)[:30]
)
@pytest.mark.parametrize("thoughts", [None, "opened by the prompt", "optional"])
def test_a_turn_follows_its_constraint_after_thoughts(grammars, constraint, right, wrong, thoughts):
    turn = turn_grammar(
        constraint.lark("form"),
        terminal=json.dumps,
        has_reasoning=thoughts is not None,
        in_reasoning=thoughts == "opened by the prompt",
    )
    beginning = {
        None: "",
        "opened by the prompt": "so { </t>\n</think>\n\n",
        "optional": "<think>so {</think>\n",
    }[thoughts]
    for text in right:
        assert follows(grammars, turn, beginning + text), text
    for text in wrong:
        assert not follows(grammars, turn, beginning + text), text
    assert follows(grammars, turn, right[0]) == (thoughts != "opened by the prompt")


@pytest.mark.parametrize("call_format", FORMATS.values(), ids=FORMATS)
def test_the_grammar_of_calls_allows_what_the_reader_reads(grammars, call_format):
    one_call, many_calls = (
        turn_grammar(call_format.rules(TOOLS, json.dumps, parallel=parallel), terminal=json.dumps)
        for parallel in (False, True)
    )
    text_of_one = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
        "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    }[call_format.name]
    text_of_two = {
        "hermes": f"{text_of_one}\n{text_of_one}",
        "mistral": re.sub(r"(\{.*\})", r"\1, \1", text_of_one),
        "llama3_json": f"{text_of_one}; {text_of_one}",
    }[call_format.name]
    for constraint in (one_call, many_calls):
        assert follows(grammars, constraint, text_of_one)
        assert not follows(grammars, constraint, text_of_one.replace("1", "2"))
        assert not follows(grammars, constraint, text_of_one.replace('"f"', '"g.h"'))
        assert not follows(grammars, constraint, "hello")
    assert not follows(grammars, one_call, text_of_two)
    assert follows(grammars, many_calls, text_of_two) == call_format.parallel
    for text, count in ((text_of_one, 1), (text_of_two, 2)):
        assert read(call_format.reader(NAMES), text, range(0, 99, 7)) == [("f", '{"a": 1}')] * count
