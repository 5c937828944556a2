"""With Ray: a server of two replicas, and a batch of two actors, of which one is killed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from openai import OpenAI
from running import PASS_RUN

from pass_runtime import GenerateOptions, SamplingParams

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow
SCRIPT = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "on_ray.py")]
FLAGS = shlex.split("--max-new-tokens 30 --ignore-eos --temperature 1 --seed 3 --threads 1")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Environment variables: Ray has a folder of its own, whose name is short enough for sockets,
    and its processes are neither niced, nor killed if other processes fill the memory."""
    folder = tempfile.mkdtemp(prefix="ray-")
    ray = {"RAY_TMPDIR": folder, "RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    yield {**os.environ, **ray, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    shutil.rmtree(folder, ignore_errors=True)


def children(process: subprocess.Popen, name: str) -> list[psutil.Process]:
    running = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.status() != "zombie"
    ]
    return [child for child in running if name in "".join(child.cmdline()[:1])]


def wait_for(condition, seconds: float = 120):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def end(process: subprocess.Popen, number: int = signal.SIGKILL) -> int:
    """End a process by a signal, and kill what Ray started for it. Return its exit status."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(number)
    status = process.wait(60)
    for child in psutil.wait_procs(started, 30)[1]:
        child.kill()
    return status


def results_of(path: Path) -> list[dict]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    for result in results:
        result.pop("stats", None)
        result.pop("request", None)
    return results


def test_a_batch_survives_the_death_of_an_actor(random_bundle, tmp_path, environment):
    requests, whole, results = (
        tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl")
    )
    lines = [{"prompt": f"number {i}", "id": i} for i in range(60)]
    lines[7] = {"prompt": "wrong", "temperature": -1}
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    subprocess.run(
        [*PASS_RUN, "batch", str(random_bundle), str(requests), str(whole), *FLAGS],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    paths = [str(path) for path in (random_bundle, requests, results)]
    on_ray = [*SCRIPT, "batch", *paths, *FLAGS, "--max-batch-size", "1", "--actors", "2"]
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(on_ray, stderr=log, stdout=log, env=environment)
    name = "MapWorker(MapBatches(Answerer)).submit"  # a working actor
    wait_for(lambda: running.poll() is not None or children(running, name))
    assert running.poll() is None, (tmp_path / "log").read_text()
    children(running, name)[0].kill()
    assert running.wait(240) == 0, (tmp_path / "log").read_text()
    assert len(results_of(whole)) == 60
    assert results_of(results) == results_of(whole)


def serve(bundle: Path, log: Path, environment: dict[str, str], port: int) -> subprocess.Popen:
    flags = ["--replicas", "2", "--port", str(port), "--max-batch-size", "4"]
    line = [*SCRIPT, "serve", str(bundle), *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(line, stdout=file, stderr=file, env=environment)
    wait_for(lambda: process.poll() is not None or "served at" in log.read_text())
    assert process.poll() is None, log.read_text()
    return process


def completions_by_replica(environment: dict[str, str]) -> dict[str, int]:
    logs = Path(environment["RAY_TMPDIR"]).glob("ray/session_2*/logs/serve/replica_pass_pass_*.log")
    return {path.name: path.read_text().count("POST /v1/completions 200") for path in logs}


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def test_replicas_survive_the_death_of_one(
    random_bundle, session, tmp_path, environment, free_port
):
    process = serve(random_bundle, tmp_path / "log", environment, free_port)
    try:
        client = OpenAI(
            base_url=f"http://127.0.0.1:{free_port}/v1", api_key="none", max_retries=8, timeout=60
        )
        name = client.models.list().data[0].id
        killed = threading.Event()

        def ask(i: int) -> str:
            if i == 20:
                wait_for(lambda: children(process, "ray::ServeReplica"))[0].kill()
                killed.set()
            body = {"model": name, "prompt": f"number {i}", "seed": i, "max_tokens": 24}
            answer = client.completions.create(**body, extra_body={"ignore_eos": True})
            return answer.choices[0].text

        with ThreadPoolExecutor(6) as pool:
            texts = list(pool.map(ask, range(60)))
        assert killed.is_set()
        assert min(sorted(completions_by_replica(environment).values())[-2:]) >= 5
        wait_for(lambda: len(children(process, "ray::ServeReplica")) == 2)  # it was replaced
        stream = client.completions.create(model=name, prompt="a", max_tokens=5, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")
    finally:
        assert end(process, signal.SIGTERM) == 0, (tmp_path / "log").read_text()
    for i, text in enumerate(texts):
        options = GenerateOptions(24, SamplingParams(1.0, seed=i), ignore_eos=True)
        assert text == session.generate(f"number {i}", options).result().text


def test_wrong_flags_are_refused_in_one_line_before_ray_starts(random_bundle, tmp_path):
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"prompt": "a"}\n')
    batch = [*SCRIPT, "batch", str(random_bundle), str(requests), str(tmp_path / "out")]
    serve = [*SCRIPT, "serve"]
    for line, expected in (
        ([*batch, "--actors", "0"], "--actors"),
        ([*batch, "--device", "cuda:1"], "cuda"),
        ([*serve, str(random_bundle), "--host", "0.0.0.0"], "--allow-no-key"),
        ([*serve, str(tmp_path / "nothing")], "nothing"),
        ([*serve, str(random_bundle), "--replicas=3", "--max-replicas=2"], "max-replicas"),
    ):
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
