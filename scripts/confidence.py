"""What it would bring to verify only the drafts that will probably survive: calibration, and simulated speed.

    python scripts/confidence.py models/smollm2-135m/lookahead.safetensors --model smollm2-135m --each 4 \\
        --pass 1 --row 0.045 --draft-pass 0.12

On answers to the first prompts of each kind of `pass-train evaluate`, outside loops. A draft's confidence is its share
of the softmax of the scores that it was chosen by (in sampling, with the position's noise); its log-odds are calibrated
by two numbers for each depth, fitted on every other text and shown on the rest. Survival is the product along the
chain. Simulated are draft and verify passes in turn: with the number of drafts that is best on average, with as many as
are worth their rows where survival is known, and where it is known which drafts are right, which no policy can exceed.
--pass, --row and --draft-pass: what a plain pass, each row more and look-ahead rows in a pass take, in any unit
(`pass-run bench --rows`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from siblings import PROMPTS, Scores

from pass_exporter.terminal import Terminal
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.measuring.real_use import KINDS, parse_temperatures, read_use, stretches
from pass_trainer.drafter import Drafter
from pass_trainer.evaluation.evaluate import EvaluateConfig, Text, answered

Floats = npt.NDArray[np.float64]
BINS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
STEPS = 200
"""Newton steps of the calibration, which converges in far fewer."""


@dataclass(frozen=True)
class Chains:
    """The drafts at every place of a text. log_odds [N,L]: of their confidence. right [N,L]: whether a draft and all
    before it are the text's own tokens. counted [N]: whether the place is outside loops."""

    log_odds: Floats
    right: npt.NDArray[np.bool_]
    counted: npt.NDArray[np.bool_]


@torch.no_grad()
def chains_of(drafter: Drafter, text: Text, anchors: range, lookahead: int) -> Chains:
    """Draft a chain at every place, as the runtime does."""
    scores, tokens = Scores(drafter, text, anchors, lookahead), text.answer.prompt + text.answer.written
    places, before = list(range(len(anchors))), [tokens[anchor + 1] for anchor in anchors]
    state = torch.zeros(len(anchors), drafter.head.width)  # type: ignore[union-attr]
    log_odds, right = np.zeros((len(anchors), lookahead)), np.zeros((len(anchors), lookahead), np.bool_)
    alive = np.ones(len(anchors), np.bool_)
    for depth in range(lookahead):
        state, ids, found = scores.after(places, [depth] * len(places), before, state)
        share = np.exp(found.max(1) - np.logaddexp.reduce(found.astype(np.float64), axis=1)).clip(1e-6, 1 - 1e-6)
        before = np.take_along_axis(ids, found.argmax(1)[:, None], 1)[:, 0].tolist()
        own = [tokens[anchor + 2 + depth] if anchor + 2 + depth < len(tokens) else -1 for anchor in anchors]
        alive &= np.array(before) == own
        log_odds[:, depth], right[:, depth] = np.log(share / (1 - share)), alive
    main, _ = stretches(text.answer.written, len(text.answer.written))
    return Chains(log_odds, right, np.isin(np.arange(len(anchors)), list(main)))


