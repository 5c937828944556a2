"""Load-tests `pass-run serve` with NVIDIA's aiperf, and measures the overhead of HTTP.

    python scripts/serve_load.py build/smollm2-135m-int4 --threads 2

aiperf, installed into an environment of its own (build/aiperf), measures the time to the first
token (TTFT), the time between tokens (ITL) and tokens per second, by the number of clients, with
and without speculation. Prompts are the chat prompts of `pass-train evaluate`; answers are greedy
and streamed. Each client sends its next request when its last answer is complete.

For the overhead of HTTP, the server and a session in this process answer each prompt in turn, with
one client and plain decoding (`ar`). The median of the ratios of their times is printed, for whole
answers with prefill. Nothing else should run on the machine meanwhile.
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
TIMES = ("TTFT p50", "p99", "ITL p50")
COLUMNS = ("clients", "speculation", *TIMES, "tokens/s", "per client", "requests", "errors")


def install(requirement: str, venv: Path, program: str, *, sees_ours: bool = False) -> Path:
    """Return the path of a program of the environment `venv`, which is made if it lacks it.
    sees_ours: whether it also has the packages of this environment."""
    path = venv / "bin" / program
    if not path.exists():
        click.echo(f"installing {requirement} into {venv}", err=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        if sees_ours:
            (own,) = venv.glob("lib/*/site-packages")
            ours = [each for each in sys.path if each.endswith("site-packages")]
            (own / "base.pth").write_text("\n".join(ours), encoding="utf-8")
        subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", requirement], check=True)
    return path


def install_aiperf() -> Path:
    return install(AIPERF, AIPERF_VENV, "aiperf")


@contextmanager
def serving(bundle: Path, threads: int, slots: int) -> Iterator[tuple[str, str, int]]:
    """Start a server, which ends with the block. Yield its URL, model name and process id."""
    flags = f"--port 0 --threads {threads} --max-batch-size {slots}".split()
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, "-m", "pass_runtime.cli.main", "serve", str(bundle), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            ready = re.compile(r"(?m)^(.+) is served at (\S+)/v1$")
            while not (address := ready.search(text := Path(log.name).read_text())):
                if process.poll() is not None:
                    raise PassError(f"the server ended: {text.strip()}")
                time.sleep(0.1)
            yield address[2], address[1], process.pid
        finally:
            process.terminate()
            process.wait(60)


def run_aiperf(
    program: Path, directory: Path, url: str, model: str, clients: int, plan: str, **counts: int
) -> Any:
    """Return aiperf's report of one run.

    directory: has prompts.jsonl and tokenizer/, and gets the results. counts: `requests` of all
    clients, and `tokens` of an answer.
    """
    results = directory / f"{clients}-{plan}"
    flags = (
        f"--concurrency {clients} --warmup-request-count {clients} --request-count "
        f"{counts['requests']} --extra-inputs max_completion_tokens:{counts['tokens']} "
        f"--extra-inputs temperature:0 --extra-inputs plan:{plan} --endpoint-type chat "
        "--streaming --ui none --custom-dataset-type single_turn --use-server-token-count "
        "--no-server-metrics --no-gpu-telemetry"
    )
    paths = ("--tokenizer", directory / "tokenizer", "--input-file", directory / "prompts.jsonl")
    command = [program, "profile", "--model", model, "--url", url, "--artifact-dir", results]
    command += [*paths, *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = results / "profile_export_aiperf.json"
    if done.returncode or not report.exists():
        raise PassError(f"aiperf failed: {' '.join((done.stdout + done.stderr).split())[-400:]}")
    return json.loads(report.read_text(encoding="utf-8"))


def row(clients: int, speculation: str, report: Any) -> list[str]:
    """Return the cells of COLUMNS for a run. report: aiperf's."""
    first, between = report["time_to_first_token"], report["inter_token_latency"]
    failed = report.get("error_request_count", {}).get("avg", 0)
    return [
        *(str(clients), speculation),
        *(f"{first['p50']:.0f} ms", f"{first['p99']:.0f} ms", f"{between['p50']:.1f} ms"),
        f"{report['output_token_throughput']['avg']:.1f}",
        f"{report['output_token_throughput_per_user']['avg']:.1f}",
        *(f"{report['request_count']['avg']:.0f}", f"{failed:.0f}"),
    ]


def ask(url: str, model: str, prompt: str, tokens: int) -> float:
    """Return the seconds that a streamed answer takes."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    body |= {"temperature": 0, "plan": "ar", "stream": True, "ignore_eos": True}
    started, headers = time.perf_counter(), {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse().read()
    connection.close()
    assert answer.endswith(b"data: [DONE]\n\n"), answer
    return time.perf_counter() - started


def http_time_ratios(
    bundle: Path, url: str, model: str, prompts: list[str], threads: int, tokens: int
) -> list[float]:
    """Return the seconds of the server divided by those of a session, for each prompt but the
    first, which warms up."""
    options, ratios = GenerateOptions(max_new_tokens=tokens, plan="ar", ignore_eos=True), []
    with load(bundle, threads=threads) as session:
        for prompt in prompts:
            of_server = ask(url, model, prompt, tokens)
            started = time.perf_counter()
            session.chat([{"role": "user", "content": prompt}], options).result()
            ratios.append(of_server / (time.perf_counter() - started))
    return ratios[1:]


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--clients", default="1,4,16", help="Numbers of clients at once.")
@click.option("--requests", default=24, help="Requests per run; at least two per client are sent.")
@click.option("--tokens", default=64, help="The most tokens of an answer.")
@click.option("--threads", default=0, help="CPU threads of the server; 0 is the engine's choice.")
@click.option("--slots", default=16, help="Slots of the server.")
@click.option("--prompts", "count", default=12, help="Number of different prompts.")
def main(
    bundle: Path, clients: str, requests: int, tokens: int, threads: int, slots: int, count: int
) -> None:
    program = install_aiperf()
    prompts = [prompt.text for prompt in read_prompt_set(PROMPTS) if prompt.kind == "chat"][:count]
    with (
        tempfile.TemporaryDirectory() as name,
        serving(bundle, threads, slots) as (url, model, _),
    ):
        directory = Path(name)
        tokenizer = directory / "tokenizer"
        tokenizer.mkdir()
        shutil.copy(bundle / "tokenizer.json", tokenizer)
        config = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        (tokenizer / "tokenizer_config.json").write_text(config, encoding="utf-8")
        lines = "".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts)
        (directory / "prompts.jsonl").write_text(lines, encoding="utf-8")
        ratios = http_time_ratios(bundle, url, model, prompts, threads, tokens)
        low, middle, high = statistics.quantiles(ratios, n=4)
        quartiles = f"(quartiles {low:.3f} to {high:.3f})"
        click.echo(f"one client, time of server / of session: {middle:.3f} {quartiles}\n")
        click.echo("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
        for concurrency in map(int, clients.split(",")):
            counts = {"requests": max(requests, 2 * concurrency), "tokens": tokens}
            for speculation, plan in PLANS.items():
                report = run_aiperf(program, directory, url, model, concurrency, plan, **counts)
                click.echo("| " + " | ".join(row(concurrency, speculation, report)) + " |")


if __name__ == "__main__":
    one_line_errors(main)()
