"""The listening: a socket, uvicorn, and what SIGTERM and Ctrl-C do."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from pass_runtime.errors import PassError
from pass_runtime.serve.service import Service

log = logging.getLogger("pass_runtime.serve")


class _Server(uvicorn.Server):
    """uvicorn, which leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """PassError where it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        told = str(getattr(error, "strerror", error)).partition(" (while")[0]  # the address is told already
        raise PassError(f"cannot listen on {host} port {port}: {told}; choose another with --host and --port") from None


def serve(app: FastAPI, listening: socket.socket, *, drain_seconds: float, max_connections: int) -> None:
    """Until SIGTERM or Ctrl-C, after which those under way have `drain_seconds`; a second signal ends them now."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=5,
        lifespan="off",
        ws="none",
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop where it is installed
        runner.run(_serve(_Server(config), app.state.service, listening, drain_seconds))


async def _serve(server: uvicorn.Server, service: Service, listening: socket.socket, drain_seconds: float) -> None:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    serving, told = asyncio.create_task(server.serve([listening])), asyncio.create_task(signals.get())
    await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
    if told.done():
        log.info("shutting down: %d requests under way have %g seconds", service.requests, drain_seconds)
        draining, again = asyncio.create_task(service.drain(drain_seconds)), asyncio.create_task(signals.get())
        await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            await service.drain(0)
        again.cancel()
    told.cancel()
    server.should_exit = True
    await serving
