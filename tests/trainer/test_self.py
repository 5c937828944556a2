"""Prompts and text that the model writes itself."""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training import Silent

from conftest import EOS, SilentProgress, make_tokenizer
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import PassError
from pass_trainer import self_prompts
from pass_trainer.config import Recipe, TrainConfig
from pass_trainer.corpus import SELF_NAME
from pass_trainer.distill import Distiller
from pass_trainer.run import run
from pass_trainer.self_prompts import SelfPrompts
from pass_trainer.text_writer import BundleTextWriter, TextWriter, TorchTextWriter

EGG, POEM = "How do I boil an egg?", "Write a poem about foxes"
TURNS = [EGG, EGG, "ok", "", "A turn without an end", POEM]


class Recites:
    """A TextWriter that writes `turns` again and again; those with "without" do not end."""

    name = "recites"

    def __init__(self, tokenizer, turns: list[str]) -> None:
        self._tokenizer, self._turns, self.calls = tokenizer, itertools.cycle(turns), []

    def write(
        self, prompts, length: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        self.calls.append((list(prompts[0]), temperature, top_p, seed))
        texts = []
        for prompt, turn in zip(prompts, self._turns, strict=False):
            end = [] if "without" in turn else [EOS]
            texts.append([*prompt, *self._tokenizer.encode(turn, add_special_tokens=False), *end])
        return texts


def test_different_turns_that_end_become_prompts():
    tokenizer = make_tokenizer()
    writer = Recites(tokenizer, TURNS)
    prompts = SelfPrompts(tokenizer, (EOS,), writer, 100).write(2, random.Random(0))
    assert [tokenizer.decode(ids) for ids in prompts] == [
        "<bos>[user]How do I boil an egg?\n[assistant]",
        "<bos>[user]Write a poem about foxes\n[assistant]",
    ]
    opening, temperature, top_p, _ = writer.calls[0]
    assert tokenizer.decode(opening) == "<bos>[user]" and (temperature, top_p) == (1.0, 0.95)
    assert len({seed for *_, seed in writer.calls}) == len(writer.calls) > 1


def test_prompts_over_the_limit_are_left_out():
    tokenizer = make_tokenizer()
    text = f"<bos>[user]{POEM}\n[assistant]"
    length = len(tokenizer.encode(text, add_special_tokens=False))
    fitting, shorter = (
        SelfPrompts(tokenizer, (EOS,), Recites(tokenizer, [POEM]), limit)
        for limit in (length, length - 1)
    )
    assert len(fitting.write(1, random.Random(0))[0]) == length
    with pytest.raises(PassError, match="--data"):
        shorter.write(1, random.Random(0))


def test_a_model_whose_turns_do_not_end_is_refused():
    tokenizer = make_tokenizer()
    writer = Recites(tokenizer, ["A turn without an end"])
    with pytest.raises(PassError, match=r"the model writes too few user messages that end.*--data"):
        SelfPrompts(tokenizer, (EOS,), writer, 100).write(3, random.Random(0))
    assert len(writer.calls) == self_prompts.MAX_BATCHES


def test_the_prompt_of_a_base_model_is_its_start_token():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    writer = Recites(tokenizer, TURNS)
    assert SelfPrompts(tokenizer, (EOS,), writer, 100).write(3, random.Random(0)) == [[0]] * 3
    assert not writer.calls


def test_a_text_is_cut_after_the_first_period_of_a_loop(tmp_path: Path):
    class Loops(Recites):
        def write(self, prompts, length, *rest):
            return [[*prompt, *range(10, 15), *[7, 8, 9] * 30][:length] for prompt in prompts]

    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    distiller = Distiller(
        Loops(tokenizer, TURNS), tokenizer, (EOS,), [None], Recipe(sequences=2, length=80)
    )
    distiller.write_missing(tmp_path, range(1), lambda _done, _total: None)
    data = distiller.read(tmp_path, [0])
    assert data.tokens[0, : data.lengths[0]].tolist() == [0, *range(10, 15), 7, 8, 9]
    assert int(data.prompt_lengths[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "w8a8"])
def test_writers_continue_prompts(tiny_model: Path, tmp_path: Path, kind: str):
    """With the same seed they write the same texts, each of which ends at its end token."""
    loaded = load_model(resolve(str(tiny_model)), "fp32")
    writer: TextWriter = TorchTextWriter(loaded.model, (EOS,))
    if kind == "w8a8":
        writer = BundleTextWriter(str(tiny_model), tmp_path, 40, SilentProgress())
    prompts = [[0, 5, 6, 7], [0, 9], [0, 30, 31, 32, 33, 34]] * 12
    for temperature in (0.0, 1.0):
        lines = writer.write(prompts, 40, temperature, 1.0, 3)
        assert lines == writer.write(prompts, 40, temperature, 1.0, 3)
        for line, prompt in zip(lines, prompts, strict=True):
            assert line[: len(prompt)] == prompt
            assert EOS not in line[len(prompt) : -1]
            assert len(line) == 40 or line[-1] == EOS
        same = sum(line == lines[0] for line in lines[::3])
        assert same == 12 if temperature == 0 else same < 12
    if kind == "w8a8":
        written = (tmp_path / "w8a8" / "trunk.onnx").stat().st_mtime_ns
        again = BundleTextWriter(str(tiny_model), tmp_path, 40, SilentProgress())
        assert again.write(prompts, 40, 0.0, 1.0, 3) == writer.write(prompts, 40, 0.0, 1.0, 3)
        assert (tmp_path / "w8a8" / "trunk.onnx").stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_base_model_trains_on_text_of_its_own(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A later run with more sequences reads the shards of the first."""
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base, ignore=shutil.ignore_patterns("chat_template*"))
    recipe = Recipe(sequences=64, length=40, prompt=(4, 8))
    small = {"lookahead": 2, "steps": 2, "head": True, "head_rank": 8, "head_width": 16}
    formats = {"dtype": "fp32", "device": "cpu", "write_with": "torch"}
    files = (str(base), (Path(SELF_NAME),), tmp_path / "run")
    config = TrainConfig(*files, recipe=recipe, **small, **formats)
    run(config, Silent())
    shards = list((tmp_path / "cache").glob("distilled/*/*/shard-*"))
    stamps = [path.stat().st_mtime_ns for path in shards]
    assert load_file(shards[0])["prompts"].unique().tolist() == [1]
    more = replace(recipe, sequences=66)
    run(replace(config, output=tmp_path / "more", recipe=more), Silent())
    assert [path.stat().st_mtime_ns for path in shards] == stamps
    assert len(list((tmp_path / "cache").glob("distilled/*/*/shard-*"))) == len(shards) + 1


def test_top_p_leaves_out_the_unlikely(tiny_model: Path):
    loaded = load_model(resolve(str(tiny_model)), "fp32")
    writer = TorchTextWriter(loaded.model, (EOS,))
    wide, narrow = (writer.write([[0, 5]] * 16, 12, 1.0, top_p, 3) for top_p in (1.0, 0.01))
    assert len({tuple(line) for line in narrow}) == 1 < len({tuple(line) for line in wide})
