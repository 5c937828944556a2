"""Compares the speed of a bundle's plans with plain decoding and with other engines.

    pip install -e '.[cpu,export,peers]'
    python scripts/bench_peers.py build/smollm2-135m-int4 --threads 2 --genai build/genai/int4
    python scripts/bench_peers.py build/smollm2-135m-int4 --threads 2 --clients 1 --clients 8

The prompts are the first chat, text and code prompts of `pass-train evaluate`; chat prompts get the
chat template. A contestant is a plan of a bundle, or another engine (a peer) with its settings. For
each prompt it writes --tokens tokens, and EXTRA_TOKENS more so that the last counted pass is
complete, or stops at the end token. The contestants take turns at every prompt, in reverse order in
every second round. Each bundle and each peer has a process of its own, so that no threads of others
spin while one is timed. The first prompt of each kind is written once before, to warm up.

A speed is the number of tokens that were written for the prompts of a kind, divided by the seconds
of decoding. A ratio is a speed divided by that of the first contestant, the median over rounds.
Greedy text of small models often repeats itself in a loop, which makes drafting easy. So there is a
second ratio, `without loops`, over the prompts that the first contestant answers without a loop,
and `tau` (tokens per pass) counts passes outside loops, `in loops` those inside. All plans of a
bundle must write the same text, or the exit status is 2. Peers decode greedily with their own
weight files, so their texts differ; `same` counts the texts that equal those of the first
contestant with the same engine.

With --clients, each client sends its next prompt after its last answer. A speed is then the number
of tokens of all clients divided by the time from the first prompt to the last token.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from bench_engines import (
    TimedText,
    Write,
    build_genai,
    open_clients,
    open_genai,
    open_llama_cpp,
    open_openvino,
    open_pass,
    rate,
    request_of,
    start_process,
)

from pass_runtime import GenerateOptions, PassError, load
from pass_runtime.cli.bench import DEFAULT_CONTENDERS, write_json
from pass_runtime.cli.tables import show_rows
from pass_runtime.commands.errors import one_line_errors
from pass_runtime.measuring import real_use
from pass_runtime.measuring.lossless import first_difference
from pass_runtime.measuring.real_use import (
    ALL_KINDS,
    CORE_KINDS,
    EXTRA_TOKENS,
    PassCounts,
    Prompt,
    encode,
    read_prompt_set,
    split_at_loop,
)

PROMPTS = Path(__file__).parents[1] / "exporter" / "pass_trainer" / "prompts" / "evaluation.jsonl"
PATH = click.Path(exists=True, path_type=Path)
POSITIVE = click.IntRange(1)
Texts = Sequence[Sequence[TimedText]]
"""The texts of a contestant: for each prompt, one of each round."""
Request = tuple[list[int], Mapping[str, Any]]
"""The token ids of a prompt, and options for `request_of`."""


@dataclass(frozen=True)
class Contestant:
    """A plan of a bundle, or another engine (a peer) with its settings.

    reference: the name of the first contestant with the same engine. bundle: None for a peer.
    """

    name: str
    write: Write
    reference: str
    bundle: Path | None = None


def our_plans(
    bundles: Sequence[Path],
    plans: Sequence[str],
    engine: Callable[[Path, int], Write],
    threads: int,
) -> list[Contestant]:
    """Start a process for every bundle, and return a contestant for each of its plans.

    plans: what --plan takes, or keys of DEFAULT_CONTENDERS. Raises PassError for other names.
    """
    options_of = {plan: DEFAULT_CONTENDERS.get(plan, {"plan": plan}) for plan in plans}
    for options in options_of.values():
        GenerateOptions(**options)  # refuses unknown plans before a process starts
    contestants = []
    for bundle in bundles:
        write = start_process(engine, bundle, threads)
        prefix = f"{bundle.name} " if len(bundles) > 1 else ""
        for plan, options in options_of.items():
            name, reference = prefix + plan, prefix + plans[0]
            contestants.append(Contestant(name, partial(write, **options), reference, bundle))
    return contestants


def start_peers(
    genai: Sequence[Path], openvino: Path | None, llama_cpp: Path | None, threads: int
) -> list[Contestant]:
    """Start a process for every peer whose model is given, and return their contestants."""
    peers = []
    for directory in genai:
        write, name = start_process(open_genai, directory, threads), f"genai {directory.name}"
        with_drafts = Contestant(f"{name}, n-gram", partial(write, ngram=True), name)
        peers += [Contestant(name, write, name), with_drafts]
    if openvino is not None:
        for name, lookup in {"openvino": False, "openvino, n-gram": True}.items():
            engine = partial(open_openvino, lookup=lookup)
            peers.append(Contestant(name, start_process(engine, openvino, threads), "openvino"))
    if llama_cpp is not None:
        write = start_process(open_llama_cpp, llama_cpp, threads)
        peers.append(Contestant("llama.cpp", write, "llama.cpp"))
    return peers


def in_turn(
    writers: Mapping[str, Callable[[], TimedText]], rounds: int
) -> dict[str, list[TimedText]]:
    """Call every writer once in each round. Return the texts of all rounds by the writer's name."""
    texts: dict[str, list[TimedText]] = {name: [] for name in writers}
    for number in range(rounds):
        for name in list(writers)[:: -1 if number % 2 else 1]:
            texts[name].append(writers[name]())
    return texts


