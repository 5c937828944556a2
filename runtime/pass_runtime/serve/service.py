"""The requests under way: admitted while there is room, followed to their ends, told to stop when the server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

from pass_runtime.decode.scheduler import QueueFull
from pass_runtime.errors import PassError
from pass_runtime.generation import Generation, Piece, merged
from pass_runtime.options import GenerateOptions
from pass_runtime.serve.errors import ApiError, as_api_error, shutting_down
from pass_runtime.serve.forms import Choice
from pass_runtime.serve.jobs import Asked
from pass_runtime.serve.metrics import Metrics, Store, Timing
from pass_runtime.serve.options import ServeOptions
from pass_runtime.serve.tokens import TokenTexts
from pass_runtime.session import Session

Event = tuple[Choice, Piece | None]
"""A piece of a choice; None behind its last one."""


class Service:
    """One session, its limits and its figures. Everything is for the event loop's thread."""

    def __init__(self, session: Session, options: ServeOptions, model: str, store: Store) -> None:
        """model: what clients call it."""
        self.session, self.options, self.model = session, options, model
        self.texts = TokenTexts(session.tokenizer)
        self.metrics = Metrics(store, model)
        self.draining = False
        self.requests = 0
        """Those whose answer is not sent to its end."""
        self._live: list[Generation] = []

    def check_room(self, wanted: int = 1) -> None:
        """ApiError where so many more sequences do not fit into slots and queue."""
        if self.draining:
            raise shutting_down()
        places = self.session.backend.capabilities.slots + self.options.max_queue
        if wanted > places:
            raise ApiError(f"{wanted} sequences at once are more than the {places} that this server takes", param="n")
        self._live = [generation for generation in self._live if not generation.done]
        if len(self._live) + wanted > places:
            raise ApiError(
                f"{len(self._live)} sequences are under way already, and this server takes {places}: try again later",
                429,
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    @asynccontextmanager
    async def job(self, asked: Asked) -> AsyncIterator[list[Choice]]:
        """The sequences of a request, decoded while this is open: leaving it cancels what has not ended."""
        self.check_room(asked.sequences)
        choices: list[Choice] = []
        self.requests += 1
        try:
            for ids, options in asked.prompts:
                for generation in self._submit(ids, options):
                    choices.append(Choice(len(choices), generation, Timing(asked.arrived)))
                    self._live.append(generation)
            yield choices
        finally:
            self.requests -= 1
            for choice in choices:
                choice.generation.cancel()
            for choice in choices:
                self.metrics.ended(choice.generation, choice.timing)

    def _submit(self, ids: list[int], options: Sequence[GenerateOptions]) -> list[Generation]:
        try:
            return self.session.submit_all(ids, options)
        except QueueFull as error:
            raise as_api_error(error) from None
        except PassError as error:
            raise ApiError(str(error), 503 if self.session.closed else 400) from None

    async def events(self, choices: list[Choice]) -> AsyncGenerator[Event, None]:
        """Pieces of all choices as they come. Raises what went wrong with any of them."""
        pieces = merged([choice.generation for choice in choices])
        async with aclosing(pieces):
            async for place, piece in pieces:
                choice = choices[place]
                if piece is not None:
                    self.metrics.wrote(piece, choice.timing)
                elif choice.generation.finish_reason == "cancelled":
                    raise shutting_down()
                yield choice, piece

    async def drain(self, seconds: float) -> None:
        """Take nothing new; after `seconds` cancel what is still under way, and wait until its readers were told."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle()
        for generation in self._live:
            generation.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._idle()

    async def _idle(self) -> None:
        while self.requests:
            await asyncio.sleep(0.02)
