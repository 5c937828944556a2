"""The engines that scripts/bench_peers.py compares: this runtime, onnxruntime-genai, OpenVINO GenAI
and llama.cpp.

`open_NAME` opens an engine and returns a function that decodes a prompt with it, a `Write`.
`start_process` does this in another process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
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

import numpy as np

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load, read_manifest

NGRAM_OPTIONS = {"ngram_size": 3, "max_draft_tokens": 8}
"""Settings of n-gram drafts in onnxruntime-genai and OpenVINO GenAI."""


@dataclass(frozen=True)
class TimedText:
    """The token ids of a text, and how long an engine decoded.

    timed: how many tokens were decoded in `seconds`, in which prefill is not included. sizes: how
    many tokens each pass wrote; () if the engine does not report passes.
    """

    tokens: Sequence[int]
    timed: int
    seconds: float
    sizes: Sequence[int] = ()


Write = Callable[..., TimedText]
"""Decodes with an engine: (prompt ids, number of tokens, **options of the engine) -> TimedText."""


def rate(texts: Iterable[TimedText]) -> float:
    """Return the tokens per second of these texts together."""
    texts = list(texts)
    return sum(text.timed for text in texts) / sum(text.seconds for text in texts)


def request_of(
    tokens: int, *, temperature: float = 0, seed: int = 1, top_k: int = 0, **options: Any
) -> GenerateOptions:
    """Return the options of a generation of `tokens` tokens, greedy by default."""
    return GenerateOptions(tokens, SamplingParams(temperature, top_k, seed=seed), **options)


def decode(session: Session, ids: list[int], tokens: int, **options: Any) -> TimedText:
    """Decode a prompt in a session. options: those of `request_of`."""
    stream = session.generate_ids(ids, request_of(tokens, **options))
    sizes = [len(emitted) for emitted in stream]
    stats = stream.stats
    return TimedText(stream.token_ids, stats.generated_tokens, stats.decode_seconds, sizes)


def open_pass(bundle: Path, threads: int, device: str) -> Write:
    """Return a Write of a session with the bundle. Options: those of `request_of`."""
    return partial(decode, load(bundle, device, threads=threads))


def open_clients(bundle: Path, threads: int, device: str, slots: int) -> Write:
    """Return a function (prompts, tokens, clients=N, **options) that decodes the prompts for N
    clients. Its TimedText has no token ids, and the time is that of all prompts together."""
    session = load(bundle, device, threads=threads, max_batch_size=slots, prefix_cache=False)
    warm_samplers = set[object]()

    def write(prompts: list[list[int]], tokens: int, *, clients: int, **options: Any) -> TimedText:
        request = request_of(tokens, **options)
        if request.sampling.sampler not in warm_samplers:
            # As servers do when they start; otherwise `auto` would time passes while it is timed.
            session.warm_up(request.sampling)
        warm_samplers.add(request.sampling.sampler)

        def answer(ids: list[int]) -> int:
            return len(session.generate_ids(ids, request).result().token_ids)

        with ThreadPoolExecutor(clients) as pool:
            started = perf_counter()
            written = sum(pool.map(answer, prompts))
            return TimedText((), written, perf_counter() - started)

    return write


def open_genai(directory: Path, threads: int) -> Write:
    """Return the greedy Write of onnxruntime-genai. Options: `ngram` (drafts), `ignore_eos`."""
    import onnxruntime_genai as og

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
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads} if threads else {}
    if lookup:
        settings["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(str(model), "CPU", **settings)

    def write(ids: list[int], tokens: int, *, ignore_eos: bool = False) -> TimedText:
        options = {"max_new_tokens": tokens, "ignore_eos": ignore_eos, "do_sample": False}
        config = genai.GenerationConfig(**options)
        if lookup:
            config.num_assistant_tokens = NGRAM_OPTIONS["max_draft_tokens"]
            config.max_ngram_size = NGRAM_OPTIONS["ngram_size"]
        result = pipeline.generate(openvino.Tensor(np.array([ids], np.int64)), config)
        written, times = list(map(int, result.tokens[0])), result.perf_metrics
        # The time to the first token is prefill.
        milliseconds = times.get_generate_duration().mean - times.get_ttft().mean
        return TimedText(written, len(written) - 1, milliseconds / 1000)

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
"""The precisions in which `build_genai` exports weights, by device."""


def write_checkpoint(model: str, directory: Path) -> None:
    """Write a model as Hugging Face's, in float32: a .gguf file without its codes."""
    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve

    loaded = load_model(resolve(model), "fp32")
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)


def build_genai(bundle: Path, directory: Path, device: str = "cpu") -> Path:
    """Return `directory`, a model for onnxruntime-genai.

    If the directory has none, the model that `bundle` was made from is exported into it; the
    directory's name is then the precision, one of GENAI_PRECISIONS. Raises PassError for another
    name.
    """
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
    """Open an engine in another process, and return a Write that runs there."""
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

    answer()  # waits until the engine is open: loading one at a time needs less memory
    return write


def _serve(engine: Callable[[Path, int], Write], path: Path, threads: int, pipe: Any) -> None:
    """Run in the other process: decode what comes through the pipe, until the script ends."""
    write = engine(path, threads)
    pipe.send("ready")
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            request, options = pipe.recv()
            pipe.send(write(*request, **options))
