"""Compares the speed of a bundle's plans with plain decoding and other engines, by prompt.

    pip install -e '.[cpu,export,peers]'
    python scripts/bench_peers.py build/smollm2-135m-w8a8 --threads 2 --genai build/genai/int4
    python scripts/bench_peers.py build/smollm2-135m-w8a8 --threads 2 --clients 1 --clients 8

It runs the first chat, text and code prompts of `pass-train evaluate`; chat prompts use the chat
template. Every contestant writes --tokens tokens (plus EXTRA_TOKENS, so that the last counted pass
is complete) or up to the end token. Contestants take turns at every prompt, in reverse order in
every second round. Each bundle and each peer runs in its own process, so that no threads of others
spin while one is timed. The first prompt of every kind warms up all of them.

A speed is the number of tokens of a kind of prompts divided by the seconds of decoding. A ratio is
relative to the first contestant, the median over rounds. Greedy text of small models often repeats
itself, which makes drafting easy. So the ratio is also shown for the prompts that the first
contestant answers without a loop, and tau (tokens per pass) outside and inside of loops. All plans
of a bundle must write the same text, or the exit status is 2. Peers decode greedily with their own
weight files, so their texts differ; `same` counts the texts that equal those of the first
contestant with the same engine.

With --clients, each client sends its next prompt after its last answer. A speed is then the number
of tokens of all clients divided by the time from the first prompt to the last token.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load, read_manifest
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
NGRAM_OPTIONS = {"ngram_size": 3, "max_draft_tokens": 8}
"""Settings of n-gram drafts in onnxruntime-genai and OpenVINO GenAI."""
PATH = click.Path(exists=True, path_type=Path)


@dataclass(frozen=True)
class TimedText:
    """A text and its time.

    timed: the number of tokens that were decoded in `seconds`. Prefill is not timed.
    sizes: the number of tokens of every pass; () if the engine does not report it.
    """

    tokens: Sequence[int]
    timed: int
    seconds: float
    sizes: Sequence[int] = ()


Write = Callable[..., TimedText]
"""(prompt ids, number of tokens, **options of the engine) -> TimedText."""
Texts = Sequence[Sequence[TimedText]]
"""The texts of a contestant, by prompt and round."""
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


def request_of(
    tokens: int, *, temperature: float = 0, seed: int = 1, top_k: int = 0, **options: Any
) -> GenerateOptions:
    return GenerateOptions(tokens, SamplingParams(temperature, top_k, seed=seed), **options)


def decode(session: Session, ids: list[int], tokens: int, **options: Any) -> TimedText:
    """Decode in a session. options: those of `request_of`."""
    stream = session.generate_ids(ids, request_of(tokens, **options))
    sizes = [len(emitted) for emitted in stream]
    return TimedText(
        stream.token_ids, stream.stats.generated_tokens, stream.stats.decode_seconds, sizes
    )


def open_pass(bundle: Path, threads: int, device: str) -> Write:
    return partial(decode, load(bundle, device, threads=threads))


def open_clients(bundle: Path, threads: int, device: str, slots: int) -> Write:
    """Return a function (prompts, tokens, clients=N, **options) for N clients, without texts."""
    session = load(bundle, device, threads=threads, max_batch_size=slots, prefix_cache=False)
    warm = set[object]()

    def write(prompts: list[list[int]], tokens: int, *, clients: int, **options: Any) -> TimedText:
        request = request_of(tokens, **options)
        if request.sampling.sampler not in warm:
            # As servers do; otherwise `auto` would time passes later.
            session.warm_up(request.sampling)
        warm.add(request.sampling.sampler)
        with ThreadPoolExecutor(clients) as pool:
            started = perf_counter()
            count = sum(
                pool.map(
                    lambda ids: len(session.generate_ids(ids, request).result().token_ids), prompts
                )
            )
            return TimedText((), count, perf_counter() - started)

    return write


def open_genai(directory: Path, threads: int) -> Write:
    """Return the greedy Write of onnxruntime-genai. Options: `ngram` (drafts), `ignore_eos`."""
    import onnxruntime_genai as og

    config = og.Config(str(directory))
    if threads:
        config.overlay(
            json.dumps(
                {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
            )
        )
    model = og.Model(config)

    def write(
        ids: list[int], tokens: int, *, ngram: bool = False, ignore_eos: bool = False
    ) -> TimedText:
        params, total = og.GeneratorParams(model), len(ids) + tokens
        params.set_search_options(
            max_length=total, min_length=total if ignore_eos else 0, do_sample=False
        )
        if ngram:
            params.set_speculative_options(**NGRAM_OPTIONS)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)  # prefill
        started, written = perf_counter(), list[int]()
        while len(written) < tokens and not generator.is_done():
            generator.generate_next_token()
            written += map(int, generator.get_next_tokens())
        return TimedText(written, len(written), perf_counter() - started)

    return write


def open_openvino(model: Path, threads: int, *, lookup: bool = False) -> Write:
    """Return the greedy Write of a GGUF file in OpenVINO GenAI. lookup: with n-gram drafts."""
    genai, openvino = import_module("openvino_genai"), import_module("openvino")
    settings = {"INFERENCE_NUM_THREADS": threads} if threads else {}
    pipeline = genai.LLMPipeline(
        str(model), "CPU", **settings, **({"prompt_lookup": True} if lookup else {})
    )

    def write(ids: list[int], tokens: int, *, ignore_eos: bool = False) -> TimedText:
        config = genai.GenerationConfig(
            max_new_tokens=tokens, ignore_eos=ignore_eos, do_sample=False
        )
        if lookup:
            config.num_assistant_tokens = NGRAM_OPTIONS["max_draft_tokens"]
            config.max_ngram_size = NGRAM_OPTIONS["ngram_size"]
        found = pipeline.generate(openvino.Tensor(np.array([ids], np.int64)), config)
        written, times = list(map(int, found.tokens[0])), found.perf_metrics
        decoding = (
            times.get_generate_duration().mean - times.get_ttft().mean
        ) / 1000  # milliseconds
        return TimedText(written, len(written) - 1, decoding)

    return write


def open_llama_cpp(model: Path, threads: int) -> Write:
    """Return the greedy Write of a GGUF file in llama.cpp."""
    llama = import_module("llama_cpp").Llama(
        str(model), n_ctx=2048, n_threads=threads or None, verbose=False
    )

    def write(ids: list[int], tokens: int, *, ignore_eos: bool = False) -> TimedText:
        stream = llama.generate(ids, temp=0.0, repeat_penalty=1.0)
        written = [next(stream)]  # prefill
        started = perf_counter()
        while len(written) < tokens and (ignore_eos or written[-1] != llama.token_eos()):
            written.append(next(stream))
        return TimedText(written, len(written) - 1, perf_counter() - started)

    return write


GENAI_PRECISIONS: Mapping[str, Sequence[str]] = {"cpu": ("int4", "fp32"), "cuda": ("int4", "fp16")}


def build_genai(bundle: Path, directory: Path, device: str = "cpu") -> Path:
    """Return `directory`. Export the base model for onnxruntime-genai into it if it is not there.

    The directory's name is the precision of an export, one of GENAI_PRECISIONS. Raises PassError
    for any other name.
    """
    if not (directory / "genai_config.json").is_file():
        if directory.name not in GENAI_PRECISIONS[device]:
            names = " or ".join(GENAI_PRECISIONS[device])
            raise PassError(
                f"{directory} has no genai_config.json; name a directory {names}, and it will "
                "be made"
            )
        os.environ["TQDM_DISABLE"] = "1"
        from pass_exporter.model.load import load_model
        from pass_exporter.model.registry import resolve

        base = directory / "base"
        loaded = load_model(resolve(read_manifest(bundle).model.name), "fp32")
        loaded.model.save_pretrained(base)
        loaded.tokenizer.save_pretrained(base)
        builder = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            base,
            "-o",
            directory,
        ]
        graphs = ["--extra_options", "enable_cuda_graph=true"] if device == "cuda" else []
        command = [*builder, "-p", directory.name, "-e", device, *graphs]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory


def start_process(engine: Callable[[Path, int], Write], path: Path, threads: int) -> Write:
    """Open an engine in another process, and return a Write that sends it requests."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=_serve, args=(engine, path, threads, there), daemon=True).start()
    there.close()

    def answer() -> Any:
        try:
            return here.recv()
        except EOFError:
            raise PassError(f"the process that runs {path} ended; see its messages above") from None

    def write(*request: Any, **options: Any) -> TimedText:
        here.send((request, options))
        written: TimedText = answer()
        return written

    answer()  # Wait, so that engines load one after the other, which needs less memory.
    return write


