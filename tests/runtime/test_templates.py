from __future__ import annotations

import datetime
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES
from pass_runtime.errors import PassError
from pass_runtime.session import load
from pass_runtime.text.templates import MAX_BYTES, ChatTemplate, load_chat_template

FILE_NAME = CHAT_TEMPLATE_FILES["default"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hi"}]
TALK = [{"role": "system", "content": "Be brief."}, *USER]


def render(source: str, messages=USER, **variables) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **variables)


def test_texts_and_json_are_written_as_they_are():
    """As Hugging Face's filter does. Jinja's own would sort the keys, and escape the characters."""
    message = {"role": "user", "content": "<b> & 'ü'"}
    expected = json.dumps(message, ensure_ascii=False)
    assert render("{{ messages[0] | tojson }}", [message]) == expected
    content = "<b>&{{ 1 }}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content


def test_a_template_can_use_the_date_and_variables_of_the_request():
    rendered = render("{{ strftime_now('%Y') }}")
    year = datetime.datetime.now().year
    assert rendered in (str(year), str(year - 1))  # a year may begin between the two calls
    assert render("{{ tools }}", tools=3) == "3"


def test_a_template_can_refuse_messages():
    message = r"^the chat template refuses these messages: roles must alternate$"
    with pytest.raises(PassError, match=message):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ messages.append(1) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__base__ }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ dict.mro() }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ self.__init__.__globals__['sys'] }}",
        "{{ '{0.__class__.__mro__[1]}'.format('') ~ ''.format.__self__.__class__.x }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages[9].content.x }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_reaches_for_pythons_internals_or_fails_is_refused(source):
    """Templates come with downloaded models, so they run in a sandbox."""
    with pytest.raises(PassError):
        render(source)


def test_some_internals_of_python_are_undefined_in_a_template():
    assert render("{{ raise_exception.__globals__ }}{{ '{0.__class__}'.format(messages) }}") == ""


def test_templates_get_the_special_tokens_that_the_manifest_lists(tiny_bundle):
    with load(tiny_bundle, "cpu", threads=1) as session:
        tokens = session.manifest.model.special_tokens
        assert session.chat_template.tokens == tokens
        assert (tokens["bos_token"], tokens["eos_token"]) == ("<bos>", "<eos>")
    source = "{{ bos_token is defined }}{{ image_token }}{{ eos_token }}"
    assert ChatTemplate(source, {"eos_token": "!", "image_token": "?"}).render(USER) == "False?!"


def test_conversations_with_tools_have_a_template_of_their_own(tmp_path):
    """`tool_use` renders those with tools, even an empty list; `default` renders the others."""
    for name, file in CHAT_TEMPLATE_FILES.items():
        (tmp_path / file).write_text(f"{name} {{{{ tools }}}}", encoding="utf-8")
    template = load_chat_template(tmp_path, TOKENS)
    assert template is not None
    assert template.render(USER) == template.render(USER, tools=None) == "default None"
    assert template.render(USER, tools=[1]) == "tool_use [1]"
    assert template.render(USER, tools=[]) == "tool_use []"
    assert template.tool_use_source == "tool_use {{ tools }}"
    (tmp_path / FILE_NAME).unlink()
    template = load_chat_template(tmp_path, TOKENS)
    assert template is not None
    assert template.render(USER, tools=[1]) == "tool_use [1]"
    with pytest.raises(PassError, match="only chat template is for conversations with tools"):
        template.render(USER)


def test_check_names_the_file_of_a_broken_template(tmp_path):
    (tmp_path / FILE_NAME).write_text("x")
    (tmp_path / "chat_template.tool_use.jinja").write_text("{% if %}")
    template = load_chat_template(tmp_path, TOKENS)
    assert template is not None
    assert template.render(USER) == "x"
    with pytest.raises(PassError, match=r"^chat_template\.tool_use\.jinja: "):
        template.check()


