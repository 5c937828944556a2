"""The slots of a backend and what stands in them: which sequence, how much of it in the cache, which window.

The device is told only what changed. Where a pass or an allocation fails, or is interrupted, the host's account is as
before it, and the windows are laid out anew from that account: nothing that half happened is believed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from pass_runtime.backends.base import Backend, Logprobs, PassKind
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import SAMPLERS, Sampler
from pass_runtime.decode.sequence import Request, Sequence, Source, Token, TokenLogprobs

Drafts = tuple[int, ...]


@dataclass
class Slot:
    """One row of the batch.

    admitted: counts the sequences that joined before. kept: tokens whose K/V are in the cache though no sequence is.
    prompt: of the sequence that is or was the last one here; the cache begins with its K/V, as far as it goes.
    left: drafts in its window, of `source`. entered: whether its window is on the device. parked: whether the device
    knows that it is left out.
    """

    number: int
    sequence: Sequence | None = None
    admitted: int = 0
    kept: list[int] = field(default_factory=list)
    prompt: tuple[int, ...] = ()
    left: int = 0
    source: Source = "lookahead"
    entered: bool = False
    parked: bool = False

    @property
    def cached(self) -> int:
        """Valid entries of the cache."""
        return len(self.kept) if self.sequence is None else self.sequence.cached


@dataclass(frozen=True)
class Outcome:
    """What a pass did to one sequence: `drafted` drafts were in its window, of `source`, and these tokens came out."""

    sequence: Sequence
    drafted: int
    source: Source
    tokens: tuple[Token, ...]


class Runner:
    """B slots. Everything here is about one thread: the scheduler's."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.slots = [Slot(number) for number in range(backend.capabilities.slots)]
        self.window: Plan | None = None
        """The plan whose windows are on the device, None where they are to be laid out anew."""

        self._sampler: Sampler = "greedy"  # of the last pass
        self._admitted = 0
        self._engine_seconds = 0.0  # in passes, those over prompts included

    @property
    def busy(self) -> list[Slot]:
        """Slots that have a sequence."""
        return [slot for slot in self.slots if slot.sequence is not None]

    @property
    def decoding(self) -> list[Slot]:
        """Slots whose sequence is past its prompt."""
        return [slot for slot in self.slots if slot.sequence is not None and slot.sequence.prefilled]

    @property
    def room(self) -> int:
        """Cache columns that a window may write behind the longest sequence, after growing if need be."""
        return self.backend.capabilities.max_capacity - max((slot.cached for slot in self.busy), default=0)

    def fits(self, prompt: int) -> bool:
        """Whether a token can be written behind a prompt of so many tokens."""
        return prompt - 1 + self.backend.capabilities.columns(1) <= self.backend.capabilities.max_capacity

    def admit(self, sequence: Sequence) -> bool:
        """Give `sequence` a free slot; False where there is none. It is the one that spares most of the reading."""
        free = [slot for slot in self.slots if slot.sequence is None]
        if not free:
            return False
        prompt = sequence.request.prompt_ids
        shared = {slot.number: _shared(slot, sequence.request) for slot in free}
        slot = max(free, key=lambda slot: (shared[slot.number], -len(slot.kept), -slot.number))
        keep = shared[slot.number]
        self._fit(len(prompt) + 1, slot, keep)
        self.backend.set_sampling(slot.number, sequence.request.sampling)
        slot.sequence, slot.prompt, sequence.cached, slot.kept = sequence, prompt, keep, []
        slot.left, slot.entered, slot.parked = 0, False, False
        self._admitted += 1
        slot.admitted = self._admitted
        sequence.stats.cached_tokens = keep
        sequence.leave_queue()
        return True

    def release(self, slot: Slot) -> None:
        """The sequence is done; what it left in the cache can serve one that begins alike."""
        if slot.sequence is not None:
            self._keep(slot, slot.sequence.tokens[: slot.sequence.cached])
            slot.sequence = None

    def share(self, slot: Slot) -> None:
        """Copy what another slot has read of the very prompt that `slot` is to read."""
        sequence = slot.sequence
        assert sequence is not None
        started, request = time.perf_counter(), sequence.request
        source = max(self.slots, key=lambda other: _read(other, request))
        if (count := _read(source, request)) <= sequence.cached:
            return
        self.backend.cache.move(source.number, slot.number, count)
        sequence.stats.cached_tokens += count - sequence.cached
        sequence.cached, slot.parked = count, False
        sequence.stats.prefill_seconds += time.perf_counter() - started

    def prefill(self, slot: Slot, most: int | None = None) -> int:
        """One chunk of the prompt, of at most `most` rows; returns how many tokens it held."""
        sequence = slot.sequence
        assert sequence is not None
        started, prompt = time.perf_counter(), sequence.request.prompt_ids
        count, width = self._chunk(sequence.cached, len(prompt) - 1, most)
        self._reserve(sequence.cached + self.backend.capabilities.columns(width))
        begun = time.perf_counter()
        self.backend.prefill(slot.number, sequence.cached, prompt[sequence.cached : sequence.cached + count], width)
        done = time.perf_counter()
        self._engine_seconds += done - begun
        sequence.cached += count
        slot.parked = False  # behind what is cached now
        sequence.stats.prefill_seconds += done - started
        return count

    def make_room(self, plan: Plan, batch: int) -> None:
        """For windows of `plan` in the first `batch` slots, growing the cache if a sequence needs it. Windows of slots
        that are free are written too: what those kept gives way."""
        columns, slots = self.backend.capabilities.columns(plan.width), self.slots[:batch]
        self._reserve(max((slot.cached for slot in slots if slot.sequence is not None), default=0) + columns)
        for slot in slots:
            if slot.cached + columns > self.backend.capacity:
                self._keep(slot, slot.kept[: self.backend.capacity - columns])

    def run(self, plan: Plan, drafts: Mapping[int, Drafts]) -> tuple[list[Outcome], float]:
        """One pass over every decoding slot, for which there must be room. `drafts`, by slot number, are written into
        windows that have others or none. Returns what it did, and its seconds."""
        active = self.decoding
        kind = self._kind(plan, active)
        if kind.sampler != self._sampler and self.backend.manifest.rule == "rejection":
            self.window = None  # drafts without the probabilities that this sampler's tail compares
        self._sampler = kind.sampler
        self._lay_out(plan, active, drafts, kind.batch)
        self.window = None  # until the pass is done
        started = time.perf_counter()
        for slot in active:
            if slot.sequence is not None and slot.sequence.decoding_since is None:
                slot.sequence.decoding_since, slot.sequence.engine_before = started, self._engine_seconds
        emitted = self.backend.run(kind)
        seconds = time.perf_counter() - started
        self._engine_seconds += seconds
        logprobs = self.backend.logprobs(kind) if kind.logprobs else None
        outcomes = [self._take(slot, plan, emitted[slot.number], logprobs) for slot in active]
        self.window = plan.next
        return outcomes, seconds

    def idle_pass(self, kind: PassKind) -> tuple[float, float]:
        """Seconds of trunk and tail in a pass in which every slot is parked: it leaves no trace."""
        self.make_room(kind.plan, kind.batch)
        self.window = None
        for slot in self.slots[: kind.batch]:
            self.backend.enter(slot.number, kind.plan, slot.cached, 0)
            self._park(slot)
        started = time.perf_counter()
        self.backend.run_trunk(kind.plan, kind.batch)
        between = time.perf_counter()
        self.backend.run_tail(kind)
        done = time.perf_counter()
        self._engine_seconds += done - started
        return between - started, done - between

    def gather(self) -> list[Slot]:
        """The decoding slots, after moving sequences down into free ones where a smaller batch then covers them all."""
        sizes = self.backend.capabilities
        while active := self.decoding:
            source = active[-1]
            target = next((slot for slot in self.slots[: source.number] if slot.sequence is None), None)
            if target is None or sizes.batch_size(len(active)) == sizes.batch_size(source.number + 1):
                break
            self._move(source, target)
        return active

    def batch(self, active: Items[Slot]) -> int:
        """Slots that a pass over `active` runs over."""
        return self.backend.capabilities.batch_size(active[-1].number + 1)

    def sampler(self, active: Items[Slot]) -> Sampler:
        """The cheapest that draws as each of `active` asks: the later ones compute what the earlier ones do."""
        samplers = (slot.sequence.request.sampling.sampler for slot in active if slot.sequence is not None)
        return max(samplers, key=SAMPLERS.index)

    def _kind(self, plan: Plan, active: Items[Slot]) -> PassKind:
        told = any(slot.sequence is not None and slot.sequence.request.logprobs is not None for slot in active)
        return PassKind(plan, self.batch(active), self.sampler(active), told)

    def _lay_out(self, plan: Plan, active: Items[Slot], drafts: Mapping[int, Drafts], batch: int) -> None:
        """Write the windows that are not on the device as they should be."""
        for slot in self.slots[:batch]:
            if slot not in active:
                if not slot.parked:
                    self._park(slot)
                continue
            sequence = slot.sequence
            assert sequence is not None
            given = drafts.get(slot.number)
            if self.window == plan and slot.entered and given is None:
                continue
            slot.entered = False
            self.backend.enter(slot.number, plan, sequence.cached, sequence.tokens[-1], given or ())
            slot.left, slot.source = len(given or ()), "ngram"
            slot.entered, slot.parked = True, False

    def _park(self, slot: Slot) -> None:
        slot.entered = slot.parked = False
        self.backend.park(slot.number, slot.cached)
        slot.parked = True

    def _take(self, slot: Slot, plan: Plan, ids: Items[int], logprobs: Logprobs | None) -> Outcome:
        """The host's account of one slot after a pass."""
        sequence, accepted = slot.sequence, len(ids) - 1
        assert sequence is not None
        sources: list[Source] = [slot.source] * accepted + ["model"]
        if logprobs is None:
            tokens = tuple(map(Token, ids, sources))
        else:
            tokens = tuple(map(Token, ids, sources, _told(logprobs, slot.number, ids, sequence.request.logprobs)))
        outcome = Outcome(sequence, slot.left, slot.source, tokens)
        sequence.cached += len(ids)
        sequence.stats.engine_seconds = self._engine_seconds - sequence.engine_before
        slot.left, slot.source = plan.left(accepted), "lookahead"
        return outcome

    def _reserve(self, columns: int) -> None:
        """Grow the cache to `columns` at least."""
        if columns > self.backend.capacity:
            self._resize(self.backend.capabilities.capacity(columns))

    def _fit(self, columns: int, slot: Slot, keep: int) -> None:
        """Before a sequence of `columns` joins in `slot`: a cache that is too long for all of them shrinks, since
        passes pay for its length. What slots kept for later goes where it does not fit."""
        self._keep(slot, slot.kept[:keep])
        busy = max((len(s.sequence.tokens) + 1 for s in self.slots if s.sequence is not None), default=0)
        fitting = self.backend.capabilities.capacity(min(max(columns, busy), self.backend.capabilities.max_capacity))
        if fitting < self.backend.capacity:
            for other in self.slots:
                self._keep(other, other.kept[:fitting])
            self._resize(fitting)

    @staticmethod
    def _keep(slot: Slot, tokens: list[int]) -> None:
        """The device is to be told anew where the windows of `slot` begin, or it would write behind the old length."""
        slot.kept, slot.entered, slot.parked = tokens, False, False

    def _resize(self, capacity: int) -> None:
        self.backend.resize(capacity, [slot.cached for slot in self.slots])

    def _move(self, source: Slot, target: Slot) -> None:
        sequence = source.sequence
        assert sequence is not None
        self._keep(target, [])
        self.backend.cache.move(source.number, target.number, sequence.cached)
        self.backend.set_sampling(target.number, sequence.request.sampling)
        target.sequence, target.prompt, source.sequence = sequence, source.prompt, None
        self._keep(source, [])

    def _chunk(self, start: int, stop: int, most: int | None) -> tuple[int, int]:
        """Prompt tokens of the next chunk and the rows of its window: the narrowest that holds the rest, where it is
        three quarters full or no other is filled, else the widest that is."""
        left, remaining = self.backend.capabilities.max_capacity - start, stop - start
        offered = [w for w in self.backend.capabilities.prefill_widths if self.backend.capabilities.columns(w) <= left]
        widths = [width for width in offered if most is None or width <= most] or offered[-1:]
        holding = [width for width in widths if width >= remaining]
        filled = [width for width in widths if width <= remaining]
        if holding and (4 * remaining >= 3 * holding[-1] or filled[0] == 1):
            return remaining, holding[-1]
        return filled[0], filled[0]


def _told(logprobs: Logprobs, slot: int, ids: Items[int], count: int | None) -> list[TokenLogprobs | None]:
    """For every token of a slot; None where its request did not ask."""
    if count is None:
        return [None] * len(ids)
    chosen = logprobs.chosen[slot].tolist()
    pairs = zip(logprobs.ids[slot, :, :count].tolist(), logprobs.values[slot, :, :count].tolist(), strict=True)
    tops = [tuple(zip(*pair, strict=True)) for pair in pairs]
    return [TokenLogprobs(chosen[i], tops[i]) for i in range(len(ids))]


def _read(slot: Slot, request: Request) -> int:
    """How much of the very prompt of `request` the cache of `slot` begins with, as reading it wrote it."""
    return min(slot.cached, len(request.prompt_ids) - 1) if slot.prompt is request.prompt_ids else 0


def _shared(slot: Slot, request: Request) -> int:
    """How much of the prompt of `request` need not be read in a free `slot`."""
    return _common_prefix(slot.kept, request.prompt_ids[:-1]) if request.reuse_prefix else _read(slot, request)


def _common_prefix(a: Items[int], b: Items[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
