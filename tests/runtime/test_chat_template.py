"""Chat templates: they are rendered as Hugging Face renders them, in a sandbox and a child process,
and their errors have one line."""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES
from pass_runtime.errors import PassError
from pass_runtime.session import load
from pass_runtime.text.chat_template import ChatTemplate, load_chat_template, template_tokens

FILE_NAME = CHAT_TEMPLATE_FILES["default"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hi"}]
TALK = [{"role": "system", "content": "Be brief."}, *USER]


def render(source: str, messages=USER, **variables) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
            "<s><system>Be brief.</s><user>Hi</s><user>Hi</s><assistant>",
        ),
        # trim_blocks and lstrip_blocks
        (
            "A\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nB",
            "A\nBe brief.\nHi\nHi\nB",
        ),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
            "{% break %}{% endfor %}",
            "Hi",
        ),
        # Hugging Face's own tag around the assistant's words
        ("a{% generation %}b{% endgeneration %}c", "abc"),
    ],
    ids=["tokens and roles", "whitespace of blocks", "loop controls", "generation"],
)
def test_templates_are_rendered_as_by_hugging_face(source, expected):
    assert render(source, [*TALK, *USER]) == expected


def test_tojson_keeps_order_html_and_non_ascii_characters():
    """As Hugging Face's filter does. Jinja's own would sort the keys, and escape the characters."""
    message = {"role": "user", "content": "<b> & 'ü'"}
    expected = json.dumps(message, ensure_ascii=False)
    assert render("{{ messages[0] | tojson }}", [message]) == expected


def test_content_is_not_escaped_and_not_a_template():
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


@pytest.mark.parametrize("source", ["{% for %}", "{{ messages", "{% endfor %}"])
def test_a_broken_template_names_its_file(source):
    with pytest.raises(PassError) as error:
        render(source)
    assert FILE_NAME in str(error.value)
    assert "\n" not in str(error.value)


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
    ],
)
def test_a_template_that_reaches_for_pythons_internals_is_refused(source):
    """Templates come with downloaded models, so they run in a sandbox."""
    with pytest.raises(PassError):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"]
)
def test_internals_of_python_are_undefined_in_a_template(source):
    assert render(source) == ""


@pytest.mark.parametrize(
    "source", ["{{ messages[9].content.x }}", "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}"]
)
def test_an_error_in_a_template_is_a_pass_error(source):
    with pytest.raises(PassError):
        render(source)


def test_templates_get_the_special_tokens_that_the_manifest_lists(tiny_bundle):
    """Older manifests list none: then only the start token and the first end token are defined."""
    session = load(tiny_bundle, "cpu", threads=1)
    model = session.manifest.model
    assert template_tokens(model, session.tokenizer) == {"bos_token": "<bos>", "eos_token": "<eos>"}
    listed = model.model_copy(
        update={"special_tokens": {"eos_token": "!", "image_token": "?"}, "eos_token_ids": (2, 1)}
    )
    assert template_tokens(listed, session.tokenizer) == {"eos_token": "!", "image_token": "?"}
    older = model.model_copy(update={"special_tokens": None, "bos_token_id": None})
    assert template_tokens(older, session.tokenizer) == {"eos_token": "<eos>"}
    session.close()
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


def test_a_child_is_started_by_the_first_chat_and_ends_with_the_session(tiny_bundle):
    with load(tiny_bundle, "cpu", threads=1) as session:
        pool = session.chat_template._pool
        assert not pool._children
        session.encode_chat(USER)
        (child,) = pool._children
        assert child.alive
    assert not child.alive


def test_threads_share_children_and_get_their_own_texts():
    template = ChatTemplate("{% for i in range(n) %}{{ i }},{% endfor %}{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as threads:
        texts = threads.map(
            lambda i: template.render([{"role": "user", "content": str(i)}], n=i % 7), range(300)
        )
        assert list(texts) == ["".join(f"{j}," for j in range(i % 7)) + str(i) for i in range(300)]
    assert 1 <= len(template._pool._children) <= 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, even if pytest runs in the background and ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_rendering():
    loops = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(loops + "{{ n }}")
    assert template.render(USER, n=1) == "1"
    with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(1) as threads:
        interrupt = threads.submit(_interrupt_while_busy, template)
        try:
            template.render(USER, n=99999)
        finally:
            interrupt.result()
    assert template.render(USER, n=2) == "2"


def _interrupt_while_busy(template: ChatTemplate) -> None:
    """Wait until a child renders: it is then not among the free ones."""
    while not template._pool._free.empty() and template._pool._free.queue[-1] is not None:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_template_files_are_utf8_and_may_be_missing(tmp_path):
    assert load_chat_template(tmp_path, TOKENS) is None
    (tmp_path / FILE_NAME).write_text("é{{ bos_token }}", encoding="utf-8")
    template = load_chat_template(tmp_path, TOKENS)
    assert template is not None
    assert template.render(USER) == "é<s>"


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
    """Whether the content is null or absent."""
    for content in ({}, {"content": None}):
        message = {"role": "assistant"} | content | turn
        assert render("{% set m = messages[0] %}" + source, [message]) == expected


def test_only_a_turn_of_the_model_may_have_no_content():
    for message in ({"role": "user"}, {"role": "tool", "content": None}):
        with pytest.raises(PassError, match="refuses these messages"):
            render("{{ 'a' + messages[0].content }}", [message])


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