def ratios_by_round(ours: Texts, theirs: Texts) -> list[float]:
    """Return our rate divided by theirs, for each round."""
    rounds = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    return [rate(our_round) / rate(their_round) for our_round, their_round in rounds]


def ratio(ours: Texts, theirs: Texts) -> float:
    """Return the median of `ratios_by_round`."""
    return statistics.median(ratios_by_round(ours, theirs))


def passes_of(text: TimedText, tokens: int) -> tuple[PassCounts, PassCounts]:
    """Count the passes that begin within the first `tokens` tokens: outside loops, and in them."""
    outside, inside = split_at_loop(text.tokens, tokens)
    return real_use.count_passes(text.sizes, outside), real_use.count_passes(text.sizes, inside)


def figures(texts: Texts, baseline: Texts, reference: Texts, tokens: int) -> dict[str, Any]:
    """Return the figures of a contestant who wrote `texts`.

    baseline: the texts of the first contestant of all, for ratios. reference: those of the first
    contestant with the same engine. tokens: how many tokens of a text are measured.
    """
    loop_free = [
        i for i, (text, *_) in enumerate(baseline) if not split_at_loop(text.tokens, tokens)[1]
    ]
    ours, theirs = ([of_all[i] for i in loop_free] for of_all in (texts, baseline))
    passes = [passes_of(text, tokens) for text, *_ in texts]
    outside, inside = (
        sum(counts, PassCounts()).tau or None for counts in zip(*passes, strict=True)
    )
    return {
        "tokens/s": rate(itertools.chain(*texts)),
        "ratio": ratio(texts, baseline),
        "by_prompt": [ratio([a], [b]) for a, b in zip(texts, baseline, strict=True)],
        "without_loops": ratio(ours, theirs) if loop_free else None,
        "looping": len(baseline) - len(loop_free),
        "tau": outside,
        "in_loops": inside,
        "same": sum(a[0].tokens == b[0].tokens for a, b in zip(texts, reference, strict=True)),
    }


def compare_texts(
    contestants: Sequence[Contestant],
    texts: Mapping[str, Mapping[str, Sequence[TimedText]]],
    requests: Mapping[str, Request],
    report: Any,
) -> None:
    """Compare the texts of each bundle's plans with its first plan's. Add differences to `report`.

    A difference where both tokens have nearly equal scores (a near-tie) is an error only if the
    bundle computes the same bits in windows of every width (`same_entries`).
    texts: by contestant, prompt id and round. requests: by prompt id.
    """
    plans = [each for each in contestants if each.bundle is not None]
    for each, (prompt, (ids, options)) in itertools.product(plans, requests.items()):
        pairs = zip(texts[each.name][prompt], texts[each.reference][prompt], strict=True)
        for ours, theirs in pairs:
            if ours.tokens == theirs.tokens:
                continue
            with load(each.bundle, report["device"]) as session:
                if session.manifest.rule == "rejection" and options["temperature"] > 0:
                    continue  # by this rule plans have the same distribution, not the same text
                request = request_of(len(theirs.tokens), **options)
                difference = first_difference(session, ids, request, theirs.tokens, ours.tokens)
                exact = session.backend.capabilities.same_entries
            near_tie = difference is not None and difference.is_near_tie and not exact
            line = f"{each.name}, {prompt}: {difference}"
            report["near_ties" if near_tie else "differences"].append(line)


def bench(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    requests: Mapping[str, Request],
    report: Any,
) -> None:
    """Run the contestants on every prompt, and add their figures by kind of prompt to `report`.
    requests: by prompt id."""
    tokens = report["tokens"]
    written = {each.name: dict[str, list[TimedText]]() for each in contestants}
    warm_kinds: list[str] = []
    for prompt in prompts:
        ids, options = requests[prompt.id]
        writers = {}
        for each in contestants:
            own = options if each.bundle else {"ignore_eos": options["ignore_eos"]}  # greedy
            writers[each.name] = partial(each.write, ids, tokens + EXTRA_TOKENS, **own)
        if prompt.kind not in warm_kinds:
            in_turn(writers, 1)
            warm_kinds.append(prompt.kind)
        for name, texts in in_turn(writers, report["rounds"]).items():
            written[name][prompt.id] = texts
    for kind in (*warm_kinds, ALL_KINDS):
        chosen = [prompt.id for prompt in prompts if kind in (prompt.kind, ALL_KINDS)]
        of_kind = {name: [texts[prompt] for prompt in chosen] for name, texts in written.items()}
        baseline = of_kind[contestants[0].name]
        for each in contestants:
            row = {"T": options["temperature"], "prompts": kind, "contestant": each.name}
            row |= figures(of_kind[each.name], baseline, of_kind[each.reference], tokens)
            report["runs"].append(row)
    compare_texts(contestants, written, requests, report)


