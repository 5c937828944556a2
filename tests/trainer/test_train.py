"""Whole training runs on a tiny model."""

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

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import Silent, small_run, weights

from pass_runtime import PassError
from pass_trainer.config import TrainConfig
from pass_trainer.run import run
from pass_trainer.train import chosen_at, clip_gradients
from pass_trainer.writers import TorchTextWriter

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> TrainConfig:
    return small_run(tiny_model, tmp_path / "numbers.txt", tmp_path / "run")


@pytest.mark.slow
def test_the_loss_falls_and_all_files_are_written(config: TrainConfig):
    report = run(replace(config, steps=120, lr=1e-2), Silent())
    losses = report.history.loss
    assert len(losses) == 120
    assert statistics.mean(losses[-20:]) < 0.9 * statistics.mean(losses[:20])
    assert report.history.evaluations[-1]["step"] == 120
    metrics = json.loads((config.output / "metrics.json").read_text())
    assert metrics["held_out"] == report.agreement.as_json()
    assert (config.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (config.output / "README.md").read_text()
    for part in ("rank 4", "numbers.txt", f"{report.agreement.tau()['fused']:.2f}"):
        assert part in card
    assert sorted(path.name for path in config.output.iterdir()) == [
        *("README.md", "checkpoint", "curves.png", "lookahead.safetensors", "metrics.json")
    ]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 9))
def test_every_epoch_takes_each_sequence_once_in_an_order_of_its_own(sequences, count, seed):
    steps = range(3 * sequences)
    taken = [index for step in steps for index in chosen_at(step, count, sequences, seed)]
    for epoch in range(3 * count):
        expected = np.random.default_rng((seed, epoch)).permutation(sequences).tolist()
        assert taken[epoch * sequences : (epoch + 1) * sequences] == expected


def test_the_gradients_of_each_group_are_scaled_to_a_norm_of_at_most_1():
    random = torch.Generator().manual_seed(0)
    groups = []
    # The gradients of the second group have a norm below 1, so they must stay as they are.
    for scale, shapes in ((5.0, [(3, 4)]), (0.01, [(2,), (4, 2)]), (2.0, [(6,), (2, 2), (3,)])):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = scale * torch.randn(parameter.shape, generator=random)
        groups.append({"params": parameters})
    before = [[parameter.grad.clone() for parameter in group["params"]] for group in groups]
    clip_gradients(groups)
    for group, gradients in zip(groups, before, strict=True):
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient / norm.clamp(min=1))


def test_more_held_out_sequences_give_more_anchors_to_measure(config: TrainConfig):
    few, many = (
        run(replace(config, steps=1, held_out=n, output=config.output / str(n)), Silent())
        for n in (2, 8)
    )
    assert 0 < few.agreement.places < many.agreement.places
    with pytest.raises(PassError, match="--held-out"):
        replace(config, held_out=64)


def test_the_aim_decides_the_loss(config: TrainConfig):
    """Distribution: some 5 nats a draft. Acceptance: a tenth of that, and 0.9 of at most 1."""
    distribution, acceptance = (
        run(replace(config, steps=1, aim=aim, output=config.output / aim), Silent()).history.loss[0]
        for aim in ("distribution", "acceptance")
    )
    assert 0.1 * distribution < acceptance <= 0.1 * distribution + 0.9 * config.lookahead


def test_a_finished_run_is_not_overwritten(config: TrainConfig):
    run(replace(config, steps=2), Silent())
    with pytest.raises(PassError, match="--resume"):
        run(replace(config, steps=2), Silent())


