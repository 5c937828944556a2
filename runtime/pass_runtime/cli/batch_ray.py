"""pass-run batch --ray N: the lines are answered by N actors of a Ray cluster, each with the bundle in a session.

The process that was started reads requests and writes results, as without Ray: so that a killed run continues in the
same way, with Ray or without. An actor that dies is started again, and what it had not answered is asked again.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pass_runtime.backends.open import GPU_DEVICES
from pass_runtime.cli.batch import Answer
from pass_runtime.cli.options import open_bundle
from pass_runtime.cli.prompts import Line
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions

UNDER_WAY = 4096
"""Calls of an actor at a time; it is never given so many."""
LIVES = 3
"""How often an actor, or a line, is tried again before the run ends."""
PATIENCE = 60
"""Seconds after which somebody is told what a run is waiting for."""


class Answerer:
    """What an actor is: answers lines with a session of its own."""

    def __init__(
        self, bundle: Path, engine: dict[str, Any], max_batch_size: int | None, defaults: GenerateOptions
    ) -> None:
        self._defaults = defaults
        try:
            self._session = open_bundle(bundle, dict(engine), max_batch_size=max_batch_size)
            self._slots = self._session.backend.capabilities.slots
            self._waiting = ThreadPoolExecutor(2 * self._slots)
        except PassError as error:  # for whoever asks: what a constructor raises is no more than a dead actor
            self._slots, self._error = 0, str(error)

    async def slots(self) -> int | str:
        """How many lines are decoded at a time, or why there is no session."""
        return self._slots or self._error

    async def answer(self, line: Line) -> dict[str, Any]:
        under_way = Answer(self._session, line, self._defaults)
        return await asyncio.get_running_loop().run_in_executor(self._waiting, under_way.wait)


class RayActors:
    """Each line goes to the actor that has the fewest."""

    def __init__(self, ray: Any, actors: list[Any], slots: list[int]) -> None:
        self._ray, self._lines = ray, dict.fromkeys(actors, 0)
        self.ahead = 2 * sum(slots)

    def start(self, line: Line) -> RayAnswer:
        actor = min(self._lines, key=self._lines.__getitem__)
        self._lines[actor] += 1
        return RayAnswer(self, actor, actor.answer.remote(line))

    def take(self, answer: RayAnswer) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._ray.get(answer.found)
        except self._ray.exceptions.RayActorError as error:
            told = str(error).strip().splitlines()[0]
            raise PassError(f"a Ray actor died {LIVES + 1} times: {told}; run again to continue") from None
        self._lines[answer.actor] -= 1
        return found


@dataclass(frozen=True)
class RayAnswer:
    """The answer to one line, under way somewhere."""

    actors: RayActors
    actor: Any
    found: Any

    def wait(self) -> dict[str, Any]:
        return self.actors.take(self)


def open_ray(
    count: int, bundle: Path, engine: dict[str, Any], max_batch_size: int | None, defaults: GenerateOptions
) -> RayActors:
    """`count` actors with sessions. engine: the engine options of the command line.

    Each takes as many CPUs as --threads says (1 where it does not), and a GPU where --device names one.
    """
    if count < 1:
        raise PassError(f"--ray must be at least 1, not {count}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise PassError("ray is not installed: pip install 'pass-toolkit[ray]'") from None
    threads = engine["threads"] = engine["threads"] or 1
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PassError(f"no Ray cluster: {' '.join(str(error).split())}; see RAY_ADDRESS") from None
    remote = ray.remote(Answerer).options(
        num_cpus=threads,
        num_gpus=int(engine["device"] in GPU_DEVICES),
        max_concurrency=UNDER_WAY,
        max_restarts=LIVES,
        max_task_retries=LIVES,
    )
    actors = [remote.remote(bundle.absolute(), engine, max_batch_size, defaults) for _ in range(count)]
    found = _slots(ray, actors)
    for told in found:
        if isinstance(told, str):
            raise PassError(told)
    return RayActors(ray, actors, [told for told in found if isinstance(told, int)])


def _slots(ray: Any, actors: list[Any]) -> list[int | str]:
    """Of every actor, once all of them have opened the bundle."""
    asked = [actor.slots.remote() for actor in actors]
    ready, missing = ray.wait(asked, num_returns=len(asked), timeout=PATIENCE)
    if missing:
        click.echo(
            f"{len(ready)} of {len(asked)} Ray actors are ready; are there CPUs, or GPUs, for the rest?", err=True
        )
    try:
        found: list[int | str] = ray.get(asked)
    except ray.exceptions.RayActorError as error:
        told = str(error).strip().splitlines()[0]
        raise PassError(f"a Ray actor died before it could begin: {told}") from None
    return found