def test_threads_get_their_own_texts_also_of_a_copy():
    template = ChatTemplate("{% for i in range(n) %}{{ i }},{% endfor %}{{ messages[0].content }}")
    template.check()
    template = pickle.loads(pickle.dumps(template))
    with ThreadPoolExecutor(8) as threads:
        texts = threads.map(
            lambda i: template.render([{"role": "user", "content": str(i)}], n=i % 7), range(300)
        )
        assert list(texts) == ["".join(f"{j}," for j in range(i % 7)) + str(i) for i in range(300)]


NESTED = "{% set n = namespace(x=[]) %}{% for i in range(5000) %}{% set n.x = [n.x] %}{% endfor %}"
TOO_LONG = {
    "text in loops": "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "a result just too large": "{{ 'a' * (2 ** 25 + 1) }}",
    "a result of characters": "{{ '🦊' * (2 ** 23 + 1) }}",
}
REFUSED = {
    "a huge range": "{{ range(10 ** 9) | list }}",
    "a recursion without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep JSON": NESTED + "{{ n.x | tojson }}",
    "deep text": NESTED + "{{ n.x }}",
}


@pytest.mark.parametrize("case", [*TOO_LONG, *REFUSED])
def test_a_template_that_writes_too_much_or_recurses_ends_in_one_line(case):
    """In any thread, and the template can be used again."""
    template = ChatTemplate(
        "{% if end %}end{% else %}" + (TOO_LONG | REFUSED)[case] + "{% endif %}"
    )
    with ThreadPoolExecutor(1) as pool, pytest.raises(PassError) as error:
        pool.submit(template.render, USER).result()
    message = str(error.value)
    assert "\n" not in message
    if case in TOO_LONG:
        assert message == "the chat template cannot be used: it writes more than 32 MiB"
    else:
        assert message.startswith("the chat template refuses these messages: ")
    assert template.render(USER, end=True) == "end"
    assert len(render("{{ 'a' * n }}", n=MAX_BYTES)) == MAX_BYTES


@pytest.mark.parametrize("depth", [300, 100_000])
@pytest.mark.parametrize("nested_in", ["list", "object"])
def test_messages_that_nest_deeply_are_rendered_or_refused_in_one_line(nested_in, depth):
    content: object = "x"
    for _ in range(depth):
        content = [content] if nested_in == "list" else {"a": content}
    source = "{{ messages[0].content | tojson | length }}"
    if depth < 1000:
        assert render(source, [{"content": content}]) == str(len(json.dumps(content)))
    else:
        with pytest.raises(PassError, match=r"refuses these messages: .*recursion"):
            render(source, [{"content": content}])


@pytest.mark.parametrize(
    "source",
    [
        *("{% for %}", "{{ messages", "{% endfor %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"),
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    ],
    ids=lambda source: source[:12],
)
def test_a_template_that_cannot_be_compiled_is_refused_in_one_line(source):
    for call in (ChatTemplate(source).check, lambda: ChatTemplate(source).render(USER)):
        with pytest.raises(PassError, match=r"^chat_template\.jinja: ") as error:
            call()
        assert "\n" not in str(error.value)


def test_template_files_are_utf8_and_may_be_missing(tmp_path):
    assert load_chat_template(tmp_path, TOKENS) is None
    (tmp_path / FILE_NAME).write_text("é{{ bos_token }}", encoding="utf-8")
    template = load_chat_template(tmp_path, TOKENS)
    assert template is not None
    assert template.render(USER) == "é<s>"
    with pytest.raises(PassError, match="at least one message"):
        template.render([])


def test_a_session_encodes_chats_if_it_has_a_template(tiny_bundle):
    session = load(tiny_bundle, "cpu", threads=1)
    ids = session.encode_chat(TALK)
    # The template writes <bos>, and the tokenizer adds no second one.
    assert ids[0] == 0
    assert session.tokenizer.decode(ids) == "[system]Be brief.\n[user]Hi\n[assistant]"
    session.chat_template = None
    with pytest.raises(PassError, match="has no chat template"):
        session.chat(USER)


