"""Answers the lines of a batch with a session, and replaces the session if it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from pass_runtime.cli.request_line import parse_request
from pass_runtime.errors import PassError
from pass_runtime.files import Line, to_json
from pass_runtime.generation import Generation
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

MAX_FAILED_SESSIONS = 3
"""The run ends when this many sessions in a row have failed."""


class LineGeneration:
    """The generation for one line. Any failure, even to begin, becomes the line's result."""

    def __init__(self, session: Session, line: Line, defaults: GenerateOptions) -> None:
        self.session = session
        self._id: dict[str, Any] = {}
        self._generation: Generation | Exception
        try:
            value = line.object()
            self._id = {"id": value["id"]} if "id" in value else {}
            request = parse_request(value)
            options = request.options(defaults, line.number)
            if request.messages is None:
                self._generation = session.generate(request.prompt or "", options)
            else:
                self._generation = session.chat(
                    [message.plain() for message in request.messages], options
                )
        except Exception as error:
            self._generation = error

    def wait(self) -> dict[str, Any]:
        """Wait for the result and return its fields. Those of a failure are "error", and
        "unexpected" if it is not the request's fault. The line's "id" comes before them."""
        try:
            if isinstance(self._generation, Exception):
                raise self._generation
            result = self._generation.result().as_dict()
            to_json(result)  # fails here, and not later, if JSON cannot hold the result
        except PassError as error:
            result = {"error": _one_line(error)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {_one_line(error)}", "unexpected": True}
        return self._id | result


def results_of(
    open_session: Callable[[], Session], lines: Sequence[Line], defaults: GenerateOptions
) -> Iterator[dict[str, Any]]:
    """Yield the results of all lines, in order, each as soon as it is complete. Two lines per slot
    are submitted ahead, so that no slot waits for a line.

    A pass that fails ends all sequences in it, and a session that fails (`Session.closed`) ends all
    its sequences. Any of them may be the cause. So a line with an unexpected error is answered
    again, alone, in a session that works. If it fails again, the line is the cause.
    """
    if not lines:
        return
    session, failed_sessions = open_session(), 0
    waiting, submitted = iter(lines), deque[LineGeneration]()
    for line in lines:
        count = 2 * session.backend.capabilities.slots - len(submitted)
        submitted.extend(LineGeneration(session, each, defaults) for each in islice(waiting, count))
        generation = submitted.popleft()
        result = generation.wait()
        if "unexpected" in result or ("error" in result and generation.session.closed):
            for other in submitted:
                other.wait()  # so that this line runs alone
            session = _reopen_if_closed(session, open_session)
            result = LineGeneration(session, line, defaults).wait()
            failed_sessions = failed_sessions + 1 if session.closed else 0
            if failed_sessions == MAX_FAILED_SESSIONS:
                raise PassError(
                    f"the session failed {MAX_FAILED_SESSIONS} times in a row, the last time at "
                    f"line {line.number}: {result['error']}; results so far are kept, run again to "
                    "continue"
                )
            session = _reopen_if_closed(session, open_session)
        yield result


def _reopen_if_closed(session: Session, open_session: Callable[[], Session]) -> Session:
    if not session.closed:
        return session
    session.close()
    return open_session()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"
