"""Load-tests `pass-run serve` with NVIDIA's aiperf: time to first token, inter-token latency and
tokens per second by the number of clients, with and without speculation. It also measures the
overhead of HTTP.

    python scripts/serve_load.py build/smollm2-135m-w8a8 --threads 2

Prompts are the chat prompts of `pass-train evaluate`; answers are greedy and streamed. Each client
sends its next request when its last answer is complete. aiperf is installed into a separate
environment, build/aiperf. For the overhead of HTTP, the server and a session in this process answer
each prompt in turn, with one client and plain decoding (`ar`). The times of whole answers,
including prefill, are compared, and the median of the ratios is printed. Nothing else should run
meanwhile.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from bench_peers import PROMPTS

from pass_runtime import GenerateOptions, load
from pass_runtime.commands.errors import one_line_errors
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import read_prompt_set

AIPERF = "aiperf==0.13.0"
AIPERF_VENV = Path(__file__).parents[1] / "build" / "aiperf"
PLANS = {"off": "ar", "on": "auto"}
"""The plan without speculation, and the plan with it."""
COLUMNS = (
    "clients",
    "speculation",
    "TTFT p50",
    "p99",
    "ITL p50",
    "tokens/s",
    "per client",
    "requests",
    "errors",
)


def install_aiperf() -> Path:
    program = AIPERF_VENV / "bin" / "aiperf"
    if not program.exists():
        click.echo(f"installing {AIPERF} into {AIPERF_VENV}", err=True)
        subprocess.run([sys.executable, "-m", "venv", str(AIPERF_VENV)], check=True)
        subprocess.run([str(AIPERF_VENV / "bin" / "pip"), "install", "--quiet", AIPERF], check=True)
    return program


@contextmanager
def serving(bundle: Path, threads: int, slots: int) -> Iterator[tuple[str, str, int]]:
    """Start a server. Yield its URL, its model's name and its process id."""
    flags = f"--port 0 --threads {threads} --max-batch-size {slots}".split()
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, "-m", "pass_runtime.cli.main", "serve", str(bundle), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while not (
                found := re.search(r"(?m)^(.+) is served at (\S+)/v1$", Path(log.name).read_text())
            ):
                if process.poll() is not None:
                    raise PassError(f"the server ended: {Path(log.name).read_text().strip()}")
                time.sleep(0.1)
            yield found[2], found[1], process.pid
        finally:
            process.terminate()
            process.wait(60)


def run_aiperf(
    program: Path,
    place: Path,
    url: str,
    model: str,
    clients: int,
    plan: str,
    requests: int,
    tokens: int,
) -> Any:
    """Return aiperf's report of one run. place: a directory with prompts and tokenizer."""
    results = place / f"{clients}-{plan}"
    flags = (
        f"--concurrency {clients} --warmup-request-count {clients} --request-count {requests} "
        f"--streaming --ui none --extra-inputs max_completion_tokens:{tokens} --extra-inputs "
        f"temperature:0 --extra-inputs plan:{plan} --endpoint-type chat --custom-dataset-type "
        "single_turn --use-server-token-count --no-server-metrics --no-gpu-telemetry"
    )
    places = (
        "--tokenizer",
        place / "tokenizer",
        "--input-file",
        place / "prompts.jsonl",
        "--artifact-dir",
        results,
    )
    line = [program, "profile", "--model", model, "--url", url, *places, *flags.split()]
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, check=False)
    report = results / "profile_export_aiperf.json"
    if done.returncode or not report.exists():
        raise PassError(f"aiperf failed: {' '.join((done.stdout + done.stderr).split())[-400:]}")
    return json.loads(report.read_text(encoding="utf-8"))


def row(clients: int, speculation: str, found: Any) -> tuple[object, ...]:
    first, between = found["time_to_first_token"], found["inter_token_latency"]
    each = found["output_token_throughput_per_user"]["avg"]
    failed = found.get("error_request_count", {}).get("avg", 0)
    times = (f"{first['p50']:.0f} ms", f"{first['p99']:.0f} ms", f"{between['p50']:.1f} ms")
    speeds = (f"{found['output_token_throughput']['avg']:.1f}", f"{each:.1f}")
    return (
        clients,
        speculation,
        *times,
        *speeds,
        f"{found['request_count']['avg']:.0f}",
        f"{failed:.0f}",
    )


def ask(url: str, model: str, prompt: str, tokens: int) -> float:
    """Return the seconds that a streamed answer takes."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    body |= {"temperature": 0, "plan": "ar", "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse().read()
    connection.close()
    assert answer.endswith(b"data: [DONE]\n\n"), answer
    return time.perf_counter() - started


def http_time_ratios(
    bundle: Path, url: str, model: str, prompts: list[str], threads: int, tokens: int
) -> list[float]:
    """Return the ratio of seconds, server over session, for every prompt but the first, a
    warm-up."""
    options, ratios = GenerateOptions(max_new_tokens=tokens, plan="ar", ignore_eos=True), []
    with load(bundle, threads=threads) as session:
        for prompt in prompts:
            there = ask(url, model, prompt, tokens)
            started = time.perf_counter()
            session.chat([{"role": "user", "content": prompt}], options).result()
            ratios.append(there / (time.perf_counter() - started))
    return ratios[1:]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--clients", default="1,4,16", show_default=True, help="Concurrent clients.")
@click.option(
    "--requests",
    default=24,
    show_default=True,
    help="Requests per run; at least two per client are sent.",
)
@click.option("--tokens", default=64, show_default=True, help="Most tokens of an answer.")
@click.option(
    "--threads", default=0, help="CPU threads of the server.  [default: the engine's choice]"
)
@click.option("--slots", default=16, show_default=True, help="Slots of the server.")
@click.option(
    "--prompts", "count", default=12, show_default=True, help="Number of different prompts."
)
def main(
    bundle: Path, clients: str, requests: int, tokens: int, threads: int, slots: int, count: int
) -> None:
    program = install_aiperf()
    prompts = [prompt.text for prompt in read_prompt_set(PROMPTS) if prompt.kind == "chat"][:count]
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(bundle, threads, slots) as (url, model, _),
    ):
        place = Path(directory)
        (place / "tokenizer").mkdir()
        shutil.copy(bundle / "tokenizer.json", place / "tokenizer")
        config = place / "tokenizer" / "tokenizer_config.json"
        config.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
        lines = "".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts)
        (place / "prompts.jsonl").write_text(lines, encoding="utf-8")
        ratios = http_time_ratios(bundle, url, model, prompts, threads, tokens)
        low, middle, high = statistics.quantiles(ratios, n=4)
        click.echo(
            f"one client, time of server / of session: {middle:.3f} (quartiles {low:.3f} to "
            f"{high:.3f})\n"
        )
        click.echo("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
        for concurrency in map(int, clients.split(",")):
            for speculation, plan in PLANS.items():
                total = max(requests, 2 * concurrency)
                found = run_aiperf(program, place, url, model, concurrency, plan, total, tokens)
                click.echo("| " + " | ".join(map(str, row(concurrency, speculation, found))) + " |")


if __name__ == "__main__":
    one_line_errors(main)()
