"""What a pass costs on a GPU by its bytes and operations, and what drafts would bring: arithmetic, not measurement.

    python scripts/gpu_cost.py                                  # every card, 7B
    python scripts/gpu_cost.py --card H100 --model 70B --format fp8 --batch 8 --context 4096
    python scripts/gpu_cost.py --markdown                       # the tables of docs/gpu-cost.md

A pass reads the weights and the K/V of its sequences once, whatever its rows, and computes for every row. It takes as
long as the slower of the two: bytes over the card's bandwidth, operations over its peak, each times the share that is
taken to be reached (a roofline: Williams, Waterman, Patterson 2009). Launches, the tail, and what attention wastes at
few rows are left out, so the truth is slower, and rows cost a little more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from pass_runtime.bundle.plan import make_cycle
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.cli.tables import show_rows

GIGA = 1e9


@dataclass(frozen=True)
class Card:
    """memory in GB, bandwidth in GB/s, dense tensor TFLOPS in fp16 and in fp8 (None: the card has no fp8)."""

    name: str
    memory: float
    bandwidth: float
    fp16: float
    fp8: float | None


CARDS = (
    Card("A10", 24, 600, 125, None),
    Card("L4", 24, 300, 121, 242),
    Card("RTX 4090", 24, 1008, 165, 330),
    Card("A100", 80, 2039, 312, None),
    Card("H100", 80, 3350, 989, 1979),
    Card("H200", 141, 4800, 989, 1979),
)
"""From NVIDIA's data sheets: SXM versions with 80 GB for A100 and H100; without sparsity; fp32 accumulation for RTX."""


@dataclass(frozen=True)
class Model:
    """The shape of a decoder: parameters, and the sizes of attention."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int


MODELS = (
    Model("1B", 1.24e9, 16, 32, 8, 64),  # Llama 3.2 1B
    Model("7B", 6.74e9, 32, 32, 32, 128),  # Llama 2 7B
    Model("13B", 13.0e9, 40, 40, 40, 128),  # Llama 2 13B
    Model("70B", 69.0e9, 80, 64, 8, 128),  # Llama 2 70B
)
WEIGHT_BYTES = {"int4": 0.5 + 2 / 128, "fp8": 1.0, "fp16": 2.0}
"""Bytes of a weight; int4 has a scale in fp16 for 128 weights, and is computed in fp16. K/V are fp16."""
LOOKAHEAD = 4


@dataclass(frozen=True)
class Way:
    """A way of decoding: of each pass of a cycle its rows, and what part of the model it runs; tokens per pass, greedy
    and at T = 0.8."""

    name: str
    passes: tuple[tuple[int, float], ...]
    tau: tuple[float, float]


def _rows(name: str) -> tuple[tuple[int, float], ...]:
    plans = make_cycle(name, LOOKAHEAD).plans
    return tuple((plan.width, 1.0) for plan in plans)


TAUS = {
    "two-pass": (1.51, 1.34),
    "fused": (1.93, 1.59),
    "tree-5": (2.10, 1.74),
    "tree-8": (2.24, 1.84),
    "tree-16": (2.50, 2.02),
}
"""Tokens per pass of SmolLM2-135M with L = 4 (docs/measurements.md, "Second choices and trees")."""
DRAFTER = 0.1
"""What a pass that drafts after acceptance takes, as a share of the whole model: some layers and the LM head."""


def ways(drafter: float) -> list[Way]:
    """The ways that are compared. Drafting after acceptance is taken to accept as `fused` does."""
    found = [Way(name, _rows(name), tau) for name, tau in TAUS.items()]
    after = ((1 + LOOKAHEAD, 1.0), (1 + LOOKAHEAD, drafter))
    tau = TAUS["fused"]
    # Two passes a cycle, of which `tau` counts the first alone.
    return [*found, Way("after acceptance", after, (tau[0] / 2, tau[1] / 2))]


@dataclass(frozen=True)
class Setting:
    """Where a pass runs: card, model, format of the weights, sequences, cached tokens of each, and the shares of
    bandwidth and peak that are reached."""

    card: Card
    model: Model
    weights: str
    batch: int
    context: int
    bandwidth_share: float
    peak_share: float

    @property
    def entry_bytes(self) -> int:
        """Bytes of a token's K/V in all layers."""
        return 2 * 2 * self.model.layers * self.model.kv_heads * self.model.head_size

    @property
    def weight_bytes(self) -> float:
        return self.model.parameters * WEIGHT_BYTES[self.weights]

    @property
    def fits(self) -> bool:
        """Whether weights and cache take at most nine tenths of the memory."""
        return self.weight_bytes + self.batch * self.context * self.entry_bytes <= 0.9 * self.card.memory * GIGA

    @property
    def peak(self) -> float | None:
        """Operations per second that are reached; None where the card does not compute in the format."""
        teraflops = self.card.fp8 if self.weights == "fp8" else self.card.fp16
        return None if teraflops is None else teraflops * 1e12 * self.peak_share

    def bytes(self, rows: int) -> float:
        """Bytes of a pass with so many rows a sequence: weights, K/V that are read, and K/V that are written."""
        return self.weight_bytes + self.batch * (self.context + rows) * self.entry_bytes

    @property
    def row_operations(self) -> float:
        """Operations for one row of one sequence: products with the weights, and attention over the context."""
        model = self.model
        return 2 * model.parameters + 4 * model.layers * model.heads * model.head_size * self.context

    def seconds(self, rows: int) -> float:
        """Of a pass with so many rows a sequence."""
        assert self.peak is not None
        reading = self.bytes(rows) / (self.card.bandwidth * GIGA * self.bandwidth_share)
        return max(reading, self.batch * rows * self.row_operations / self.peak)

    def free_rows(self) -> int:
        """The most rows a sequence with which a pass still takes as long as its bytes do."""
        assert self.peak is not None
        speed = self.card.bandwidth * GIGA * self.bandwidth_share
        by_row = self.batch * (self.row_operations / self.peak - self.entry_bytes / speed)
        return int((self.bytes(0) / speed) / by_row)

    def speed_up(self, way: Way, sampled: bool) -> float:
        """Tokens per second relative to plain decoding."""
        seconds = sum(share * self.seconds(rows) for rows, share in way.passes)
        return len(way.passes) * way.tau[sampled] * self.seconds(1) / seconds


