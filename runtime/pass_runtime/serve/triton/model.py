"""The model itself: requests become sequences of a session, pieces become responses.

`1/model.py` of a repository gives it Triton's utilities and nothing else; a test gives it something like them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pass_runtime.decode.sequence import Token
from pass_runtime.errors import PassError
from pass_runtime.serve.errors import as_api_error
from pass_runtime.serve.jobs import ask
from pass_runtime.serve.service import Service
from pass_runtime.serve.triton.answers import Answers
from pass_runtime.serve.triton.fields import inputs
from pass_runtime.serve.triton.figures import TritonFigures
from pass_runtime.serve.triton.reading import Tensors, TritonRequest, Wanted, read_request
from pass_runtime.serve.triton.replies import Reply
from pass_runtime.serve.triton.settings import Settings, read_settings
from pass_runtime.serve.triton.signals import Signals
from pass_runtime.serve.triton.troubles import Troubles
from pass_runtime.session import load

LOOK_SECONDS = 0.02
"""How often everybody is asked whether they still want their answer, and the gauges are looked at."""


class Model:
    """What Triton calls: `initialize`, `execute` for requests that came, `finalize`. Needs `pb_utils`."""

    pb_utils: Any

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle, and time what `auto` has to time before anybody waits."""
        try:
            settings = self._settings(args)
            directory = Path(args["model_repository"])
            if args.get("model_instance_kind") == "GPU":
                os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
            options = settings.load
            session = load(
                settings.path(directory),
                options.device,
                threads=options.threads,
                max_batch_size=options.max_batch_size,
                max_queue=options.max_queue,
                capacity=options.capacity,
            )
        except PassError as error:
            raise self.pb_utils.TritonModelException(str(error)) from None
        session.warm_up()
        self._figures = TritonFigures(self.pb_utils, args["model_instance_name"])
        self._service = Service(session, settings.limits, args["model_name"], self._figures)
        self._answers = Answers(self._service.texts, tokens=settings.tokens)
        self._live: dict[asyncio.Task[None], Reply] = {}
        self._troubles = Troubles()
        self._drain_seconds, self._drains = settings.drain_seconds, set[asyncio.Task[None]]()
        self._loop = asyncio.new_event_loop()
        self._signals = Signals(self._loop, self._drain)
        self._thread = threading.Thread(target=self._run, name="pass-triton", daemon=True)
        self._thread.start()
        self._guard = guard(directory / args["model_version"] / "crashes.log")

    def execute(self, requests: list[Any]) -> None:
        """Take requests, whose answers are sent from elsewhere. Tensors are read here: they are Triton's memory."""
        for request in requests:
            reply = Reply(self.pb_utils, request)
            try:
                read = read_request(self._service.model, self._tensors(request), request.parameters())
            except Exception as error:
                self._loop.call_soon_threadsafe(reply.refuse, as_api_error(error))
            else:
                self._loop.call_soon_threadsafe(self._begin, reply, *read)

    def finalize(self) -> None:
        """Nothing is under way any more, unless Triton could not wait for it."""
        self._guard.communicate(b"done\n")
        asyncio.run_coroutine_threadsafe(self._service.drain(0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._signals.close()
        self._figures.close()
        self._service.session.close()

    def _settings(self, args: dict[str, str]) -> Settings:
        parameters = json.loads(args["model_config"]).get("parameters", {})
        settings = read_settings({name: value["string_value"] for name, value in parameters.items()})
        self._inputs = [field.name for field in inputs(tokens=settings.tokens)]
        return settings

    def _tensors(self, request: Any) -> Tensors:
        found = {name: self.pb_utils.get_input_tensor_by_name(request, name) for name in self._inputs}
        return {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        looking = self._loop.create_task(self._look())
        self._loop.run_forever()
        left = [looking, *self._drains]
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    def _drain(self) -> None:
        """A signal has come: those under way have their time, and none behind a second one. Triton itself waits for
        them as long as it may, and crashes where that was not enough."""
        task = self._loop.create_task(self._service.drain(0 if self._service.draining else self._drain_seconds))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _look(self) -> None:
        """What fails for one is for the others no reason not to look at them, nor to look again."""
        while True:
            for task, reply in list(self._live.items()):
                with self._troubles.told():
                    if reply.cancelled:
                        task.cancel()
            with self._troubles.told():
                self._figures.look(self._service.session, self._service.model)
            await asyncio.sleep(LOOK_SECONDS)

    def _begin(self, reply: Reply, request: TritonRequest, wanted: Wanted) -> None:
        task = self._loop.create_task(self._answer(reply, request, wanted))
        self._live[task] = reply
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """One that was cancelled may not even have begun: only here it is certain to be told."""
        reply = self._live.pop(task)
        if task.cancelled():
            reply.end_cancelled()

    async def _answer(self, reply: Reply, request: TritonRequest, wanted: Wanted) -> None:
        try:
            async with asyncio.timeout(self._service.options.request_seconds):
                await self._decode(reply, request, wanted)
        except Exception as error:
            reply.refuse(as_api_error(error))

    async def _decode(self, reply: Reply, request: TritonRequest, wanted: Wanted) -> None:
        service = self._service
        service.check_room()  # before any work is done
        asked = await asyncio.to_thread(ask, service.session, service.options, request)
        tokens: list[Token] = []
        text = ""
        async with service.job(asked) as choices, aclosing(service.events(choices)) as events:
            async for choice, piece in events:
                if piece is not None:
                    tokens += piece.tokens
                    text += piece.text
                if piece is None or wanted.stream:
                    last = piece is None
                    reply.send(self._answers.told(wanted, choice, tokens, text, last=last), last=last)
                    tokens, text = [], ""


def guard(crashes: Path) -> subprocess.Popen[bytes]:
    """Writes down when this process died without a last word to the guard. Triton never starts a process again that
    died, but with --model-control-mode=poll it loads a model again whose files have changed, and that is one."""
    return subprocess.Popen(
        ["sh", "-c", 'read -r _ || date >>"$0"', str(crashes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
