"""pass-run chat in a terminal: line editing, history, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from pass_run import ENTERED, PROMPT, SLOW_PASS_RUN, Terminal

FLAGS = ("--max-new-tokens", "12", "--ignore-eos", "--plan", "ar")
UP, LEFT = "\x1b[A", "\x1b[D"


@pytest.mark.slow
def test_lines_can_be_edited_and_recalled(tiny_bundle: Path, tmp_path: Path):
    saved = tmp_path / "talk.json"
    with Terminal("chat", tiny_bundle, *FLAGS) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type(f"helo{LEFT}l\r")
        terminal.wait_for("12 tokens")
        terminal.wait_for(PROMPT)
        terminal.type(f"{UP}!\r")
        terminal.wait_for("12 tokens")
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[200~two\nlines\x1b[201~\r")  # as terminals send pasted text
        terminal.wait_for("12 tokens")
        terminal.wait_for(PROMPT)
        terminal.type(f"/save {saved}\r")
        terminal.wait_for("6 messages written")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")  # Ctrl-D
        assert terminal.exit_status() == 0
    assert [turn["content"] for turn in json.loads(saved.read_text())[::2]] == [
        "hello",
        "hello!",
        "two\nlines",
    ]


@pytest.mark.slow
def test_ctrl_c_stops_answers_and_ends_at_the_prompt(tiny_bundle: Path):
    """Two answers are stopped, because the prompt between them changes the signal's handler."""
    flags = ("--max-new-tokens", "700", "--ignore-eos", "--plan", "ar")
    with Terminal("chat", tiny_bundle, *flags, command=SLOW_PASS_RUN) as terminal:
        for _ in range(2):
            terminal.wait_for(PROMPT)
            terminal.type("hello\r")
            terminal.wait_for(ENTERED)
            terminal.wait_for_characters(
                8
            )  # before the answer, Ctrl-C would be a key of the prompt
            terminal.type("\x03")
            terminal.wait_for("[stopped]")
        terminal.wait_for(PROMPT)
        terminal.type("\x03")
        assert terminal.exit_status() == 0
        assert "Traceback" not in terminal.shown


@pytest.mark.slow
def test_sigterm_at_the_prompt_ends_the_chat(tiny_bundle: Path):
    with Terminal("chat", tiny_bundle, *FLAGS) as terminal:
        terminal.wait_for(PROMPT)
        terminal.process.send_signal(signal.SIGTERM)
        assert "Traceback" not in terminal.wait_for("interrupted")
        assert terminal.exit_status() == 130
