"""The model that Triton's Python backend calls. An event loop in a thread of its own decodes each
request as a sequence of a session."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pass_runtime import PassError, Token, load
from pass_server.api_error import as_api_error
from pass_server.service import Service
from pass_server.triton.config import Settings, inputs, read_settings
from pass_server.triton.metric_sink import FailureLog, TritonMetricSink
from pass_server.triton.tensors import (
    OutputTensors,
    ResponseOptions,
    ResponseSender,
    Tensors,
    TritonRequest,
    read_request,
)

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Calls `on_signal` in `loop` for each SIGTERM and SIGINT until `close`. A socket tells the
    loop: Python's handlers run only after the main thread returns from Triton."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_signal: Callable[[], None]) -> None:
        """loop: does not run yet. Signals come only to an object that the main thread makes."""
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        loop.add_reader(self._reader, self._read)
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._previous_handlers = {
                number: signal.signal(number, lambda *_: None) for number in HANDLED_SIGNALS
            }
            for number in HANDLED_SIGNALS:
                signal.siginterrupt(number, False)  # Triton's system calls restart, as before
            self._previous_wakeup_fd = signal.set_wakeup_fd(
                self._writer.fileno(), warn_on_full_buffer=False
            )

    def close(self) -> None:
        """Restore the handlers, after the loop has ended, in the thread of `__init__`."""
        if self._in_main_thread:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            for number, handler in self._previous_handlers.items():
                if handler is not None:  # None: it was not set by Python, which cannot restore it
                    signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        for number in self._reader.recv(64):
            if number in HANDLED_SIGNALS:
                self._on_signal()


POLL_SECONDS = 0.02


class Model:
    """Triton calls `initialize`, then `execute` whenever requests come, then `finalize`."""

    pb_utils: Any

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle, and warm the session up."""
        try:
            settings = self._settings(args)
            directory = Path(args["model_repository"])
            if args.get("model_instance_kind") == "GPU":
                os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(
                    args["model_instance_device_id"]
                )
            session = load(settings.path(directory), settings.load)
        except PassError as error:
            raise self.pb_utils.TritonModelException(str(error)) from None
        session.warm_up()
        self._sink = TritonMetricSink(self.pb_utils, args["model_instance_name"])
        self._service = Service(session, settings.serve, args["model_name"], self._sink)
        self._outputs = OutputTensors(self._service.texts, tokens=settings.tokens)
        self._senders: dict[asyncio.Task[None], ResponseSender] = {}
        self._failures = FailureLog()
        self._drain_seconds, self._drains = settings.drain_seconds, set[asyncio.Task[None]]()
        self._loop = asyncio.new_event_loop()
        self._signals = Signals(self._loop, self._drain)
        self._thread = threading.Thread(target=self._run, name="pass-triton", daemon=True)
        self._thread.start()
        self._crash_recorder = CrashRecorder(directory / args["model_version"] / "crashes.log")

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the event loop. Tensors are read at once: their memory is Triton's."""
        for request in requests:
            sender = ResponseSender(self.pb_utils, request)
            try:
                tensors = self._tensors(request)
                completion = read_request(self._service.model, tensors, request.parameters())
            except Exception as error:
                self._loop.call_soon_threadsafe(sender.send_error, as_api_error(error))
            else:
                self._loop.call_soon_threadsafe(self._begin, sender, *completion)

    def is_ready(self) -> bool:
        """Whether the model takes requests. Triton 2.51 does not ask, newer versions do."""
        return not self._service.draining and not self._service.session.closed

    def finalize(self) -> None:
        """Cancel the requests for which Triton no longer waits, and close the session."""
        self._crash_recorder.end()
        asyncio.run_coroutine_threadsafe(self._service.drain(0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._signals.close()
        self._sink.close()
        self._service.session.close()

    def _settings(self, args: dict[str, str]) -> Settings:
        parameters = json.loads(args["model_config"]).get("parameters", {})
        settings = read_settings(
            {name: value["string_value"] for name, value in parameters.items()}
        )
        self._inputs = [field.name for field in inputs(tokens=settings.tokens)]
        return settings

    def _tensors(self, request: Any) -> Tensors:
        tensors = {
            name: self.pb_utils.get_input_tensor_by_name(request, name) for name in self._inputs
        }
        return {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        polling = self._loop.create_task(self._poll())
        self._loop.run_forever()
        unfinished = [polling, *self._drains]
        for task in unfinished:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(unfinished))
        self._loop.close()

    def _drain(self) -> None:
        """At the first signal, give requests `drain_seconds`; at the second, cancel them. Triton
        crashes if requests outlast its time-out."""
        task = self._loop.create_task(
            self._service.drain(0 if self._service.draining else self._drain_seconds)
        )
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _poll(self) -> None:
        """Cancel the requests that clients have cancelled, and update the gauges."""
        while True:
            for task, sender in list(self._senders.items()):
                with self._failures.logged():
                    if sender.cancelled:
                        task.cancel()
            with self._failures.logged():
                self._sink.update_gauges(self._service.session, self._service.model)
            if self._service.session.closed:
                self._crash_recorder.record()
            await asyncio.sleep(POLL_SECONDS)

    def _begin(
        self, sender: ResponseSender, request: TritonRequest, options: ResponseOptions
    ) -> None:
        task = self._loop.create_task(self._answer(sender, request, options))
        self._senders[task] = sender
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Send a cancelled request's last response."""
        sender = self._senders.pop(task)
        if task.cancelled():
            sender.end_cancelled()

    async def _answer(
        self, sender: ResponseSender, request: TritonRequest, options: ResponseOptions
    ) -> None:
        try:
            async with self._service.time_limit(time.perf_counter()):
                await self._decode(sender, request, options)
        except Exception as error:
            sender.send_error(as_api_error(error))

    async def _decode(
        self, sender: ResponseSender, request: TritonRequest, options: ResponseOptions
    ) -> None:
        service = self._service
        parsed = await service.parse(request, len(request.prompt))
        tokens: list[Token] = []
        text = ""
        async with service.decode(parsed) as choices, aclosing(service.pieces(choices)) as pieces:
            async for choice, piece in pieces:
                if piece is not None:
                    tokens += piece.tokens
                    text += piece.text
                last = piece is None  # the choice has ended
                if last or options.stream:
                    arrays = self._outputs.arrays(options, choice, tokens, text, last=last)
                    sender.send(arrays, last=last)
                    tokens, text = [], ""


class CrashRecorder:
    """A child process that appends a line to `crashes` if this process dies before `end`. Triton
    does not restart the process of a model, but with --model-control-mode=poll it loads a model
    again if a file of it has changed."""

    def __init__(self, crashes: Path) -> None:
        self._lock = threading.Lock()
        self._child = subprocess.Popen(
            ["sh", "-c", 'read -r _ || date >>"$0"', str(crashes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def record(self) -> None:
        """Append the line now, once: the model cannot answer any more."""
        self._tell(b"")

    def end(self) -> None:
        self._tell(b"done\n")

    def _tell(self, text: bytes) -> None:
        with self._lock:  # Triton may end a model while a request of it fails.
            if self._child.returncode is None:
                self._child.communicate(text)


def visible_device(number: str) -> str:
    """Return the CUDA_VISIBLE_DEVICES for a GPU. number: among those that Triton sees."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = [name.strip() for name in names if name.strip()]
    return visible[int(number)] if int(number) < len(visible) else number
