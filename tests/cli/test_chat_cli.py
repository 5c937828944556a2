"""pass-run chat over a pipe: turns, /reset, the end of input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pass_run import bundle_copy, output, process, refusal

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
        answer = session.chat(messages, GenerateOptions(max_new_tokens=12, ignore_eos=True)).run().text
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert said(tiny_bundle, "hello", "again", "hello", flags=(*FLAGS, "--system", "short")) == expected
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
    assert said(tiny_bundle, "hello", "again", flags=flags) == said(tiny_bundle, "hello", "again", flags=flags)


def test_end_of_input_ends_it(tiny_bundle: Path):
    """As a process: an unfinished last line is a turn too, no prompt sign is printed, and the status is 0."""
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
