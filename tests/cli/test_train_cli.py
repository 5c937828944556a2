"""pass-train and pass-train evaluate: what they write, and what they refuse in one line."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click import Command
from click.testing import CliRunner, Result
from safetensors import safe_open

import pass_exporter.cli
from pass_trainer.cli import main

SMALL = shlex.split(
    "--sequences 64 --sequence-length 48 --prompt-tokens 4 8 --dtype fp32 --device cpu"
)
LORA = shlex.split("--lookahead 2 --adapter lora --rank 2")
TRAIN = [*LORA, "--steps", "5", *SMALL]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


def run(command: Command, *arguments: object, cache: str | None = None) -> Result:
    environment = {} if cache is None else {"PASS_CACHE": cache}
    done = CliRunner(env=environment).invoke(command, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.stderr
    return done


def refusal(*arguments: object) -> str:
    """Run pass-train, which must refuse. Return the only error."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


@pytest.mark.parametrize(
    "arguments", [["--wrap"], ["evaluat"], ["--steps", "many"], ["--prompt-tokens", "1"]], ids=str
)
def test_usage_errors_are_one_line(arguments):
    assert refusal(*arguments).endswith("--help")
    assert CliRunner().invoke(main, arguments).stderr.count("\n") == 1


@pytest.fixture(scope="module")
def trained(tiny_model, text, cache, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "run"
    flags = ["--model", tiny_model, "--data", text, "-o", output, *TRAIN]
    command = [sys.executable, "-m", "pass_trainer.cli", *map(str, flags)]
    environment = {**os.environ, "PASS_CACHE": cache}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}/lookahead.safetensors\n"
    assert "training: 5/5  loss" in done.stderr and "held-out" in done.stderr
    assert not {"\r", "\x1b"} & set(done.stderr)  # no progress bars and colours: not a terminal
    return output / "lookahead.safetensors"


@pytest.mark.slow
def test_a_resumed_run_without_steps_keeps_those_of_the_first_run(
    tiny_model, text, trained, cache, tmp_path
):
    shutil.copytree(trained.parent, tmp_path / "run")
    flags = ["--model", tiny_model, "--data", text, "-o", tmp_path / "run", *LORA, *SMALL]
    run(main, *flags, "--resume", cache=cache)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["training"]["steps"] == 5


@pytest.mark.slow
def test_export_takes_what_was_trained(tiny_model, trained, tmp_path):
    bundle = tmp_path / "bundle"
    flags = ("--model", tiny_model, "--lookahead", 2, "--lookahead-weights", trained, "-o", bundle)
    done = run(pass_exporter.cli.main, *flags)
    assert "trained 5 steps, lora rank 2" in " ".join(done.stderr.split())
    manifest = json.loads((bundle / "pass_config.json").read_text())
    assert manifest["lookahead"]["trained"] and manifest["lookahead"]["adapter_rank"] == 2


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text(
        '{"id": "a", "kind": "chat", "prompt": "who is the fox?"}\n'
        '{"id": "b", "kind": "chat", "prompt": "and the dog"}\n'
        '{"id": "c", "kind": "code", "prompt": "def add("}\n'
    )
    return path


@pytest.fixture
def evaluation(tiny_model, prompts) -> list[object]:
    return ["--model", tiny_model, "--prompts", prompts, "--lookahead", 2, "--tokens", 12]


def test_evaluate_prints_json(evaluation, trained, cache):
    flags = [*evaluation, "--temperatures", "0,0.8"]
    for weights in ([trained], []):  # without weights, the baseline is evaluated
        done = run(main, "evaluate", *weights, *flags, "--json", cache=cache)
        report = json.loads(done.stdout)
        assert list(report["temperatures"]) == ["0", "0.8"] and report["prompts"] == 3
        for kinds in report["temperatures"].values():
            assert list(kinds) == ["chat", "code", "all"]
            value = kinds["all"]
            assert value["places"] + value["looping"]["places"] > 11
            # By draft: survival, how often it is right if those before it are; chain, how often it
            # and all before it are. So the first values are equal.
            assert len(value["survival"]) == 2 and value["chain"][0] == value["survival"][0]
            assert all(1 <= tau <= 3 for tau in value["tau"].values())
    flags = [*evaluation, "--temperatures", "0.8", "--top-k", 5]
    done = run(main, "evaluate", trained, *flags, cache=cache)
    assert "T=0.8, top-k 5" in done.stderr and "writing" in done.stderr
    flags = [*evaluation, "--temperatures", "0", "--kinds", "code,mail", "--json"]
    report = json.loads(run(main, "evaluate", trained, *flags, cache=cache).stdout)
    assert list(report["temperatures"]["0"]) == ["code", "all"] and report["prompts"] == 1