@pytest.mark.parametrize("arguments", ['{"a": "b', "[1]", "no JSON"])
def test_templates_write_arguments_of_calls_as_the_model_wrote_them(arguments):
    """Even if they are no JSON object. Templates write them as an object, as text, or by field."""
    function = {"name": "f", "written_arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    as_object, as_field = f'{{"name": "f", "arguments": {arguments}}}', f"arguments={arguments}"
    for source, expected in (
        ("{{ c | tojson }}", as_object),
        ('{"name": "f", "arguments": {{ c.arguments | tojson }}}', as_object),
        ('{{ \'{"name": "f", "arguments": \' + c.arguments + "}" }}', as_object),
        ("{{ c.arguments if c.arguments is string else c.arguments | tojson }}", arguments),
        ("{% for k, v in c.arguments.items() %}{{ k ~ '=' ~ v }}{% endfor %}", as_field),
        ("{% for k, v in c.arguments | items %}{{ k ~ '=' ~ v }}{% endfor %}", as_field),
    ):
        set_call = "{%- set c = messages[0].tool_calls[0].function -%}"
        assert render(set_call + source, messages) == expected


CALLS = [
    {"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "abc"
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' + m.content + 'b' }}", "ab"),
        ("{{ 'a' ~ m.content | trim }}", "a"),
        ("{{ m.content.split('</think>')[-1].lstrip('x') }}{{ m.content is string }}", "True"),
        ("{{ '</think>' in m.content }}{{ m.content | length }}", "False0"),
        ("{{ 'text' if m.content else 'none' }}", "none"),
        ("{{ m.content | tojson }}{{ {'content': m.content} | tojson }}", '""{"content": ""}'),
        ("{{ m.content is none }}{{ m.content is not none }}", "TrueFalse"),
        ("{{ m.content == none }}{{ m.content != none }}{{ m.content == '' }}", "TrueFalseTrue"),
        ("{{ m['content'] is defined and m['content'] is not none }}", "False"),
        ("{% for part in m.content %}a{% endfor %}{{ m.content[:3] }}", ""),
        ("{{ m.name is none }}{{ m.name is defined }}{{ none is none }}", "FalseFalseTrue"),
    ],
)
@pytest.mark.parametrize("turn", [{"tool_calls": CALLS[:1]}, {"reasoning_content": "So."}])
def test_a_turn_without_content_has_an_empty_text_that_is_none(source, expected, turn):
    for content in ({}, {"content": None}):
        message = {"role": "assistant"} | content | turn
        assert render("{% set m = messages[0] %}" + source, [message]) == expected
    for other in ({"role": "user"}, {"role": "tool", "content": None}):
        with pytest.raises(PassError, match="refuses these messages"):
            render("{{ 'a' + messages[0].content }}", [other])


ONE_CALL = """
{%- for m in messages %}
    {%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one only') }}{% endif %}
    {{- m.role[0] ~ m.content }}{% for call in m.tool_calls or [] %}({{ call.id }}){% endfor %}
{%- endfor %}"""


def test_templates_that_refuse_several_calls_get_them_one_after_another():
    """Each is followed by its results. Turns of one call, and other messages, stay as they are."""
    results = [{"role": "tool", "tool_call_id": name, "content": name * 2} for name in "cabb"]
    turn = {"role": "assistant", "content": "x", "tool_calls": CALLS}
    again = {"role": "assistant", "content": None, "tool_calls": CALLS[1:2]}
    messages = [*USER, turn, *results, *USER, again, results[-1]]
    assert render(ONE_CALL, messages) == "uHiax(a)taaa(b)tbbtbba(c)tccuHia(b)tbb"
    taken = ONE_CALL.replace("> 1", "> 3")
    assert render(taken, messages) == "uHiax(a)(b)(c)tcctaatbbtbbuHia(b)tbb"
    with pytest.raises(PassError, match=r"refuses these messages: never$"):
        render("{{ raise_exception('never') }}", messages)
