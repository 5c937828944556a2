"""Compares the speed of a bundle's plans with plain decoding, onnxruntime-genai and llama.cpp.

    pip install -e '.[cpu,export,peers]'    # and llama-cpp-python, for --llama-cpp
    python scripts/bench_peers.py build/smollm2-135m-int4 --threads 2 --genai build/genai/int4
    python scripts/bench_peers.py build/smollm2-135m-int4 --threads 2 --clients 1 --clients 8

A contestant is a plan of a bundle, or another engine (a peer), which decodes greedily with its own
weights. All take turns at every prompt. A ratio is the speed of decoding relative to the first
contestant's, the median over rounds; `without loops` leaves out prompts that it answers with a
loop, which is easy to draft. `tau` counts tokens per pass outside loops, `in loops` inside; `same`
counts texts that equal those of the same engine's first contestant. Plans of a bundle must write
the same text, or the exit status is 2.

With --clients, each client sends its next prompt after its last answer, and the speed is that of
all clients together, prefill included.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load, read_manifest
from pass_runtime.cli.bench import DEFAULT_CONTENDERS, write_json
from pass_runtime.cli.tables import show_rows
from pass_runtime.commands.errors import one_line_errors
from pass_runtime.measuring import real_use
from pass_runtime.measuring.lossless import first_difference
from pass_runtime.measuring.real_use import ALL_KINDS, EXTRA_TOKENS, PassCounts, Prompt

PROMPTS = Path(__file__).parents[1] / "exporter" / "pass_trainer" / "prompts" / "evaluation.jsonl"
PATH = click.Path(exists=True, path_type=Path)
POSITIVE = click.IntRange(1)
GENAI_NGRAM = {"ngram_size": 3, "max_draft_tokens": 8}
GENAI_PRECISIONS = {"cpu": ("int4", "fp32"), "cuda": ("int4", "fp16")}


@dataclass(frozen=True)
class TimedText:
    """timed: tokens decoded in `seconds`, without prefill. sizes: tokens of each pass, if the
    engine says."""

    tokens: Sequence[int]
    timed: int
    seconds: float
    sizes: Sequence[int] = ()


Write = Callable[..., TimedText]
"""(prompt ids, number of tokens, **options of the engine) -> TimedText."""
Texts = Sequence[Sequence[TimedText]]
"""For each prompt, of all rounds."""
Requests = Mapping[str, tuple[list[int], Mapping[str, Any]]]
"""Token ids and options for `request_of`, by prompt id."""


@dataclass(frozen=True)
class Contestant:
    """reference: the name of the first contestant with the same engine. bundle: None for a peer."""

    name: str
    write: Write
    reference: str
    bundle: Path | None = None


def request_of(
    tokens: int, *, temperature: float = 0, seed: int = 1, top_k: int = 0, **options: Any
) -> GenerateOptions:
    return GenerateOptions(tokens, SamplingParams(temperature, top_k, seed=seed), **options)


def decode(session: Session, ids: list[int], tokens: int, **options: Any) -> TimedText:
    """options: of `request_of`."""
    stream = session.generate_ids(ids, request_of(tokens, **options))
    sizes = [len(emitted) for emitted in stream]
    stats = stream.stats
    return TimedText(stream.token_ids, stats.generated_tokens, stats.decode_seconds, sizes)


def open_pass(bundle: Path, threads: int, device: str) -> Write:
    return partial(decode, load(bundle, device, threads=threads))


def open_clients(bundle: Path, threads: int, device: str, slots: int) -> Write:
    """Return a function (prompts, tokens, clients=N, **options) that times all prompts together."""
    session = load(bundle, device, threads=threads, max_batch_size=slots, prefix_cache=False)

    def write(prompts: list[list[int]], tokens: int, *, clients: int, **options: Any) -> TimedText:
        request = request_of(tokens, **options)
        session.warm_up(request.sampling)  # as servers do; later calls find everything measured

        def answer(ids: list[int]) -> int:
            return len(session.generate_ids(ids, request).result().token_ids)

        with ThreadPoolExecutor(clients) as pool:
            started = perf_counter()
            written = sum(pool.map(answer, prompts))
            return TimedText((), written, perf_counter() - started)

    return write


def open_genai(directory: Path, threads: int) -> Write:
    og = import_module("onnxruntime_genai")
    config = og.Config(str(directory))
    if threads:
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
    model = og.Model(config)

    def write(
        ids: list[int], tokens: int, *, ngram: bool = False, ignore_eos: bool = False
    ) -> TimedText:
        params, total = og.GeneratorParams(model), len(ids) + tokens
        least = total if ignore_eos else 0
        params.set_search_options(max_length=total, min_length=least, do_sample=False)
        if ngram:
            params.set_speculative_options(**GENAI_NGRAM)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)  # prefill
        started, written = perf_counter(), list[int]()
        while len(written) < tokens and not generator.is_done():
            generator.generate_next_token()
            written += map(int, generator.get_next_tokens())
        return TimedText(written, len(written), perf_counter() - started)

    return write


def open_llama_cpp(model: Path, threads: int, *, lookup: bool = False) -> Write:
    drafts = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
    llama = import_module("llama_cpp").Llama(
        str(model),
        n_ctx=2048,
        n_threads=threads or None,
        n_threads_batch=threads or None,
        draft_model=drafts() if lookup else None,
        logits_all=lookup,  # else drafts after 512 tokens fail
        verbose=False,
    )

    def write(ids: list[int], tokens: int, *, ignore_eos: bool = False) -> TimedText:
        stream = llama.generate(ids, temp=0.0, repeat_penalty=1.0)
        written = [next(stream)]  # prefill
        started = perf_counter()
        while len(written) < tokens and (ignore_eos or written[-1] != llama.token_eos()):
            written.append(next(stream))
        return TimedText(written, len(written) - 1, perf_counter() - started)

    return write


def write_checkpoint(model: str, directory: Path) -> None:
    """Write a model as Hugging Face's, in float32."""
    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve

    loaded = load_model(resolve(model), "fp32")
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)


