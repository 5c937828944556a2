"""pass-run chat that reads lines from a pipe, and in a terminal: line editing, history, Ctrl-C and
Ctrl-D."""

from __future__ import annotations

import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from pass_run import (
    ENTERED,
    PASS_RUN,
    PROMPT,
    SLOW_PASS_RUN,
    Terminal,
    changed_bundle,
    output,
    pass_run,
    process,
    refusal,
)

from pass_runtime import GenerateOptions, Session, load

FLAGS = ("--max-new-tokens", "12", "--ignore-eos")


def answers_to(bundle: Path, *lines: str, flags: tuple[str, ...] = FLAGS) -> str:
    return output("chat", bundle, *flags, stdin="".join(f"{line}\n" for line in lines))


def test_turns_build_on_each_other(tiny_bundle):
    session = load(tiny_bundle, "cpu", threads=1)
    options = GenerateOptions(max_new_tokens=12, ignore_eos=True)
    messages: list[dict[str, str]] = [{"role": "system", "content": "short"}]
    lines, expected = ("hello", "again", "hello"), ""
    for line in lines:
        messages.append({"role": "user", "content": line})
        answer = session.chat(messages, options).result().text
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert answers_to(tiny_bundle, *lines, flags=(*FLAGS, "--system", "short")) == expected
    assert len({message["content"] for message in messages[2::2]}) == 3


@pytest.mark.slow
def test_reset_forgets_the_conversation(tiny_bundle):
    conversation = answers_to(tiny_bundle, "hello", "again")
    alone = answers_to(tiny_bundle, "hello")
    assert answers_to(tiny_bundle, "hello", "again", "/reset", "hello") == conversation + alone
    assert answers_to(tiny_bundle, "hello", "again", "hello") != conversation + alone


def test_blank_lines_are_skipped_and_quit_ends_the_chat(tiny_bundle):
    assert answers_to(tiny_bundle, "", "  ", "hello", "/quit", "not read") == answers_to(
        tiny_bundle, "hello"
    )
    assert answers_to(tiny_bundle) == ""


