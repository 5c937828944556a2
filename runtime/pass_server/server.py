"""Runs the app with uvicorn, and lets requests end at SIGTERM and Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue

import uvicorn

from pass_runtime import PassError, Session
from pass_server.app import Entry, make_app
from pass_server.serve_options import ListenOptions, ServeOptions, check_exposure
from pass_server.service import Service

log = logging.getLogger("pass_server")


def run_server(
    open_session: Callable[[], Session],
    options: ServeOptions,
    listen_options: ListenOptions,
    report: Callable[[str], None],
) -> None:
    """Serve a session until a signal ends the server. The address is checked before the session is
    opened. report: called with the server's addresses, one per line, once it serves."""
    check_exposure(listen_options.host, options.keys, allow_no_key=listen_options.allow_no_key)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    entry = Entry()
    server = uvicorn.Server(
        uvicorn.Config(
            entry,
            # httptools loses the body of a request that offers to upgrade, as Java's clients do.
            http="h11",
            ws="none",
            lifespan="off",
            limit_concurrency=listen_options.max_connections + 1,  # uvicorn counts to below it
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
    )
    runner = asyncio.Runner(loop_factory=server.config.get_loop_factory())
    events = SimpleQueue[int]()
    """Numbers of signals, and 0 when there is no more to wait for."""

    def answer() -> None:
        try:
            with runner:
                runner.run(server.serve([listener]))
        finally:
            events.put(0)

    thread = threading.Thread(target=answer, name="pass-http", daemon=True)

    def stop() -> None:
        server.should_exit = True
        thread.join()

    with listen(listen_options.host, listen_options.port) as listener, ExitStack() as closing:
        host, port = listener.getsockname()[:2]
        loop = runner.get_loop()
        thread.start()
        closing.callback(stop)
        session = closing.enter_context(open_session())
        if session.chat_template is not None:
            session.chat_template.check()
        session.warm_up()
        app = make_app(session, options)
        service: Service = app.state.service
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: events.put(received))
        entry.app = app
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        page = f"\na page to try it: {address}/" if options.page else ""
        report(f"{service.model} is served at {address}/v1{page}")
        if events.get():
            seconds = listen_options.drain_seconds
            active = service.active_requests
            log.info("shutting down: %d requests under way have %g seconds", active, seconds)
            draining = asyncio.run_coroutine_threadsafe(service.drain(seconds), loop)
            draining.add_done_callback(lambda _: events.put(0))
            if events.get():  # A second signal ends the requests at once.
                asyncio.run_coroutine_threadsafe(service.drain(0), loop).result()
        stop()


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