def _serve(engine: Callable[[Path, int], Write], path: Path, threads: int, pipe: Any) -> None:
    write = engine(path, threads)
    pipe.send("ready")
    with suppress(EOFError, KeyboardInterrupt):  # until the script ends
        while True:
            request, options = pipe.recv()
            pipe.send(write(*request, **options))


def our_plans(
    bundles: Sequence[Path],
    plans: Sequence[str],
    engine: Callable[[Path, int], Write],
    threads: int,
) -> list[Contestant]:
    """Start a process for every bundle. Return a contestant for each bundle and each of `plans`,
    which are names of plans or keys of DEFAULT_CONTENDERS. Raises PassError for other names."""
    chosen = {plan: DEFAULT_CONTENDERS.get(plan, {"plan": plan}) for plan in plans}
    for options in chosen.values():
        GenerateOptions(**options)
    found = []
    for bundle in bundles:
        write = start_process(engine, bundle, threads)
        prefix = f"{bundle.name} " if len(bundles) > 1 else ""
        for plan, options in chosen.items():
            found.append(
                Contestant(prefix + plan, partial(write, **options), prefix + plans[0], bundle)
            )
    return found


def start_peers(
    genai: Sequence[Path], openvino: Path | None, llama_cpp: Path | None, threads: int
) -> list[Contestant]:
    found = []
    for directory in genai:
        write, name = start_process(open_genai, directory, threads), f"genai {directory.name}"
        found += [
            Contestant(name, write, name),
            Contestant(f"{name}, n-gram", partial(write, ngram=True), name),
        ]
    if openvino is not None:
        for name, lookup in {"openvino": False, "openvino, n-gram": True}.items():
            engine = partial(open_openvino, lookup=lookup)
            found.append(Contestant(name, start_process(engine, openvino, threads), "openvino"))
    if llama_cpp is not None:
        found.append(
            Contestant("llama.cpp", start_process(open_llama_cpp, llama_cpp, threads), "llama.cpp")
        )
    return found


