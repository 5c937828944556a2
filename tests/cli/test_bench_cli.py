"""pass-run bench: its report, the prompts, and the order of what is timed; with --rows, times of
windows with a given number of rows."""

from __future__ import annotations

import json
import re
import shlex
import threading
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

import pytest
from pass_run import output, pass_run, process, refusal

from pass_runtime import SamplingParams, load
from pass_runtime.backends.ort.backend import BoundSessions
from pass_runtime.cli import bench
from pass_runtime.cli.bench import (
    DEFAULT_CONTENDERS,
    BenchOptions,
    Contender,
    contender_name,
    run_bench,
)
from pass_runtime.cli.bench_rows import RowsOptions, measure_rows, windows
from pass_runtime.decode.engine import Engine
from pass_runtime.measuring.lossless import Difference
from pass_runtime.measuring.real_use import (
    CORE_KINDS,
    FIRST_LOOK_PROMPTS,
    TIMED_PASSES,
    WARM_UP_PASSES,
    encode,
    read_prompt_set,
)
from pass_runtime.options import GenerateOptions
from pass_runtime.tuning.auto import Auto

GREEDY = SamplingParams(0.0)
QUICK = ("--max-new-tokens", "8", "--repeat", "2")
BAR = "\N{FULL BLOCK}"
"""What bars of charts are drawn with."""


def report_of(bundle: Path, flags: str, *more: object) -> dict:
    return json.loads(output("bench", bundle, *shlex.split(flags), *more, "--json"))


def measure(bundle: Path, *, slots: int = 1, save=None, sampling=None, **options) -> dict:
    """Compare plans, greedily by default. save: gets the report after every round. options: of
    BenchOptions."""
    with load(bundle, threads=1, max_batch_size=slots, prefix_cache=False) as session:
        options = BenchOptions(sampling or GREEDY, **options)
        return run_bench(session, options, *([save] if save else []))


@pytest.mark.slow
def test_the_output_file_has_the_report_that_is_printed(tiny_bundle, tmp_path):
    file = tmp_path / "bench.json"
    file.write_text("of an earlier run")
    plans = "--plan ar --plan two-pass --plan fused --plan auto"
    report = report_of(tiny_bundle, plans, *QUICK, "-o", file)
    assert json.loads(file.read_text()) == report
    assert list(tmp_path.iterdir()) == [file]
    assert report["prompts"] == 9 and report["repeat"] == 2 and report["max_new_tokens"] == 8
    assert "untrained" in report["lookahead_source"]
    plain, fast, *_ = report["plans"]
    assert [plan["plan"] for plan in report["plans"]] == ["ar", "two-pass L=6", "fused L=6", "auto"]
    assert plain["ratio"] == 1.0 and plain["tau"] == 1.0 and plain["acceptance_per_position"] == []
    assert fast["ratio"] > 0 and len(fast["acceptance_per_position"]) == 6
    for plan in report["plans"]:
        assert plan["tokens_per_second"] > 0
        assert 0 < plan["host_milliseconds_per_pass"] < plan["milliseconds_per_pass"]


@pytest.mark.slow
def test_default_prompts_and_plans(tiny_bundle):
    prompts = read_prompt_set(FIRST_LOOK_PROMPTS)
    assert [prompt.kind for prompt in prompts] == [kind for kind in CORE_KINDS for _ in range(3)]
    text = output("bench", tiny_bundle, "--max-new-tokens", "8", "--repeat", "1")
    tables, _ = text.split("look-ahead embeddings: ")  # sentences below may be longer
    assert all(prompt.id in tables for prompt in prompts)
    assert max(map(len, tables.splitlines())) <= 80
    comparison = "times as fast as plain decoding \\(ar\\) here"
    result = f"auto is .* {comparison}; every plan wrote the same text, token for token"
    assert re.fullmatch(result, text.splitlines()[-1])
    with load(tiny_bundle, threads=1, prefix_cache=False) as session:
        names = [*DEFAULT_CONTENDERS]
        contenders = [GenerateOptions(**fields) for fields in DEFAULT_CONTENDERS.values()]
        assert [contender_name(session, options) for options in contenders] == names
        options = BenchOptions(GREEDY, max_new_tokens=4, repeat=1)
        ids = [encode(session, prompt) for prompt in prompts]
        assert [*options.encoded(session).values()] == ids
        assert [plan["plan"] for plan in run_bench(session, options)["plans"]] == names
        messages = [{"role": "user", "content": prompts[0].text}]
        assert ids[0] == session.encode_chat(messages)
        assert ids[-1] == session.encode(prompts[-1].text)


