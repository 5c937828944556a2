"""Runs with --minutes end in time, and resume after an interruption. The tests move the clock."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training import Silent, same, small_run, weights

from pass_runtime import PassError
from pass_trainer import run as run_module
from pass_trainer.config import TrainConfig
from pass_trainer.run import run
from pass_trainer.schedule import WRITING_SECONDS, Schedule, Times
from pass_trainer.text_writer import TorchTextWriter

STEP_SECONDS, MEASURE_SECONDS, SHARD_SECONDS = 5.0, 7.0, 11.0
pytestmark = pytest.mark.usefixtures("cache")


class Watch(Silent):
    """A clock that steps, measurements and shards move forward. killed_at: the time in seconds at
    which it raises KeyboardInterrupt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, killed_at: float = 1e9) -> None:
        self.now, self.killed_at, self.written = 0.0, killed_at, 0
        measure, write = run_module.measure, TorchTextWriter.write

        def slow_measure(*given):
            self.now += MEASURE_SECONDS
            return measure(*given)

        def slow_write(*given):
            self.now += SHARD_SECONDS
            self.written += 1
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
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    config = small_run(tiny_model, tmp_path / "numbers.txt", tmp_path / "run")
    return replace(
        config, steps=None, minutes=4, batch=8, recipe=replace(config.recipe, sequences=None)
    )


@pytest.mark.slow
def test_a_run_ends_in_time_with_weights_and_a_last_measurement(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        report = run(config, watch, watch)
    steps = len(report.history.loss)
    left = 60 * config.minutes - watch.now
    assert WRITING_SECONDS <= left <= WRITING_SECONDS + MEASURE_SECONDS + 2 * STEP_SECONDS
    assert steps > 10 and report.history.evaluations[-1]["step"] == steps
    measured = len(report.history.evaluations)
    assert measured >= 3 and MEASURE_SECONDS * measured <= 0.1 * watch.now + 2 * MEASURE_SECONDS
    assert weights(config.output)
    assert f"{steps} steps" in (config.output / "README.md").read_text()


@pytest.mark.slow
def test_a_shard_joins_once_all_sequences_were_used(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    """A shard has 64 sequences, of which the first holds out 8: the second joins after 56."""
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        report = run(config, watch, watch)
    joins = report.history.joins
    assert joins[:2] == [[0, 56], [56, 120]]
    assert len(joins) == watch.written
    used = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(joins)]
    assert used == [56] + [64] * (len(joins) - 2)


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_with_the_time_that_is_left(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        half = Watch(patch, killed_at=60 * config.minutes / 2)
        run(config, half, half)
    assert (config.output / "checkpoint" / "progress.json").exists()
    assert not (config.output / "lookahead.safetensors").exists()
    with monkeypatch.context() as patch:
        rest = Watch(patch)
        report = run(replace(config, resume=True), rest, rest)
    # Checkpoints are at most a tenth of the run apart; later steps are repeated.
    lost = 60 * config.minutes / 10 + STEP_SECONDS + MEASURE_SECONDS
    assert 60 * config.minutes / 2 - 20 <= rest.now <= 60 * config.minutes / 2 + lost
    assert report.history.evaluations[-1]["step"] == len(report.history.loss)
    assert [stage.minutes for stage in report.history.stages] == [4]


@pytest.mark.slow
def test_a_finished_run_is_given_more_minutes(config: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        first = run(replace(config, minutes=2), watch, watch)
    made = weights(config.output)
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        more = run(replace(config, resume=True), watch, watch)
    assert more.history.loss[: len(first.history.loss)] == first.history.loss
    assert len(more.history.loss) > len(first.history.loss)
    assert [(stage.start, stage.minutes) for stage in more.history.stages] == [
        (0, 2),
        (len(first.history.loss), 4),
    ]
    assert watch.now < 140
    assert not same(made, weights(config.output))
    with pytest.raises(PassError, match=r"another --minutes \(4, not 3\); give at least as many"):
        run(replace(config, minutes=3, resume=True), Silent())
    of_steps = replace(
        config, minutes=None, steps=9000, recipe=replace(config.recipe, sequences=64)
    )
    with pytest.raises(PassError, match=r"another --sequences \(none, not 64\)"):
        run(replace(of_steps, resume=True), Silent())


def test_minutes_that_pass_before_there_is_text_are_refused(
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
    schedule = Schedule(config.steps, config.minutes, lambda: 0.0)
    end = 240 - 1.25 * (7 + 1) - WRITING_SECONDS
    shares = []
    for now in (15, 15 + (end - 15) / 2, end, 300):
        schedule.see(Times(now=now, training=15, measuring=7, saving=1))
        shares.append(schedule.share(0))
    assert shares == pytest.approx([0, 0.5, 1, 1])
    assert schedule.is_over(0)


@pytest.mark.slow
def test_text_of_another_process_joins_at_fixed_steps(config: TrainConfig, tmp_path: Path):
    """With --steps, the settings decide these steps: a second run, which finds all text in the
    cache, gets the same weights. A run that has all text from its first step on gets others."""
    config = replace(
        config, minutes=None, steps=6, batch=2, recipe=replace(config.recipe, sequences=160)
    )
    beside = replace(config, write_text="beside")
    first = run(beside, Silent())
    again = run(replace(beside, output=tmp_path / "again"), Silent())
    before = run(replace(config, output=tmp_path / "before"), Silent())
    assert first.history.joins == again.history.joins == [[0, 54], [2, 118], [4, 150]]
    assert before.history.joins == [[0, 150]]
    assert first.history.loss == again.history.loss
    assert same(weights(config.output), weights(tmp_path / "again"))
    assert not same(weights(config.output), weights(tmp_path / "before"))
    assert torch.isfinite(weights(config.output)["lookahead"]).all()


@pytest.mark.slow
def test_a_failure_of_the_writing_process_is_reported(config: TrainConfig, tmp_path: Path):
    """Its model is not there."""
    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve
    from pass_trainer.text_supply import RunProcess, WrittenBeside, make_distiller

    config = replace(config, write_text="beside")
    loaded = load_model(resolve(config.model, None), "fp32")
    alone = RunProcess(torch.device("cpu"), 0, 1)
    distiller, directory = make_distiller(config, loaded, alone, Silent())
    supply = WrittenBeside(
        distiller, directory, replace(config, model=str(tmp_path / "gone")), alone, lambda: None
    )
    try:
        with pytest.raises(PassError, match=r"the process that writes text: .*gone") as failed:
            supply.wait(1)
        assert "\n" not in str(failed.value)
    finally:
        supply.close()
