"""A chat template that runs away ends in one line: loops, recursion, and operators that make huge values."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pass_runtime.errors import PassError
from pass_runtime.text import sandbox
from pass_runtime.text.chat import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}BODY{% endfor %}" + (
    "{% endfor %}{% endfor %}"
)


def render(source: str) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(USER)


def doubling(expression: str, start: str = "'aa'") -> str:
    """60 turns of x = expression: 2^60 of whatever doubles."""
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set n.x = {expression} %}}{{% endfor %}}"


RUNNING_AWAY = {
    "nested loops": FOREVER.replace("BODY", ""),
    "nested loops that write": FOREVER.replace("BODY", "text"),
    "nested loops in a set block": "{% set x %}" + FOREVER.replace("BODY", "text") + "{% endset %}",
    "nested loops in a macro": "{% macro f() %}"
    + FOREVER.replace("BODY", "{{ bos_token }}")
    + "{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a recursive loop": (
        "{% for x in messages recursive %}{% if loop.depth < 60 %}{{ loop(messages) }}{{ loop(messages) }}{% endif %}"
        "{% endfor %}"
    ),
    "a loop's condition": (
        "{% for i in range(99999) if range(99999) | map('string') | list | length == 1 %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("case", RUNNING_AWAY)
@pytest.mark.timeout(20)
def test_a_template_that_does_not_end(case: str, monkeypatch: pytest.MonkeyPatch):
    """From any thread: signals would only reach the first."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    started = time.monotonic()
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(PassError, match=r"^the chat template cannot be used: it ") as error,
    ):
        pool.submit(render, RUNNING_AWAY[case]).result()
    assert time.monotonic() - started < 5
    assert "\n" not in str(error.value)


HUGE = [
    "{{ 10 ** 5000 }}",
    doubling("n.x * n.x", "3"),
    "{{ 'a' * 5000000 }}",
    "{{ 5000000 * [1] }}",
    "{{ 'a' | center(5000000) }}",
    "{{ 'a' | center(width=5000000) }}",
    "{{ 'a'.ljust(5000000) }}",
    "{{ '%5000000d' % 1 }}",
    "{{ '%*d' % (5000000, 1) }}",
    "{{ '%5000000d' | format(1) }}",
    "{{ '{:5000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 5000000) }}",
    "{{ messages | tojson(indent=5000000) }}",
    doubling("n.x ~ n.x"),
    doubling("n.x + n.x"),
    doubling("n.x + n.x", "[1]"),
    doubling("n.x.replace('a', n.x)"),
    doubling("n.x | replace('a', n.x)"),
    doubling("n.x | join(n.x)"),
    doubling("n.x.join(n.x)"),
    "{% set x = 'a' * 999999 %}{% for i in range(99) %}{{ x }}{% endfor %}",
    "{% set x = 'a' * 999999 %}{% set y %}{% for i in range(99) %}{{ x }}{% endfor %}{% endset %}",
]


@pytest.mark.parametrize("source", HUGE)
@pytest.mark.timeout(20)
def test_huge_values_are_refused_before_they_are_made(source: str):
    with pytest.raises(PassError, match=r"^the chat template cannot be used: it "):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30]
)
def test_a_template_that_cannot_be_compiled(source: str):
    with pytest.raises(PassError, match=r"^chat_template\.jinja: ") as error:
        render(source)
    assert "\n" not in str(error.value)


def test_what_templates_do_is_what_jinja_does():
    source = (
        "{{ ['aa', 'bb'] | join(', ') }}|{{ messages | join(',', attribute='content') }}|{{ '-'.join(['1', '2']) }}|"
        "{{ 'aaa' | replace('a', 'b', 2) }}|{{ 'aaa'.replace('a', 'b', 2) }}|{{ '%s %3d' % ('a', 3) }}|"
        "{{ '%s' | format(5) }}|{{ '{:>3}'.format('x') }}|{{ 1 ~ none ~ 'x' }}|{{ 2 ** 10 }}|{{ 3 * 'ab' }}|"
        "{% for x in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ x }}{% if loop.last %}.{% endif %}{% else %}none"
        "{% endfor %}"
    )
    assert render(source) == "aa, bb|Hi|1-2|bba|bba|a   3|5|  x|1Nonex|1024|ababab|1/3a2/3b3/3c."


def test_long_messages_are_no_runaway():
    long = "word " * 1_000_000
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", "", "")
    assert template.render([{"role": "user", "content": long}]) == long.strip()


def test_no_messages():
    with pytest.raises(PassError, match="at least one message"):
        ChatTemplate("x", "", "").render([])
