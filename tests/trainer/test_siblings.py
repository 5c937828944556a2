"""scripts/siblings.py: its chain is that of `pass-train evaluate`, and its trees are those of the definition."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.bundle.reference import gumbel_scores
from pass_runtime.measuring.real_use import ALL, CORE_KINDS, MARGIN
from pass_trainer.drafter import Drafter
from pass_trainer.evaluation.counts import fused_sizes
from pass_trainer.evaluation.drafts import group_states, last_logits
from pass_trainer.evaluation.evaluate import EvaluateConfig, Text, answered, evaluate

LOOKAHEAD, TOKENS = 3, 24


class Silent:
    def phase(self, _name: str):
        return lambda _done, _total, _note="": None


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "siblings.py"
    spec = importlib.util.spec_from_file_location("siblings", path)
    module = sys.modules["siblings"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(subset_bundle: Path, tmp_path: Path, cache) -> EvaluateConfig:
    """The head's candidates are half of the vocabulary."""
    path, texts = tmp_path / "prompts.jsonl", ("who is the fox?", "The quick brown", "def add(a, b):")
    lines = [{"id": t, "kind": kind, "prompt": t} for kind, t in zip(CORE_KINDS, texts, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model, weights = subset_bundle.parent / "model", subset_bundle.parent / "lookahead.safetensors"
    return EvaluateConfig(str(model), weights, path, TOKENS, (0.0, 0.8, 9.0), lookahead=LOOKAHEAD, device="cpu")


def test_the_chain_is_that_of_evaluate(script, config):
    expected, found = evaluate(config, Silent()), script.measure(config, Silent())
    for temperature, sums in found.items():
        assert sums["chain", LOOKAHEAD] == expected[f"{temperature:g}"][ALL].main.fused
    hot = found[9.0]
    assert hot["chain", LOOKAHEAD].tau > 1.2 and hot["tree", 32].tau > hot["tree", 4].tau
    lines = script.table(found, LOOKAHEAD).splitlines()
    assert len(lines) == 2 + len(hot) and {line.count("|") for line in lines} == {3 + 2 * 3}


def likeliest(drafter: Drafter, text: Text, anchors: range, place: int, most: int) -> list[tuple[int, ...]]:
    """Return the paths of the `most` likeliest drafts: from all tokens, level by level, by the runtime's definition."""
    tokens = text.answer.prompt + text.answer.written
    hidden, positions = group_states(drafter, tokens, anchors, LOOKAHEAD)
    level, every = [((), 0.0)], []
    for depth in range(LOOKAHEAD):
        following = []
        for path, log in level:
            before = torch.tensor([[tokens[anchors[place] + 1], *path]])
            logits = last_logits(drafter, hidden[place : place + 1, : depth + 1], before).numpy()
            (scores,) = gumbel_scores(logits, positions[place, depth : depth + 1], text.sampling)
            scores = scores - np.logaddexp.reduce(scores)
            following += [((*path, int(token)), log + scores[token]) for token in np.argsort(-scores)[:most]]
        level = sorted(following, key=lambda found: -found[1])[:most]
        every += level
    return [path for path, _ in sorted(every, key=lambda found: -found[1])[:most]]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 0.8, 9.0])
def test_trees(script, config, temperature):
    """Against a search through all drafts, at places of one text."""
    drafter, texts = answered(config, Silent())
    text, most, right = texts[temperature][0], 12, 0
    anchors = text.anchors(TOKENS)
    places = script.grown(drafter, text, anchors, LOOKAHEAD, most)
    for k in range(0, len(places), 3):
        paths = likeliest(drafter, text, anchors, k, most)
        follows = [tuple(places[k].text[: len(path)]) == path for path in paths]
        assert [places[k].accepted(n) for n in range(most + 1)] == [sum(follows[:n]) for n in range(most + 1)]
        first = [path[0] for path in paths if len(path) == 1]
        assert first and places[k].first[: len(first)] == first
        right += sum(follows)
    assert right > 0 or temperature < 9


def test_a_pass_after_a_second_choice_has_no_drafts(script):
    places = [script.Place([5, 6, 7], first=[5, 1, 2], chain=2), *(script.Place([9]) for _ in range(2))]
    places.append(script.Place([8, 3], first=[4, 8, 3]))
    places += [script.Place([7, 7], first=[7, 1, 1], chain=2) for _ in range(6)]
    # tokens 0 | 1 2 3 | 4 5, of which 5 is after the second choice | 6, without drafts | 7 8 9
    assert list(script.sibling_sizes(places, 1, 10)) == [1, 3, 2, 1, 3]
    places[3].first = [4, 3, 8]
    assert list(script.sibling_sizes(places, 1, 10)) == [1, 3, 1, 3, 2]
    assert list(script.sibling_sizes(places, 2, 10)) == [1, 3, 2, 1, 3]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 30 + MARGIN))
def test_without_second_choices_it_is_the_chain(script, accepted, length):
    places = [script.Place([1, 1, 1], first=[1 if n else 0, 1], chain=n) for n in accepted]
    assert list(script.sibling_sizes(places, 0, length)) == list(fused_sizes(accepted, length))
