"""scripts/bench_peers.py: contestants take turns, figures are those of the texts, and texts that
differ are told."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.measuring.real_use import ALL_KINDS, EXTRA_TOKENS, read_prompt_set

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LINES = [
    {"id": f"{kind}{i}", "kind": kind, "prompt": f"tell {i}"}
    for kind in ("chat", "code")
    for i in range(2)
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_peers")


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def texts(script: ModuleType, *sizes: tuple[list[int], float]) -> list[list[Any]]:
    """Texts of one round: their tokens and the seconds of each."""
    return [
        [script.TimedText(tokens, len(tokens), seconds, [1] * len(tokens))]
        for tokens, seconds in sizes
    ]


def run(script: ModuleType, *arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(script.main, [str(each) for each in arguments])
    assert done.exit_code == status, done.output
    return done.output


def test_plans_by_kind_of_prompt(
    script: ModuleType, tiny_bundle: Path, prompt_file: Path, tmp_path: Path
):
    """Greedy and sampled, every kind and all together; every plan writes what the runtime
    writes."""
    flags = [
        "--prompt-file",
        prompt_file,
        "--kinds",
        "chat,code",
        "--tokens",
        8,
        "--rounds",
        2,
        "--ignore-eos",
    ]
    plans = ["--plan", "ar", "--plan", "auto (lookahead)", "--plan", "fused", "--threads", 1]
    shown = run(script, tiny_bundle, *flags, *plans, "-o", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    names = [(run["T"], run["prompts"], run["contestant"]) for run in report["runs"]]
    kinds, contestants = ("chat", "code", ALL_KINDS), ("ar", "auto (lookahead)", "fused")
    assert names == [(t, kind, name) for t in (0.0, 0.8) for kind in kinds for name in contestants]
    for each in report["runs"]:
        count = 4 if each["prompts"] == ALL_KINDS else 2
        assert (
            each["same"] == len(each["by_prompt"]) == count
            and each["tokens/s"] > 0
            and 0 <= each["looping"] <= count
        )
        assert each["contestant"] != "ar" or (
            each["ratio"] == 1 and 1 in (each["tau"], each["in_loops"])
        )
    assert report["near_ties"] == report["differences"] == [] and "(lookahead)" in shown


def test_a_text_and_its_passes(script: ModuleType, tiny_bundle: Path, prompt_file: Path):
    """They are those of the session, with the prompt's own seed."""
    prompt = read_prompt_set(prompt_file)[0]
    with load(tiny_bundle, threads=1) as session:
        ids = session.encode(prompt.text)
        text = script.decode(
            session,
            ids,
            20,
            temperature=0.8,
            top_k=5,
            seed=prompt.seed,
            plan="fused",
            ignore_eos=True,
        )
        options = GenerateOptions(
            20, SamplingParams(0.8, 5, seed=prompt.seed), plan="fused", ignore_eos=True
        )
        stream = session.generate_ids(ids, options)
        assert [len(emitted) for emitted in stream] == text.sizes
        assert stream.token_ids == text.tokens and sum(text.sizes) == 20


def test_several_clients(script: ModuleType, tiny_bundle: Path, prompt_file: Path, tmp_path: Path):
    flags = [
        "--prompt-file",
        prompt_file,
        "--kinds",
        "code",
        "--tokens",
        8,
        "--rounds",
        2,
        "--plan",
        "ar",
        "--plan",
        "auto",
    ]
    many = [
        "--clients",
        1,
        "--clients",
        3,
        "--temperature",
        0,
        "--threads",
        1,
        "-o",
        tmp_path / "out.json",
    ]
    run(script, tiny_bundle, *flags, *many)
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(each["clients"], each["contestant"]) for each in runs] == [
        (1, "ar"),
        (1, "auto"),
        (3, "ar"),
        (3, "auto"),
    ]
    assert [each["by_round"] for each in runs[::2]] == [[1.0, 1.0]] * 2 and len(
        runs[1]["by_round"]
    ) == 2


def test_what_clients_write_is_counted(script: ModuleType, tiny_bundle: Path):
    write = script.open_clients(tiny_bundle, 1, "cpu", 2)
    found = write([[3, 4], [5, 6], [7, 8]], 6, clients=2, plan="ar", ignore_eos=True)
    assert found.timed == 18 and found.seconds > 0 and not found.tokens


