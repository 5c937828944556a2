"""`--data self`, and text writers."""

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
from pass_trainer.config import Recipe, TrainConfig
from pass_trainer.corpus import SELF_NAME
from pass_trainer.run import run
from pass_trainer.text import MAX_BATCHES, Distiller, SelfPrompts
from pass_trainer.writers import BundleTextWriter, TextWriter, TorchTextWriter

EGG, POEM = "How do I boil an egg?", "Write a poem about foxes"
ENDLESS = "A turn without an end"
TURNS = [EGG, EGG, "ok", "", ENDLESS, POEM]
"""Only EGG and POEM end, and are not too short."""


class TurnWriter:
    """Writes `turns` again and again, each with an end token but ENDLESS."""

    name = "turns"

    def __init__(self, tokenizer, turns: list[str]) -> None:
        self._tokenizer, self._turns, self.calls = tokenizer, itertools.cycle(turns), []

    def write(
        self, prompts, length: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        self.calls.append((list(prompts[0]), temperature, top_p, seed))
        texts = []
        for prompt, turn in zip(prompts, self._turns, strict=False):
            end = [] if turn == ENDLESS else [EOS]
            texts.append([*prompt, *self._tokenizer.encode(turn, add_special_tokens=False), *end])
        return texts


def test_different_turns_that_end_become_prompts():
    tokenizer = make_tokenizer()
    writer = TurnWriter(tokenizer, TURNS)
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
    fitting, too_short = (
        SelfPrompts(tokenizer, (EOS,), TurnWriter(tokenizer, [POEM]), limit)
        for limit in (length, length - 1)
    )
    assert len(fitting.write(1, random.Random(0))[0]) == length
    with pytest.raises(PassError, match="--data"):
        too_short.write(1, random.Random(0))


def test_a_model_whose_turns_do_not_end_is_refused():
    tokenizer = make_tokenizer()
    writer = TurnWriter(tokenizer, [ENDLESS])
    with pytest.raises(PassError, match=r"the model writes too few user messages that end.*--data"):
        SelfPrompts(tokenizer, (EOS,), writer, 100).write(3, random.Random(0))
    assert len(writer.calls) == MAX_BATCHES


def test_the_prompt_of_a_base_model_is_its_start_token():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    writer = TurnWriter(tokenizer, TURNS)
    assert SelfPrompts(tokenizer, (EOS,), writer, 100).write(3, random.Random(0)) == [[0]] * 3
    assert not writer.calls


def test_a_text_is_cut_after_the_first_period_of_a_loop(tmp_path: Path):
    class LoopWriter(TurnWriter):
        def write(self, prompts, length, *_):
            return [[*prompt, *range(10, 15), *[7, 8, 9] * 30][:length] for prompt in prompts]

    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    writer, recipe = LoopWriter(tokenizer, TURNS), Recipe(sequences=2, sequence_length=80)
    distiller = Distiller(writer, tokenizer, (EOS,), [None], recipe)
    distiller.write_missing(tmp_path, range(1))
    data = distiller.read(tmp_path, [0])
    assert data.tokens[0, : data.lengths[0]].tolist() == [0, *range(10, 15), 7, 8, 9]
    assert int(data.prompt_lengths[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "int8"])
def test_a_writer_continues_prompts_up_to_an_end_token_or_the_length(tiny_model, tmp_path, kind):
    loaded = load_model(resolve(str(tiny_model)), "fp32")
    writer: TextWriter = TorchTextWriter(loaded.model, (EOS,))
    if kind == "int8":
        writer = BundleTextWriter(str(tiny_model), tmp_path, 40, SilentProgress())
    prompts = [[0, 5, 6, 7], [0, 9], [0, 30, 31, 32, 33, 34]] * 12
    for temperature in (0.0, 1.0):
        texts = writer.write(prompts, 40, temperature, 1.0, 3)
        assert texts == writer.write(prompts, 40, temperature, 1.0, 3)
        for text, prompt in zip(texts, prompts, strict=True):
            assert text[: len(prompt)] == prompt
            assert EOS not in text[len(prompt) : -1]
            assert len(text) == 40 or text[-1] == EOS
        equal = sum(text == texts[0] for text in texts[::3])  # of the twelve with the first prompt
        assert equal == 12 if temperature == 0 else equal < 12
    if kind == "int8":  # a second writer uses the bundle that the first exported
        exported = (tmp_path / "int8" / "trunk.onnx").stat().st_mtime_ns
        second = BundleTextWriter(str(tiny_model), tmp_path, 40, SilentProgress())
        assert second.write(prompts, 40, 0.0, 1.0, 3) == writer.write(prompts, 40, 0.0, 1.0, 3)
        assert (tmp_path / "int8" / "trunk.onnx").stat().st_mtime_ns == exported


@pytest.mark.slow
def test_a_base_model_trains_on_text_of_its_own(tiny_model, tmp_path, monkeypatch):
    """A later run reads the shards of the first."""
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base, ignore=shutil.ignore_patterns("chat_template*"))
    recipe = Recipe(sequences=64, sequence_length=40, prompt_tokens=(4, 8))
    small = {"lookahead": 2, "steps": 2, "head": True, "head_rank": 8, "head_width": 16}
    formats = {"dtype": "fp32", "device": "cpu", "write_with": "torch"}
    files = (str(base), (Path(SELF_NAME),), tmp_path / "run")
    config = TrainConfig(*files, recipe=recipe, **small, **formats)
    run(config, Silent())
    shards = list((tmp_path / "cache").glob("distilled/*/*/shard-*"))
    stamps = [path.stat().st_mtime_ns for path in shards]
    # The prompts of a base model are its start token alone, so one token long.
    assert load_file(shards[0])["prompt_lengths"].unique().tolist() == [1]
    larger = replace(recipe, sequences=66)
    run(replace(config, output=tmp_path / "larger", recipe=larger), Silent())
    assert [path.stat().st_mtime_ns for path in shards] == stamps
    assert len(list((tmp_path / "cache").glob("distilled/*/*/shard-*"))) == len(shards) + 1


def test_a_small_top_p_leaves_only_the_likeliest_token(tiny_model: Path):
    loaded = load_model(resolve(str(tiny_model)), "fp32")
    writer = TorchTextWriter(loaded.model, (EOS,))
    all_tokens, likeliest = (
        {tuple(text) for text in writer.write([[0, 5]] * 16, 12, 1.0, top_p, 3)}
        for top_p in (1.0, 0.01)
    )
    assert len(likeliest) == 1 < len(all_tokens)
