"""Runs that resume, and what is refused before the model writes text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Interrupted, Silent, equal_tensors, small_run, weights

from conftest import VOCAB_SIZE, write_random_weights
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import read_lookahead
from pass_exporter.model.registry import resolve
from pass_runtime import PassError
from pass_trainer.checkpoint import Checkpoint, History, Stage
from pass_trainer.config import TrainConfig
from pass_trainer.initial import make_drafter
from pass_trainer.run import run
from pass_trainer.train import learning_rate_factor
from pass_trainer.writers import TorchTextWriter

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> TrainConfig:
    return small_run(tiny_model, tmp_path / "numbers.txt", tmp_path / "run")


@pytest.fixture(scope="module")
def two_steps(tiny_model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two-steps")
    config = replace(small_run(tiny_model, directory / "numbers.txt", directory / "run"), steps=2)
    run(config, Silent())
    return config.output


@pytest.fixture
def done(config: TrainConfig, two_steps: Path) -> TrainConfig:
    shutil.copytree(two_steps, config.output)
    return replace(config, steps=2)


@pytest.fixture
def writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pass_trainer.run.write_text", lambda *_: pytest.fail("text was written first")
    )


@pytest.mark.slow
def test_a_run_that_was_interrupted_twice_ends_with_the_same_losses_and_weights(config, tmp_path):
    whole = run(replace(config, checkpoint_minutes=1e9), Silent())
    interrupted = replace(
        config, output=tmp_path / "interrupted", checkpoint_minutes=0, resume=True
    )
    for steps in (9, 12):
        with pytest.raises(KeyboardInterrupt):
            run(interrupted, Interrupted(steps))
    state = json.loads((interrupted.output / "checkpoint" / "progress.json").read_text())
    assert 9 < len(state["loss"]) < 30  # the second run continued from the first
    resumed = run(interrupted, Silent())
    assert resumed.history.loss == whole.history.loss
    assert resumed.history.evaluations == whole.history.evaluations
    assert equal_tensors(weights(config.output), weights(interrupted.output))
    run(replace(config, seed=1, output=tmp_path / "other"), Silent())
    assert not equal_tensors(weights(config.output), weights(tmp_path / "other"))


@pytest.mark.slow
def test_a_run_resumes_from_the_old_checkpoint_if_a_save_was_cut_off_between_its_renames(config):
    whole = run(config, Silent())
    (config.output / "checkpoint").rename(config.output / "checkpoint.old")
    resumed = run(replace(config, resume=True), Silent())
    assert resumed.history.loss == whole.history.loss


def test_a_damaged_checkpoint_is_refused_by_name(done: TrainConfig):
    (done.output / "checkpoint" / "progress.json").write_text("{")
    with pytest.raises(PassError, match=r"cannot resume from .*checkpoint"):
        run(replace(done, resume=True), Silent())


class SlowSecondProcess:
    """The second process writes as late as possible: when the first waits."""

    is_main_process = True

    def __init__(self) -> None:
        self.unwritten: list[Path] = []

    def save_state(self, directory: str) -> None:
        Path(directory).mkdir()
        self.unwritten.append(Path(directory, "random_states_1.pkl"))

    def wait_for_everyone(self) -> None:
        while self.unwritten:
            self.unwritten.pop().touch()


def test_a_checkpoint_is_complete_only_with_the_part_of_every_process(config: TrainConfig):
    config.output.mkdir()
    checkpoint = Checkpoint(config.output, config.resume_settings(), SlowSecondProcess(), 5.0)
    checkpoint.save(History([Stage(0, 30)]))
    assert (config.output / "checkpoint" / "random_states_1.pkl").exists()


def test_a_checkpoint_of_an_earlier_version_is_refused(done: TrainConfig):
    path = done.output / "checkpoint" / "progress.json"
    state = json.loads(path.read_text())
    del state["shards"]
    path.write_text(json.dumps(state))
    with pytest.raises(PassError, match="is of an earlier version; use --start"):
        run(replace(done, steps=3, resume=True), Silent())


@pytest.mark.usefixtures("writes_nothing")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sequences": 65}, r"sequences \(64, not 65\); give the same options"),
        ({"sequence_length": 40}, r"sequence-length \(48, not 40\); give the same options"),
        ({"prompt_tokens": (4, 9)}, r"prompt-tokens \(4 8, not 4 9\); give the same options"),
        ({"temperatures": (0.5,)}, r"temperatures \(0.0 0.8 1.0, not 0.5\); give the same options"),
        ({"chat_share": 0.5}, r"chat-share \(0.0, not 0.5\); give the same options"),
        ({"rank": 5}, r"rank \(4, not 5\); give the same options"),
        ({"steps": 1}, r"steps \(2, not 1\); give at least as many"),
        ({"lookahead": 2}, r"lookahead \(3, not 2\); give the same options"),
        ({"lr": 1e-3}, r"lr \(0.002, not 0.001\); give the same options"),
        ({"adapter_from": 1}, r"adapter-from \(0, not 1\); give the same options"),
        ({"seed": 1}, r"seed \(0, not 1\); give the same options"),
        ({"aim": "distribution"}, r"aim \(acceptance, not distribution\); give the same options"),
        ({"write_with": "int8"}, r"write-with \(torch, not int8\); give the same options"),
    ],
    ids=str,
)
def test_a_run_does_not_resume_with_other_settings(done, change, error):
    if change.keys() <= vars(done.recipe).keys() - {"seed"}:  # a run has a seed of its own
        change = {"recipe": replace(done.recipe, **change)}
    with pytest.raises(
        PassError, match=f"checkpoint was made with another --{error}, or another -o"
    ):
        run(replace(done, resume=True, **change), Silent())


def test_a_run_resumes_with_a_copy_of_its_text_but_not_with_other_text(done, tmp_path, request):
    weights_before = weights(done.output)
    copy, other = tmp_path / "copy.txt", tmp_path / "numbers2.txt"
    copy.write_bytes(done.data[0].read_bytes())
    other.write_text("other words " * 400)
    run(replace(done, resume=True, data=(copy,)), Silent())
    request.getfixturevalue("writes_nothing")
    with pytest.raises(
        PassError, match="was made with another --data; give the same options, or another -o"
    ):
        run(replace(done, resume=True, data=(other,)), Silent())
    assert equal_tensors(weights(done.output), weights_before)


def test_a_run_without_its_checkpoint_does_not_resume(done: TrainConfig):
    (done.output / "checkpoint").rename(done.output / "elsewhere")
    with pytest.raises(
        PassError, match=r"has no checkpoint to resume from; use --start .*lookahead.safetensors"
    ):
        run(replace(done, resume=True), Silent())


@pytest.mark.slow
def test_a_finished_run_is_given_more_steps(config: TrainConfig, tmp_path: Path):
    first = run(replace(config, steps=10), Silent())
    longer = replace(config, steps=25, resume=True)
    copied = replace(longer, output=tmp_path / "copy", checkpoint_minutes=0)
    shutil.copytree(config.output / "checkpoint", copied.output / "checkpoint")
    extended = run(longer, Silent())
    assert extended.history.loss[:10] == first.history.loss and len(extended.history.loss) == 25
    assert extended.history.stages == [Stage(0, 10), Stage(10, 25)]
    training = json.loads((config.output / "metrics.json").read_text())["training"]
    assert training["steps"] == 25
    assert training["recipe"]["stages"] == [{"start": 0, "steps": 10}, {"start": 10, "steps": 25}]
    with pytest.raises(KeyboardInterrupt):
        run(copied, Interrupted(6))
    run(copied, Silent())
    assert equal_tensors(weights(config.output), weights(copied.output))


def test_learning_rates_of_a_run_with_more_steps():
    """After a new warm-up, those of a run that had all steps from its start."""

    def rates(start: int, end: int, steps: range) -> list[float]:
        return [learning_rate_factor(step / end, step - start) for step in steps]

    assert rates(0, 100, range(99, 100))[0] < 0.06  # the last step of the first 100
    warm_up = rates(100, 300, range(100, 119))
    assert warm_up[0] < 0.05 and warm_up == sorted(warm_up)
    assert rates(100, 300, range(119, 300)) == rates(0, 300, range(119, 300))


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Path:
    return write_random_weights(tiny_model, tmp_path / "s.safetensors", lookahead=8, head_rank=12)


@pytest.mark.usefixtures("writes_nothing")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"adapter_from": 2}, r"--adapter-from must be 0 to 1, a layer of the model, not 2"),
        ({"lr": float("inf")}, r"--lr must be a finite number above 0"),
        ({"checkpoint_minutes": float("nan")}, r"--checkpoint-minutes must be at least 0"),
        ({"lookahead": 9}, r"holds 8 look-ahead embeddings; use --lookahead 8 or less"),
        ({"rank": 5}, r"has an adapter of rank 4; use --rank 4 or less"),
        ({"head": True, "head_rank": 7}, r"has a head with --head-rank 12 --head-width 24; give"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_trained_are_refused_before_text_is_written(
    config: TrainConfig, start: Path, change: dict[str, Any], reason: str
):
    with pytest.raises(PassError, match=reason):
        run(replace(config, **({"start": start} | change)), Silent())
    assert not config.output.exists()


@pytest.mark.parametrize(
    "sizes", [{}, {"head_rank": 12}, {"head_rank": 12, "head_width": 24}], ids=str
)
def test_a_head_from_start_computes_the_same_logits(config, tiny_model, start, sizes):
    loaded = load_model(resolve(str(tiny_model)), "fp32")
    start_head = read_lookahead(start, 3, loaded.model).head
    head = make_drafter(replace(config, start=start, head=True, **sizes), loaded).head
    assert head is not None
    assert start_head is not None
    assert (head.rank, head.width) == (12, 24)
    assert all(parameter.requires_grad for parameter in head.parameters())
    random = torch.Generator().manual_seed(3)
    hidden, logits = (torch.randn(2, 5, n, generator=random) for n in (64, VOCAB_SIZE))
    rows = torch.randint(0, VOCAB_SIZE, (2, 5), generator=random), torch.arange(5).expand(2, 5)
    before, after = (each(hidden, logits, *rows)[1].log_softmax(-1) for each in (start_head, head))
    torch.testing.assert_close(before, after, atol=1e-3, rtol=0)
    assert (before - logits.log_softmax(-1)).abs().max() > 1, "the head must matter"


def test_data_too_short_for_a_prompt_is_refused_before_text_is_written(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(TorchTextWriter, "write", lambda *_: pytest.fail("text was written first"))
    (tmp_path / "short.txt").write_text("too short")
    data, recipe = (
        (Path("self"), tmp_path / "short.txt"),
        replace(config.recipe, prompt_tokens=(40, 44)),
    )
    with pytest.raises(
        PassError, match=r"short\.txt: no text is long enough for a prompt of 40 tokens"
    ):
        run(replace(config, data=data, recipe=recipe), Silent())