def test_a_text_that_differs(
    script: ModuleType,
    tiny_bundle: Path,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The report has it with its place, and the status is not 0."""

    def start(engine: Any, path: Path, threads: int) -> Any:
        decode = engine(path, threads)

        def write(*request: Any, **options: Any) -> Any:
            text = decode(*request, **options)
            wrong = [*text.tokens[:3], 1 + text.tokens[3], *text.tokens[4:]]
            return (
                text
                if options["plan"] == "ar"
                else script.TimedText(wrong, text.timed, text.seconds, text.sizes)
            )

        return write

    monkeypatch.setattr(script, "start_process", start)
    flags = [
        "--prompt-file",
        prompt_file,
        "--kinds",
        "chat",
        "--prompts",
        1,
        "--tokens",
        6,
        "--ignore-eos",
    ]
    flags += ["--plan", "ar", "--plan", "fused", "--temperature", 0, "-o", tmp_path / "out.json"]
    said = run(script, tiny_bundle, *flags, status=2)
    assert "1 texts differ from those of the same bundle's first plan" in said
    report = json.loads((tmp_path / "out.json").read_text())
    (line,) = report["differences"]
    assert line.startswith("fused, chat0: token 3: ") and "NOT a near-tie" in line
    assert [each["same"] for each in report["runs"]] == [1, 0] * 2


def test_engines_take_turns(script: ModuleType):
    """In reverse order in every second round."""
    calls: list[str] = []
    writers = {name: partial(lambda name: calls.append(name) or len(calls), name) for name in "abc"}
    assert script.in_turn(writers, 3) == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert calls == [*"abc", *"cba", *"abc"]


def test_figures_by_hand(script: ModuleType):
    """The second text loops, so its speed is in the ratio of all prompts, and not in that of those
    without loops."""
    loop = [1, 2, 3, 4] * 10
    plain = texts(script, ([5, 6, 7, 8], 2.0), (loop, 20.0))
    faster = [
        [script.TimedText([5, 6, 7, 8], 4, 1.0, [1, 1, 2])],
        [script.TimedText([1, 2, 3, 9] * 10, 40, 4.0, [4] * 10)],
    ]
    found = script.figures(faster, plain, plain, 40)
    assert found["ratio"] == pytest.approx((44 / 5) / (44 / 22)) and found[
        "tokens/s"
    ] == pytest.approx(44 / 5)
    assert found["without_loops"] == pytest.approx(2.0) and found["looping"] == 1
    assert found["by_prompt"] == pytest.approx([2.0, 5.0]) and found["same"] == 1
    assert (
        found["tau"] == pytest.approx(8 / 4) and found["in_loops"] == 4
    )  # of the loop the first pass counts
    (alone,) = [script.figures(plain[1:], plain[1:], plain[1:], 40)]
    assert alone["without_loops"] is None and alone["ratio"] == 1


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=5))
def test_a_ratio_is_the_median_of_the_rounds(rounds):
    import statistics
    import sys

    sys.path.insert(0, str(SCRIPTS))
    script = importlib.import_module("bench_peers")
    ours, theirs = ([[script.TimedText([1], 1, each[i]) for each in rounds]] for i in (0, 1))
    assert script.ratio(ours, theirs) == pytest.approx(statistics.median(b / a for a, b in rounds))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plan", "fast"], "unknown plan 'fast'"),
        (["--kinds", "chat,poems"], "--kinds has 'poems'"),
        (["--genai", "none/other"], "name a directory int4 or fp32"),
    ],
)
def test_what_cannot_be_run_is_refused(script, tiny_bundle, monkeypatch, flags, said):
    monkeypatch.setattr(script, "start_process", lambda *_: pytest.fail("started"))
    found = run(script, tiny_bundle, *flags, status=2)
    assert found.startswith("error: ") and found.count("\n") == 1 and said in found


def test_peers(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each engine has a process, and its n-gram drafts are compared with its own text."""
    started: list[Path] = []

    def start(_engine: object, path: Path, _threads: int) -> Any:
        started.append(path)
        return lambda *_, **options: options

    monkeypatch.setattr(script, "start_process", start)
    found = script.start_peers([tmp_path / "int4"], tmp_path / "x.gguf", tmp_path / "y.gguf", 2)
    names = {each.name: each.reference for each in found}
    assert names == {
        "genai int4": "genai int4",
        "genai int4, n-gram": "genai int4",
        "openvino": "openvino",
        "openvino, n-gram": "openvino",
        "llama.cpp": "llama.cpp",
    }
    assert (
        len(started) == 4
        and found[1].write() == {"ngram": True}
        and not any(each.bundle for each in found)
    )


def test_genai_decodes_the_same_tokens(script: ModuleType, tiny_model: Path, tmp_path: Path):
    """Its own export of a model, with n-gram drafts and without."""
    pytest.importorskip("onnxruntime_genai")
    manifest = type("Manifest", (), {"model": type("Model", (), {"name": str(tiny_model)})})
    script.read_manifest = lambda _bundle: manifest
    try:
        directory = script.build_genai(Path("unread"), tmp_path / "fp32")
    finally:
        importlib.reload(script)
    write = script.open_genai(directory, 1)
    plain = write(list(range(3, 20)), 8 + EXTRA_TOKENS, ignore_eos=True)
    assert len(plain.tokens) == plain.timed == 8 + EXTRA_TOKENS and plain.seconds > 0
    assert (
        write(list(range(3, 20)), 8 + EXTRA_TOKENS, ngram=True, ignore_eos=True).timed
        >= 8 + EXTRA_TOKENS
    )
