"""Runs the app with uvicorn, limits its connections, and at SIGTERM and Ctrl-C lets requests end.

uvicorn itself has no time limit for the head of a request, nor for a client that does not read its
answer: without the limits here, any client could hold connections and their memory forever.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pass_runtime import PassError, Session
from pass_server.app import make_app
from pass_server.middleware import CONNECTION
from pass_server.serve_options import ListenOptions, ServeOptions, check_exposure
from pass_server.service import Service
from pass_server.warming_up import warming_up

log = logging.getLogger("pass_server")
MAX_IDLE_BYTES = 1 << 20
"""The most bytes that a connection accepts outside a request under way: the head of the next one,
or the rest of a body that was refused."""
MIN_READ_BYTES = 1 << 14
"""A client that reads fewer bytes than this within `client_seconds` counts as not reading."""


def bounded_protocol(connections: int, seconds: float) -> type[asyncio.Protocol]:
    """Return a `Connection` class with these limits, of which uvicorn makes objects. connections:
    if there are more, an idle one is closed for each new request. seconds: `client_seconds`, how
    long a client may take to send the head of a request, or to read MIN_READ_BYTES."""

    class BoundedConnection(Connection):
        max_connections, client_seconds = connections, seconds

    return BoundedConnection


class Connection(H11Protocol):
    """An HTTP connection that is closed if its client is too slow, or to make room for another.

    uvicorn's other implementation, on httptools, loses the body of a request that offers to
    upgrade, as those of Java's clients do, and sends chunks to clients of HTTP/1.0."""

    max_connections: int
    client_seconds: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self.idle_bytes = 0  # received since then
        self.read_at = self.loop.time()  # when the client had last read MIN_READ_BYTES
        self.unsent = 0  # bytes that waited to be sent at `read_at`
        # uvicorn's object for the request and response that was last admitted.
        self._admitted_cycle: Any = None
        self.app_state = {**self.app_state, CONNECTION: self}
        if len(self.connections) > self.max_connections:
            self._make_room(close_admitted=False)

    def data_received(self, data: bytes) -> None:
        self.idle_bytes += len(data)
        if self.idle and self.idle_bytes > MAX_IDLE_BYTES:
            self.transport.abort()
        else:
            super().data_received(data)

    def on_response_complete(self) -> None:
        self.idle_since, self.idle_bytes = self.loop.time(), 0
        # A client that sends on without waiting for the answer may read none, so it gets only one.
        if self._pipelined():
            self.transport.close()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """Whether the connection has no request under way."""
        return self.cycle is None or self.cycle.response_complete

    def close_if_overdue(self, now: float) -> None:
        """Close the connection if its client has kept the server waiting for `client_seconds`. What
        the server itself takes for a request is limited elsewhere."""
        unsent = self.transport.get_write_buffer_size()
        # The server waits for the client to read if it has no more to write, or no room to write.
        must_read = unsent and (self.idle or self.flow.write_paused or self.transport.is_closing())
        has_read = unsent <= self.unsent - MIN_READ_BYTES
        if not must_read or has_read or unsent > self.unsent:
            self.unsent, self.read_at = unsent, now  # The client has `client_seconds` again.
        waiting_since = self.read_at if must_read else self.idle_since
        if (must_read or self.idle) and now - waiting_since > self.client_seconds:
            self.transport.abort()

    @property
    def admitted(self) -> bool:
        """Whether any request so far was admitted."""
        return self._admitted_cycle is not None

    def admit(self) -> bool:
        """Note that the request under way is admitted. If there are too many connections, close
        another one that has no admitted request under way. Return False if there is none."""
        self._admitted_cycle = self.cycle
        has_room = len(self.connections) <= self.max_connections
        return has_room or self._make_room(close_admitted=True)

    def _make_room(self, *, close_admitted: bool) -> bool:
        """Close one other connection that has no admitted request under way: first those that never
        had one, then the one that is idle for longest. Return whether there was any.

        close_admitted: whether connections that once had an admitted request may be closed: only if
        this one has an admitted request too; until then it is itself one too many.
        """
        connections: set[Any] = self.connections
        candidates = [
            each
            for each in connections
            if each is not self
            and (close_admitted or not each.admitted)
            and (each.idle or each.cycle is not each._admitted_cycle)
        ]
        if not candidates:
            return False
        closed = min(candidates, key=lambda each: (each.admitted, each.idle_since))
        self.connections.discard(closed)
        closed.transport.abort()
        return True

    def _should_upgrade(self) -> bool:
        return False  # uvicorn's method would also log two warnings for each offer

    def _pipelined(self) -> bool:
        """Return whether the next request came before this one was answered."""
        # Once both sides are done, bytes after the body are the next request's.
        is_done = self.conn.their_state is self.conn.our_state
        return is_done and bool(self.conn.trailing_data[0])