def in_turn(
    writers: Mapping[str, Callable[[], TimedText]], rounds: int
) -> dict[str, list[TimedText]]:
    """Let all contestants write in each round. Return the texts of each."""
    found: dict[str, list[TimedText]] = {name: [] for name in writers}
    for number in range(rounds):
        for name in list(writers)[:: -1 if number % 2 else 1]:
            found[name].append(writers[name]())
    return found


def rate(texts: Iterable[TimedText]) -> float:
    """Return the tokens per second."""
    texts = list(texts)
    return sum(text.timed for text in texts) / sum(text.seconds for text in texts)


def ratios_by_round(ours: Texts, theirs: Texts) -> list[float]:
    rounds = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    return [rate(a) / rate(b) for a, b in rounds]


def ratio(ours: Texts, theirs: Texts) -> float:
    """Return the median over rounds of the ratio of rates."""
    return statistics.median(ratios_by_round(ours, theirs))


def passes_of(text: TimedText, tokens: int) -> tuple[PassCounts, PassCounts]:
    """Return the counts of passes that begin within the first `tokens` tokens: outside of loops,
    and in loops."""
    outside, inside = (
        real_use.count_passes(text.sizes, indices) for indices in split_at_loop(text.tokens, tokens)
    )
    return outside, inside


def figures(texts: Texts, baseline: Texts, reference: Texts, tokens: int) -> dict[str, Any]:
    """Return the figures of a contestant.

    baseline: the texts of the first contestant, for ratios. reference: those of the first one with
    the same engine.
    """
    loop_free = [
        i for i, (text, *_) in enumerate(baseline) if not split_at_loop(text.tokens, tokens)[1]
    ]
    passes = [passes_of(text, tokens) for text, *_ in texts]
    outside, inside = (sum(parts, PassCounts()).tau or None for parts in zip(*passes, strict=True))
    without_loops = (
        ratio([texts[i] for i in loop_free], [baseline[i] for i in loop_free])
        if loop_free
        else None
    )
    return {
        "tokens/s": rate(itertools.chain(*texts)),
        "ratio": ratio(texts, baseline),
        "by_prompt": [ratio([a], [b]) for a, b in zip(texts, baseline, strict=True)],
        "without_loops": without_loops,
        "looping": len(baseline) - len(loop_free),
        "tau": outside,
        "in_loops": inside,
        "same": sum(a[0].tokens == b[0].tokens for a, b in zip(texts, reference, strict=True)),
    }