@pytest.mark.slow
def test_record_writes_the_figures_into_weights_and_model_card(
    tiny_model, evaluation, trained, cache, tmp_path
):
    for name in ("lookahead.safetensors", "README.md"):
        shutil.copy(trained.with_name(name), tmp_path / name)
    copy = tmp_path / "lookahead.safetensors"
    flags = [*evaluation, "--temperatures", "0,0.8", "--record", "--json"]
    done = run(main, "evaluate", copy, *flags, cache=cache)
    figures = json.loads(done.stdout)["temperatures"]
    with safe_open(trained, "pt") as before, safe_open(copy, "pt") as after:
        assert set(before.keys()) == set(after.keys())
        names = before.keys()
        assert all(torch.equal(before.get_tensor(name), after.get_tensor(name)) for name in names)
        old, new = (json.loads(file.metadata()["pass"]) for file in (before, after))
    assert old["acceptance_sampled"] == []
    greedy, sampled = (figures[temperature]["all"]["chain"] for temperature in ("0", "0.8"))
    assert new == old | {"acceptance": greedy, "acceptance_sampled": sampled}
    bundle = tmp_path / "bundle"
    export = [*("--model", tiny_model, "--lookahead", 1), "--lookahead-weights", copy, "-o", bundle]
    run(pass_exporter.cli.main, *export)
    exported = json.loads((bundle / "pass_config.json").read_text())["lookahead"]
    assert exported["acceptance_per_position"] == greedy[:1]
    assert exported["acceptance_per_position_sampled"] == sampled[:1]
    card = (tmp_path / "README.md").read_text()
    assert "Not measured yet" in trained.with_name("README.md").read_text()
    assert "Not measured yet" not in card
    assert card.index("| T=0.8 | all |") < card.index("## Held-out sequences")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--temperatures", "0"], "0 and 0.8"),
        (["--top-k", "5"], "--top-k"),
        (["--kinds", "chat,text"], "--kinds"),
        (["--lookahead", "1"], "--lookahead 2"),
    ],
    ids=str,
)
def test_record_refuses_figures_that_the_card_does_not_have(tiny_model, trained, flags, reason):
    before = trained.read_bytes()
    line = refusal("evaluate", trained, "--model", tiny_model, "--lookahead", 2, "--record", *flags)
    assert reason in line and trained.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "empty"),
        ('{"id": "a", "prompt": "b"}', "line 1"),
        ('{"id": "a", "kind": "poem", "prompt": "b"}', "chat, text, code"),
        ('{"id": "a", "kind": "text", "prompt": "b"}\n' * 2, "line 2"),
        (json.dumps({"id": "long", "kind": "text", "prompt": "x " * 800}), "the prompt long has"),
    ],
    ids=["empty", "no kind", "unknown kind", "one id twice", "too long"],
)
def test_wrong_prompts_are_refused(tiny_model, tmp_path, line, reason):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    assert reason in refusal("evaluate", "--model", tiny_model, "--prompts", path)


RUN = "--model MODEL --data TEXT -o OUT " + shlex.join(SMALL)
EVALUATE = "evaluate --model MODEL --prompts PROMPTS"
REFUSED = [
    ("", "missing --model"),
    ("--model x", "missing --output"),
    ("evaluate x", "missing --model"),
    ("evaluate --model MODEL --record", "evaluate WEIGHTS"),
    ("evaluate TRAINED --model MODEL --lookahead 3", "--lookahead 2"),
    (f"{EVALUATE} --kinds chat,poem", "'poem'"),
    (f"{EVALUATE} --kinds ''", "not one of chat"),
    (f"{EVALUATE} --kinds mail", "no prompts of"),
    *((f"{EVALUATE} --temperatures={each}", "temperature") for each in ("", "0,hot", "-1", "nan")),
    (f"{RUN} --lookahead 17", "1 to 16"),
    (f"{RUN} --start nowhere.safetensors", "--start nowhere.safetensors"),
    (f"{RUN} --prompt-tokens 8 100", "--prompt-tokens"),
    (f"{RUN} --chat-share 2", "--chat-share"),
    (f"{RUN} --sequences 0", "--sequences"),
    (f"{RUN} --sequence-length 5000", "at most 768"),
    (f"{RUN} --device tpu", "--device"),
]


@pytest.mark.parametrize(("line", "reason"), REFUSED)
def test_wrong_options_are_refused(tiny_model, text, prompts, trained, tmp_path, line, reason):
    paths = {"MODEL": tiny_model, "TEXT": text, "PROMPTS": prompts, "TRAINED": trained}
    paths["OUT"] = tmp_path / "out"
    assert reason in refusal(*(paths.get(word, word) for word in shlex.split(line)))


@pytest.mark.slow
@pytest.mark.usefixtures("trained")  # so that the training text is in the cache
def test_progress_in_a_terminal(tiny_model, text, cache, tmp_path):
    """A phase redraws its line until it is done; then a line with a check mark stays."""
    master, slave = pty.openpty()
    flags = ["--model", tiny_model, "--data", text, "-o", tmp_path / "run", *TRAIN]
    command = [sys.executable, "-m", "pass_trainer.cli", *map(str, flags)]
    environment = {**os.environ, "PASS_CACHE": cache, "COLUMNS": "100", "TERM": "xterm"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=slave, env=environment
    ) as running:
        os.close(slave)
        written = b""
        with contextlib.suppress(OSError):  # raised on Linux when the other end is closed
            while part := os.read(master, 1 << 16):
                written += part
        os.close(master)
    assert running.returncode == 0, written.decode()
    text_only = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    assert "\x1b[" in written.decode() and "Warning" not in text_only
    done = [line for line in re.split(r"[\r\n]+", text_only) if line.startswith("✓")]
    assert {line.split()[1] for line in done} == {"loading", "writing", "training"}
    assert re.search(r"✓ training .* \d:\d\d:\d\d  5/5  loss \d", "\n".join(done))
    assert re.search(r"✓ writing training text .*  64/64", "\n".join(done))