def run_server(
    open_session: Callable[[], Session],
    options: ServeOptions,
    listen_options: ListenOptions,
    report: Callable[[str], None],
) -> None:
    """Serve a session until a signal ends the server. The address is checked before the session is
    opened. report: called with the server's addresses, one per line, once it serves."""
    check_exposure(listen_options.host, options.keys, allow_no_key=listen_options.allow_no_key)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listener = listen(listen_options.host, listen_options.port)
    max_connections = listen_options.max_connections
    with listener, ExitStack() as closing:
        with answering(listener, warming_up(), max_connections, options.client_seconds):
            session = closing.enter_context(open_session())
            if session.chat_template is not None:
                session.chat_template.check()
            session.warm_up()
        app = make_app(session, options)
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        service: Service = app.state.service
        text = f"{service.model} is served at {address}/v1"
        if options.page:
            text += f"\na page to try it: {address}/"
        server = HttpServer(app, max_connections, options.client_seconds)
        # uvicorn's event loop is that of uvloop if it is installed.
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            serving = _serve(
                server, service, listener, listen_options.drain_seconds, lambda: report(text)
            )
            runner.run(serving)


@contextmanager
def answering(
    listener: socket.socket, app: ASGIApp, max_connections: int, client_seconds: float
) -> Generator[None, None, None]:
    """Serve `app` in a thread within this context. Clients that connect between this app and the
    next one wait for the latter, because the listener stays open."""
    server = HttpServer(app, max_connections, client_seconds)

    def run() -> None:
        with (
            listener.dup() as own_listener,
            asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner,
        ):
            runner.run(server.serve([own_listener]))

    thread = threading.Thread(target=run, name="pass-warming-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


class HttpServer(uvicorn.Server):
    """uvicorn with the limits of `bounded_protocol`, and without its signal handlers."""

    def __init__(self, app: ASGIApp, max_connections: int, client_seconds: float) -> None:
        config = uvicorn.Config(
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
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `_serve`."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Check every connection. uvicorn calls this ten times a second."""
        now = asyncio.get_running_loop().time()
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            connection.close_if_overdue(now)
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises PassError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", error))
        reason = reason.partition(" (while")[0]  # the rest repeats the address
        raise PassError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --host and --port"
        ) from None
    # Without TCP_NODELAY a token waits up to 40 ms until the client acknowledges the one before.
    # asyncio does not set it for this socket, from which accepted connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _serve(
    server: uvicorn.Server,
    service: Service,
    listener: socket.socket,
    drain_seconds: float,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C. Requests under way then have `drain_seconds`; a second signal
    cancels them. ready: called once the signal handlers are installed."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    ready()
    serving = asyncio.create_task(server.serve([listener]))
    first_signal = asyncio.create_task(signals.get())
    await asyncio.wait({serving, first_signal}, return_when=asyncio.FIRST_COMPLETED)
    if first_signal.done():
        message = "shutting down: %d requests under way have %g seconds"
        log.info(message, service.active_requests, drain_seconds)
        draining = asyncio.create_task(service.drain(drain_seconds))
        second_signal = asyncio.create_task(signals.get())
        await asyncio.wait({draining, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            await service.drain(0)
        second_signal.cancel()
    first_signal.cancel()
    server.should_exit = True
    await serving