@pytest.mark.parametrize("shards", [[5], [64], [64, 6]], ids=str)
def test_a_run_writes_as_many_sequences_as_it_needs_in_shards_of_64(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shards: list[int]
):
    """A second run reads the first one's shards, but one of another size."""
    monkeypatch.setenv("PASS_CACHE", str(tmp_path))
    sizes, progress = [], []
    write = TorchTextWriter.write

    def recorded_write(writer, prompts, *rest):
        sizes.append(len(prompts))
        return write(writer, prompts, *rest)

    class Recorded(Silent):
        def phase(self, name: str):
            return lambda done, total, _note="": progress.append((name, done, total))

    monkeypatch.setattr(TorchTextWriter, "write", recorded_write)
    config = replace(config, steps=1, recipe=replace(config.recipe, sequence_length=12))
    count = sum(shards)
    run(replace(config, recipe=replace(config.recipe, sequences=count)), Recorded())
    assert sizes == shards
    written = [(done, total) for name, done, total in progress if name.startswith("writing")]
    assert written == [(done, count) for done in itertools.accumulate(shards)]
    if shards == [64, 6]:
        fewer = replace(config.recipe, sequences=66)
        run(replace(config, output=tmp_path / "fewer", recipe=fewer), Silent())
        assert sizes == [64, 6, 2]


def test_a_sequence_longer_than_the_model_is_refused_before_anything_is_written(config):
    with pytest.raises(
        PassError, match=r"--sequence-length must be at most 768.*tiny-llama.*not 772"
    ) as refused:
        run(replace(config, recipe=replace(config.recipe, sequence_length=772)), Silent())
    assert "\n" not in str(refused.value)
    assert not list(config.output.glob("*"))


def test_a_damaged_shard_is_refused(config, monkeypatch, tmp_path):
    monkeypatch.setenv("PASS_CACHE", str(tmp_path))
    run(replace(config, steps=1), Silent())
    (shard,) = tmp_path.glob("distilled/*/*/shard-00000.safetensors")
    shard.write_bytes(b"no")
    with pytest.raises(PassError, match="damaged"):
        run(replace(config, steps=1, output=tmp_path / "second"), Silent())


@pytest.mark.slow
def test_a_run_without_an_adapter_saves_embeddings_alone(config: TrainConfig):
    run(replace(config, adapter="none", steps=3), Silent())
    assert set(weights(config.output)) == {"lookahead", "base_sample"}


def command(config: TrainConfig, output: Path, flags: str) -> list[str]:
    recipe = "--sequences 64 --sequence-length 48 --prompt-tokens 4 8 --chat-share 0"
    flags = f"{flags} {recipe} --dtype fp32 --device cpu --write-with torch"
    files = ("--model", config.model, "--data", str(config.data[0]), "-o", str(output))
    return ["-m", "pass_trainer.cli", *files, *flags.split()]


@pytest.mark.slow
def test_two_processes_average_their_gradients(config: TrainConfig, tmp_path: Path):
    config = replace(config, steps=4, lr=1e-2)  # a batch of two
    run(config, Silent())
    run(replace(config, batch=1, output=tmp_path / "batch1"), Silent())
    flags = "--lookahead 3 --lr 1e-2 --adapter lora --rank 4 --steps 4 --batch 1 --anchors 12"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two_processes = [sys.executable, *torchrun, *command(config, tmp_path / "processes2", flags)]
    done = subprocess.run(two_processes, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    batch2, batch1 = weights(config.output), weights(tmp_path / "batch1")
    processes2 = weights(tmp_path / "processes2")
    torch.testing.assert_close(processes2, batch2, rtol=2e-3, atol=2e-4)
    to_processes2, to_batch1 = (
        (batch2["lookahead"].float() - other["lookahead"].float()).abs().max()
        for other in (processes2, batch1)
    )
    assert to_batch1 > 20 * to_processes2 and to_batch1 > 5e-3


@pytest.mark.slow
def test_a_command_that_was_killed_resumes(config: TrainConfig, tmp_path: Path):
    flags = "--resume --steps 60 --checkpoint-minutes 0"
    line = [sys.executable, *command(config, tmp_path / "out", flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, **pipes) as running:
        progress = tmp_path / "out" / "checkpoint" / "progress.json"
        for _ in range(9000):
            if progress.exists() or running.poll() is not None:
                break
            time.sleep(0.01)
        assert running.poll() is None, running.communicate()
        running.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out" / "lookahead.safetensors").exists()
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("lookahead.safetensors")
    assert len(json.loads((tmp_path / "out" / "metrics.json").read_text())["loss"]) == 60
