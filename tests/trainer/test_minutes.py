"""Runs with --minutes, by a fake clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training import Silent, equal_tensors, small_run, weights

from pass_runtime import PassError
from pass_trainer import run as run_module
from pass_trainer.config import TrainConfig
from pass_trainer.run import TrainReport, run
from pass_trainer.train import TEXT_SHARE, WRITING_SECONDS, Schedule, Times
from pass_trainer.writers import TorchTextWriter

STEP_SECONDS, MEASURE_SECONDS, SHARD_SECONDS = 5.0, 7.0, 11.0
pytestmark = pytest.mark.usefixtures("cache")


class Watch(Silent):
    """The clock and the progress of a run."""

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


def timed_run(config: TrainConfig, killed_at: float = 1e9) -> tuple[Watch, TrainReport]:
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, killed_at)
        return watch, run(config, watch, watch)


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    config = small_run(tiny_model, tmp_path / "numbers.txt", tmp_path / "run")
    recipe = replace(config.recipe, sequences=None)
    return replace(config, steps=None, minutes=4, batch=8, recipe=recipe)


@pytest.mark.slow
def test_a_run_ends_in_time_with_weights_and_a_last_measurement(config: TrainConfig):
    watch, report = timed_run(config)
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
def test_text_is_written_for_its_share_of_the_time(config: TrainConfig):
    """A shard that was begun is finished."""
    few = replace(config, output=config.output / "few", recipe=replace(config.recipe, sequences=64))
    watch, report = timed_run(config)
    assert watch.shards == report.history.shards
    assert report.history.clock["training"] == SHARD_SECONDS * watch.shards
    least = TEXT_SHARE * 60 * config.minutes
    assert least <= report.history.clock["training"] < least + SHARD_SECONDS
    assert timed_run(few)[1].history.shards == 1


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_with_the_time_that_is_left(config: TrainConfig):
    with pytest.raises(KeyboardInterrupt):
        timed_run(config, killed_at=60 * config.minutes * 3 / 4)
    assert (config.output / "checkpoint" / "progress.json").exists()
    assert not (config.output / "lookahead.safetensors").exists()
    watch, report = timed_run(replace(config, resume=True))
    # Steps after the last checkpoint are repeated: checkpoints are up to a tenth of the run apart.
    repeated = 60 * config.minutes / 10 + STEP_SECONDS + MEASURE_SECONDS
    assert 60 * config.minutes / 4 - 20 <= watch.now <= 60 * config.minutes / 4 + repeated
    assert report.history.evaluations[-1]["step"] == len(report.history.loss)
    assert [stage.minutes for stage in report.history.stages] == [4]


@pytest.mark.slow
def test_a_finished_run_is_given_more_minutes(config: TrainConfig):
    _, first = timed_run(replace(config, minutes=2))
    steps, first_weights = len(first.history.loss), weights(config.output)
    watch, longer = timed_run(replace(config, resume=True))
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


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"minutes": 0.2}, r"--minutes 0\.2 passed before .* give more"),
        ({"held_out": 4096}, r"--held-out 4096 leaves none of the \d+ written"),
    ],
)
def test_a_run_that_has_no_text_to_train_on_fails(config, change, error):
    with pytest.raises(PassError, match=error):
        timed_run(replace(config, **change))
    assert not (config.output / "lookahead.safetensors").exists()


def test_the_share_of_a_run_follows_the_clock(config: TrainConfig):
    """From the start of training to what is left for a measurement, a save, and a quarter more."""
    schedule, start = Schedule(config.steps, config.minutes, lambda: 0.0), 15
    end = 240 - 1.25 * (7 + 1) - WRITING_SECONDS
    shares = []
    for now in (start, (start + end) / 2, end, 300):
        schedule.see(Times(now=now, training=start, measuring=7, saving=1))
        shares.append(schedule.share(0))
    assert shares == pytest.approx([0, 0.5, 1, 1])
    assert schedule.is_over(0)