def build_genai(bundle: Path, directory: Path, device: str = "cpu") -> Path:
    """Return `directory`, with a model for onnxruntime-genai, made from that of `bundle` if it is
    missing, in the precision that the directory is named after."""
    if not (directory / "genai_config.json").is_file():
        if directory.name not in GENAI_PRECISIONS[device]:
            names = " or ".join(GENAI_PRECISIONS[device])
            raise PassError(
                f"{directory} has no genai_config.json; name a directory {names}, and it will "
                "be made"
            )
        os.environ["TQDM_DISABLE"] = "1"
        base = directory / "base"
        write_checkpoint(read_manifest(bundle).model.name, base)
        flags = ["-i", base, "-o", directory, "-p", directory.name, "-e", device]
        flags += ["--extra_options", "enable_cuda_graph=true"] if device == "cuda" else []
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory


def start_process(engine: Callable[[Path, int], Write], path: Path, threads: int) -> Write:
    """Return a Write in a process of its own: no threads of other engines spin meanwhile."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, spawn, _open, (engine, path, threads))

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool:
            raise PassError(f"the process that runs {path} ended; see its messages above") from None

    call(int)  # waits: to load one engine at a time needs less memory
    return partial(call, _write)


_opened: list[Write] = []


def _open(engine: Callable[[Path, int], Write], path: Path, threads: int) -> None:
    _opened.append(engine(path, threads))


def _write(*request: Any, **options: Any) -> TimedText:
    return _opened[0](*request, **options)


def our_plans(
    bundles: Sequence[Path], plans: Sequence[str], engine: Callable[..., Write], threads: int
) -> list[Contestant]:
    """plans: what --plan takes, or keys of DEFAULT_CONTENDERS."""
    options_of = {plan: DEFAULT_CONTENDERS.get(plan, {"plan": plan}) for plan in plans}
    for options in options_of.values():
        GenerateOptions(**options)  # refuses unknown plans before a process starts
    contestants = []
    for bundle in bundles:
        write = start_process(engine, bundle, threads)
        prefix = f"{bundle.name} " if len(bundles) > 1 else ""
        for plan, options in options_of.items():
            run = partial(write, **options)
            contestants.append(Contestant(prefix + plan, run, prefix + plans[0], bundle))
    return contestants


def start_peers(genai: Sequence[Path], llama_cpp: Path | None, threads: int) -> list[Contestant]:
    peers = []
    for directory in genai:
        write, name = start_process(open_genai, directory, threads), f"genai {directory.name}"
        with_drafts = Contestant(f"{name}, n-gram", partial(write, ngram=True), name)
        peers += [Contestant(name, write, name), with_drafts]
    if llama_cpp is not None:
        for name, lookup in (("llama.cpp", False), ("llama.cpp, lookup", True)):
            write = start_process(partial(open_llama_cpp, lookup=lookup), llama_cpp, threads)
            peers.append(Contestant(name, write, "llama.cpp"))
    return peers


def in_turn(
    writers: Mapping[str, Callable[[], TimedText]], rounds: int
) -> dict[str, list[TimedText]]:
    """Call every writer once a round, in reverse order in every second one."""
    texts: dict[str, list[TimedText]] = {name: [] for name in writers}
    for number in range(rounds):
        for name in list(writers)[:: -1 if number % 2 else 1]:
            texts[name].append(writers[name]())
    return texts


def rate(texts: Iterable[TimedText]) -> float:
    texts = list(texts)
    return sum(text.timed for text in texts) / sum(text.seconds for text in texts)


def ratios_by_round(ours: Texts, theirs: Texts) -> list[float]:
    rounds = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    return [rate(our_round) / rate(their_round) for our_round, their_round in rounds]


def ratio(ours: Texts, theirs: Texts) -> float:
    return statistics.median(ratios_by_round(ours, theirs))


def passes_of(text: TimedText, tokens: int) -> tuple[PassCounts, PassCounts]:
    """Count passes that begin in the first `tokens` tokens: outside loops, and in them."""
    outside, inside = real_use.split_at_loop(text.tokens, tokens)
    return real_use.count_passes(text.sizes, outside), real_use.count_passes(text.sizes, inside)


def figures(texts: Texts, baseline: Texts, reference: Texts, tokens: int) -> dict[str, Any]:
    """baseline: of the first contestant. reference: of the first with the same engine. tokens:
    measured of a text."""
    loop_free = [
        i
        for i, (text, *_) in enumerate(baseline)
        if not real_use.split_at_loop(text.tokens, tokens)[1]
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
    requests: Requests,
    report: Any,
) -> None:
    """Add to `report` where plans wrote other texts than their bundle's first plan. texts: by
    contestant, prompt id and round."""
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
    contestants: Sequence[Contestant], prompts: Sequence[Prompt], requests: Requests, report: Any
) -> None:
    """Add the figures by kind of prompt to `report`."""
    tokens = report["tokens"]
    written = {each.name: dict[str, list[TimedText]]() for each in contestants}
    warm_kinds: list[str] = []
    for prompt in prompts:
        ids, options = requests[prompt.id]
        writers = {}
        for each in contestants:
            own = options if each.bundle else {"ignore_eos": options["ignore_eos"]}
            # EXTRA_TOKENS: so that the last counted pass is complete.
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
    """Send two or more prompts for each client, and add the figures to `report`."""

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
    """Return the text of a figure; of a list, minimum and maximum."""
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
@click.option(
    "--kinds",
    default=",".join(real_use.CORE_KINDS),
    help="Kinds of prompts; edit, quote and reformat copy much.",
)
@click.option("--prompt-file", type=PATH, default=PROMPTS, help="JSON lines: id, kind, prompt.")
@click.option("--tokens", type=click.IntRange(2), default=128, help="Measured tokens per answer.")
@click.option("--rounds", type=POSITIVE, default=1, help="Runs of each prompt.")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.8))
@click.option("--top-k", default=0)
@click.option("--ignore-eos", is_flag=True, help="Continue after the end token.")
@click.option("--plan", "plans", multiple=True, default=[*DEFAULT_CONTENDERS], help="Repeatable.")
@click.option(
    "--genai",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Directory of an onnxruntime-genai model; repeatable. One named int4 or fp32 is made.",
)
@click.option("--llama-cpp", type=PATH, help="The model's GGUF file, for llama-cpp-python.")
@click.option("--clients", multiple=True, type=POSITIVE, help="Clients at once; without peers.")
@click.option("--device", default="cpu", help="Device of the bundles.")
@click.option("--threads", default=0, help="0 is each engine's default.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write JSON here.")
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
    by_kind = [
        real_use.read_prompt_set(given["prompt_file"], (kind,), given["count"]) for kind in kinds
    ]
    # The first prompt of each kind, then the second of each, and so on.
    prompts = [prompt for each in itertools.zip_longest(*by_kind) for prompt in each if prompt]
    with load(bundles[0], "cpu") as session:
        ids = {prompt.id: real_use.encode(session, prompt) for prompt in prompts}
    genai = [] if clients else [build_genai(bundles[0], directory) for directory in given["genai"]]
    engine = partial(open_clients, slots=max(clients)) if clients else open_pass
    engine = partial(engine, device=given["device"])
    contestants = our_plans(bundles, given["plans"], engine, threads)
    if not clients:
        contestants += start_peers(genai, given["llama_cpp"], threads)
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
