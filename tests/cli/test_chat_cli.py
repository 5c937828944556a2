"""pass-run chat that reads lines from a pipe."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from pass_run import PASS_RUN, changed_bundle, output, pass_run, process, refusal

from pass_runtime import GenerateOptions, load

FLAGS = ("--max-new-tokens", "12", "--ignore-eos")


def answers_to(bundle: Path, *lines: str, flags: tuple[str, ...] = FLAGS) -> str:
    return output("chat", bundle, *flags, stdin="".join(f"{line}\n" for line in lines))


def test_turns_build_on_each_other(tiny_bundle: Path):
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
def test_reset_forgets_the_conversation(tiny_bundle: Path):
    conversation = answers_to(tiny_bundle, "hello", "again")
    alone = answers_to(tiny_bundle, "hello")
    assert answers_to(tiny_bundle, "hello", "again", "/reset", "hello") == conversation + alone
    assert answers_to(tiny_bundle, "hello", "again", "hello") != conversation + alone


def test_blank_lines_are_skipped_and_quit_ends_the_chat(tiny_bundle: Path):
    assert answers_to(tiny_bundle, "", "  ", "hello", "/quit", "not read") == answers_to(
        tiny_bundle, "hello"
    )
    assert answers_to(tiny_bundle) == ""


def test_a_seed_repeats_the_conversation(tiny_bundle: Path):
    flags = (*FLAGS, "--temperature", "1", "--seed", "3")
    first, second = (answers_to(tiny_bundle, "hello", "again", flags=flags) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_a_last_line_without_line_feed_is_answered(tiny_bundle: Path):
    done = process("chat", tiny_bundle, *FLAGS, stdin="hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == answers_to(tiny_bundle, "hello")


def test_a_model_without_template_is_refused_at_once(tiny_bundle: Path, tmp_path: Path):
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


def test_a_message_that_is_too_long_costs_only_itself(tiny_bundle: Path):
    answers, errors = chat(tiny_bundle, "hello", "12 " * 800, "again")
    assert answers == answers_to(tiny_bundle, "hello", "again")
    assert len(errors) == 1 and "more than the context of 768; shorten the message" in errors[0]


def test_a_line_that_is_not_utf8_costs_only_itself(tiny_bundle: Path):
    done = pass_run("chat", tiny_bundle, *FLAGS, stdin=b"\xef\xbb\xbfhello\r\nStra\xdfe\nagain\n")
    assert done.exit_code == 2 and done.stdout == answers_to(tiny_bundle, "hello", "again")
    assert done.stderr == "error: skipped a line that is not UTF-8 text; encode it as UTF-8\n"


def test_messages_that_the_template_refuses(tiny_bundle: Path, tmp_path: Path):
    refuse = "{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    template = refuse + (tiny_bundle / "chat_template.jinja").read_text()
    copy = changed_bundle(tiny_bundle, tmp_path / "copy", template=template)
    answers, errors = chat(copy, "hello", "no", "again")
    assert answers == answers_to(tiny_bundle, "hello", "again")
    assert errors == ["error: the chat template refuses these messages: not that"]


def test_only_commands_that_read_a_broken_template_refuse_it(tiny_bundle: Path, tmp_path: Path):
    copy = changed_bundle(tiny_bundle, tmp_path / "copy", template="{% for %}")
    refused = [("chat", copy), ("generate", copy, "--chat", "-p", "hello")]
    if find_spec("fastapi"):
        refused.append(("serve", copy, "--port", "0"))
    for command in refused:
        assert refusal(*command, stdin="hello\n").startswith("error: chat_template.jinja: ")
    assert pass_run("generate", copy, "-p", "hello", "--max-new-tokens", "2").exit_code == 0


LONG_LINES = [f"{i} {'fox ' * 90}".strip() for i in range(8)]
"""Messages of which a few fill the context."""


def test_a_full_context_drops_the_oldest_exchanges(tiny_bundle: Path, tmp_path: Path):
    saved = tmp_path / "talk.json"
    flags = (*FLAGS, "--system", "short", "--context-overflow", "drop-oldest")
    answers, notes = chat(tiny_bundle, *LONG_LINES, f"/save {saved}", flags=flags)
    assert len(answers.splitlines()) >= 8
    assert any("dropped the oldest exchange" in note for note in notes)
    assert not any(note.startswith("error") for note in notes)
    kept = json.loads(saved.read_text())
    exchanges = len(kept) // 2
    assert kept[0] == {"role": "system", "content": "short"}  # never dropped
    assert [turn["role"] for turn in kept[1:]] == ["user", "assistant"] * exchanges
    assert [turn["content"] for turn in kept[1::2]] == LONG_LINES[-exchanges:]
    session = load(tiny_bundle, "cpu", threads=1)
    assert 768 // 2 < len(session.encode_chat(kept)) <= 768


def test_a_full_context_can_refuse_messages(tiny_bundle: Path, tmp_path: Path):
    saved = tmp_path / "talk.json"
    flags = (*FLAGS, "--context-overflow", "stop")
    _, notes = chat(
        tiny_bundle, *LONG_LINES, f"/save {saved}", "/reset", LONG_LINES[0], flags=flags
    )
    refused = [note for note in notes if note.startswith("error: the conversation (")]
    assert refused and "drop-oldest" in refused[0]
    kept = json.loads(saved.read_text())
    assert [turn["content"] for turn in kept[::2]] == LONG_LINES[: 8 - len(refused)]
    assert not notes[-1].startswith("error")  # after /reset there is room again


def test_an_answer_may_not_take_more_than_half_of_the_context(tiny_bundle: Path):
    """Otherwise --max-new-tokens could leave no room for the conversation."""
    flags = ("--max-new-tokens", "5000", "--context-overflow", "stop")
    answers, notes = chat(tiny_bundle, "hello", flags=flags)
    assert answers.strip() and notes == []


@pytest.mark.parametrize("capacity", [4, 24, 32])
def test_tiny_capacities_answer_or_refuse_in_one_line(tiny_bundle: Path, capacity: int):
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


def test_a_saved_conversation_can_be_loaded(tiny_bundle: Path, tmp_path: Path):
    saved = tmp_path / "a talk.json"
    flags = (*FLAGS, "--system", "short")
    first, notes = chat(tiny_bundle, "hello", f"/save {saved}", "again", flags=flags)
    assert notes == [f"3 messages written to {saved}"]
    roles = [turn["role"] for turn in json.loads(saved.read_text())]
    assert roles == ["system", "user", "assistant"]
    second, notes = chat(tiny_bundle, f"/load {saved}", "again")
    assert notes == [f"3 messages read from {saved}"] and first.endswith(second)
    assert list(tmp_path.iterdir()) == [saved]


BAD_FILES = {  # case: the file's text, or None for no file
    "missing": None,
    "not JSON": "hello",
    "no list": '{"role": "user", "content": "a"}',
    "no content": '[{"role": "user"}]',
    "an unknown key": '[{"role": "user", "content": "a", "name": "b"}]',
    "a question without answer": '[{"role": "user", "content": "a"}]',
    "an answer first": '[{"role": "assistant", "content": "a"}]',
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_conversation_changes_nothing(
    tiny_bundle: Path, tmp_path: Path, case: str
):
    file = tmp_path / "talk.json"
    if (text := BAD_FILES[case]) is not None:
        file.write_text(text)
    answers, errors = chat(tiny_bundle, "hello", f"/load {file}", "again")
    assert answers == answers_to(tiny_bundle, "hello", "again")
    assert len(errors) == 1 and errors[0].startswith("error: ") and str(file) in errors[0]


@pytest.mark.slow
def test_system_message_and_other_commands(tiny_bundle: Path, tmp_path: Path):
    with_system = (*FLAGS, "--system", "short")
    system = answers_to(tiny_bundle, "hello", flags=with_system)
    plain = answers_to(tiny_bundle, "hello")
    assert system != plain
    assert chat(tiny_bundle, "/system short", "hello")[0] == system
    assert chat(tiny_bundle, "/system", "hello", flags=with_system)[0] == plain
    after_reset, _ = chat(tiny_bundle, "other", "/reset", "hello", flags=with_system)
    assert after_reset.endswith(system)  # /reset keeps the system message
    unwritable = tmp_path / "no" / "file"
    answers, notes = chat(tiny_bundle, "/help", "/rset", "/save", f"/save {unwritable}", "hello")
    assert answers == plain
    for name in ("/reset", "/system", "/save", "/load", "/quit"):
        assert any(name in note for note in notes)
    assert [note.split(":")[1] for note in notes[-3:]] == [
        " unknown command /rset; /help lists them",
        " name a file",
        f" cannot write {unwritable}",
    ]


def test_a_path_is_not_a_command(tiny_bundle: Path):
    answers, notes = chat(tiny_bundle, "/etc/passwd is a file")
    assert answers.strip() and notes == []


def test_a_closed_standard_input_ends_the_chat(tiny_bundle: Path):
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *PASS_RUN, "chat", str(tiny_bundle)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
