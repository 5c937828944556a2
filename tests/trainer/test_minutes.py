"""Runs with --minutes end in time, and resume after an interruption. A fake clock stands in for
time, so that runs of minutes take seconds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training import Silent, equal_tensors, small_run, weights

from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import PassError
from pass_trainer import run as run_module
from pass_trainer.config import TrainConfig
from pass_trainer.run import run
from pass_trainer.schedule import WRITING_SECONDS, Schedule, Times
from pass_trainer.text_supply import RunProcess, WrittenBeside, make_distiller
from pass_trainer.text_writer import TorchTextWriter

STEP_SECONDS, MEASURE_SECONDS, SHARD_SECONDS = 5.0, 7.0, 11.0
pytestmark = pytest.mark.usefixtures("cache")


class Watch(Silent):
    """The clock and the progress of a run. Each training step, measurement and shard of text moves
    the clock forward by the seconds above.

    shards: how many shards were written.
    killed_at: the time in seconds at which the run gets a KeyboardInterrupt.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, killed_at: float = 1e9) -> None:
        self.now, self.killed_at, self.shards = 0.0, killed_at, 0
        measure, write = run_module.measure, TorchTextWriter.write

        def slow_measure(*given):
            self.now += MEASURE_SECONDS
            return measure(*given)

        def slow_write(*given):
            self.now += SHARD_SECONDS
            self.shards += 1
            return write(*given)

        monkeypatch.setattr(run_module, "measure", slow_measure)
        monkeypatch.setattr(TorchTextWriter, "write", slow_write)

    def __call__(self) -> float:
        return self.now

    def phase(self, name: str):
        def step(_done: int, _total: int, _note: str = "") -> None:
            if name == "training":
                self.now += STEP_SECONDS
                if self.now >= self.killed_at:
                    raise KeyboardInterrupt

        return step


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The settings of a run of four minutes, whose text is written while it trains."""
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    config = small_run(tiny_model, tmp_path / "numbers.txt", tmp_path / "run")
    recipe = replace(config.recipe, sequences=None)
    return replace(config, steps=None, minutes=4, batch=8, recipe=recipe)


@pytest.mark.slow
def test_a_run_ends_in_time_with_weights_and_a_last_measurement(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        report = run(config, watch, watch)
    steps = len(report.history.loss)
    remaining = 60 * config.minutes - watch.now
    assert WRITING_SECONDS <= remaining <= WRITING_SECONDS + MEASURE_SECONDS + 2 * STEP_SECONDS
    assert steps > 10 and report.history.evaluations[-1]["step"] == steps
    measuring = MEASURE_SECONDS * len(report.history.evaluations)
    # Measurements take a tenth of the time, but the first and the last are made in any case.
    assert 3 * MEASURE_SECONDS <= measuring <= 0.1 * watch.now + 2 * MEASURE_SECONDS
    assert weights(config.output)
    assert f"{steps} steps" in (config.output / "README.md").read_text()


@pytest.mark.slow
def test_another_shard_joins_once_all_sequences_were_used(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    """A shard has 64 sequences. Eight of the first shard are held out, so the second joins after 56
    sequences, and each later one after 64 more."""
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        report = run(config, watch, watch)
    joins = report.history.joins
    assert joins[:2] == [[0, 56], [56, 120]]
    assert len(joins) == watch.shards
    used = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(joins)]
    assert used == [56] + [64] * (len(joins) - 2)


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_with_the_time_that_is_left(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch = Watch(patch, killed_at=60 * config.minutes / 2)
        run(config, watch, watch)
    assert (config.output / "checkpoint" / "progress.json").exists()
    assert not (config.output / "lookahead.safetensors").exists()
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        report = run(replace(config, resume=True), watch, watch)
    # Steps after the last checkpoint are repeated: checkpoints are up to a tenth of the run apart.
    repeated = 60 * config.minutes / 10 + STEP_SECONDS + MEASURE_SECONDS
    assert 60 * config.minutes / 2 - 20 <= watch.now <= 60 * config.minutes / 2 + repeated
    assert report.history.evaluations[-1]["step"] == len(report.history.loss)
    assert [stage.minutes for stage in report.history.stages] == [4]


@pytest.mark.slow
def test_a_finished_run_is_given_more_minutes(config: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        first = run(replace(config, minutes=2), watch, watch)
    steps, first_weights = len(first.history.loss), weights(config.output)
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        longer = run(replace(config, resume=True), watch, watch)
    assert longer.history.loss[:steps] == first.history.loss
    assert len(longer.history.loss) > steps
    assert [(stage.start, stage.minutes) for stage in longer.history.stages] == [(0, 2), (steps, 4)]
    assert watch.now < 140  # two of the four minutes had passed before
    assert not equal_tensors(first_weights, weights(config.output))
    with pytest.raises(
        PassError, match=r"another --minutes \(4.0, not 3.0\); give at least as many"
    ):
        run(replace(config, minutes=3, resume=True), Silent())
    recipe = replace(config.recipe, sequences=64)
    by_steps = replace(config, minutes=None, steps=9000, recipe=recipe, resume=True)
    with pytest.raises(PassError, match=r"another --sequences \(none, not 64\)"):
        run(by_steps, Silent())


def test_a_run_whose_minutes_pass_before_there_is_text_fails(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    with (
        monkeypatch.context() as patch,
        pytest.raises(PassError, match=r"--minutes 0\.2 passed before .* give more"),
    ):
        watch = Watch(patch)
        run(replace(config, minutes=0.2), watch, watch)
    assert not (config.output / "lookahead.safetensors").exists()


def test_the_share_of_a_run_follows_the_clock(config: TrainConfig):
    """From the start of training, after 15 s, to the time that is left for a measurement of 7 s, a
    save of 1 s, a quarter more for safety, and writing the results."""
    schedule, start = Schedule(config.steps, config.minutes, lambda: 0.0), 15
    end = 240 - 1.25 * (7 + 1) - WRITING_SECONDS
    shares = []
    for now in (start, (start + end) / 2, end, 300):
        schedule.see(Times(now=now, training=start, measuring=7, saving=1))
        shares.append(schedule.share(0))
    assert shares == pytest.approx([0, 0.5, 1, 1])
    assert schedule.is_over(0)


@pytest.mark.slow
def test_text_of_another_process_joins_at_fixed_steps(config: TrainConfig, tmp_path: Path):
    """With --steps, the settings alone decide these steps: a second run, which finds all text in
    the cache, gets the same weights. A run that has all text from its first step on gets others."""
    recipe = replace(config.recipe, sequences=160)
    config = replace(config, minutes=None, steps=6, batch=2, recipe=recipe)
    beside = replace(config, write_text="beside")
    first = run(beside, Silent())
    second = run(replace(beside, output=tmp_path / "second"), Silent())
    text_first = run(replace(config, output=tmp_path / "text first"), Silent())
    assert first.history.joins == second.history.joins == [[0, 54], [2, 118], [4, 150]]
    assert text_first.history.joins == [[0, 150]]
    assert first.history.loss == second.history.loss
    assert equal_tensors(weights(config.output), weights(tmp_path / "second"))
    assert not equal_tensors(weights(config.output), weights(tmp_path / "text first"))
    assert torch.isfinite(weights(config.output)["lookahead"]).all()


@pytest.mark.slow
def test_a_failure_of_the_process_that_writes_text_is_reported(config: TrainConfig, tmp_path: Path):
    """The process fails because the directory of its model does not exist."""
    config = replace(config, write_text="beside")
    loaded = load_model(resolve(config.model, None), "fp32")
    only_process = RunProcess(torch.device("cpu"), 0, 1)
    distiller, directory = make_distiller(config, loaded, only_process, Silent())
    config = replace(config, model=str(tmp_path / "missing"))
    supply = WrittenBeside(distiller, directory, config, only_process, lambda: None)
    try:
        with pytest.raises(PassError, match=r"the process that writes text: .*missing") as error:
            supply.wait(1)
        assert "\n" not in str(error.value)
    finally:
        supply.close()
