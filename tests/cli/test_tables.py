"""Tables in narrow terminals: no word of a heading or a cell is cut."""

from __future__ import annotations

import io
import re

import pytest
from machines import times_by_rows
from pass_run import Terminal, pass_run
from rich.console import Console
from rich.table import Table

from pass_runtime.cli.tables import print_reasoning, show_table
from pass_runtime.tuning.auto import Tuner


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("boxed", [True, False], ids=["boxed", "plain"])
def test_no_word_is_cut(width, boxed):
    headings = ("plan", "tokens/s in all", "each", "milliseconds/pass", "acceptance by position")
    row = ("fused:6,5,4,3,2,1,1 +ngram x16", "12345.6", "[bold]12345.6", "123.45", "0.11 0.22 0.33")
    table = Table() if boxed else Table(box=None, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=heading == "plan")
    table.add_row(*row)
    show_table(Console(file=(file := io.StringIO()), width=width), table)
    text = file.getvalue()
    assert row[0] in text and "…" not in text
    assert set(" ".join((*headings, *row)).replace("[bold]", "").split()) <= set(text.split())
    assert max(map(len, text.splitlines())) <= max(width, 93)


def test_the_table_of_auto_fits_80_columns(capsys, monkeypatch):
    """Even with the longest names of plans. Times that were estimated are marked with ~."""
    monkeypatch.setenv("COLUMNS", "80")
    tuner = Tuner(times_by_rows({1: 0.1, 81: 0.5}), 8, (0.6, 0.4, 0.2))
    for plan in tuner.decide(8).plan.windows:
        tuner.observe(plan, 1, 0.1)
    print_reasoning(tuner, None)
    lines = capsys.readouterr().err.splitlines()
    table = [line for line in lines if line.startswith("│")]
    assert max(map(len, table)) <= 80 and len(table) == len(tuner.choices(8))
    names = [line.split("│")[1].strip() for line in table]
    assert {"ar", "draft-8 + verify-8", "fused:8,7,6,5,4,3,2,1,1", "fused:2,2,1"} < set(names)
    measured = [name for name, line in zip(names, table, strict=True) if "~" not in line]
    assert measured == [tuner.decided.plan.windows[0].name]


WIDE = ("--batch", "1,2", "--plan", "ar", "--plan", "fused:6,5,4,3,2,1,1", "--draft", "both")
HEADINGS = {
    "bench": "plan tokens/s each ratio ms/pass tau acceptance position +ngram",
    "rows": "sequences rows window look-ahead trunk, ratio tail,",
    "inspect": "name rows drafts groups next samplers",
    "explain": "plan rows ms/pass tokens/pass tokens/s against",
}


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("name", HEADINGS)
def test_commands_in_80_columns(random_bundle, name, terminal, monkeypatch):
    command, *flags = {
        "bench": ("bench", "--max-new-tokens", "8", "--repeat", "1", *WIDE),
        "rows": ("bench", "--rows", "1,9", "--batch", "1,2", "--repeat", "1"),
        "inspect": ("inspect",),
        "explain": ("generate", "-p", "fox", "--max-new-tokens", "8", "--explain"),
    }[name]
    arguments = [command, str(random_bundle), *flags]
    if terminal:
        with Terminal(*arguments) as running:
            text = running.wait_for("└")
    else:
        monkeypatch.setenv("COLUMNS", "80")
        done = pass_run(*arguments)
        text = done.stdout + done.stderr
    words = set(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    assert set(HEADINGS[name].split()) <= words and "…" not in text
