"""pass-run batch --ray N: N actors of a Ray cluster answer the lines, each with the bundle in a session of its own.

The process that was started reads requests and writes results, as without Ray, so that a killed run continues in the
same way with Ray and without. An actor that dies is started again and gets the lines that it had not answered.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from pass_runtime.backends.open import gpus_of_replica
from pass_runtime.cli.batch_session import LineGeneration
from pass_runtime.cli.flags import open_bundle
from pass_runtime.errors import PassError
from pass_runtime.files import Line
from pass_runtime.options import GenerateOptions, LoadOptions

UNDER_WAY = 4096
"""The most calls of an actor at a time: more than it is ever given."""
LIVES = 3
"""How often an actor is started again, and a line tried again, before the run ends."""
PATIENCE = 60
"""Seconds after which a message says what the run is waiting for."""


class AnswererActor:
    """The class of the Ray actors: answers lines with a session of its own."""

    def __init__(self, bundle: Path, opened: LoadOptions, defaults: GenerateOptions) -> None:
        self._defaults = defaults
        try:
            self._session = open_bundle(bundle, opened)
            self._slots = self._session.backend.capabilities.slots
            self._waiting = ThreadPoolExecutor(2 * self._slots)
        except PassError as error:  # kept for `slots`: raised in a constructor it would only be a dead actor
            self._slots, self._error = 0, str(error)

    async def slots(self) -> int | str:
        """How many lines are decoded at a time, or why there is no session."""
        return self._slots or self._error

    async def answer(self, line: Line) -> dict[str, Any]:
        pending = LineGeneration(self._session, line, self._defaults)
        found = await asyncio.get_running_loop().run_in_executor(self._waiting, pending.wait)
        if "error" in found and self._session.closed:
            os._exit(1)  # Ray starts the actor again and repeats the calls that it had not answered
        return found


class RayActors:
    """An `Answerer` that gives each line to the actor with the fewest lines under way."""

    def __init__(self, ray: Any, actors: list[Any], slots: list[int]) -> None:
        self._ray, self._lines = ray, dict.fromkeys(actors, 0)
        self.ahead = 2 * sum(slots)

    def start(self, line: Line) -> PendingCall:
        actor = min(self._lines, key=self._lines.__getitem__)
        self._lines[actor] += 1
        return PendingCall(self, actor, actor.answer.remote(line))

    def wait(self, call: PendingCall) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._ray.get(call.reference)
        except self._ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[0]
            raise PassError(f"a Ray actor died {LIVES + 1} times: {reason}; run again to continue") from None
        self._lines[call.actor] -= 1
        return found


@dataclass(frozen=True)
class PendingCall:
    """A call of an actor with one line. reference: Ray's, to its result."""

    actors: RayActors
    actor: Any
    reference: Any

    def wait(self) -> dict[str, Any]:
        return self.actors.wait(self)


def open_ray(count: int, bundle: Path, opened: LoadOptions, defaults: GenerateOptions) -> RayActors:
    """Start `count` actors, each with a session that is opened with `opened`.

    Each takes as many of Ray's CPUs as --threads says (1 by default), and a GPU where --device names one.
    """
    if count < 1:
        raise PassError(f"--ray must be at least 1, not {count}")
    gpus = gpus_of_replica(opened.device)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise PassError("ray is not installed: pip install 'pass-toolkit[ray]'") from None
    opened = replace(opened, threads=opened.threads or 1)
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PassError(f"no Ray cluster: {' '.join(str(error).split())}; see RAY_ADDRESS") from None
    remote = ray.remote(AnswererActor).options(
        num_cpus=opened.threads,
        num_gpus=gpus,
        max_concurrency=UNDER_WAY,
        max_restarts=LIVES,
        max_task_retries=LIVES,
    )
    actors = [remote.remote(bundle.absolute(), opened, defaults) for _ in range(count)]
    found = _slots(ray, actors)
    for slots_or_error in found:
        if isinstance(slots_or_error, str):
            raise PassError(slots_or_error)
    return RayActors(ray, actors, [slots for slots in found if isinstance(slots, int)])


def _slots(ray: Any, actors: list[Any]) -> list[int | str]:
    """The slots of every actor, or its error, once all of them have opened the bundle."""
    calls = [actor.slots.remote() for actor in actors]
    ready, missing = ray.wait(calls, num_returns=len(calls), timeout=PATIENCE)
    if missing:
        click.echo(
            f"{len(ready)} of {len(calls)} Ray actors are ready; are there CPUs, or GPUs, for the rest?", err=True
        )
    try:
        found: list[int | str] = ray.get(calls)
    except ray.exceptions.RayActorError as error:
        reason = str(error).strip().splitlines()[0]
        raise PassError(f"a Ray actor died before it could begin: {reason}") from None
    return found
