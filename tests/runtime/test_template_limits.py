"""A runaway chat template ends in one line: its child process has limits of time and memory."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from pass_runtime.errors import PassError
from pass_runtime.text import chat_template
from pass_runtime.text.chat_template import ChatTemplate
from pass_runtime.text.child import Limits

USER = [{"role": "user", "content": "Hi"}]
UNREADABLE = "the chat template cannot read these messages and variables:"
MANY = "range(99999)"
SET = f"{{% set many = {MANY} | list %}}"


def nested(condition: str = "") -> str:
    return (
        f"{SET}{{% for i in many %}}{{% for j in many{condition} %}}BODY{{% endfor %}}{{% "
        f"endfor %}}"
    )


def nested_lists(written: str) -> str:
    """Return a template that sets `l60`, a list of two lists of two lists ..., 60 deep, without a
    loop, and then does what `written` says."""
    return (
        "{% set l0 = ['a'] %}"
        + "".join(f"{{% set l{i + 1} = [l{i}, l{i}] %}}" for i in range(60))
        + written
    )


def turns(statement: str, start: str, count: int = 99) -> str:
    """Return a template that sets n.x to `start`, and then `count` times to `statement`."""
    loop = f"{{% for i in range({count}) %}}{{% set n.x = {statement} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{loop}"


TOO_SLOW = {
    "loops": nested().replace("BODY", "{% if false %}{% endif %}"),
    "a filter that is false": nested(" if false").replace("BODY", ""),
    "a filter of a filter": nested(" if range(99999) | map('string') | list | length == 1").replace(
        "BODY", ""
    ),
    "in, in a condition": SET + "{% for i in many if 'x' in many %}{% endfor %}",
    "a comparison of lists in lists": nested_lists("{% set m0 = ['a'] %}").replace("['a']", "[[1]]")
    + "".join(f"{{% set m{i + 1} = [m{i}, m{i}] %}}" for i in range(60))
    + "{{ l60 == m60 }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a recursive loop": (
        "{% for x in messages recursive %}{% if loop.depth < 60 %}{{ loop(messages) }}{{ "
        "loop(messages) }}{% endif %}{% endfor %}"
    ),
    "translate": "{% set t = 'ab' * 999999 %}"
    + turns("t.translate({97: 'b', 98: 'a'}) | length", "1", 9999),
    "numbers": turns("n.x * n.x", "3"),
    "a number's text": "{{ '%d' % 10 ** 9999999 }}",
    "replace": turns("n.x.replace('a', 'b').replace('b', 'a')", "'a' * 9999999", 9999),
    "sort": turns(f"{MANY} | sort(reverse=true) | first", "1", 9999),
    "batch": turns(f"{MANY} | batch(1) | list | length", "1", 9999),
    "format": turns("n.x.format(1) * 0 ~ n.x", "'{0:9999}' * 99", 9999),
    "compilation": "{% if messages %}{{ messages }}{% endif %}" * 30000,
}
TOO_LARGE = {
    "text in loops": nested().replace("BODY", "x" * 99999),
    "text in a set block": "{% set x %}" + nested().replace("BODY", "x" * 99999) + "{% endset %}",
    "lists in lists, by set": nested_lists("{{ l60 }}"),
    "lists in lists, as JSON": nested_lists("{{ l60 | tojson }}"),
    "translate, to longer text": "{{ ('a' * 999999).translate({97: 'b' * 99999}) }}",
    "range": turns(f"n.x + ({MANY} | list)", "[]", 9999),
    "tilde": turns("n.x ~ n.x", "'aa'"),
    "plus": turns("n.x + n.x", "'aa'"),
    "lists": turns("n.x + n.x", "[1]"),
    "times": "{{ 'a' * 10 ** 11 }}",
    "times, not written": "{% set x = 'a' * 10 ** 11 %}",
    "a list times": "{{ 10 ** 11 * [1] }}",
    "center": "{{ 'a' | center(10 ** 11) }}",
    "ljust": "{{ 'a'.ljust(10 ** 11) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width as argument": "{{ '%*d' % (10 ** 9, 1) }}",
    "a width of the filter": "{{ '%1000000000d' | format(1) }}",
    "a width of the method": "{{ '{:1000000000}'.format(1) }}",
    "a width in a width": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "an indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "a method's replace": turns("n.x.replace('a', n.x)", "'aa'"),
    "the filter replace": turns("n.x | replace('a', n.x)", "'aa'"),
    "the filter join": turns("n.x | join(n.x)", "'aa'"),
    "the method join": turns("n.x.join(n.x)", "'aa'"),
    "indent": turns("n.x | indent(999999)", "'a\\nb'"),
    "lipsum": "{{ lipsum(n=99999, max=99999, min=99998) }}",
    "expandtabs": "{{ ('\\t' * 9999).expandtabs(999999) }}",
    "a result of gigabytes": "{% for i in range(2000) %}{{ 'a' * 999999 }}{% endfor %}",
    "a result just too large": "{{ 'a' * (2 ** 25 + 1) }}",
    "a result of characters": "{{ '🦊' * (2 ** 23 + 1) }}",
}
REFUSED = {
    "a huge range": "{{ range(10 ** 9) | list }}",
    "a recursion without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a list in itself": "{% set l = [] %}{% set _ = l.append(l) %}{{ l | tojson }}",
    "JSON a thousand deep": turns("[n.x]", "[]", 5000).replace(
        "endfor %}", "endfor %}{{ n.x | tojson }}"
    ),
    "a text a thousand deep": turns("[n.x]", "[]", 5000).replace("endfor %}", "endfor %}{{ n.x }}"),
}
ATTACKS = TOO_SLOW | TOO_LARGE | REFUSED
SELDOM_TRIED = (
    "a filter of a filter|in, in a condition|translate|numbers|replace|batch|format|"
    "lists in lists, as JSON|tilde|plus|lists|times, not written|a list times|ljust|"
    "a width as argument|a width of the filter|a width of the method|a width in a width|"
    "the method join|a method's replace|indent|lipsum|expandtabs"
)
"""Attacks that meet the same limit as another attack. Each takes a process of its own, so that
they are tried before a release only."""


@pytest.fixture(scope="module")
def brief() -> Limits:
    return Limits(cpu_seconds=0.3, memory_bytes=256 << 20)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.seldom] * (case in SELDOM_TRIED.split("|")))
        for case in ATTACKS
    ],
)
@pytest.mark.timeout(60)
def test_an_attack_ends_in_one_line(case: str, brief: Limits, monkeypatch):
    """In any thread: Python handles signals, as those of a timer, in the main thread alone."""
    monkeypatch.setattr(chat_template, "RENDER_LIMITS", brief)
    template = ChatTemplate(ATTACKS[case])
    with ThreadPoolExecutor(1) as pool, pytest.raises(PassError) as error:
        pool.submit(template.render, USER).result()
    template.close()
    message = str(error.value)
    assert "\n" not in message
    if case in REFUSED:
        assert message.startswith("the chat template refuses these messages: ")
    else:
        assert message.startswith("the chat template cannot be used: it ")
        assert len(message) < 100


def test_a_template_works_again_after_an_attack(brief: Limits, monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_LIMITS", brief)
    loops = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(loops + "{{ n }}")
    assert template.render(USER, n=2) == "2"
    message = r"^the chat template cannot be used: it takes more than 0\.3 seconds$"
    with pytest.raises(PassError, match=message):
        template.render(USER, n=99999)
    assert template.render(USER, n=3) == "3"


@pytest.mark.parametrize("depth", [300, 100_000])
@pytest.mark.parametrize("nested_in", ["list", "object"])
def test_messages_that_nest_deeply_are_rendered_or_refused_in_one_line(nested_in: str, depth: int):
    content: object = "x"
    for _ in range(depth):
        content = [content] if nested_in == "list" else {"a": content}
    template = ChatTemplate("{{ messages[0].content | tojson | length }}")
    if depth < 1000:
        assert template.render([{"content": content}]) == str(len(json.dumps(content)))
    else:
        with pytest.raises(PassError, match=f"^{UNREADABLE} .*recursion"):
            template.render([{"content": content}])


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30],
)
def test_a_template_that_cannot_be_compiled_is_refused_in_one_line(source: str):
    for call in (ChatTemplate(source).check, lambda: ChatTemplate(source).render(USER)):
        with pytest.raises(PassError, match=r"^chat_template\.jinja: ") as error:
            call()
        assert "\n" not in str(error.value)


def test_long_messages_are_within_the_limits():
    long = "word " * 1_000_000
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    assert template.render([{"role": "user", "content": long}]) == long.strip()


def test_an_empty_conversation_is_refused():
    with pytest.raises(PassError, match="at least one message"):
        ChatTemplate("x").render([])


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", 1j])
def test_variables_that_are_no_json_are_refused(value: object):
    with pytest.raises(PassError, match=f"^{UNREADABLE} they must be JSON values, not "):
        ChatTemplate("x").render(USER, documents=value)
