"""What listens: a socket, uvicorn with bounds on connections, and a graceful end at SIGTERM and Ctrl-C.

uvicorn itself waits without end for the head of a request, and for a client to read its answer: any client could hold
connections, and the memory that goes with them, for good.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from pass_runtime import PassError, Session
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions, check_exposure
from pass_server.service import Service

log = logging.getLogger("pass_server")
MAX_IDLE_BYTES = 1 << 20
"""The most bytes that may arrive while no request is under way: a head, or the rest of a body that was refused."""
PROGRESS_BYTES = 1 << 14
"""A client has to read this many bytes within the time limit; one that reads less counts as not reading."""


def bounded_protocol(max_connections: int, seconds: float) -> type[asyncio.Protocol]:
    """max_connections: with more, an idle one is closed for each that asks something. seconds: how long a client may
    take to send a request's head, to send the next request, or to go on reading."""

    class BoundedConnection(Connection):
        limit, client_seconds = max_connections, seconds

    return BoundedConnection


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """The server calls `check` several times a second."""

    limit: int
    client_seconds: float
    app_state: dict[str, Any]

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.idle_since = self.read_at = self.loop.time()
        self.unsent = self.idle_bytes = 0
        self.admitted = False
        self.app_state = {**self.app_state, "take_place": self.take_place}  # becomes `state` in the scope of requests
        if len(self.connections) > self.limit:
            self._make_room(admitted=False)

    def data_received(self, data: bytes) -> None:
        self.idle_bytes += len(data)
        if self.idle and self.idle_bytes > MAX_IDLE_BYTES:
            self.transport.abort()
        else:
            super().data_received(data)

    def on_response_complete(self) -> None:
        self.idle_since, self.idle_bytes = self.loop.time(), 0
        self.admitted = self.admitted or _admitted(self.cycle)
        if self._pipelined():  # a client that sends without waiting for answers may never read them: it gets only one
            self.transport.close()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """Whether the connection has no request under way."""
        return self.cycle is None or self.cycle.response_complete

    def check(self, now: float) -> None:
        """Close the connection if the client's time is over. Requests under way have limits of their own."""
        unsent = self.transport.get_write_buffer_size()
        stuck = unsent and (self.idle or self.flow.write_paused or self.transport.is_closing())
        reads = not self.unsent - PROGRESS_BYTES < unsent <= self.unsent  # or there is more for it to read
        if not stuck or reads:
            self.unsent, self.read_at = unsent, now
        waits_since = self.read_at if stuck else self.idle_since if self.idle else now
        if now - waits_since > self.client_seconds:
            self.transport.abort()

    def take_place(self) -> bool:
        """Whether there is room for the admitted request that has come. One connection that has none under way is
        closed if that makes room."""
        return len(self.connections) <= self.limit or self._make_room(admitted=True)

    def _make_room(self, *, admitted: bool) -> bool:
        """Close one other connection that has no admitted request under way, and return whether there was one:
        preferably one that never had any, and of those the one that is idle for longest. admitted: whether those that
        had one may be closed too. A new connection cannot do that before it has shown a key: until then it is there
        besides those of the limit."""
        others = [other for other in self.connections if other is not self and (admitted or not other.admitted)]
        idle = [other for other in others if other.idle or not _admitted(other.cycle)]
        if not idle:
            return False
        leaving = min(idle, key=lambda other: (other.admitted, other.idle_since))
        self.connections.discard(leaving)
        leaving.transport.abort()
        return True

    def _pipelined(self) -> bool:
        """Whether the next request came before this one was answered."""
        if hasattr(self, "pipeline"):  # httptools
            return bool(self.pipeline)
        done = self.conn.their_state is self.conn.our_state  # h11: bytes that are left are not this request's body
        return done and bool(self.conn.trailing_data[0])


def _admitted(cycle: Any) -> bool:
    """Whether `middleware.KeyCheck` has let the request pass."""
    return bool(cycle.scope["state"].get("admitted"))


@dataclass(frozen=True)
class Listening:
    """Where a server listens, for how many connections, and for how many seconds it drains. allow_no_key: also where
    others than this machine reach it, without keys. Raises PassError if a number is out of range."""

    host: str = "127.0.0.1"
    port: int = 8000
    allow_no_key: bool = False
    max_connections: int = 512
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.max_connections < 1 or not 0 <= self.drain_seconds < float("inf"):
            raise PassError("max-connections must be at least 1, and drain-seconds at least 0")


def run_server(
    open_session: Callable[[], Session], options: ServeOptions, where: Listening, tell: Callable[[str], None]
) -> None:
    """Serve a session until a signal ends the server. What can be refused without the session is refused before it is
    opened. tell: is given a line with the server's address once it listens."""
    check_exposure(where.host, options.keys, allow_no_key=where.allow_no_key)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listening = listen(where.host, where.port)
    with listening, open_session() as session:
        if session.chat_template is not None:
            session.chat_template.check()
        session.warm_up()
        app = make_app(session, options)
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        line = f"{app.state.service.model} is served at {address}/v1"
        serve(app, listening, where.max_connections, where.drain_seconds, ready=lambda: tell(line))


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with the limits of `Connection`.

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
    """A listening socket. Raises PassError if the address cannot be used."""
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
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop if it is installed
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