def compare_texts(
    contestants: Sequence[Contestant],
    found: Mapping[str, Any],
    asked: Mapping[str, Request],
    report: Any,
) -> None:
    """Compare texts of each bundle's plans with the first plan's; add differences to `report`.

    A difference where both tokens' scores are nearly equal (a near-tie) is an error only with
    `same_entries`.
    found: texts by contestant, prompt id and round.
    """
    for each in contestants:
        for prompt, (ids, options) in asked.items():
            for ours, theirs in zip(
                found[each.name][prompt], found[each.reference][prompt], strict=True
            ):
                if each.bundle is None or ours.tokens == theirs.tokens:
                    continue
                with load(each.bundle, report["device"]) as session:
                    if session.manifest.rule == "rejection" and options["temperature"] > 0:
                        # By this rule plans have the same distribution, not the same text.
                        continue
                    request = request_of(len(theirs.tokens), **options)
                    difference = first_difference(session, ids, request, theirs.tokens, ours.tokens)
                    # Windows of all widths give the same bits.
                    exact = session.backend.capabilities.same_entries
                near_tie = difference is not None and difference.is_near_tie and not exact
                report["near_ties" if near_tie else "differences"].append(
                    f"{each.name}, {prompt}: {difference}"
                )


def bench(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    asked: Mapping[str, Request],
    report: Any,
) -> None:
    """Run the contestants on every prompt, and add their figures by kind of prompt to `report`."""
    tokens = report["tokens"]
    found = {each.name: dict[str, list[TimedText]]() for each in contestants}
    warm: list[str] = []
    for prompt in prompts:
        ids, options = asked[prompt.id]
        writers = {}
        for each in contestants:
            used = options if each.bundle else {"ignore_eos": options["ignore_eos"]}
            writers[each.name] = partial(each.write, ids, tokens + EXTRA_TOKENS, **used)
        if prompt.kind not in warm:
            in_turn(writers, 1)
            warm.append(prompt.kind)
        for name, texts in in_turn(writers, report["rounds"]).items():
            found[name][prompt.id] = texts
    for kind in (*warm, ALL_KINDS):
        chosen = [prompt.id for prompt in prompts if kind in (prompt.kind, ALL_KINDS)]
        texts = {
            name: [by_prompt[prompt] for prompt in chosen] for name, by_prompt in found.items()
        }
        for each in contestants:
            entry = figures(
                texts[each.name], texts[contestants[0].name], texts[each.reference], tokens
            )
            report["runs"].append(
                {"T": options["temperature"], "prompts": kind, "contestant": each.name, **entry}
            )
    compare_texts(contestants, found, asked, report)


def bench_clients(
    plans: Sequence[Contestant], ids: Sequence[list[int]], clients: int, options: Any, report: Any
) -> None:
    """Run the prompts with `clients` concurrent clients, and add the figures to `report`."""
    prompts = list(itertools.islice(itertools.cycle(ids), max(len(ids), 2 * clients)))
    write = {
        each.name: partial(each.write, tokens=report["tokens"], clients=clients, **options)
        for each in plans
    }
    in_turn({name: partial(call, prompts[:clients]) for name, call in write.items()}, 1)  # warms up
    found = in_turn(
        {name: partial(call, prompts) for name, call in write.items()}, report["rounds"]
    )
    for name, rounds in found.items():
        by_round = ratios_by_round([rounds], [found[plans[0].name]])
        entry = {
            "tokens/s": rate(rounds),
            "ratio": statistics.median(by_round),
            "by_round": by_round,
        }
        report["runs"].append(
            {"T": options["temperature"], "clients": clients, "contestant": name, **entry}
        )


def cell(value: Any) -> str:
    """Return the table's text for a figure; for a list, its minimum and maximum."""
    if isinstance(value, list):
        return f"{min(value):.2f}-{max(value):.2f}"
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


