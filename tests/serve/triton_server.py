"""NVIDIA's tritonserver as scripts/install_triton.sh installs it, and a gRPC client, for tests."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from metered import Metered, wait_until

from pass_server.triton.config import inputs

ROOT = Path(__file__).parents[2]
INSTALLED = Path(os.environ.get("PASS_TRITON", ROOT / "build" / "triton")).absolute()
DTYPES = {field.name: field.dtype for tokens in (False, True) for field in inputs(tokens=tokens)}
NUMPY = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64}
NUMPY |= {"FP32": np.float32, "STRING": np.object_}
SLOW = """

import time
from pass_runtime.backends.base import Backend

run = Backend.run


def after(*args):
    time.sleep(0.03)
    return run(*args)


Backend.run = after
"""
"""Appended to model.py: makes passes slow, since a tiny model would be done before a test can
cancel a request."""


def require_triton() -> None:
    """Skip the test if Triton is not installed; else make its client importable."""
    if not (INSTALLED / "tritonserver").exists():
        pytest.skip("no Triton: run scripts/install_triton.sh")
    client = str(INSTALLED / "client")
    if client not in sys.path:
        sys.path.append(client)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Triton(Metered):
    """A server over `repository` on free loopback ports. Its output goes to `log`."""

    def __init__(self, repository: Path, log: Path, *arguments: str) -> None:
        self.repository, self.log = repository, log
        self._shared = f"pass_tests_{os.getpid()}_{time.monotonic_ns()}"
        http, grpc, metrics = free_ports(3)
        self.http, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self.metrics_url = f"http://127.0.0.1:{metrics}"
        line = [str(INSTALLED / "tritonserver"), f"--model-repository={repository}"]
        line += ["--log-info=true", *arguments]
        for kind, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
            line += [f"--{kind}-address=127.0.0.1", f"--{kind}-port={port}"]
        line += [f"--backend-config=python,shm-region-prefix-name={self._shared}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                line, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log_text
            return self.ready

        wait_until(ready, 120)

    def __enter__(self) -> Triton:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            # Not SIGTERM, after which the server may wait for as long as --exit-timeout-secs.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for file in Path("/dev/shm").glob(f"{self._shared}*"):  # killed stubs leave their files
            file.unlink(missing_ok=True)

    @property
    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def ready(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.http}/v2/health/ready", timeout=10).status_code == 200
        return False

    def stubs(self) -> dict[str, psutil.Process]:
        """Return the processes that run models, which Triton calls stubs, by name of the model."""
        stubs = {}
        for child in psutil.Process(self.process.pid).children():
            line = "" if child.status() == psutil.STATUS_ZOMBIE else " ".join(child.cmdline())
            if model := re.search(r" (\S+)_0_0 \S+$", line):
                stubs[model[1]] = child
        return stubs

    def generate(self, model: str, **fields: object) -> httpx.Response:
        return httpx.post(f"{self.http}/v2/models/{model}/generate", json=fields, timeout=60)

    @contextmanager
    def first_response(self, model: str, **fields: object) -> Iterator[None]:
        """Wait for the first response of a stream, and disconnect at the end. By HTTP: Triton 2.51
        can crash if a gRPC stream is cancelled while it responds."""
        url = f"{self.http}/v2/models/{model}/generate_stream"
        with httpx.stream("POST", url, json=fields, timeout=60) as response:
            lines = response.iter_lines()  # kept: without it the connection is closed
            assert next(lines).startswith("data: ")
            yield

    def disconnect_early(self, model: str, **fields: object) -> None:
        with self.first_response(model, **fields):
            pass


class Client:
    """Sends requests to a server over one gRPC stream, one at a time."""

    def __init__(self, server: Triton) -> None:
        import tritonclient.grpc as grpc

        self._grpc = grpc
        self._client = grpc.InferenceServerClient(server.grpc)
        self._streaming = self._under_way = False
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the request only if it still runs: otherwise Triton 2.51 may never unload the
        model."""
        self._end_stream(cancel=self._under_way)
        self._client.close()

    def tensor(self, name: str, value: Any, dtype: str | None = None) -> Any:
        """Return an input tensor. dtype: None for that of the model's input."""
        dtype = dtype or DTYPES.get(name, "STRING")
        values = value if isinstance(value, list | tuple) else [value]
        if dtype == "STRING":
            values = [each.encode() if isinstance(each, str) else each for each in values]
        array = np.array(values, dtype=NUMPY[dtype])
        tensor = self._grpc.InferInput(name, array.shape, "BYTES" if dtype == "STRING" else dtype)
        return tensor.set_data_from_numpy(array)

    def begin(self, model: str, **fields: Any) -> None:
        self.send(model, [self.tensor(name, value) for name, value in fields.items()])

    def send(self, model: str, tensors: list[Any]) -> None:
        if not self._streaming:
            self._answers = queue.Queue()
            put = self._answers.put
            self._client.start_stream(callback=lambda result, error: put((result, error)))
            self._streaming = True
        self._under_way = True
        self._client.async_stream_infer(model, tensors, enable_empty_final_response=True)

    def responses(self, timeout: float = 60) -> Iterator[dict[str, list[Any]]]:
        while True:
            result, error = self._answers.get(timeout=timeout)
            if error is not None:
                self._under_way = False
                raise error
            response = result.get_response()
            if response.outputs:
                names = [output.name for output in response.outputs]
                yield {name: result.as_numpy(name).tolist() for name in names}
            if response.parameters["triton_final_response"].bool_param:
                self._under_way = False
                return

    def ask(self, model: str, **fields: Any) -> list[dict[str, list[Any]]]:
        self.begin(model, **fields)
        return list(self.responses())

    def cancel(self) -> None:
        self._end_stream(cancel=True)

    def _end_stream(self, *, cancel: bool) -> None:
        if self._streaming:
            self._client.stop_stream(cancel_requests=cancel)
            self._streaming = self._under_way = False


def text_of(responses: list[dict[str, list[Any]]]) -> str:
    return b"".join(response["text_output"][0] for response in responses).decode()


def ids_of(responses: list[dict[str, list[Any]]]) -> list[int]:
    return [token for response in responses for token in response["output_ids"]]
