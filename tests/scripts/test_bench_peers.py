from __future__ import annotations

import json
import operator
import shlex
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_peers
import pytest
from click.testing import CliRunner

from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import ALL_KINDS, EXTRA_TOKENS

LINES = [
    {"id": f"{kind}{i}", "kind": kind, "prompt": f"tell {i}"}
    for kind in ("chat", "code")
    for i in range(2)
]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def plain_texts(*texts: tuple[list[int], float]) -> list[list[Any]]:
    """One round, a token per pass."""
    return [
        [bench_peers.TimedText(tokens, len(tokens), seconds, [1] * len(tokens))]
        for tokens, seconds in texts
    ]


def run(bundle: Path, flags: str, *words: object, status: int = 0) -> str:
    arguments = [bundle, *shlex.split(flags), *words]
    done = CliRunner().invoke(bench_peers.main, [str(each) for each in arguments])
    assert done.exit_code == status, done.output
    return done.output


def report_of(bundle: Path, flags: str, prompts: Path, status: int = 0) -> dict[str, Any]:
    path = prompts.with_name("out.json")
    words = ("--prompt-file", prompts, "-o", path)
    printed = run(bundle, flags, *words, status=status)
    return json.loads(path.read_text()) | {"printed": printed}


@pytest.mark.slow
def test_plans_are_compared_by_kind_of_prompt(tiny_bundle, prompt_file):
    flags = "--kinds chat,code --tokens 8 --rounds 2 --ignore-eos --threads 1"
    plans = "--plan ar --plan 'auto (lookahead)' --plan fused"
    report = report_of(tiny_bundle, f"{flags} {plans}", prompt_file)
    names = [(run["T"], run["prompts"], run["contestant"]) for run in report["runs"]]
    kinds, contestants = ("chat", "code", ALL_KINDS), ("ar", "auto (lookahead)", "fused")
    assert names == [(t, kind, name) for t in (0.0, 0.8) for kind in kinds for name in contestants]
    for row in report["runs"]:
        count = 4 if row["prompts"] == ALL_KINDS else 2
        assert row["same"] == len(row["by_prompt"]) == count
        assert row["tokens/s"] > 0 and 0 <= row["looping"] <= count
        if row["contestant"] == "ar":
            assert row["ratio"] == 1 and 1 in (row["tau"], row["in_loops"])
    assert report["near_ties"] == report["differences"] == [] and "(lookahead)" in report["printed"]


def test_plans_are_compared_by_number_of_clients(tiny_bundle, prompt_file):
    flags = "--kinds code --tokens 8 --rounds 2 --plan ar --plan auto --clients 1 --clients 3"
    flags += " --temperature 0 --threads 1"
    runs = report_of(tiny_bundle, flags, prompt_file)["runs"]
    names = [(row["clients"], row["contestant"]) for row in runs]
    assert names == [(1, "ar"), (1, "auto"), (3, "ar"), (3, "auto")]
    assert [row["by_round"] for row in runs[::2]] == [[1.0, 1.0]] * 2
    assert len(runs[1]["by_round"]) == 2


def test_tokens_of_several_clients_are_counted(tiny_bundle: Path):
    write = bench_peers.open_clients(tiny_bundle, 1, "cpu", 2)
    text = write([[3, 4], [5, 6], [7, 8]], 6, clients=2, plan="ar", ignore_eos=True)
    assert text.timed == 18 and text.seconds > 0 and not text.tokens


def test_a_text_that_differs_is_an_error(tiny_bundle, prompt_file, monkeypatch):
    def start(engine: Any, path: Path, threads: int) -> Any:
        decode = engine(path, threads)

        def write(*request: Any, **options: Any) -> Any:
            """With a wrong token 3 unless the plan is `ar`."""
            text = decode(*request, **options)
            tokens = [*text.tokens[:3], 1 + text.tokens[3], *text.tokens[4:]]
            wrong = bench_peers.TimedText(tokens, text.timed, text.seconds, text.sizes)
            return text if options["plan"] == "ar" else wrong

        return write

    monkeypatch.setattr(bench_peers, "start_process", start)
    flags = (
        "--kinds chat --prompts 1 --tokens 6 --ignore-eos --plan ar --plan fused --temperature 0"
    )
    report = report_of(tiny_bundle, flags, prompt_file, status=2)
    assert "1 texts differ from those of the same bundle's first plan" in report["printed"]
    (line,) = report["differences"]
    assert line.startswith("fused, chat0: token 3: ") and "NOT a near-tie" in line
    assert [row["same"] for row in report["runs"]] == [1, 0] * 2


