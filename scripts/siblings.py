"""What drafts beside the chain would add: tau of `fused` with second choices, and with a tree of drafts.

    python scripts/siblings.py models/smollm2-135m/lookahead.safetensors --model smollm2-135m --each 4

On answers to the first prompts of each kind of `pass-train evaluate`, outside loops, by the exact-match rule: a pass
follows the draft that is the model's own token. Compared are

- the chain of L drafts;
- the chain and the next one or two choices for its first draft. No look-ahead group follows them, so the pass after one
  that accepted a second choice has no drafts;
- a tree of the N likeliest drafts, at most L deep, grown best first, with a group of L rows after every draft.

A draft's likelihood is the product of probabilities on its path. In sampling they are those of a softmax of the scores
with the position's noise, whose largest is drawn. Rows are those of a pass with whole groups: a runtime that leaves out
unlikely ones needs fewer.
"""

from __future__ import annotations

import heapq
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console

from pass_exporter.model.head import candidates
from pass_exporter.terminal import Terminal
from pass_runtime.bundle import noise
from pass_runtime.bundle.reference import log_exponentials, two_level_scores
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import KINDS, Passes, count_passes, parse_temperatures, read_use, stretches
from pass_trainer.drafter import Drafter
from pass_trainer.evaluation.counts import fused_sizes
from pass_trainer.evaluation.drafts import group_states
from pass_trainer.evaluation.evaluate import PROMPTS, EvaluateConfig, Text, answered

SIBLINGS = (1, 2)
TREES = (4, 8, 16, 32)
Key = tuple[str, int]
"""(kind of drafts, their number): ("chain", L), ("siblings", 1), ("tree", 8)."""


@dataclass
class Place:
    """The tree of one place. heap: drafts that are not in it yet, with the node before them. order: of the text's own
    first tokens, how many drafts the tree had before each; a tree of N drafts has those with less than N."""

    text: Sequence[int]
    heap: list[tuple[float, int, int, int]] = field(default_factory=list)
    taken: int = 0
    order: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    chain: int = 0

    def accepted(self, rows: int) -> int:
        return sum(order < rows for order in self.order)


