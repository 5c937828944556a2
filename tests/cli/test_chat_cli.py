"""pass-run chat over a pipe: turns, commands, a full context, and lines that cannot be answered."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path

import pytest
from pass_run import PASS_RUN, bundle_copy, output, pass_run, process, refusal

from pass_runtime import GenerateOptions, load

FLAGS = ("--max-new-tokens", "12", "--ignore-eos")


def said(bundle: Path, *lines: str, flags: tuple[str, ...] = FLAGS) -> str:
    return output("chat", bundle, *flags, stdin="".join(f"{line}\n" for line in lines))


def test_turns_build_on_each_other(tiny_bundle: Path):
    session = load(tiny_bundle, "cpu", threads=1)
    messages: list[dict[str, str]] = [{"role": "system", "content": "short"}]
    expected = ""
    for line in ("hello", "again", "hello"):
        messages.append({"role": "user", "content": line})
        answer = (
            session.chat(messages, GenerateOptions(max_new_tokens=12, ignore_eos=True))
            .result()
            .text
        )
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert (
        said(tiny_bundle, "hello", "again", "hello", flags=(*FLAGS, "--system", "short"))
        == expected
    )
    assert len({message["content"] for message in messages[2::2]}) == 3


def test_reset_forgets(tiny_bundle: Path):
    conversation = said(tiny_bundle, "hello", "again")
    alone = said(tiny_bundle, "hello")
    assert said(tiny_bundle, "hello", "again", "/reset", "hello") == conversation + alone
    assert said(tiny_bundle, "hello", "again", "hello") != conversation + alone


def test_blank_lines_and_quit(tiny_bundle: Path):
    assert said(tiny_bundle, "", "  ", "hello", "/quit", "not read") == said(tiny_bundle, "hello")
    assert said(tiny_bundle) == ""


def test_a_seed_repeats_the_conversation(tiny_bundle: Path):
    flags = (*FLAGS, "--temperature", "1", "--seed", "3")
    assert said(tiny_bundle, "hello", "again", flags=flags) == said(
        tiny_bundle, "hello", "again", flags=flags
    )


def test_end_of_input_ends_it(tiny_bundle: Path):
    """As a process: an unfinished last line is a turn too, no prompt sign is printed, and the
    status is 0."""
    done = process("chat", tiny_bundle, *FLAGS, stdin="hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == said(tiny_bundle, "hello")


def test_a_model_without_template_is_refused_at_once(tiny_bundle: Path, tmp_path: Path):
    manifest = (tiny_bundle / "pass_config.json").read_text()
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without="pass_config.json")
    (copy / "chat_template.jinja").unlink()
    without = re.sub(r'\n *"chat_template.jinja": \{[^}]*\},', "", manifest)
    assert without != manifest
    (copy / "pass_config.json").write_text(without)
    assert "no chat template" in refusal("chat", copy, stdin="hello\n")
    assert "no chat template" in refusal("generate", copy, "--chat", "-p", "hello")


@pytest.mark.parametrize("flags", [["--top-p", "2"], ["--lookahead", "9"]], ids=" ".join)
def test_refused_flags(tiny_bundle: Path, flags: list[str]):
    """Before the first line is read."""
    refusal("chat", tiny_bundle, *flags, stdin="hello\n")


def commands(bundle: Path, *lines: str, flags: tuple[str, ...] = FLAGS) -> tuple[str, list[str]]:
    """Answers, and the lines on stderr. The status says whether an error is among these."""
    done = pass_run("chat", bundle, *flags, stdin="".join(f"{line}\n" for line in lines))
    errors = done.stderr.splitlines()
    assert done.exit_code == (2 if any(line.startswith("error: ") for line in errors) else 0), (
        done.stderr
    )
    return done.stdout, errors


LONG = "12 " * 800


def test_a_message_that_is_too_long_costs_only_itself(tiny_bundle: Path):
    answers, errors = commands(tiny_bundle, "hello", LONG, "again")
    assert answers == said(tiny_bundle, "hello", "again")
    assert len(errors) == 1 and "more than the context of 768; shorten the message" in errors[0]


def test_a_line_that_is_not_utf8_costs_only_itself(tiny_bundle: Path):
    done = pass_run("chat", tiny_bundle, *FLAGS, stdin=b"\xef\xbb\xbfhello\r\nStra\xdfe\nagain\n")
    assert done.exit_code == 2 and done.stdout == said(tiny_bundle, "hello", "again")
    assert done.stderr == "error: skipped a line that is not UTF-8 text; encode it as UTF-8\n"


def test_messages_that_the_template_refuses(tiny_bundle: Path, tmp_path: Path):
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without="chat_template.jinja")
    refuse = "{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    write_listed(
        copy, "chat_template.jinja", refuse + (tiny_bundle / "chat_template.jinja").read_text()
    )
    answers, errors = commands(copy, "hello", "no", "again")
    assert answers == said(tiny_bundle, "hello", "again")
    assert errors == ["error: the chat template refuses these messages: not that"]


def test_a_broken_template(tiny_bundle: Path, tmp_path: Path):
    """It is refused by what reads it, and by nothing else."""
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without="chat_template.jinja")
    write_listed(copy, "chat_template.jinja", "{% for %}")
    assert refusal("chat", copy, stdin="hello\n").startswith("error: chat_template.jinja: ")
    assert refusal("generate", copy, "--chat", "-p", "hello").startswith(
        "error: chat_template.jinja: "
    )
    assert pass_run("generate", copy, "-p", "hello", "--max-new-tokens", "2").exit_code == 0


def test_a_server_does_not_start_with_a_broken_template(tiny_bundle: Path, tmp_path: Path):
    pytest.importorskip("fastapi")
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without="chat_template.jinja")
    write_listed(copy, "chat_template.jinja", "{% for %}")
    assert refusal("serve", copy, "--port", "0").startswith("error: chat_template.jinja: ")


def write_listed(bundle: Path, name: str, text: str) -> None:
    """A file of a bundle and its entry in the manifest."""
    (bundle / name).write_text(text)
    config = bundle / "pass_config.json"
    manifest = json.loads(config.read_text())
    manifest["files"][name] = {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "bytes": len(text.encode()),
    }
    config.unlink()  # a link
    config.write_text(json.dumps(manifest))


HALF = " ".join(["fox"] * 90)
"""Of which a handful fill the context."""


def test_a_full_context_drops_the_oldest_exchanges(tiny_bundle: Path, tmp_path: Path):
    saved = tmp_path / "talk.json"
    lines = [f"{i} {HALF}" for i in range(8)]
    flags = (*FLAGS, "--system", "short", "--context-overflow", "drop-oldest")
    answers, notes = commands(tiny_bundle, *lines, f"/save {saved}", flags=flags)
    assert len(answers.splitlines()) >= 8 and any(
        "dropped the oldest exchange" in note for note in notes
    )
    assert not any(note.startswith("error") for note in notes)
    kept = json.loads(saved.read_text())
    assert kept[0] == {"role": "system", "content": "short"}  # never dropped
    assert [turn["role"] for turn in kept[1:]] == ["user", "assistant"] * (len(kept) // 2)
    assert [turn["content"] for turn in kept[1::2]] == lines[
        -(len(kept) // 2) :
    ]  # the newest, without a gap
    session = load(tiny_bundle, "cpu", threads=1)
    assert 768 // 2 < len(session.encode_chat(kept)) <= 768


def test_a_full_context_can_refuse_instead(tiny_bundle: Path, tmp_path: Path):
    saved = tmp_path / "talk.json"
    lines = [f"{i} {HALF}" for i in range(8)]
    flags = (*FLAGS, "--context-overflow", "stop")
    _, notes = commands(tiny_bundle, *lines, f"/save {saved}", "/reset", lines[0], flags=flags)
    refused = [note for note in notes if note.startswith("error: the conversation (")]
    assert refused and "drop-oldest" in refused[0]
    kept = json.loads(saved.read_text())
    assert [turn["content"] for turn in kept[::2]] == lines[: 8 - len(refused)]
    assert not notes[-1].startswith("error")  # after /reset there is room again


def test_an_answer_may_not_take_more_than_half_of_the_context(tiny_bundle: Path):
    """--max-new-tokens beyond the context is no reason to forget everything at once."""
    flags = ("--max-new-tokens", "5000", "--context-overflow", "stop")
    answers, notes = commands(tiny_bundle, "hello", flags=flags)
    assert answers.strip() and notes == []


@pytest.mark.parametrize("capacity", [4, 24, 32])
def test_tiny_capacities_answer_or_refuse_in_one_line(tiny_bundle: Path, capacity: int):
    """Messages that do not fit, then ever shorter ones: the first prompt that is answered fills the
    capacity."""
    lines = ["12" * count for count in range(15, 0, -1)]
    session = load(tiny_bundle, "cpu", threads=1)
    lengths = [len(session.encode_chat([{"role": "user", "content": line}])) for line in lines]
    assert capacity in lengths or capacity < min(lengths)
    answers, notes = commands(
        tiny_bundle, *lines, flags=("--ignore-eos", "--capacity", str(capacity))
    )
    refused = [note for note in notes if note.startswith("error: ")]
    assert refused == [
        (
            f"error: the prompt has {length} tokens, more than the context of {capacity}; shorten "
            "the message"
        )
        for length in lengths
        if length > capacity
    ]
    assert all("oldest exchange" in note for note in notes if note not in refused)
    assert len(answers.splitlines()) >= len(lines) - len(refused)


def test_save_and_load(tiny_bundle: Path, tmp_path: Path):
    saved = tmp_path / "a talk.json"
    first, notes = commands(
        tiny_bundle, "hello", f"/save {saved}", "again", flags=(*FLAGS, "--system", "short")
    )
    assert notes == [f"3 messages written to {saved}"]
    assert [turn["role"] for turn in json.loads(saved.read_text())] == [
        "system",
        "user",
        "assistant",
    ]
    second, notes = commands(tiny_bundle, f"/load {saved}", "again")
    assert notes == [f"3 messages read from {saved}"] and first.endswith(second)
    assert list(tmp_path.iterdir()) == [saved]


BAD_FILES = {
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
    answers, errors = commands(tiny_bundle, "hello", f"/load {file}", "again")
    assert answers == said(tiny_bundle, "hello", "again")
    assert len(errors) == 1 and errors[0].startswith("error: ") and str(file) in errors[0]


def test_system_message_and_other_commands(tiny_bundle: Path, tmp_path: Path):
    system = said(tiny_bundle, "hello", flags=(*FLAGS, "--system", "short"))
    assert system != said(tiny_bundle, "hello")
    assert commands(tiny_bundle, "/system short", "hello")[0] == system
    assert commands(tiny_bundle, "/system", "hello", flags=(*FLAGS, "--system", "short"))[
        0
    ] == said(tiny_bundle, "hello")
    again = (*FLAGS, "--system", "short")
    assert commands(tiny_bundle, "other", "/reset", "hello", flags=again)[0].endswith(
        system
    )  # /reset keeps it
    answers, notes = commands(
        tiny_bundle, "/help", "/rset", "/save", f"/save {tmp_path / 'no' / 'file'}", "hello"
    )
    assert answers == said(tiny_bundle, "hello")
    assert all(
        any(name in note for note in notes)
        for name in ("/reset", "/system", "/save", "/load", "/quit")
    )
    assert [note.split(":")[1] for note in notes[-3:]] == [
        " unknown command /rset; /help lists them",
        " name a file",
        f" cannot write {tmp_path / 'no' / 'file'}",
    ]


def test_a_path_is_not_a_command(tiny_bundle: Path):
    answers, notes = commands(tiny_bundle, "/etc/passwd is a file")
    assert answers.strip() and notes == []


def test_closed_standard_input(tiny_bundle: Path):
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *PASS_RUN, "chat", str(tiny_bundle)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