def test_engines_take_turns():
    calls: list[str] = []
    # Each writer returns the number of calls so far.
    writers = {name: partial(lambda name: calls.append(name) or len(calls), name) for name in "abc"}
    assert bench_peers.in_turn(writers, 3) == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert calls == [*"abc", *"cba", *"abc"]


def test_figures_leave_out_loops():
    """The second text is a loop."""
    loop = [1, 2, 3, 4] * 10
    plain = plain_texts(([5, 6, 7, 8], 2.0), (loop, 20.0))
    faster = [
        [bench_peers.TimedText([5, 6, 7, 8], 4, 1.0, [1, 1, 2])],
        [bench_peers.TimedText([1, 2, 3, 9] * 10, 40, 4.0, [4] * 10)],
    ]
    figures = bench_peers.figures(faster, plain, plain, 40)
    assert figures["ratio"] == pytest.approx((44 / 5) / (44 / 22))
    assert figures["tokens/s"] == pytest.approx(44 / 5)
    assert figures["without_loops"] == pytest.approx(2.0) and figures["looping"] == 1
    assert figures["by_prompt"] == pytest.approx([2.0, 5.0]) and figures["same"] == 1
    # The first pass of the second text counts in tau, since nothing repeats itself yet.
    assert figures["tau"] == pytest.approx(8 / 4) and figures["in_loops"] == 4
    alone = bench_peers.figures(plain[1:], plain[1:], plain[1:], 40)
    assert alone["without_loops"] is None and alone["ratio"] == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--plan fast", "unknown plan 'fast'"),
        ("--kinds chat,poems", "--kinds has 'poems'"),
        ("--genai none/other", "name a directory int4 or fp32"),
    ],
)
def test_refused_flags_start_no_engine(tiny_bundle, monkeypatch, flags, reason):
    monkeypatch.setattr(bench_peers, "start_process", lambda *_: pytest.fail("started"))
    line = run(tiny_bundle, flags, status=2)
    assert line.startswith("error: ") and line.count("\n") == 1 and reason in line


def test_each_peer_has_a_process_and_a_reference(monkeypatch, tmp_path):
    started: list[Path] = []

    def start(_engine: object, path: Path, _threads: int) -> Any:
        started.append(path)
        return lambda *_, **options: options

    monkeypatch.setattr(bench_peers, "start_process", start)
    peers = bench_peers.start_peers([tmp_path / "int4"], tmp_path / "y.gguf", 2)
    assert {peer.name: peer.reference for peer in peers} == {
        "genai int4": "genai int4",
        "genai int4, n-gram": "genai int4",
        "llama.cpp": "llama.cpp",
        "llama.cpp, lookup": "llama.cpp",
    }
    assert len(started) == 3 and not any(peer.bundle for peer in peers)
    assert peers[1].write() == {"ngram": True}


@pytest.mark.slow
def test_genai_exports_and_decodes(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime_genai")
    manifest = SimpleNamespace(model=SimpleNamespace(name=str(tiny_model)))
    monkeypatch.setattr(bench_peers, "read_manifest", lambda _bundle: manifest)
    directory = bench_peers.build_genai(Path("unread"), tmp_path / "fp32")
    write, prompt, count = bench_peers.open_genai(directory, 1), [*range(3, 20)], 8 + EXTRA_TOKENS
    plain = write(prompt, count, ignore_eos=True)
    assert len(plain.tokens) == plain.timed == count and plain.seconds > 0
    assert write(prompt, count, ngram=True, ignore_eos=True).timed >= count


def test_an_engine_that_does_not_open_is_an_error_of_one_line(tmp_path):
    with pytest.raises(PassError, match=r"the process that runs .* ended; see its messages above"):
        bench_peers.start_process(operator.truediv, tmp_path, 1)  # raises TypeError
