"""scripts/confidence.py: its calibration finds the truth, and its simulated speeds are those worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("confidence", SCRIPTS / "confidence.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["confidence"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPTS))


def chains(script, right, log_odds=None):
    right = np.array(right, bool)
    return script.Chains(np.zeros(right.shape) if log_odds is None else log_odds, right, np.ones(len(right), bool))


def test_calibration_finds_what_the_drafts_were_drawn_by(script):
    rng = np.random.default_rng(0)
    x = rng.normal(0, 2, (20_000, 2))
    each = rng.random(x.shape) < script.sigmoid(np.array([0.5, 1.5]) * x + np.array([-1.0, 0.3]))
    drawn = chains(script, np.cumprod(each, 1), x)
    numbers = [script.calibrate([drawn], depth) for depth in range(2)]
    np.testing.assert_allclose(numbers, [(0.5, -1.0), (1.5, 0.3)], atol=0.1)
    expected = script.survival(drawn, numbers)
    assert abs(expected[:, 1].mean() - drawn.right[:, 1].mean()) < 0.01


def test_one_sided_places_do_not_diverge(script):
    """Where every draft is wrong, the numbers stay finite."""
    found = script.calibrate([chains(script, np.zeros((9, 1)), np.full((9, 1), -8.0))], 0)
    assert np.abs(found).max() < 10


def test_speeds_by_hand(script):
    """A pass takes 1, a row 0.1, and look-ahead rows in a pass 0.2."""
    cost = script.Cost(1.0, 0.1, 0.2)
    # Both drafts are right at place 0, so the cycle emits a token, and then two drafts and one more.
    drawn = [chains(script, [[1, 1], [0, 0], [0, 0], [0, 0]])]
    speed, share = script.rate(drawn, lambda _text, _place: 2, cost)
    assert speed == pytest.approx(4 / ((1 + 0.2 + 0.2) + (1 + 0.2))) and share == 1.0
    # With no drafts verified every pass is a draft pass that emits one token.
    assert script.rate(drawn, lambda _text, _place: 0, cost) == (pytest.approx(1 / 1.4), 0.0)
    best = script.simulate(drawn, [np.array([1.0, 0.0])] * 2, cost)
    assert best["those that are right"][0] >= best["as many as is best on average"][0]


def test_only_drafts_that_pay_are_verified(script):
    cost = script.Cost(1.0, 0.1, 0.2)
    assert script.worth(np.array([0.9, 0.8, 0.05]), cost, 1.0) == 2
    assert script.worth(np.array([0.9, 0.8, 0.7]), cost, 1.0) == 3
    assert script.worth(np.array([0.05, 0.01, 0.0]), cost, 1.0) == 0
