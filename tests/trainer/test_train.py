"""Whole runs on a tiny model: the loss falls, interrupted runs end where uninterrupted ones do, processes average."""

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
from safetensors.torch import load_file

from pass_runtime import PassError
from pass_trainer.config import TrainConfig
from pass_trainer.distill import Recipe
from pass_trainer.run import run
from pass_trainer.trainer import Checkpoint, History
from pass_trainer.writer import TorchWriter

pytestmark = pytest.mark.usefixtures("cache")


class Silent:
    """pass_trainer.run.Progress for tests."""

    def phase(self, _name: str):
        return lambda _done, _total, _note="": None


class Interrupted(Silent):
    """Raises KeyboardInterrupt, as Ctrl-C does, after `at` training steps of this process."""

    def __init__(self, at: int) -> None:
        self._at = at

    def phase(self, name: str):
        def step(_done: int, _total: int, _note: str = "") -> None:
            self._at -= name == "training"
            if self._at < 0:
                raise KeyboardInterrupt

        return step


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"line {i}: the quick brown fox has {i * i} friends\n" for i in range(400)))
    return path


@pytest.fixture
def config(tiny_model: Path, text: Path, tmp_path: Path) -> TrainConfig:
    recipe = Recipe(sequences=64, length=48, prompt=(4, 8), chat=0.0)
    base = TrainConfig(str(tiny_model), (text,), tmp_path / "run", lookahead=3, adapter="lora", rank=4, steps=30)
    return replace(base, batch=2, anchors=12, dtype="fp32", device="cpu", write_with="torch", recipe=recipe)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "lookahead.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_loss_falls_and_everything_is_written(config: TrainConfig):
    report = run(replace(config, steps=120, lr=1e-2), Silent())
    losses = report.history.loss
    assert len(losses) == 120
    assert statistics.mean(losses[-20:]) < 0.9 * statistics.mean(losses[:20])
    assert report.history.evaluations[-1]["step"] == 120
    metrics = json.loads((config.output / "metrics.json").read_text())
    assert metrics["held_out"] == report.acceptance.as_json()
    assert (config.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (config.output / "README.md").read_text()
    assert "rank 4" in card and "numbers.txt" in card and f"{report.acceptance.tau()['fused']:.2f}" in card
    assert sorted(path.name for path in config.output.iterdir()) == [
        *("README.md", "checkpoint", "curves.png", "lookahead.safetensors", "metrics.json")
    ]


def test_two_interruptions_change_nothing(config: TrainConfig, tmp_path: Path):
    """A checkpoint after every step; work since the last one is done again."""
    whole = run(replace(config, checkpoint_minutes=1e9), Silent())
    often = replace(config, output=tmp_path / "interrupted", checkpoint_minutes=0, resume=True)
    for at in (9, 12):
        with pytest.raises(KeyboardInterrupt):
            run(often, Interrupted(at))
    state = json.loads((often.output / "checkpoint" / "progress.json").read_text())
    assert 9 < state["step"] < 30
    resumed = run(often, Silent())
    assert resumed.history.loss == whole.history.loss
    assert resumed.history.evaluations == whole.history.evaluations
    assert same(weights(config.output), weights(often.output))
    assert not same(weights(config.output), weights(_other_seed(config, tmp_path)))


def _other_seed(config: TrainConfig, tmp_path: Path) -> Path:
    run(replace(config, seed=1, output=tmp_path / "other"), Silent())
    return tmp_path / "other"


def test_a_save_cut_off_between_its_renames(config: TrainConfig):
    whole = run(config, Silent())
    (config.output / "checkpoint").rename(config.output / "checkpoint.old")
    again = run(replace(config, resume=True), Silent())
    assert again.history.loss == whole.history.loss


@pytest.mark.parametrize("change", [{"rank": 5}, {"steps": 3}, {"lookahead": 2}, {"lr": 1e-3}], ids=str)
def test_other_settings_do_not_resume(config: TrainConfig, change: dict[str, int]):
    run(replace(config, steps=2), Silent())
    with pytest.raises(PassError, match=f"another --{next(iter(change))}"):
        run(replace(config, **({"steps": 2, "resume": True} | change)), Silent())


def test_a_damaged_checkpoint_is_named(config: TrainConfig):
    run(replace(config, steps=2), Silent())
    (config.output / "checkpoint" / "progress.json").write_text("{")
    with pytest.raises(PassError, match=r"cannot resume from .*checkpoint"):
        run(replace(config, steps=2, resume=True), Silent())


def test_a_finished_run_is_not_trained_over(config: TrainConfig):
    run(replace(config, steps=2), Silent())
    with pytest.raises(PassError, match="--resume"):
        run(replace(config, steps=2), Silent())


def test_the_models_writing_is_made_once(config: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    run(replace(config, steps=2), Silent())
    monkeypatch.setattr(TorchWriter, "write", lambda *_: pytest.fail("generated again"))
    run(replace(config, steps=2, lr=1e-3, output=config.output / "again"), Silent())


@pytest.mark.parametrize(("asked", "made"), [(5, [5]), (64, [64]), (70, [64, 6])])
def test_as_many_sequences_as_asked(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: int, made: list[int]
):
    """Also where an earlier run wrote more: what a run trains on does not depend on what others left in the cache."""
    monkeypatch.setenv("PASS_CACHE", str(tmp_path))
    seen, steps = [], []
    write = TorchWriter.write

    def counted(writer, prompts, *rest):
        seen.append(len(prompts))
        return write(writer, prompts, *rest)

    class Counting(Silent):
        def phase(self, name: str):
            return lambda done, total, _note="": steps.append((name, done, total))

    monkeypatch.setattr(TorchWriter, "write", counted)
    recipe = replace(config.recipe, sequences=asked, length=12)
    run(replace(config, steps=1, recipe=recipe), Counting())
    assert seen == made
    assert [done for name, done, _ in steps if name.startswith("writing")] == [*itertools.accumulate(made)]
    assert {total for name, _, total in steps if name.startswith("writing")} == {asked}
    if asked == 70:
        run(replace(config, steps=1, output=tmp_path / "fewer", recipe=replace(recipe, sequences=66)), Silent())
        assert seen == [64, 6, 2]


def test_a_sequence_longer_than_the_model(config: TrainConfig):
    """The tiny model has 768 positions: refused before anything is written."""
    with pytest.raises(PassError, match=r"--sequence-length must be at most 768.*tiny-llama.*not 772") as refused:
        run(replace(config, recipe=replace(config.recipe, length=772)), Silent())
    assert "\n" not in str(refused.value)
    assert not list(config.output.glob("*"))


def test_damaged_sequences_are_named(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
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
        run(replace(config, data=(tmp_path / "short.txt",), recipe=replace(config.recipe, prompt=(40, 44))), Silent())


def test_two_processes_average_their_gradients(config: TrainConfig, tmp_path: Path):
    """Two processes with one sequence each take the steps of one process with both; the first alone goes elsewhere."""
    config = replace(config, steps=4, lr=1e-2)
    run(config, Silent())
    run(replace(config, batch=1, output=tmp_path / "alone"), Silent())
    arguments = [
        *("--model", config.model, "--data", config.data[0], "-o", tmp_path / "two", "--lookahead", 3, "--lr", 1e-2),
        *("--adapter", "lora", "--rank", 4, "--steps", 4, "--batch", 1, "--anchors", 12, "--dtype", "fp32"),
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
            "--chat-share",
            0,
            "--device",
            "cpu",
        ),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "pass_trainer.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    one, two, alone = weights(config.output), weights(tmp_path / "two"), weights(tmp_path / "alone")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=2e-3, atol=2e-4, msg=lambda why, name=name: f"{name}: {why}")
    difference = (one["lookahead"].float() - alone["lookahead"].float()).abs().max()
    assert difference > 20 * (one["lookahead"].float() - two["lookahead"].float()).abs().max()
    assert difference > 5e-3


class SlowOther:
    """An accelerator of two processes, as the first sees it: the second writes its part of a checkpoint only just
    before it meets the first."""

    is_main_process = True

    def __init__(self) -> None:
        self.owed: list[Path] = []

    def save_state(self, directory: str) -> None:
        Path(directory).mkdir()
        self.owed.append(Path(directory, "random_states_1.pkl"))

    def wait_for_everyone(self) -> None:
        while self.owed:
            self.owed.pop().touch()


def test_a_checkpoint_has_the_part_of_every_process(config: TrainConfig):
    config.output.mkdir()
    Checkpoint(config, SlowOther()).save(3, History())
    assert (config.output / "checkpoint" / "random_states_1.pkl").exists()


def test_killed_and_resumed_as_a_command(config: TrainConfig, tmp_path: Path):
    command = [
        *(sys.executable, "-m", "pass_trainer.cli", "--model", config.model, "--data", config.data[0], "--resume"),
        *("-o", tmp_path / "out", "--steps", 150, "--sequences", 64, "--sequence-length", 48, "--prompt-tokens", 4, 8),
        *("--chat-share", 0, "--dtype", "fp32", "--device", "cpu", "--checkpoint-minutes", 0),
        *("--write-with", "torch"),
    ]
    command = list(map(str, command))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
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
    assert len(json.loads((tmp_path / "out" / "metrics.json").read_text())["loss"]) == 150