@click.command(
    help=(__doc__ or "").split("\n\n")[0], context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument("bundles", nargs=-1, required=True, type=PATH)
@click.option(
    "--prompts",
    "count",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    help="Prompts of each kind.",
)
@click.option("--kinds", default=",".join(CORE_KINDS), show_default=True, help="Kinds of prompts.")
@click.option(
    "--prompt-file",
    type=PATH,
    default=PROMPTS,
    help="JSON lines: id, kind, prompt.  [default: evaluate's]",
)
@click.option(
    "--tokens",
    type=click.IntRange(2),
    default=128,
    show_default=True,
    help="Measured tokens per answer.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=1, show_default=True, help="Runs of each prompt."
)
@click.option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=float,
    default=(0.0, 0.8),
    show_default=True,
)
@click.option("--top-k", default=0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Continue after the end token.")
@click.option(
    "--plan",
    "plans",
    multiple=True,
    help=f"Plan, or {', '.join(DEFAULT_CONTENDERS)} (default: all); repeatable.",
)
@click.option(
    "--genai",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Directory of an onnxruntime-genai model. If its name is int4 or fp32, a missing "
    "model is made; repeatable.",
)
@click.option(
    "--openvino",
    type=PATH,
    help="The model's GGUF file, for OpenVINO GenAI (pip install openvino-genai).",
)
@click.option(
    "--llama-cpp", type=PATH, help="The same for llama.cpp (pip install llama-cpp-python)."
)
@click.option(
    "--clients",
    multiple=True,
    type=click.IntRange(1),
    help="Concurrent clients, without peers; repeatable.",
)
@click.option("--device", default="cpu", show_default=True, help="Device of the bundles.")
@click.option("--threads", default=0, help="0 is each engine's default.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the figures as JSON.",
)
@one_line_errors
def main(
    bundles: tuple[Path, ...], temperatures: tuple[float, ...], output: Path | None, **given: Any
) -> None:
    clients, threads = given["clients"], given["threads"]
    names = real_use.parse_kinds(given["kinds"])
    kinds = [read_prompt_set(given["prompt_file"], (kind,), given["count"]) for kind in names]
    prompts = [prompt for each in itertools.zip_longest(*kinds) for prompt in each if prompt]
    with load(bundles[0], "cpu") as session:
        ids = {prompt.id: encode(session, prompt) for prompt in prompts}
    engine = partial(open_clients, slots=max(clients)) if clients else open_pass
    plans = given["plans"] or tuple(DEFAULT_CONTENDERS)
    made = (
        [build_genai(bundles[0], directory) for directory in given["genai"]] if not clients else []
    )
    contestants = our_plans(bundles, plans, partial(engine, device=given["device"]), threads)
    if not clients:
        contestants += start_peers(made, given["openvino"], given["llama_cpp"], threads)
    report = {
        "bundles": [bundle.name for bundle in bundles],
        "device": given["device"],
        "threads": threads,
        "runs": [],
    }
    report |= {
        "tokens": given["tokens"],
        "rounds": given["rounds"],
        "near_ties": [],
        "differences": [],
    }
    for temperature in temperatures:
        options = {
            "temperature": temperature,
            "top_k": given["top_k"],
            "ignore_eos": given["ignore_eos"],
        }
        for count in clients:
            bench_clients(contestants, [*ids.values()], count, options, report)
        if not clients:
            asked = {
                prompt.id: (ids[prompt.id], options | {"seed": prompt.seed}) for prompt in prompts
            }
            bench(
                [each for each in contestants if each.bundle or not temperature],
                prompts,
                asked,
                report,
            )
        write_json(report, output)
    rows = [
        {name.replace("_", " "): cell(value) for name, value in run.items()}
        for run in report["runs"]
    ]
    show_rows(", ".join(report["bundles"]), rows, left=("contestant", "prompts"))
    for name in ("near_ties", "differences"):
        for line in report[name]:
            click.echo(f"{name.replace('_', ' ')}: {line}", err=True)
    if report["differences"]:
        raise PassError(
            f"{len(report['differences'])} texts differ from those of the same bundle's first plan"
        )


if __name__ == "__main__":
    main()
