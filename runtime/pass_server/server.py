"""The HTTP server: a listening socket, uvicorn, and a graceful end at SIGTERM and Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from pass_runtime.errors import PassError
from pass_server.connections import bounded_protocol
from pass_server.service import Service

log = logging.getLogger("pass_server")


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with the limits of `connections`.

    client_seconds: for a client to send the head of a request, to send the next request, and to go on reading.
    """

    def __init__(self, app: ASGIApp, max_connections: int, client_seconds: float) -> None:
        super().__init__(_configured(app, max_connections, client_seconds))

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Check every connection. uvicorn calls this ten times a second."""
        now = asyncio.get_running_loop().time()
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            connection.check(now)
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; PassError where the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", error)).partition(" (while")[0]  # what follows repeats the address
        raise PassError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --host and --port"
        ) from None
    # Without TCP_NODELAY a token waits up to 40 ms until the client has acknowledged the one before it. asyncio sets it
    # only on sockets that it makes itself; accepted connections inherit it from this one.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _configured(app: ASGIApp, max_connections: int, client_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded_protocol(max_connections, client_seconds),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        lifespan="off",
        ws="none",
    )


def serve(
    app: FastAPI, listening: socket.socket, max_connections: int, drain_seconds: float, ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C. Requests under way then have `drain_seconds` to end; a second signal ends them.

    ready: called once these signals are handled.
    """
    service: Service = app.state.service
    server = HttpServer(app, max_connections, service.options.client_seconds)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop where it is installed
        runner.run(_serve(server, service, listening, drain_seconds, ready))


async def _serve(
    server: uvicorn.Server,
    service: Service,
    listening: socket.socket,
    drain_seconds: float,
    ready: Callable[[], None],
) -> None:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    ready()
    serving, signalled = asyncio.create_task(server.serve([listening])), asyncio.create_task(signals.get())
    await asyncio.wait({serving, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        log.info("shutting down: %d requests under way have %g seconds", service.requests, drain_seconds)
        draining, again = asyncio.create_task(service.drain(drain_seconds)), asyncio.create_task(signals.get())
        await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            await service.drain(0)
        again.cancel()
    signalled.cancel()
    server.should_exit = True
    await serving