def test_figures_are_given_by_prompt(tiny_bundle):
    flags = "-p one -p another --plan ar --plan fused --max-new-tokens 8 --repeat 1"
    report = report_of(tiny_bundle, flags)
    plain, fused = (plan["by_prompt"] for plan in report["plans"])
    assert [figures["prompt"] for figures in fused] == ["1: one", "2: another"]
    for figures, base in zip(fused, plain, strict=True):
        assert figures["ratio"] == figures["tokens_per_second"] / base["tokens_per_second"]
        assert base["ratio"] == 1.0 and figures["tau"] >= base["tau"] == 1.0
    rates = [figures["tokens_per_second"] for figures in fused]
    assert min(rates) < report["plans"][1]["tokens_per_second"] < max(rates)
    assert "by_prompt" not in report_of(tiny_bundle, f"{flags} --batch 2")["plans"][0]


@pytest.mark.parametrize("batches", [(), (2, 3)])
def test_plans_take_turns_at_every_prompt(tiny_bundle, monkeypatch, batches):
    """The first of three rounds warms up. With --batch, a turn is of several prompts."""
    turns, run = [], Contender.run

    def recorded(self, session, prompts):
        turns.append((self.name, [session.tokenizer.decode(ids) for ids in prompts]))
        return run(self, session, prompts)

    monkeypatch.setattr(Contender, "run", recorded)
    report = measure(
        tiny_bundle,
        slots=max(batches, default=1),
        prompts=tuple("abcd"),
        max_new_tokens=4,
        plans=("ar", "fused"),
        repeat=2,
        batches=batches,
    )
    names = [plan["plan"] for plan in report["plans"]]
    one_round = [(name, [prompt]) for prompt in "abcd" for name in names]
    if batches:
        assert names == ["ar x2", "fused L=6 x2", "ar x3", "fused L=6 x3"]
        of_two, of_three = names[:2], names[2:]
        groups = (("ab", of_two), ("abc", of_three), ("cd", of_two), ("d", of_three))
        one_round = [(name, list(prompts)) for prompts, plans in groups for name in plans]
    assert turns == one_round * 3