class Scores:
    """The scores of drafts at the places of a text: their order is that of the choices, noise included."""

    def __init__(self, drafter: Drafter, text: Text, anchors: range, lookahead: int) -> None:
        if drafter.head is None:
            raise PassError("the weights have no draft head; without one a draft does not depend on the one before it")
        tokens = text.answer.prompt + text.answer.written
        states, self.positions = group_states(drafter, tokens, anchors, lookahead)
        logits = drafter.logits(states)
        self.head, self.sampling, self.states = drafter.head, text.sampling, states.float() @ drafter.head.hidden.T
        self.ids = candidates(logits)
        self.logits, self.vocabulary = logits.gather(-1, self.ids).float(), logits.shape[-1]

    def after(
        self, places: Sequence[int], depth: Sequence[int], before: Sequence[int], state: torch.Tensor
    ) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Return the head's states [N,m], the candidates' ids [N,C] and their scores [N,C]. before: the token before
        each draft; state [N,m]: the head's states there."""
        head, at = self.head, (torch.tensor(places), torch.tensor(depth))
        read = self.states[at] + head.table[torch.tensor(before)] @ head.token.T + head.bias + state @ head.state.T
        state, ids = torch.nn.functional.silu(read), self.ids[at]
        added = torch.einsum("ncr,nr->nc", head.table[ids], state @ head.out.T)
        logits = (self.logits[at] + added).numpy()
        return state, ids.numpy(), self._scores(logits, ids.numpy(), self.positions[places, depth])

    def _scores(self, logits: np.ndarray, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """`reference.gumbel_scores` of the candidates alone: they are whole blocks, in the vocabulary's order."""
        if self.sampling.temperature == 0:
            return logits
        scaled = logits / np.float32(self.sampling.temperature)
        offsets = noise.noise_offsets(self.sampling.seed or 0, positions)
        drawn = log_exponentials(offsets, self.vocabulary)
        (start, _), _ = noise.entries_per_position(self.vocabulary)
        blocks = ids[:, : noise.vocabulary_blocks(ids.shape[1])]  # a candidate id below K is its block's number
        chosen = np.concatenate([drawn[:, :start], np.take_along_axis(drawn, start + blocks, 1)], 1)
        return two_level_scores(scaled - scaled.max(-1, keepdims=True), chosen)


@torch.no_grad()
def grown(drafter: Drafter, text: Text, anchors: range, lookahead: int, rows: int) -> list[Place]:
    """Grow the tree of every place, one draft after another, to `rows` drafts."""
    scores = Scores(drafter, text, anchors, lookahead)
    tokens = text.answer.prompt + text.answer.written
    places = [Place(tokens[anchor + 2 : anchor + 2 + lookahead]) for anchor in anchors]
    # A node is (place, tokens on its path, the log of its likelihood, the head's state); the first is the new root.
    state = torch.zeros(len(places), drafter.head.width)  # type: ignore[union-attr]
    nodes = [(k, (), 0.0, state[k]) for k in range(len(places))]
    paths: list[list[tuple[tuple[int, ...], torch.Tensor]]] = [[] for _ in places]
    while nodes:
        before = [path[-1] if path else tokens[anchors[k] + 1] for k, path, _, _ in nodes]
        states, ids, found = scores.after(
            [k for k, *_ in nodes], [len(path) for _, path, _, _ in nodes], before, torch.stack([s for *_, s in nodes])
        )
        logs = found - np.logaddexp.reduce(found, axis=1, keepdims=True)
        best = np.argsort(-found, axis=1, kind="stable")[:, :rows]
        for (k, path, log, _), state_after, row, choices, each in zip(nodes, states, ids, best, logs, strict=True):
            place = places[k]
            paths[k].append((path, state_after))
            _note(place, path, row[choices])
            for choice in choices:
                heapq.heappush(place.heap, (-(log + float(each[choice])), len(paths[k]) - 1, int(row[choice]), 0))
        nodes = []
        for k, place in enumerate(places):
            nodes += _take(k, place, paths[k], lookahead, rows)
    return places


def _note(place: Place, path: tuple[int, ...], choices: np.ndarray) -> None:
    """Note what the chain and the second choices are, where the path is the text so far."""
    if not path:
        place.first = choices.tolist()
    depth = len(path)
    if list(path) == list(place.text[:depth]) and place.chain == depth < len(place.text):
        place.chain += int(choices[0]) == place.text[depth]


def _take(
    k: int, place: Place, paths: list[tuple[tuple[int, ...], torch.Tensor]], lookahead: int, rows: int
) -> Iterator[tuple[int, tuple[int, ...], float, torch.Tensor]]:
    """Take the likeliest drafts into the tree, up to one that others can follow, and yield that."""
    while place.heap and place.taken < rows:
        minus_log, number, token, _ = heapq.heappop(place.heap)
        before, state = paths[number]
        path = (*before, token)
        if list(path) == list(place.text[: len(path)]):
            place.order.append(place.taken)
        place.taken += 1
        if len(path) < lookahead:
            yield k, path, -minus_log, state
            return


def sibling_sizes(places: Sequence[Place], siblings: int, length: int) -> Iterator[int]:
    """Yield the tokens of each pass, as `counts.fused_sizes` does, where the chain has second choices at its first
    draft: no drafts follow one that was accepted."""
    yield 1
    begin, drafted = 1, True
    while begin - 1 < len(places) and begin < length:
        place, size = places[begin - 1], 1
        by_sibling = (
            drafted and place.chain == 0 and bool(place.text) and place.text[0] in place.first[1 : 1 + siblings]
        )
        if drafted:
            size += place.chain + by_sibling
        size, drafted = min(size, length - begin), not by_sibling
        yield size
        begin += size


def passes_of(places: Sequence[Place], lookahead: int, length: int, where: range) -> dict[Key, Passes]:
    """Count the passes of every kind of drafts over one text."""
    sizes: dict[Key, Iterator[int]] = {("chain", lookahead): fused_sizes([p.chain for p in places], length)}
    sizes |= {("siblings", n): sibling_sizes(places, n, length) for n in SIBLINGS}
    sizes |= {("tree", n): fused_sizes([p.accepted(n) for p in places], length) for n in TREES}
    return {key: count_passes(each, where) for key, each in sizes.items()}


def rows_of(key: Key, lookahead: int) -> int:
    """Rows of a pass: the root and the drafts, and a group after each of them but second choices."""
    kind, number = key
    chain = 1 + lookahead + lookahead * (1 + lookahead)
    return {"chain": chain, "siblings": chain + number, "tree": 1 + number + lookahead * (1 + number)}[kind]


def measure(config: EvaluateConfig, progress: Terminal) -> dict[float, dict[Key, Passes]]:
    """Return the passes by temperature and kind of drafts."""
    drafter, texts_at = answered(config, progress)
    sums: dict[float, dict[Key, Passes]] = {}
    for temperature, texts in texts_at.items():
        step, total = progress.phase(f"trees at temperature {temperature:g}"), {}
        for done, text in enumerate(texts):
            written, anchors = text.answer.written, text.anchors(config.tokens)
            if anchors:
                places = grown(drafter, text, anchors, config.lookahead, max(TREES))
                main, _ = stretches(written, config.tokens)
                for key, passes in passes_of(places, config.lookahead, len(written), main).items():
                    total[key] = total.get(key, Passes()) + passes
            step(done + 1, len(texts))
        sums[temperature] = total
    return sums


def table(sums: dict[float, dict[Key, Passes]], lookahead: int) -> str:
    """Return the table of tau, and of its gain over the chain, in Markdown."""
    names = [SamplingParams(t).temperature for t in sums]
    heading = " | ".join(f"tau, T={t:g} | gain" for t in names)
    lines = [f"| drafts | rows | {heading} |", "|---" * (2 + 2 * len(names)) + "|"]
    chain = ("chain", lookahead)
    for key in next(iter(sums.values())):
        kind, number = key
        label = {
            "chain": f"chain of {number}",
            "siblings": f"and {number} more at depth 1",
            "tree": f"tree of {number}",
        }
        cells = " | ".join(f"{s[key].tau:.3f} | {100 * (s[key].tau / s[chain].tau - 1):+.1f} %" for s in sums.values())
        lines.append(f"| {label[kind]} | {rows_of(key, lookahead)} | {cells} |")
    return "\n".join(lines)


@click.command()
@click.argument("weights", type=click.Path(exists=True, path_type=Path))
@click.option("--model", required=True)
@click.option("--each", type=click.IntRange(1), default=4, show_default=True, help="Prompts of each kind.")
@click.option(
    "--tokens", type=click.IntRange(2), default=128, show_default=True, help="The longest answer that counts."
)
@click.option("--temperatures", default="0,0.8", show_default=True)
@click.option("--lookahead", default=4, show_default=True)
@one_line_errors
def main(weights: Path, model: str, each: int, tokens: int, temperatures: str, lookahead: int) -> None:
    """Print tau by temperature and kind of drafts."""
    prompts = read_use(PROMPTS)
    chosen = [prompt for kind in KINDS for prompt in [p for p in prompts if p.kind == kind][:each]]
    with tempfile.TemporaryDirectory() as directory, Terminal(Console(stderr=True)) as progress:
        path = Path(directory) / "prompts.jsonl"
        lines = [json.dumps({"id": p.id, "kind": p.kind, "prompt": p.text}) + "\n" for p in chosen]
        path.write_text("".join(lines), encoding="utf-8")
        at = parse_temperatures(temperatures)
        sums = measure(EvaluateConfig(model, weights, path, tokens, at, lookahead=lookahead, device="cpu"), progress)
    print(table(sums, lookahead))


if __name__ == "__main__":
    main()
