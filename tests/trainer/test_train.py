"""Whole runs on a tiny model: the loss falls, interrupted runs end where uninterrupted ones do,
processes average."""

from __future__ import annotations

import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training import Silent, small_run, weights

from pass_runtime import PassError
from pass_trainer.config import TrainConfig
from pass_trainer.run import run
from pass_trainer.text_writer import TorchTextWriter

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> TrainConfig:
    return small_run(tiny_model, tmp_path / "numbers.txt", tmp_path / "run")


def test_the_loss_falls_and_everything_is_written(config: TrainConfig):
    report = run(replace(config, steps=120, lr=1e-2), Silent())
    losses = report.history.loss
    assert len(losses) == 120
    assert statistics.mean(losses[-20:]) < 0.9 * statistics.mean(losses[:20])
    assert report.history.evaluations[-1]["step"] == 120
    metrics = json.loads((config.output / "metrics.json").read_text())
    assert metrics["held_out"] == report.agreement.as_json()
    assert (config.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (config.output / "README.md").read_text()
    assert (
        "rank 4" in card
        and "numbers.txt" in card
        and f"{report.agreement.tau()['fused']:.2f}" in card
    )
    assert sorted(path.name for path in config.output.iterdir()) == [
        *("README.md", "checkpoint", "curves.png", "lookahead.safetensors", "metrics.json")
    ]


def test_as_many_sequences_are_held_out_as_asked_for(config: TrainConfig):
    """Of 64: every place of a held-out sequence with three tokens after it is measured, and each
    has some."""
    few, many = (
        run(replace(config, steps=1, held_out=n, output=config.output / str(n)), Silent())
        for n in (2, 8)
    )
    assert 0 < few.agreement.places < many.agreement.places
    with pytest.raises(PassError, match="--held-out"):
        replace(config, held_out=64)


def test_a_run_has_the_aim_it_was_given(config: TrainConfig):
    """At a draft's chance of being accepted, most of the loss is gone: at most 1 for a draft, not
    some 5 nats."""
    losses = {
        aim: run(
            replace(config, steps=1, aim=aim, output=config.output / aim), Silent()
        ).history.loss[0]
        for aim in ("distribution", "acceptance")
    }
    assert (
        0.1 * losses["distribution"]
        < losses["acceptance"]
        <= 0.1 * losses["distribution"] + 0.9 * config.lookahead
    )


def test_a_finished_run_is_not_trained_over(config: TrainConfig):
    run(replace(config, steps=2), Silent())
    with pytest.raises(PassError, match="--resume"):
        run(replace(config, steps=2), Silent())


def test_the_models_writing_is_made_once(config: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    run(replace(config, steps=2), Silent())
    monkeypatch.setattr(TorchTextWriter, "write", lambda *_: pytest.fail("generated again"))
    run(replace(config, steps=2, lr=1e-3, output=config.output / "again"), Silent())


@pytest.mark.parametrize(("asked", "made"), [(5, [5]), (64, [64]), (70, [64, 6])])
def test_as_many_sequences_as_asked(
    config: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: int,
    made: list[int],
):
    """Also where an earlier run wrote more: what a run trains on does not depend on what others
    left in the cache."""
    monkeypatch.setenv("PASS_CACHE", str(tmp_path))
    seen, steps = [], []
    write = TorchTextWriter.write

    def counted(writer, prompts, *rest):
        seen.append(len(prompts))
        return write(writer, prompts, *rest)

    class Counting(Silent):
        def phase(self, name: str):
            return lambda done, total, _note="": steps.append((name, done, total))

    monkeypatch.setattr(TorchTextWriter, "write", counted)
    recipe = replace(config.recipe, sequences=asked, length=12)
    run(replace(config, steps=1, recipe=recipe), Counting())
    assert seen == made
    assert [done for name, done, _ in steps if name.startswith("writing")] == [
        *itertools.accumulate(made)
    ]
    assert {total for name, _, total in steps if name.startswith("writing")} == {asked}
    if asked == 70:
        run(
            replace(
                config, steps=1, output=tmp_path / "fewer", recipe=replace(recipe, sequences=66)
            ),
            Silent(),
        )
        assert seen == [64, 6, 2]


def test_a_sequence_longer_than_the_model(config: TrainConfig):
    """The tiny model has 768 positions: refused before anything is written."""
    with pytest.raises(
        PassError, match=r"--sequence-length must be at most 768.*tiny-llama.*not 772"
    ) as refused:
        run(replace(config, recipe=replace(config.recipe, length=772)), Silent())
    assert "\n" not in str(refused.value)
    assert not list(config.output.glob("*"))


def test_damaged_sequences_are_named(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PASS_CACHE", str(tmp_path))
    run(replace(config, steps=1), Silent())
    (shard,) = tmp_path.glob("distilled/*/*/shard-00000.safetensors")
    shard.write_bytes(b"no")
    with pytest.raises(PassError, match="damaged"):
        run(replace(config, steps=1, output=tmp_path / "again"), Silent())


def test_embeddings_alone(config: TrainConfig):
    run(replace(config, adapter="none", steps=3), Silent())
    assert set(weights(config.output)) == {"lookahead", "base_sample"}


def test_text_too_short_for_a_prompt(config: TrainConfig, tmp_path: Path):
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(PassError, match="prompt of 40 tokens"):
        run(
            replace(
                config,
                data=(tmp_path / "short.txt",),
                recipe=replace(config.recipe, prompt=(40, 44)),
            ),
            Silent(),
        )


@pytest.mark.slow
def test_two_processes_average_their_gradients(config: TrainConfig, tmp_path: Path):
    """Two processes with one sequence each take the steps of one process with both; the first alone
    goes elsewhere."""
    config = replace(config, steps=4, lr=1e-2)
    run(config, Silent())
    run(replace(config, batch=1, output=tmp_path / "alone"), Silent())
    arguments = [
        *(
            "--model",
            config.model,
            "--data",
            config.data[0],
            "-o",
            tmp_path / "two",
            "--lookahead",
            3,
            "--lr",
            1e-2,
        ),
        *(
            "--adapter",
            "lora",
            "--rank",
            4,
            "--steps",
            4,
            "--batch",
            1,
            "--anchors",
            12,
            "--dtype",
            "fp32",
        ),
        *(
            "--write-with",
            "torch",
            "--sequences",
            64,
            "--sequence-length",
            48,
            "--prompt-tokens",
            4,
            8,
        ),
        *("--chat-share", 0, "--device", "cpu"),
    ]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command = [*torchrun, "-m", "pass_trainer.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    one, two, alone = weights(config.output), weights(tmp_path / "two"), weights(tmp_path / "alone")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            two[name], tensor, rtol=2e-3, atol=2e-4, msg=lambda why, name=name: f"{name}: {why}"
        )
    difference = (one["lookahead"].float() - alone["lookahead"].float()).abs().max()
    assert difference > 20 * (one["lookahead"].float() - two["lookahead"].float()).abs().max()
    assert difference > 5e-3


@pytest.mark.slow
def test_killed_and_resumed_as_a_command(config: TrainConfig, tmp_path: Path):
    command = [
        *(
            sys.executable,
            "-m",
            "pass_trainer.cli",
            "--model",
            config.model,
            "--data",
            config.data[0],
            "--resume",
        ),
        *(
            "-o",
            tmp_path / "out",
            "--steps",
            60,
            "--sequences",
            64,
            "--sequence-length",
            48,
            "--prompt-tokens",
            4,
            8,
        ),
        *("--chat-share", 0, "--dtype", "fp32", "--device", "cpu", "--checkpoint-minutes", 0),
        *("--write-with", "torch"),
    ]
    command = list(map(str, command))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        progress = tmp_path / "out" / "checkpoint" / "progress.json"
        for _ in range(9000):
            if progress.exists() or running.poll() is not None:
                break
            time.sleep(0.01)
        assert running.poll() is None, running.communicate()
        running.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out" / "lookahead.safetensors").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("lookahead.safetensors")
    assert len(json.loads((tmp_path / "out" / "metrics.json").read_text())["loss"]) == 60