def bench_clients(
    plans: Sequence[Contestant], ids: Sequence[list[int]], clients: int, options: Any, report: Any
) -> None:
    """Send the prompts from `clients` clients at once to every plan. Add the figures to `report`.
    Prompts are repeated until each client has two."""

    def writers(prompts: list[list[int]]) -> dict[str, Callable[[], TimedText]]:
        own = {"clients": clients, **options}
        return {each.name: partial(each.write, prompts, report["tokens"], **own) for each in plans}

    prompts = list(itertools.islice(itertools.cycle(ids), max(len(ids), 2 * clients)))
    in_turn(writers(prompts[:clients]), 1)  # warms up
    texts = in_turn(writers(prompts), report["rounds"])
    for name, rounds in texts.items():
        ratios = ratios_by_round([rounds], [texts[plans[0].name]])
        row = {"T": options["temperature"], "clients": clients, "contestant": name}
        row |= {"tokens/s": rate(rounds), "ratio": statistics.median(ratios), "by_round": ratios}
        report["runs"].append(row)


def cell(value: Any) -> str:
    """Return the table's text for a figure; for a list, its minimum and maximum."""
    if isinstance(value, list):
        return f"{min(value):.2f}-{max(value):.2f}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)


@click.command(
    help=(__doc__ or "").split("\n\n")[0],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.argument("bundles", nargs=-1, required=True, type=PATH)
@click.option("--prompts", "count", type=POSITIVE, default=12, help="Prompts of each kind.")
@click.option("--kinds", default=",".join(CORE_KINDS), help="Kinds of prompts.")
@click.option(
    "--prompt-file",
    type=PATH,
    default=PROMPTS,
    show_default="evaluate's",
    help="JSON lines: id, kind, prompt.",
)
@click.option("--tokens", type=click.IntRange(2), default=128, help="Measured tokens per answer.")
@click.option("--rounds", type=POSITIVE, default=1, help="Runs of each prompt.")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.8))
@click.option("--top-k", default=0)
@click.option("--ignore-eos", is_flag=True, help="Continue after the end token.")
@click.option(
    "--plan", "plans", multiple=True, default=list(DEFAULT_CONTENDERS), help="Plan; repeatable."
)
@click.option(
    "--genai",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Directory of an onnxruntime-genai model; repeatable. If its name is int4 or fp32, a "
    "missing model is made.",
)
@click.option("--openvino", type=PATH, help="The model's GGUF file, for openvino-genai.")
@click.option("--llama-cpp", type=PATH, help="The model's GGUF file, for llama-cpp-python.")
@click.option(
    "--clients", multiple=True, type=POSITIVE, help="Clients at once, without peers; repeatable."
)
@click.option("--device", default="cpu", help="Device of the bundles.")
@click.option("--threads", default=0, help="0 is each engine's default.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write JSON here."
)
@one_line_errors
def main(
    bundles: tuple[Path, ...],
    temperatures: tuple[float, ...],
    clients: tuple[int, ...],
    threads: int,
    output: Path | None,
    **given: Any,
) -> None:
    kinds = real_use.parse_kinds(given["kinds"])
    by_kind = [read_prompt_set(given["prompt_file"], (kind,), given["count"]) for kind in kinds]
    # The first prompt of each kind, then the second of each, and so on.
    prompts = [prompt for each in itertools.zip_longest(*by_kind) for prompt in each if prompt]
    with load(bundles[0], "cpu") as session:
        ids = {prompt.id: encode(session, prompt) for prompt in prompts}
    genai = [] if clients else [build_genai(bundles[0], directory) for directory in given["genai"]]
    engine = partial(open_clients, slots=max(clients)) if clients else open_pass
    engine = partial(engine, device=given["device"])
    contestants = our_plans(bundles, given["plans"], engine, threads)
    if not clients:
        contestants += start_peers(genai, given["openvino"], given["llama_cpp"], threads)
    report: dict[str, Any] = {"bundles": [bundle.name for bundle in bundles], "threads": threads}
    report |= {name: given[name] for name in ("device", "tokens", "rounds")}
    report |= {"runs": [], "near_ties": [], "differences": []}
    for temperature in temperatures:
        options = {"temperature": temperature}
        options |= {name: given[name] for name in ("top_k", "ignore_eos")}
        for count in clients:
            bench_clients(contestants, [*ids.values()], count, options, report)
        if not clients:
            requests = {each.id: (ids[each.id], options | {"seed": each.seed}) for each in prompts}
            # Peers decode greedily only.
            allowed = [each for each in contestants if each.bundle or not temperature]
            bench(allowed, prompts, requests, report)
        write_json(report, output)
    rows = [
        {name.replace("_", " "): cell(value) for name, value in run.items()}
        for run in report["runs"]
    ]
    show_rows(", ".join(report["bundles"]), rows, left=("contestant", "prompts"))
    for name in ("near_ties", "differences"):
        for line in report[name]:
            click.echo(f"{name.replace('_', ' ')}: {line}", err=True)
    if count := len(report["differences"]):
        raise PassError(f"{count} texts differ from those of the same bundle's first plan")


if __name__ == "__main__":
    main()
