"""pass-run bench --rows: times of windows with a given number of rows."""

from __future__ import annotations

import json
import shlex
import threading
from itertools import groupby
from pathlib import Path

import pytest
from pass_run import output, refusal
from test_bench_cli import measure, report_of

from pass_runtime import SamplingParams, load
from pass_runtime.backends.ort.backend import BoundSessions
from pass_runtime.cli.bench_rows import RowsOptions, measure_rows, windows
from pass_runtime.decode.engine import Engine
from pass_runtime.measuring.real_use import TIMED_PASSES, WARM_UP_PASSES
from pass_runtime.options import GenerateOptions

GREEDY, PROMPT = SamplingParams(0.0), [5, 6, 7]
ROWS = ("--repeat", "1", "--trust-bundle")


def test_rows_with_and_without_look_ahead(tiny_bundle: Path):
    report = report_of(tiny_bundle, "--rows 2,7,9,9,49 --cached 20", *ROWS)
    rows = [(row["rows"], row["window"], row["lookahead_rows"]) for row in report["rows"]]
    assert rows == [
        (1, "ar", 0),
        *((2, "verify-1", 0), (2, "draft-1", 1)),
        *((7, "verify-6", 0), (7, "draft-6", 6), (7, "fused:2,1,1", 4)),
        *((9, "prefill-9", 0), (9, "fused-2", 6)),
        *((49, "prefill-49", 0), (49, "fused-6", 42)),
    ]
    assert report["rows"][0]["ratio"] == 1.0
    assert report["cached"] == 20 and report["capacity"] == 128
    for row in report["rows"]:
        assert row["trunk_milliseconds"] > 0
        assert (row["tail_milliseconds"] is None) == ("prefill" in row["window"])


def test_passes_of_a_plan_are_timed_in_a_row(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    """Plans take turns, and the first round warms up. So does --breakdown, but without that
    round."""
    passes, time_pass = [], Engine.time_pass

    def recorded(self, batch, **options):
        passes.append((batch.window.name, threading.get_ident()))
        return time_pass(self, batch, **options)

    monkeypatch.setattr(Engine, "time_pass", recorded)
    with load(tiny_bundle, threads=1, prefix_cache=False) as session:
        report = measure_rows(session, RowsOptions(GREEDY, (2,), cached=20, repeat=2), [PROMPT])
    passes_of_rows, passes[:] = list(passes), []
    options = {"prompts": ("a",), "plans": ("two-pass",), "lookahead": (1,), "repeat": 2}
    measure(tiny_bundle, breakdown=True, max_new_tokens=4, **options)
    names = [row["window"] for row in report["rows"]]
    assert names == ["ar", "verify-1", "draft-1"] and report["repeat"] == 2
    of_breakdown = ["ar", "draft-1", "verify-1"]
    for timed, order in ((passes_of_rows, names * 3), (passes, of_breakdown * 2)):
        turns = [(name, [*turn]) for name, turn in groupby(timed, key=lambda each: each[0])]
        assert [name for name, _ in turns] == order
        for _, turn in turns:
            assert len(turn) == WARM_UP_PASSES + TIMED_PASSES and len({*turn}) == 1  # one thread


def test_what_is_timed_is_what_decoding_runs(adapter_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    used: list = []
    get = BoundSessions.get

    def recorded(self, key, make):
        used.append((key, bound := get(self, key, make)))
        return bound

    def used_by(plan: str) -> set:
        return {(key, id(bound._session)) for key, bound in used if key[0] == plan}

    monkeypatch.setattr(BoundSessions, "get", recorded)
    with load(adapter_bundle, threads=1, prefix_cache=False) as session:
        lookahead = session.manifest.lookahead.length
        for mode, plan, rows in (
            ("ar", "ar", 1),
            ("fused:1,1", "fused-1", 4),
            ("two-pass", f"verify-{lookahead}", 1 + lookahead),
        ):
            used.clear()
            options = GenerateOptions(12, GREEDY, plan=mode, ignore_eos=True)
            session.generate_ids(PROMPT, options).result()
            in_decoding = used_by(plan)
            used.clear()
            measure_rows(session, RowsOptions(GREEDY, (rows,), cached=20, repeat=1), [PROMPT])
            assert used_by(plan) == in_decoding and len(in_decoding) == 2  # a trunk and a tail


def test_rows_in_batches_over_a_given_capacity(random_bundle: Path, tmp_path: Path):
    """Ratios refer to one row in a batch of the same size."""
    file, flags = tmp_path / "rows.json", "--rows 1,4 --batch 1,3 --capacity 512 --cached 130"
    flags = (*shlex.split(f"{flags} --temperature 0.8 --top-p 0.9"), "-o", file)
    table = output("bench", random_bundle, *ROWS, *flags)
    for words in ("sequences", "draft-3", "130 cached tokens, KV capacity 512"):
        assert words in table
    report = json.loads(file.read_text())
    assert report["capacity"] == 512 and report["sampling"]["top_p"] == 0.9
    by_batch = {batch: [row for row in report["rows"] if row["batch"] == batch] for batch in (1, 3)}
    assert [row["window"] for row in by_batch[1]] == [row["window"] for row in by_batch[3]]
    for rows in by_batch.values():
        assert rows[0]["ratio"] == 1.0
        assert rows[1]["ratio"] == rows[1]["trunk_milliseconds"] / rows[0]["trunk_milliseconds"]


def test_windows_have_the_rows_that_were_asked_for():
    for lookahead in (1, 2, 4, 16):
        for rows in range(1, 1 + lookahead * (lookahead + 2) + 1):
            plain, *with_lookahead = offered = windows(rows, lookahead)
            assert all(window.width == rows for window in offered), (rows, lookahead)
            assert not plain.groups and all(window.groups for window in with_lookahead)
            assert bool(with_lookahead) == (rows > 1)
            assert all(window.drafts <= lookahead for window in with_lookahead)
        assert windows(rows + 1, lookahead) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--rows 50", "--rows 50: this bundle has no such window here; its widest has 49 rows"),
        ("--rows 5,x", "--rows must list numbers, as in 1,2,5, not '5,x'"),
        ("--rows 5 --cached 800", "lower --cached or raise --capacity"),
        ("--rows 5 --plan ar", "--plan has no use here: --rows times single passes"),
        ("--cached 20", "it is for --rows; leave it out"),
        ("--rows 5 --breakdown", "--breakdown has no use here"),
    ],
)
def test_flags_that_do_not_fit_rows_are_refused(tiny_bundle: Path, flags: str, expected: str):
    assert expected in refusal("bench", tiny_bundle, *flags.split())
