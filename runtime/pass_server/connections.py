"""uvicorn's HTTP protocol with bounds on clients that are slow, idle, or do not read, and with room for new ones.

uvicorn itself waits without end for the head of a request, and for a client to read its answer: any client could hold
connections, and the memory that goes with them, for good.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_IDLE_BYTES = 1 << 20
"""The most bytes that may arrive while no request is under way: a head, or the rest of a body that was refused."""
PROGRESS_BYTES = 1 << 14
"""A client has to read this many bytes within the time limit; one that reads less counts as not reading."""


def bounded_protocol(most: int, seconds: float) -> type[asyncio.Protocol]:
    """most: the number of connections above which an idle one is closed for each that asks something. seconds: how long
    a client may take to send a request's head, to send the next request, or to go on reading."""

    class BoundedConnection(Connection):
        limit, patience = most, seconds

    return BoundedConnection


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """The server calls `check` several times a second. patience: in seconds."""

    limit: int
    patience: float
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
        """Close the connection where the client's time is over. Requests under way have limits of their own."""
        unsent = self.transport.get_write_buffer_size()
        stuck = unsent and (self.idle or self.flow.write_paused or self.transport.is_closing())
        reads = not self.unsent - PROGRESS_BYTES < unsent <= self.unsent  # or there is more for it to read
        if not stuck or reads:
            self.unsent, self.read_at = unsent, now
        waits_since = self.read_at if stuck else self.idle_since if self.idle else now
        if now - waits_since > self.patience:
            self.transport.abort()

    def take_place(self) -> bool:
        """Whether there is room for the admitted request that has come. One connection that has none under way is
        closed where that makes room."""
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