def settings(
    cards: Sequence[Card],
    models: Sequence[Model],
    formats: Sequence[str],
    batches: Sequence[int],
    rest: tuple[int, float, float],
) -> Iterator[Setting]:
    """Those that a card can run."""
    for model in models:
        for card in cards:
            for weights in formats:
                for batch in batches:
                    found = Setting(card, model, weights, batch, *rest)
                    if found.peak is not None:
                        yield found


def cells(setting: Setting, every: Sequence[Way]) -> dict[str, str]:
    """One line of a table."""
    found = {
        "model": setting.model.name,
        "card": setting.card.name,
        "weights": setting.weights,
        "batch": str(setting.batch),
    }
    if not setting.fits:
        return found | {"plain pass, ms": "does not fit"}
    found |= {
        "plain pass, ms": f"{1e3 * setting.seconds(1):.1f}",
        "GB": f"{setting.bytes(1) / GIGA:.1f}",
        "GFLOP a row": f"{setting.row_operations / GIGA:.0f}",
        "free rows": str(setting.free_rows()),
    }
    return found | {
        way.name: f"{setting.speed_up(way, False):.2f} / {setting.speed_up(way, True):.2f}" for way in every
    }


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Return a Markdown table; columns are those of the rows together."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([row.get(name, "") for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(rest: tuple[int, float, float], drafter: float) -> list[str]:
    """Return the tables of docs/gpu-cost.md: 7B whole, and the other models with one sequence."""
    seven = [model for model in MODELS if model.name == "7B"]
    others = [model for model in MODELS if model.name != "7B"]
    first = settings(CARDS, seven, list(WEIGHT_BYTES), (1, 8, 32), rest)
    second = settings(CARDS, others, list(WEIGHT_BYTES), (1,), rest)
    return [markdown([cells(each, ways(drafter)) for each in some]) for some in (first, second)]


NAMES = {card.name.lower().removeprefix("rtx "): card for card in CARDS}


@click.command()
@click.option(
    "--card", "cards", multiple=True, type=click.Choice(list(NAMES), case_sensitive=False), help="[default: all]"
)
@click.option(
    "--model", "models", multiple=True, type=click.Choice([m.name for m in MODELS]), default=("7B",), show_default=True
)
@click.option("--format", "formats", multiple=True, type=click.Choice(list(WEIGHT_BYTES)), help="[default: all]")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=(1, 8, 32), show_default=True)
@click.option("--context", type=click.IntRange(1), default=1024, show_default=True, help="Tokens in the cache.")
@click.option(
    "--bandwidth-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.8,
    show_default=True,
    help="Of the data sheet's.",
)
@click.option(
    "--peak-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    help="Of the data sheet's.",
)
@click.option(
    "--drafter",
    type=click.FloatRange(0, 1),
    default=DRAFTER,
    show_default=True,
    help="Cost of drafting after acceptance.",
)
@click.option("--markdown", "as_page", is_flag=True, help="The tables of docs/gpu-cost.md.")
@one_line_errors
def main(
    cards: tuple[str, ...],
    models: tuple[str, ...],
    formats: tuple[str, ...],
    batches: tuple[int, ...],
    context: int,
    bandwidth_share: float,
    peak_share: float,
    drafter: float,
    as_page: bool,
) -> None:
    """Print what passes would cost, and the speed of each plan relative to plain decoding, greedy / T = 0.8."""
    rest = (context, bandwidth_share, peak_share)
    if as_page:
        click.echo("\n\n".join(tables(rest, drafter)))
        return
    chosen = [NAMES[name.lower()] for name in cards] or CARDS
    found = settings(chosen, [m for m in MODELS if m.name in models], formats or list(WEIGHT_BYTES), batches, rest)
    rows = [cells(each, ways(drafter)) for each in found]
    if not rows:
        raise click.UsageError("none of these cards computes in this format")
    names = list(dict.fromkeys(name for row in rows for name in row))
    show_rows("arithmetic, not measured", [{name: row.get(name, "") for name in names} for row in rows], left=rows[0])


if __name__ == "__main__":
    main()