def test_a_text_that_differs_is_an_error(tiny_bundle, monkeypatch):
    run = Contender.run

    def wrong(self, session, prompts):
        turn = run(self, session, prompts)
        changed = [[*ids[:-1], ids[-1] ^ 1] for ids in turn.token_ids]
        return replace(turn, token_ids=changed) if self.name == "auto" else turn

    monkeypatch.setattr(Contender, "run", wrong)
    command = ("bench", tiny_bundle, "-p", "hello", *QUICK)
    done = pass_run(*command)
    assert done.exit_code == 1 and "tokens/s" in done.stdout and "same text" not in done.output
    assert "DIFFERENT TEXT: auto: token 7: " in done.stderr and "lookahead" not in done.stderr
    done = pass_run(*command, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1 and report["near_ties"] == []
    assert report["differences"][0].startswith("auto: token 7")


@pytest.mark.parametrize(("margin", "same_entries"), [*product([1e-4, 0.5], [True, False])])
def test_a_near_tie_is_excused_only_where_rows_may_round_differently(
    tiny_bundle, monkeypatch, margin, same_entries
):
    monkeypatch.setattr(bench, "first_difference", lambda *_: Difference(2, (3, 4), margin, 1e-3))
    with load(tiny_bundle, threads=1, prefix_cache=False) as session:
        capabilities = session.backend.capabilities
        session.backend.capabilities = replace(capabilities, same_entries=same_entries)
        options = {"prompts": ("a",), "max_new_tokens": 4, "plans": ("ar", "fused"), "repeat": 1}
        report = run_bench(session, BenchOptions(GREEDY, **options))
    excused = margin < 1e-3 and not same_entries
    assert (len(report["near_ties"]), len(report["differences"])) == (excused, not excused)


def test_plans_are_measured_with_each_source_of_drafts(tiny_bundle):
    flags = "--plan ar --plan fused --plan fused:2,1,0 --plan auto -p hello --lookahead 4"
    sources = ("--draft", "lookahead", "--draft", "ngram", "--draft", "both")
    report = report_of(tiny_bundle, flags, *QUICK, *sources)
    names = "ar|fused L=4|ngram L=4|fused L=4 +ngram|fused:2,1,0|fused:2,1,0 +ngram"
    names += "|auto L=4 (lookahead)|auto L=4 (ngram)|auto L=4"
    assert [plan["plan"] for plan in report["plans"]] == names.split("|")


def test_a_plan_given_twice_is_measured_once(random_bundle):
    flags = "--temperature 1 --seed 3 --plan two-pass --plan ar --plan two-pass"
    report = report_of(random_bundle, flags, *QUICK)
    assert [plan["plan"] for plan in report["plans"]] == ["two-pass L=6", "ar"]
    assert report["sampling"] == vars(SamplingParams(temperature=1.0, seed=3))


def test_auto_probes_before_any_round(tiny_bundle, monkeypatch):
    calls, timed, run = [], Auto.timed, Contender.run

    def recorded(self, batch, *seconds):
        calls.append((batch.sampler, batch.size))
        timed(self, batch, *seconds)

    monkeypatch.setattr(Auto, "timed", recorded)
    monkeypatch.setattr(
        Contender, "run", lambda *arguments: (calls.append("round"), run(*arguments))[1]
    )
    sampling = SamplingParams(temperature=0.8, top_k=5, seed=1)
    options = {"plans": ("ar", "auto"), "batches": (4,), "repeat": 1, "prompts": ("a",)}
    measure(tiny_bundle, slots=4, sampling=sampling, max_new_tokens=8, **options)
    calls = [call for call, _ in groupby(calls)][:3] + [call for call in calls if call == "round"]
    assert calls == [("truncated", 1), ("truncated", 2), ("truncated", 4), *["round"] * 4]


def test_passes_of_every_round_are_counted(tiny_bundle, monkeypatch):
    """The first round has no drafts here, the second has some."""
    run = Contender.run

    def other_plan(self, session, prompts):
        plan = "fused:1,1" if self.rounds else "ar"
        return run(Contender(self.name, replace(self.options, plan=plan)), session, prompts)

    monkeypatch.setattr(Contender, "run", other_plan)
    saved = []
    options = {"plans": ("auto",), "repeat": 2, "prompts": ("the the the the",)}
    report = measure(tiny_bundle, save=saved.append, max_new_tokens=24, **options)
    (first,), (both,) = saved[0]["plans"], report["plans"]
    assert first["tau"] == first["by_prompt"][0]["tau"] == 1.0
    assert both["tau"] == both["by_prompt"][0]["tau"] > 1.0
    assert both["draft_acceptance_rate"] > 0 and first["draft_acceptance_rate"] == 0
    assert both["milliseconds_per_pass"] > both["host_milliseconds_per_pass"] > 0


@pytest.mark.parametrize(
    "flags", [("--plan", "ar", "--max-new-tokens", "4"), ("--rows", "2", "--cached", "20")]
)
def test_the_report_is_written_after_every_round(tiny_bundle, tmp_path, monkeypatch, flags):
    written: list[int] = []
    write = lambda _path, text: written.append(json.loads(text)["repeat"])  # noqa: E731
    monkeypatch.setattr(bench, "write_whole", write)
    output("bench", tiny_bundle, "--repeat", "3", *flags, "-o", tmp_path / "out")
    assert written == [1, 2, 3]


def test_prompts_of_a_file_and_of_flags_are_added_up(tiny_bundle, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "Zwei 🦊", "id": 2}\n', encoding="utf-8")
    flags = ("--prompt-file", file, "-p", "three")
    assert report_of(tiny_bundle, "", *QUICK, *flags)["prompts"] == 3


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b'{"prompt": "a"}\n\nhello\n', "prompts.jsonl, line 3: not JSON"),
    "no prompt": (b'{"text": "x"}\n', 'line 1: it needs a "prompt"'),
    "prompt is no text": (b'\n{"prompt": 5}\n', 'line 2: it needs a "prompt" that is text'),
    "empty": (b"\n", "prompts.jsonl is empty"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_refused_prompt_files(tiny_bundle, tmp_path, case):
    file = tmp_path / "prompts.jsonl"
    content, expected = BAD_FILES[case]
    file.write_bytes(content)
    assert expected in refusal("bench", tiny_bundle, *QUICK, "--prompt-file", file)


def test_an_unwritable_output_is_refused(tiny_bundle, tmp_path):
    line = refusal("bench", tiny_bundle, *QUICK, "-o", tmp_path / "no" / "bench.json")
    assert "cannot write" in line and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_output_to_a_device_and_through_a_link(tiny_bundle, tmp_path):
    flags = (*QUICK, "-p", "hello", "--repeat", "1", "--plan", "ar")
    done = process("bench", tiny_bundle, *flags, "--json", "-o", "/dev/stdout")
    assert done.returncode == 0 and done.stdout.count('"plans"') == 2
    assert "cannot write /dev/full" in refusal("bench", tiny_bundle, *flags, "-o", "/dev/full")
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    output("bench", tiny_bundle, *flags, "-o", link)
    assert link.is_symlink() and json.loads(file.read_text())["prompts"] == 1
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_a_prompt_that_fills_the_capacity(tiny_bundle):
    """It leaves room for one pass of one row, so every plan decodes plainly."""
    assert report_of(tiny_bundle, "--repeat 1", "-p", "<bos>" * 768)["prompts"] == 1


PROMPT = [5, 6, 7]
ROWS = ("--repeat", "1", "--trust-bundle")


def test_rows_with_and_without_look_ahead(tiny_bundle):
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


def test_passes_of_a_window_are_timed_in_a_row(tiny_bundle, monkeypatch):
    """Windows take turns, and the first round warms up."""
    passes, time_pass = [], Engine.time_pass

    def recorded(self, batch, **options):
        passes.append((batch.window.name, threading.get_ident()))
        return time_pass(self, batch, **options)

    monkeypatch.setattr(Engine, "time_pass", recorded)
    with load(tiny_bundle, threads=1, prefix_cache=False) as session:
        report = measure_rows(session, RowsOptions(GREEDY, (2,), cached=20, repeat=2), [PROMPT])
    names = [row["window"] for row in report["rows"]]
    assert names == ["ar", "verify-1", "draft-1"] and report["repeat"] == 2
    turns = [(name, [*turn]) for name, turn in groupby(passes, key=lambda each: each[0])]
    assert [name for name, _ in turns] == names * 3
    for _, turn in turns:
        assert len(turn) == WARM_UP_PASSES + TIMED_PASSES and len({*turn}) == 1  # one thread


def test_what_is_timed_is_what_decoding_runs(adapter_bundle, monkeypatch):
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


def test_rows_in_batches_over_a_given_capacity(random_bundle, tmp_path):
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
        ("--repeat 0", "repeat"),
        ("--plan warp", "warp"),
        ("--lookahead 7", "look-ahead"),
        ("--max-new-tokens 0", "max-new-tokens"),
        ("--top-k -2", "top-k"),
        ("--rows 50", "--rows 50: this bundle has no such window here; its widest has 49 rows"),
        ("--rows 5,x", "--rows must list numbers, as in 1,2,5, not '5,x'"),
        ("--rows 5 --cached 800", "lower --cached or raise --capacity"),
        ("--rows 5 --plan ar", "--plan has no use here: --rows times single passes"),
        ("--cached 20", "it is for --rows; leave it out"),
    ],
)
def test_flags_that_are_wrong_or_do_not_fit_rows_are_refused(tiny_bundle, flags, expected):
    assert expected in refusal("bench", tiny_bundle, *flags.split())
