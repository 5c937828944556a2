"""What compare_genai.py, speed_in_use.py and gpu_peers.py share: engines that write texts in turn, and the figures. The
engines of the first two have processes of their own, so that no other threads spin while one is timed."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from pass_runtime import GenerateOptions, PassError, SamplingParams, load
from pass_runtime.measuring.lossless import run_tokens

NGRAM = {"ngram_size": 3, "max_draft_tokens": 8}
"""How onnxruntime-genai drafts with n-grams."""


@dataclass(frozen=True)
class Written:
    """A text, and the seconds in which `timed` of its tokens were decoded. passes: 0 where an engine does not count."""

    tokens: list[int]
    timed: int
    seconds: float
    passes: int = 0


Write = Callable[..., Written]
"""(prompt ids, tokens to write, **options of the engine) -> Written."""


def open_pass(bundle: Path, threads: int) -> Write:
    """Return decoding by a session. Options: those of GenerateOptions, and `temperature`."""
    session = load(bundle, "cpu", threads=threads)

    def write(ids: list[int], tokens: int, *, temperature: float = 0, **options: Any) -> Written:
        sampling = SamplingParams(temperature=temperature, seed=1)
        stream = run_tokens(session, ids, GenerateOptions(max_new_tokens=tokens, sampling=sampling, **options))
        return Written(
            stream.token_ids, stream.stats.generated_tokens, stream.stats.decode_seconds, stream.stats.passes
        )

    return write


def open_genai(directory: Path, threads: int) -> Write:
    """Return greedy decoding by onnxruntime-genai. Options: `ngram`, to draft, and `ignore_eos`."""
    import onnxruntime_genai as og

    config = og.Config(str(directory))
    if threads:
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)

    def write(ids: list[int], tokens: int, *, ngram: bool = False, ignore_eos: bool = False) -> Written:
        params, total = og.GeneratorParams(model), len(ids) + tokens
        params.set_search_options(max_length=total, min_length=total if ignore_eos else 0, do_sample=False)
        if ngram:
            params.set_speculative_options(**NGRAM)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)  # prefill
        started, written = perf_counter(), list[int]()
        while len(written) < tokens and not generator.is_done():
            generator.generate_next_token()
            written += map(int, generator.get_next_tokens())
        return Written(written, len(written), perf_counter() - started)

    return write


def open_openvino(model: Path, threads: int, *, lookup: bool = False) -> Write:
    """Return greedy decoding by OpenVINO GenAI of a GGUF file, with its prompt lookup or without. Option:
    `ignore_eos`."""
    genai, openvino = import_module("openvino_genai"), import_module("openvino")
    settings = {"INFERENCE_NUM_THREADS": threads} if threads else {}
    pipeline = genai.LLMPipeline(str(model), "CPU", **settings, **({"prompt_lookup": True} if lookup else {}))

    def write(ids: list[int], tokens: int, *, ignore_eos: bool = False) -> Written:
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=ignore_eos, do_sample=False)
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = NGRAM["max_draft_tokens"], NGRAM["ngram_size"]
        found = pipeline.generate(openvino.Tensor(np.array([ids], np.int64)), config)
        written, times = list(map(int, found.tokens[0])), found.perf_metrics
        decoding = (times.get_generate_duration().mean - times.get_ttft().mean) / 1000  # milliseconds
        return Written(written, len(written) - 1, decoding)

    return write


def open_llama_cpp(model: Path, threads: int) -> Write:
    """Return greedy decoding by llama.cpp of a GGUF file. Option: `ignore_eos`."""
    llama_cpp = import_module("llama_cpp")
    llama = llama_cpp.Llama(str(model), n_ctx=2048, n_threads=threads or None, verbose=False)

    def write(ids: list[int], tokens: int, *, ignore_eos: bool = False) -> Written:
        stream = llama.generate(ids, temp=0.0, repeat_penalty=1.0)
        written = [next(stream)]  # prefill
        started = perf_counter()
        while len(written) < tokens and (ignore_eos or written[-1] != llama.token_eos()):
            written.append(next(stream))
        return Written(written, len(written) - 1, perf_counter() - started)

    return write


def start(engine: Callable[[Path, int], Write], path: Path, threads: int) -> Write:
    """Open an engine in another process, and return its decoding."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=_serve, args=(engine, path, threads, there), daemon=True).start()
    there.close()

    def answer() -> Any:
        try:
            return here.recv()
        except EOFError:
            raise PassError(f"the process that runs {path} ended; what it wrote above says why") from None

    def write(*request: Any, **options: Any) -> Written:
        here.send((request, options))
        written: Written = answer()
        return written

    answer()  # engines load one after the other, which needs less memory
    return write


def _serve(engine: Callable[[Path, int], Write], path: Path, threads: int, pipe: Any) -> None:
    write = engine(path, threads)
    pipe.send("ready")
    with suppress(EOFError, KeyboardInterrupt):  # until the script ends
        while True:
            request, options = pipe.recv()
            pipe.send(write(*request, **options))


def rate(texts: Sequence[Written]) -> float:
    """Tokens per second."""
    return sum(each.timed for each in texts) / sum(each.seconds for each in texts)


def ratio(ours: Sequence[Sequence[Written]], theirs: Sequence[Sequence[Written]]) -> float:
    """The median over rounds of the ratio of rates."""
    return statistics.median(rate(a) / rate(b) for a, b in zip(ours, theirs, strict=True))


def same_tokens(ours: Sequence[Written], theirs: Sequence[Written]) -> tuple[int, int]:
    """Return how many tokens are the same, and of how many."""
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.tokens, b.tokens, strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)
