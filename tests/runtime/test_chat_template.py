"""Chat templates: rendered as Hugging Face renders them, refusing politely, and unable to leave the sandbox."""

from __future__ import annotations

import datetime
import json

import pytest

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES
from pass_runtime.errors import PassError
from pass_runtime.session import load
from pass_runtime.text.chat import ChatTemplate, load_chat_template

FILE_NAME = CHAT_TEMPLATE_FILES["default"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hi"}]
TALK = [{"role": "system", "content": "Be brief."}, *USER]


def render(source: str, messages=USER, **variables) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **variables)


def test_messages_tokens_and_generation_prompt():
    source = (
        "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert render(source, TALK) == "<s><system>Be brief.</s><user>Hi</s><assistant>"


def test_blocks_leave_no_whitespace():
    """trim_blocks and lstrip_blocks, which most published templates rely on."""
    assert render("A\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nB") == "A\nHi\nB"


def test_loop_controls():
    source = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}"
    assert render(source, [*TALK, *USER]) == "Hi"


def test_tojson_is_that_of_hugging_face():
    """Keys in their own order, no HTML escapes, no ASCII escapes: jinja's own filter does all three."""
    message = {"role": "user", "content": "<b> & 'ü'"}
    assert render("{{ messages[0] | tojson }}", [message]) == json.dumps(message, ensure_ascii=False)


def test_generation_blocks_are_transparent():
    """Hugging Face's own tag around the assistant's words, which published templates use."""
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_content_is_not_escaped_and_not_a_template():
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "<b>&{{ 1 }}"}]) == "<b>&{{ 1 }}"


def test_date_and_extra_variables():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year - back) for back in (0, 1)}
    assert render("{{ tools }}", tools=3) == "3"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% if messages[0].role != 'system' %}{{ raise_exception('roles must alternate') }}{% endif %}",
    ],
)
def test_refusal(source):
    with pytest.raises(PassError, match=r"^the chat template refuses these messages: roles must alternate$"):
        render(source)


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
    ],
)
def test_the_sandbox_holds(source):
    """Templates come with downloaded models: attributes of Python's innards and changes are refused."""
    with pytest.raises(PassError):
        render(source)


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_innards_are_nothing_to_a_template(source):
    assert render(source) == ""


@pytest.mark.parametrize("source", ["{{ messages[9].content.x }}", "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}"])
def test_a_template_that_stumbles_is_a_pass_error(source):
    """Not a traceback of TypeError or ZeroDivisionError: the template is data."""
    with pytest.raises(PassError):
        render(source)


def test_no_template_file(tmp_path):
    assert load_chat_template(tmp_path, TOKENS) is None
    (tmp_path / FILE_NAME).write_text("é{{ bos_token }}", encoding="utf-8")
    template = load_chat_template(tmp_path, TOKENS)
    assert template is not None
    assert template.render(USER) == "é<s>"


def test_session_renders_with_the_models_own_tokens(tiny_bundle):
    session = load(tiny_bundle, "cpu", threads=1)
    ids = session.encode_chat(TALK)
    expected = "[system]Be brief.\n[user]Hi\n[assistant]"
    assert ids[0] == 0  # <bos>, once: the template writes it, the tokenizer adds none
    assert session.tokenizer.decode(ids) == expected


def test_session_without_a_template(tiny_bundle):
    session = load(tiny_bundle, "cpu", threads=1)
    session.chat_template = None
    with pytest.raises(PassError, match="has no chat template"):
        session.chat(USER)