def calibrate(chains: Sequence[Chains], depth: int) -> Floats:
    """Return (a, b): the draft at `depth` is right with the log-odds a * log_odds + b where those before it are."""
    reached = [c.counted & (c.right[:, depth - 1] if depth else True) for c in chains]
    x = np.concatenate([c.log_odds[r, depth] for c, r in zip(chains, reached, strict=True)])
    y = np.concatenate([c.right[r, depth] for c, r in zip(chains, reached, strict=True)])
    features, uncalibrated = np.stack([x, np.ones_like(x)], 1), np.array([1.0, 0.0])
    numbers = uncalibrated
    for _ in range(STEPS):  # Newton's method, with one place's worth of belief in no calibration
        p = sigmoid(features @ numbers)
        slope = features.T @ (y - p) - (numbers - uncalibrated)
        curvature = (features * (p * (1 - p))[:, None]).T @ features + np.eye(2)
        change = np.linalg.solve(curvature, slope)
        numbers = numbers + change / max(1.0, float(np.abs(change).max()))  # A step of at most 1 does not overshoot.
    return numbers


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))"""
    found: Floats = 0.5 * (1 + np.tanh(x / 2))
    return found


def survival(chain: Chains, numbers: Sequence[Floats]) -> Floats:
    """[N,L]: how likely drafts 1..i are all right."""
    each = [sigmoid(a * chain.log_odds[:, depth] + b) for depth, (a, b) in enumerate(numbers)]
    found: Floats = np.cumprod(np.stack(each, 1), 1)
    return found


@dataclass(frozen=True)
class Cost:
    """What passes take: a plain one, each row more, and what look-ahead rows add to a pass of their own."""

    plain: float
    row: float
    draft: float

    def verify(self, drafts: int) -> float:
        return self.plain + self.row * drafts

    def drafting(self, lookahead: int) -> float:
        return self.plain + self.row * lookahead + self.draft


def rate(chains: Sequence[Chains], choose: Callable[[int, int], int], cost: Cost) -> tuple[float, float]:
    """Tokens for each unit of time, and accepted drafts for each one verified, where choose(text, place) says how many
    drafts a verify pass gets; after 0 the next draft pass comes at once."""
    tokens, time, verified, accepted = 0, 0.0, 0, 0
    for number, chain in enumerate(chains):
        place, count, lookahead = 0, len(chain.right), chain.right.shape[1]
        while place < count:
            drafts = choose(number, place)
            size = 1
            spent = cost.drafting(lookahead)
            if drafts:
                found = int(chain.right[place, :drafts].sum())
                size, spent = size + 1 + found, spent + cost.verify(drafts)
                verified, accepted = verified + drafts, accepted + found
            tokens, time, place = tokens + size, time + spent, place + size
    return tokens / time, accepted / verified if verified else 0.0


def worth(survives: Floats, cost: Cost, speed: float) -> int:
    """How many drafts to verify: those that bring more than their rows cost at this speed; 0 where a pass with them
    brings less than it takes."""
    gains = 1 + np.cumsum(survives) - speed * np.array([cost.verify(i + 1) for i in range(len(survives))])
    best = int(gains.argmax())
    return best + 1 if gains[best] > 0 else 0


def simulate(chains: Sequence[Chains], numbers: Sequence[Floats], cost: Cost) -> dict[str, tuple[float, float]]:
    """Speed relative to plain decoding, and the share of verified drafts that are accepted, by policy."""
    lookahead = chains[0].right.shape[1]
    found = {
        "as many as is best on average": max(rate(chains, lambda _t, _p, k=k: k, cost) for k in range(1, lookahead + 1))
    }
    expected = [survival(chain, numbers) for chain in chains]
    speed = found["as many as is best on average"][0]
    for _ in range(5):  # What a row is worth depends on the speed, which depends on that.
        chosen = [[worth(row, cost, speed) for row in rows] for rows in expected]
        found["as survival says"] = rate(chains, lambda text, place, chosen=chosen: chosen[text][place], cost)
        speed = found["as survival says"][0]
    found["those that are right"] = rate(chains, lambda t, p: int(chains[t].right[p].sum()), cost)
    return {name: (speed * cost.plain, share) for name, (speed, share) in found.items()}


def curve(chains: Sequence[Chains], numbers: Sequence[Floats], depth: int) -> list[str]:
    """Return the calibration at a depth by bins of survival: expected and true shares, and places."""
    x = np.concatenate([survival(c, numbers)[c.counted, depth] for c in chains])
    y = np.concatenate([c.right[c.counted, depth] for c in chains])
    at = np.clip(np.digitize(x, BINS) - 1, 0, len(BINS) - 2)
    return [
        f"{x[at == i].mean():.2f} {y[at == i].mean():.2f} ({(at == i).sum()})" if (at == i).any() else "-"
        for i in range(len(BINS) - 1)
    ]


@click.command()
@click.argument("weights", type=click.Path(exists=True, path_type=Path))
@click.option("--model", required=True)
@click.option("--each", type=click.IntRange(1), default=4, show_default=True, help="Prompts of each kind.")
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True, help="The longest answer.")
@click.option("--temperatures", default="0,0.8", show_default=True)
@click.option("--lookahead", default=4, show_default=True)
@click.option("--pass", "plain", type=float, default=1.0, show_default=True)
@click.option("--row", type=float, default=0.045, show_default=True)
@click.option("--draft-pass", type=float, default=0.12, show_default=True)
@one_line_errors
def main(
    weights: Path,
    model: str,
    each: int,
    tokens: int,
    temperatures: str,
    lookahead: int,
    plain: float,
    row: float,
    draft_pass: float,
) -> None:
    """Print calibration and simulated speeds."""
    prompts, cost = read_use(PROMPTS), Cost(plain, row, draft_pass)
    chosen = [prompt for kind in KINDS for prompt in [p for p in prompts if p.kind == kind][:each]]
    with tempfile.TemporaryDirectory() as directory, Terminal(Console(stderr=True)) as progress:
        path = Path(directory) / "prompts.jsonl"
        lines = [json.dumps({"id": p.id, "kind": p.kind, "prompt": p.text}) + "\n" for p in chosen]
        path.write_text("".join(lines), encoding="utf-8")
        at = parse_temperatures(temperatures)
        config = EvaluateConfig(model, weights, path, tokens, at, lookahead=lookahead, device="cpu")
        drafter, texts_at = answered(config, progress)
        for temperature, texts in texts_at.items():
            found = [(t, t.anchors(tokens)) for t in texts]
            every = [chains_of(drafter, text, anchors, lookahead) for text, anchors in found if anchors]
            fitted, rest = every[::2], every[1::2]
            numbers = [calibrate(fitted, depth) for depth in range(lookahead)]
            click.echo(f"T = {SamplingParams(temperature).temperature:g}")
            for depth, (a, b) in enumerate(numbers):
                shown = " | ".join(curve(rest, numbers, depth))
                click.echo(f"  depth {depth + 1}: {a:.2f} x + {b:.2f}; expected, true (places): {shown}")
            for name, (speed, share) in simulate(rest, numbers, cost).items():
                click.echo(f"  {name}: {speed:.3f} times plain decoding; {share:.2f} of the verified drafts accepted")


if __name__ == "__main__":
    main()