@pytest.mark.slow
def test_a_last_line_without_line_feed_is_answered(tiny_bundle):
    done = process("chat", tiny_bundle, *FLAGS, stdin="hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == answers_to(tiny_bundle, "hello")


def test_a_model_without_template_is_refused_at_once(tiny_bundle, tmp_path):
    copy = changed_bundle(tiny_bundle, tmp_path / "copy", template=None)
    assert "no chat template" in refusal("chat", copy, stdin="hello\n")
    assert "no chat template" in refusal("generate", copy, "--chat", "-p", "hello")


def chat(bundle: Path, *lines: str, flags: tuple[str, ...] = FLAGS) -> tuple[str, list[str]]:
    """Return stdout, and the lines of stderr. Assert status 2 if one is an error, else 0."""
    done = pass_run("chat", bundle, *flags, stdin="".join(f"{line}\n" for line in lines))
    notes = done.stderr.splitlines()
    failed = any(note.startswith("error: ") for note in notes)
    assert done.exit_code == (2 if failed else 0), done.stderr
    return done.stdout, notes


def test_a_message_that_is_too_long_costs_only_itself(tiny_bundle):
    answers, errors = chat(tiny_bundle, "hello", "12 " * 800, "again")
    assert answers == answers_to(tiny_bundle, "hello", "again")
    assert len(errors) == 1 and "more than the context of 768; shorten the message" in errors[0]


def test_a_line_that_is_not_utf8_costs_only_itself(tiny_bundle):
    done = pass_run("chat", tiny_bundle, *FLAGS, stdin=b"\xef\xbb\xbfhello\r\nStra\xdfe\nagain\n")
    assert done.exit_code == 2 and done.stdout == answers_to(tiny_bundle, "hello", "again")
    assert done.stderr == "error: skipped a line that is not UTF-8 text; encode it as UTF-8\n"


def test_messages_that_the_template_refuses(tiny_bundle, tmp_path):
    refuse = "{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    template = refuse + (tiny_bundle / "chat_template.jinja").read_text()
    copy = changed_bundle(tiny_bundle, tmp_path / "copy", template=template)
    answers, errors = chat(copy, "hello", "no", "again")
    assert answers == answers_to(tiny_bundle, "hello", "again")
    assert errors == ["error: the chat template refuses these messages: not that"]


def test_only_commands_that_read_a_broken_template_refuse_it(tiny_bundle, tmp_path):
    copy = changed_bundle(tiny_bundle, tmp_path / "copy", template="{% for %}")
    refused = [("chat", copy), ("generate", copy, "--chat", "-p", "hello")]
    if find_spec("fastapi"):
        refused.append(("serve", copy, "--port", "0"))
    for command in refused:
        assert refusal(*command, stdin="hello\n").startswith("error: chat_template.jinja: ")
    assert pass_run("generate", copy, "-p", "hello", "--max-new-tokens", "2").exit_code == 0


LONG_LINES = [f"{i} {'fox ' * 90}".strip() for i in range(8)]
"""Messages of which a few fill the context."""


@pytest.fixture
def conversations(monkeypatch):
    """The conversations that the chat template wrote."""
    seen, encode_chat = [], Session.encode_chat

    def recorded(session, messages):
        seen.append([*messages])
        return encode_chat(session, messages)

    monkeypatch.setattr(Session, "encode_chat", recorded)
    return seen


def test_a_full_context_drops_the_oldest_exchanges(tiny_bundle, conversations):
    flags = (*FLAGS, "--system", "short", "--context-overflow", "drop-oldest")
    answers, notes = chat(tiny_bundle, *LONG_LINES, flags=flags)
    assert len(answers.splitlines()) >= 8
    assert any("dropped the oldest exchange" in note for note in notes)
    assert not any(note.startswith("error") for note in notes)
    kept = conversations[-1]
    exchanges = len(kept) // 2
    assert kept[0] == {"role": "system", "content": "short"}  # never dropped
    assert [turn["role"] for turn in kept[1:]] == ["user", "assistant"] * (exchanges - 1) + ["user"]
    assert [turn["content"] for turn in kept[1::2]] == LONG_LINES[-exchanges:]
    session = load(tiny_bundle, "cpu", threads=1)
    assert 768 // 2 < len(session.encode_chat(kept)) <= 768


def test_a_full_context_can_refuse_messages(tiny_bundle, conversations):
    flags = (*FLAGS, "--context-overflow", "stop")
    _, notes = chat(tiny_bundle, *LONG_LINES, "/reset", LONG_LINES[0], flags=flags)
    refused = [note for note in notes if note.startswith("error: the conversation (")]
    assert refused and "drop-oldest" in refused[0]
    *kept, last = max(conversations, key=len)
    assert [turn["content"] for turn in kept[::2]] == LONG_LINES[: 8 - len(refused)]
    assert last["content"] in LONG_LINES[8 - len(refused) :]
    assert conversations[-1] == [{"role": "user", "content": LONG_LINES[0]}]  # /reset made room


def test_an_answer_may_not_take_more_than_half_of_the_context(tiny_bundle):
    """Otherwise --max-new-tokens could leave no room for the conversation."""
    flags = ("--max-new-tokens", "5000", "--context-overflow", "stop")
    answers, notes = chat(tiny_bundle, "hello", flags=flags)
    assert answers.strip() and notes == []


@pytest.mark.parametrize("capacity", [4, 24, 32])
def test_tiny_capacities_answer_or_refuse_in_one_line(tiny_bundle, capacity):
    """The messages get shorter until they fit. If any fits, one fills the capacity exactly."""
    lines = ["12" * count for count in range(15, 0, -1)]
    session = load(tiny_bundle, "cpu", threads=1)
    lengths = [len(session.encode_chat([{"role": "user", "content": line}])) for line in lines]
    assert capacity in lengths or capacity < min(lengths)
    answers, notes = chat(tiny_bundle, *lines, flags=("--ignore-eos", "--capacity", str(capacity)))
    refused = [note for note in notes if note.startswith("error: ")]
    message = "error: the prompt has {} tokens, more than the context of {}; shorten the message"
    too_long = [length for length in lengths if length > capacity]
    assert refused == [message.format(length, capacity) for length in too_long]
    assert all("oldest exchange" in note for note in notes if note not in refused)
    assert len(answers.splitlines()) >= len(lines) - len(refused)


@pytest.mark.slow
def test_system_message_and_other_commands(tiny_bundle):
    with_system = (*FLAGS, "--system", "short")
    system = answers_to(tiny_bundle, "hello", flags=with_system)
    plain = answers_to(tiny_bundle, "hello")
    assert system != plain
    assert chat(tiny_bundle, "/system short", "hello")[0] == system
    assert chat(tiny_bundle, "/system", "hello", flags=with_system)[0] == plain
    after_reset, _ = chat(tiny_bundle, "other", "/reset", "hello", flags=with_system)
    assert after_reset.endswith(system)  # /reset keeps the system message
    answers, notes = chat(tiny_bundle, "/help", "/rset", "hello")
    assert answers == plain
    for name in ("/reset", "/system", "/quit"):
        assert any(name in note for note in notes)
    assert notes[-1] == "error: unknown command /rset; /help lists them"


def test_a_path_is_not_a_command(tiny_bundle):
    answers, notes = chat(tiny_bundle, "/etc/passwd is a file")
    assert answers.strip() and notes == []


def test_a_closed_standard_input_ends_the_chat(tiny_bundle):
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *PASS_RUN, "chat", str(tiny_bundle)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


UP, LEFT = "\x1b[A", "\x1b[D"


@pytest.mark.slow
def test_lines_can_be_edited_and_recalled(tiny_bundle):
    lines = ("hello", "hello!", "two\nlines")
    session, options = load(tiny_bundle, "cpu", threads=1), GenerateOptions(12, ignore_eos=True)
    messages: list[dict[str, str]] = []
    answers = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        answers.append(session.chat(messages, options).result().text)
        messages.append({"role": "assistant", "content": answers[-1]})
    keys = (
        f"helo{LEFT}l\r",
        f"{UP}!\r",
        "\x1b[200~two\nlines\x1b[201~\r",  # as terminals send pasted text
    )
    with Terminal("chat", tiny_bundle, *FLAGS, "--plan", "ar") as terminal:
        for typed, answer in zip(keys, answers, strict=True):
            terminal.wait_for(PROMPT)
            terminal.type(typed)
            terminal.wait_for(answer.splitlines()[-1].strip()[-20:])
            terminal.wait_for("12 tokens")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")  # Ctrl-D
        assert terminal.exit_status() == 0


@pytest.mark.slow
def test_ctrl_c_stops_answers_and_ends_at_the_prompt(tiny_bundle):
    """Two answers are stopped, because the prompt between them changes the signal's handler."""
    flags = ("--max-new-tokens", "700", "--ignore-eos", "--plan", "ar")
    with Terminal("chat", tiny_bundle, *flags, command=SLOW_PASS_RUN) as terminal:
        for _ in range(2):
            terminal.wait_for(PROMPT)
            terminal.type("hello\r")
            terminal.wait_for(ENTERED)
            terminal.wait_for_characters(8)  # before them, Ctrl-C would be a key of the prompt
            terminal.type("\x03")
            terminal.wait_for("[stopped]")
        terminal.wait_for(PROMPT)
        terminal.type("\x03")
        assert terminal.exit_status() == 0
        assert "Traceback" not in terminal.shown


@pytest.mark.slow
def test_sigterm_at_the_prompt_ends_the_chat(tiny_bundle):
    with Terminal("chat", tiny_bundle, *FLAGS, "--plan", "ar") as terminal:
        terminal.wait_for(PROMPT)
        terminal.process.send_signal(signal.SIGTERM)
        assert "Traceback" not in terminal.wait_for("interrupted")
        assert terminal.exit_status() == 130
