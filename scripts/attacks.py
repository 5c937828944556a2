"""Measures how another client's hostile requests delay a client's stream of tokens.

    python scripts/attacks.py build/smollm2-135m-int4 --threads 2

The script starts `pass-run serve` on a free loopback port. A client, the victim, streams
completions, while another process repeats an attack. Each row of the table is an attack: the
statuses of the answers it got, the gaps between the victim's tokens in milliseconds, alone and
during the attack, and the memory of the server and its child processes. The victim is measured
alone before every attack, so that both figures of a row are from the same minute.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
from serve_load import serving

from pass_runtime.cli.tables import show_rows
from pass_runtime.commands.errors import one_line_errors
from pass_runtime.errors import PassError

NO_REQUEST = "no request: a process that computes"
"""Compared with attacks, it shows what a busy CPU alone does to the victim."""
COMPLETIONS = "/v1/completions"
PROMPT = "Once upon a time"
HEAD_START_SECONDS = 0.3
"""How long an attack runs before the victim's stream begins."""


def schema_request(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"prompt": "x", "max_tokens": 64, "response_format": form}


def chained_refs(count: int) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def chained_all_of(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(count):
        schema = {"allOf": [schema]}
    return schema


def structured_request(**outputs: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 64, "structured_outputs": outputs}


def patterns_request(count: int) -> dict[str, Any]:
    patterns = [f"a.{{{i}}}b" for i in range(1, count + 1)]
    return schema_request({"allOf": [{"type": "string", "pattern": each} for each in patterns]})


def stops_request(count: int, size: int) -> dict[str, Any]:
    words = [" " * (size - i) + "x" for i in range(count)]
    return {"prompt": " " * 64, "max_tokens": 64, "ignore_eos": True, "stop": words}


CHAINED_RULES = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(5000)), 'r5000: "x"'])
AMBIGUOUS_RULES = 'start: a\na: a a | a a a | "x" | "y"'
ANY_TEXT_RULES = "start: a*\na: b | c | b c\nb: /(.|\\n)+/\nc: /(.|\\n)+/"
"""Grammars of Lark, as are the two above."""
CHOICES = [f"choice number {i}" for i in range(2500)]
BIASES = {f"x{i}": 1 for i in range(100_000)}
ATTACKS: dict[str, Callable[[], dict[str, Any]]] = {
    NO_REQUEST: dict,
    "one short request after another": lambda: {"prompt": "x", "max_tokens": 8},
    "1,000 chained $ref": lambda: schema_request(chained_refs(1000)),
    "400 nested allOf": lambda: schema_request(chained_all_of(400)),
    "5,000 chained Lark rules": lambda: structured_request(grammar=CHAINED_RULES),
    "allOf of 23 patterns": lambda: patterns_request(23),
    "allOf of 39 patterns": lambda: patterns_request(39),
    "2,500 choices": lambda: structured_request(choice=CHOICES),
    "an ambiguous grammar": lambda: structured_request(grammar=AMBIGUOUS_RULES),
    "an ambiguous grammar of all text": lambda: structured_request(grammar=ANY_TEXT_RULES),
    "16 stops of 58,000 spaces": lambda: stops_request(16, 58_000),
    "4 stops of 256 spaces": lambda: stops_request(4, 256),
    "a prompt of 300,000 objects": lambda: {"prompt": [{}] * 300_000},
    "a prompt of 200,000 floats": lambda: {"prompt": [0.5] * 200_000},
    "a prompt of 200,000 ids and a text": lambda: {"prompt": [*[5] * 200_000, "x"]},
    "a prompt of 300,000 ids": lambda: {"prompt": [5] * 300_000},
    "50,000 wrong messages": lambda: {"messages": [{"role": 1}] * 50_000},
    "100,000 biases": lambda: {"prompt": "x", "logit_bias": BIASES},
    "/detokenize of 200,000 objects": lambda: {"tokens": [{}] * 200_000},
    "/tokenize of 1 MB": lambda: {"prompt": "x " * 500_000},
    "a nested body": lambda: {"prompt": "x", "metadata": json.loads("[" * 400 + "]" * 400)},
    "unknown fields": lambda: {f"field{i}": i for i in range(60_000)},
}
"""Functions that make the body of a request, by name of the attack."""
PATHS = {
    NO_REQUEST: "",
    "50,000 wrong messages": "/v1/chat/completions",
    "/detokenize of 200,000 objects": "/detokenize",
    "/tokenize of 1 MB": "/tokenize",
}
"""The paths of attacks that are not sent to COMPLETIONS."""


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    total, server = 0, psutil.Process(pid)
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def stream_gaps(url: str, model: str, tokens: int) -> list[float]:
    """Return the seconds between the events of one streamed completion."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "plan": "ar"}
    body |= {"ignore_eos": True, "stream": True}
    times = []
    with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=600) as response:
        if response.status_code != 200:
            raise PassError(f"the victim's request was refused: {response.read().decode()[:300]}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def repeat_attack(url: str, path: str, body: bytes, queue: Any, stop: Any) -> None:
    """Send an attack's request until `stop` is set, then put the number of answers by status into
    `queue`. If `path` is "", keep a CPU busy instead of sending."""
    statuses = Counter[str]()
    headers = {"Content-Type": "application/json"}
    while not stop.is_set():
        if not path:
            sum(range(100_000))
            continue
        try:
            response = httpx.post(f"{url}{path}", content=body, headers=headers, timeout=600)
            statuses[str(response.status_code)] += 1
        except httpx.HTTPError as error:
            statuses[type(error).__name__] += 1
    queue.put(statuses)


def run_attack(
    name: str, url: str, model: str, pid: int, tokens: int, rounds: int
) -> dict[str, str]:
    """Return an attack's row of the table. pid: of the server. tokens: of a victim's stream."""
    path, body = PATHS.get(name, COMPLETIONS), ATTACKS[name]() | {"model": model}
    alone, during, statuses, max_bytes = [], [], Counter[str](), 0
    for _ in range(rounds):
        alone += stream_gaps(url, model, tokens)
        queue: Any = multiprocessing.Queue()
        stop = multiprocessing.Event()
        arguments = (url, path, json.dumps(body).encode(), queue, stop)
        attacker = multiprocessing.Process(target=repeat_attack, args=arguments)
        attacker.start()
        time.sleep(HEAD_START_SECONDS)
        during += stream_gaps(url, model, tokens)
        max_bytes = max(max_bytes, resident_bytes(pid))
        stop.set()
        statuses += queue.get()
        attacker.join()
    return {
        "attack": name,
        "answers": ", ".join(f"{count} x {status}" for status, count in statuses.items()),
        "median alone": f"{1e3 * statistics.median(alone):.1f}",
        "median during": f"{1e3 * statistics.median(during):.1f}",
        "worst alone": f"{1e3 * max(alone):.1f}",
        "worst during": f"{1e3 * max(during):.1f}",
        "MiB": f"{max_bytes >> 20}",
    }


@click.command(
    help=(__doc__ or "").split("\n\n")[0],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--threads", default=0, help="0 is the engine's choice.")
@click.option("--tokens", default=96, help="Tokens of the victim's stream.")
@click.option("--rounds", default=2, help="Streams alone, and as many during each attack.")
@click.option(
    "--attack",
    "chosen",
    multiple=True,
    type=click.Choice([*ATTACKS]),
    metavar="NAME",
    help="An attack (default: all); repeatable.",
)
@one_line_errors
def main(bundle: Path, threads: int, tokens: int, rounds: int, chosen: tuple[str, ...]) -> None:
    rows = []
    with serving(bundle, threads, slots=4) as (url, model, pid):
        stream_gaps(url, model, tokens)  # warms up
        for name in chosen or ATTACKS:
            rows.append(run_attack(name, url, model, pid, tokens, rounds))
            click.echo("  ".join(rows[-1].values()), err=True)
    show_rows(f"a victim's gaps between tokens, ms: {bundle.name}", rows)


if __name__ == "__main__":
    main()
