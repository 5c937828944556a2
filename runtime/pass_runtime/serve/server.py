"""The listening: a socket, uvicorn, and what SIGTERM and Ctrl-C do."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from pass_runtime.errors import PassError
from pass_runtime.serve.middleware import Limited
from pass_runtime.serve.service import Service

log = logging.getLogger("pass_runtime.serve")


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves signals alone.

    head_seconds: in which a new connection has to have sent the head of a request.
    """

    def __init__(self, app: ASGIApp, max_connections: int, head_seconds: float) -> None:
        super().__init__(_configured(app, head_seconds))
        self.config.app = Limited(app, max_connections, self.server_state.connections)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """PassError where it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        told = str(getattr(error, "strerror", error)).partition(" (while")[0]  # the address is told already
        raise PassError(f"cannot listen on {host} port {port}: {told}; choose another with --host and --port") from None
    # Accepted connections inherit it. Without it tokens wait up to 40 ms until the client acknowledges those before
    # them: asyncio only sees to that for sockets that it makes itself.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _configured(app: ASGIApp, head_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_patient(head_seconds),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        lifespan="off",
        ws="none",
    )


def _patient(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol. By itself it waits for a connection's first request for ever, and idle connections, which
    count among the most that there may be, would keep everybody else out."""

    class Patient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._head_due = self.loop.call_later(seconds, self._look, transport)

        def connection_lost(self, error: Exception | None) -> None:
            self._head_due.cancel()
            super().connection_lost(error)

        def _look(self, transport: asyncio.Transport) -> None:
            if self.cycle is None:
                transport.close()

    return Patient


def serve(
    app: FastAPI, listening: socket.socket, max_connections: int, drain_seconds: float, ready: Callable[[], None]
) -> None:
    """Until SIGTERM or Ctrl-C, after which those under way have `drain_seconds`; a second signal ends them now.

    ready: called once signals do this.
    """
    service: Service = app.state.service
    server = HttpServer(app, max_connections, service.options.body_seconds)
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
