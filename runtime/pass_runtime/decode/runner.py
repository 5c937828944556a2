"""Runs passes over the slots of a backend for the scheduler, and knows what each slot holds: a
sequence, how many of its tokens are cached, and a window.

A window is staged (written to the device) only if it differs from the window there. If a pass or an
allocation fails, the host's state stays as it was, and all windows are staged again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.backends.base import Backend, Emitted, Logprobs, PassKind
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import SAMPLERS, Sampler
from pass_runtime.decode.prefix_cache import (
    PrefixStore,
    SavedPrefix,
    common_prefix,
    rounded_to_blocks,
)
from pass_runtime.decode.processors import no_processing
from pass_runtime.decode.sequence import (
    Request,
    SequenceState,
    Slot,
    Token,
    TokenLogprobs,
    TokenSource,
)

Drafts = tuple[int, ...]


@dataclass(frozen=True)
class SlotResult:
    """What a pass did for the sequence of one slot.

    drafted: how many drafts the window had; of a tree, how deep it was. source: what proposed the
    drafts. tokens: those that the pass emitted. accepted_first_choices: how many accepted drafts,
    from the first on, were first choices (in a chain, all). last_row: the row of the last accepted
    draft, or 0.
    """

    sequence: SequenceState
    drafted: int
    source: TokenSource
    tokens: tuple[Token, ...]
    accepted_first_choices: int
    last_row: int


class Runner:
    """The slots of one backend. Only the thread that runs the scheduler may call it."""

    def __init__(
        self, backend: Backend, *, processed_logprobs: bool = False, prefix_cache: bool = True
    ) -> None:
        """processed_logprobs: whether log-probabilities are those after the logits processors.
        prefix_cache: whether to reuse K/V of other sequences where it changes no bit."""
        self.backend, self.processed_logprobs = backend, processed_logprobs
        has_store = prefix_cache and backend.capabilities.same_entries
        self._store = PrefixStore(backend.cache, backend.memory) if has_store else None
        self.slots = [Slot(number) for number in range(backend.capabilities.slots)]
        self.staged_plan: Plan | None = None
        """The plan whose windows are on the device; None if all windows must be staged again."""

        self._sampler: Sampler = "greedy"  # of the last pass
        self._admitted = 0  # how many sequences have got a slot
        self._engine_seconds = 0.0  # spent in passes and prefill

    @property
    def busy(self) -> list[Slot]:
        """Slots that have a sequence."""
        return [slot for slot in self.slots if slot.sequence is not None]

    @property
    def decoding(self) -> list[Slot]:
        """Slots whose sequence has its whole prompt in the cache."""
        return [slot for slot in self.busy if slot.current.prefilled]

    @property
    def room(self) -> int:
        """How many tokens fit after the longest sequence, at the largest KV capacity."""
        longest = max((slot.cached for slot in self.busy), default=0)
        return self.backend.capabilities.max_capacity - longest

    def fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length leaves room for a window (its last token is the root)."""
        capabilities = self.backend.capabilities
        return prompt_tokens - 1 + capabilities.padded_width(1) <= capabilities.max_capacity

    def admit(self, sequence: SequenceState) -> bool:
        """Give `sequence` the free slot with the most K/V of its prompt; False if none is free."""
        free = [slot for slot in self.slots if slot.sequence is None]
        if not free:
            return False
        prompt = sequence.request.prompt_ids
        reusable = {slot.number: self._reusable(slot, sequence.request) for slot in free}
        # Of equal slots, the one whose K/V are the least loss, then the first.
        slot = max(free, key=lambda slot: (reusable[slot.number], -len(slot.kept), -slot.number))
        reused = reusable[slot.number]
        self._shrink(len(prompt) + 1, slot, reused)
        self.backend.set_sampling(slot.number, sequence.request.sampling)
        slot.sequence, slot.prompt, slot.salt = sequence, prompt, sequence.request.cache_salt
        slot.kept = []
        sequence.cached = reused
        slot.exact_prefix_len = min(slot.exact_prefix_len, reused)
        slot.num_drafts, slot.staged, slot.masked = 0, False, False
        self._admitted += 1
        sequence.admission_number = self._admitted
        sequence.stats.cached_tokens = reused
        sequence.leave_queue()
        return True

    def release(self, slot: Slot) -> None:
        """Free a finished sequence's slot, which keeps the K/V for sequences that begin alike."""
        self._set_kept(slot, slot.current.tokens[: slot.cached])
        slot.sequence = None

    def share(self, slot: Slot) -> None:
        """Copy K/V of the prompt from another slot or a saved prefix, if one has more of them."""
        sequence, started = slot.current, time.perf_counter()
        others = [other for other in self.slots if other is not slot]
        reusable = [self._reusable(other, sequence.request) for other in others]
        count = max(reusable, default=0)
        saved, saved_count = self._saved_prefix(sequence.request)
        if max(count, saved_count) <= sequence.cached:
            return
        if self._store and saved and saved_count > count:
            self._reserve(saved_count)
            self._store.load(saved, slot.number, saved_count)
            count = exact = saved_count
        else:
            source = others[reusable.index(count)]
            self.backend.cache.copy_slot(source.number, slot.number, count)
            exact = min(source.exact_prefix_len, count)
        sequence.stats.cached_tokens += count - sequence.cached
        sequence.cached, slot.masked, slot.exact_prefix_len = count, False, exact
        sequence.stats.prefill_seconds += time.perf_counter() - started

    def prefill(self, slot: Slot, max_rows: int | None = None) -> int:
        """Prefill the next prompt chunk, in at most `max_rows` rows. Return how long it is."""
        sequence, started = slot.current, time.perf_counter()
        prompt, top = sequence.request.prompt_ids, sequence.request.prompt_logprobs
        scored, begin = top is not None, sequence.cached
        count, width = self._chunk(begin, len(prompt) - 1, max_rows, scored)
        following = prompt[begin + 1 : begin + count + 1] if scored else ()
        self._reserve(begin + self.backend.capabilities.padded_width(width))
        engine_started = time.perf_counter()
        logprobs = self.backend.prefill(
            slot.number, begin, prompt[begin : begin + count], width, following
        )
        ended = time.perf_counter()
        self._engine_seconds += ended - engine_started
        sequence.prompt_logprobs += _logprobs(logprobs, 0, following, top)
        if slot.exact_prefix_len == begin:  # K/V are exact only after exact K/V.
            slot.exact_prefix_len += count
        sequence.cached += count
        slot.masked = False  # It was masked with its length before this chunk: mask it again.
        sequence.stats.prefill_seconds += ended - started
        return count

    def make_room(self, plan: Plan, batch: int) -> None:
        """Make room for windows of `plan` in the first `batch` slots: grow the cache if a sequence
        needs that. A pass also writes windows into free slots, which drop tokens instead."""
        width, slots = self.backend.capabilities.padded_width(plan.width), self.slots[:batch]
        longest = max((slot.cached for slot in slots if slot.sequence is not None), default=0)
        self._reserve(longest + width)
        for slot in slots:
            if slot.cached + width > self.backend.capacity:
                self._set_kept(slot, slot.kept[: self.backend.capacity - width])

    def run(self, plan: Plan, drafts: Sequence[Drafts | None]) -> tuple[list[SlotResult], float]:
        """Run one pass over all slots that decode, after `make_room`. Return the result of each
        sequence, and the seconds of the pass.

        drafts: for each of these slots, n-gram drafts for its window; None keeps the window.
        """
        active = self.decoding
        kind = self._kind(plan, active)
        if kind.sampler != self._sampler and self.backend.manifest.rule == "rejection":
            # The draft probabilities beside the windows are those of the other sampler's tail.
            self.staged_plan = None
        self._sampler = kind.sampler
        self._stage(plan, active, drafts, kind.batch)
        if kind.touched:
            self._process(kind, active)
        self.staged_plan = None  # If the pass fails, all windows are staged again.
        started = time.perf_counter()
        for sequence in (slot.current for slot in active):
            if sequence.decoding_since is None:
                sequence.decoding_since = started
                sequence.engine_seconds_before = self._engine_seconds
        emitted = self.backend.run(kind)
        self._engine_seconds += (seconds := time.perf_counter() - started)
        logprobs = self.backend.logprobs(kind) if kind.logprobs else None
        # All results are computed before the state changes, in case one of them fails.
        results = [self._result(slot, emitted[slot.number], logprobs) for slot in active]
        for slot, result in zip(active, results, strict=True):
            # The root and first choices write the same bits as a prefill.
            if slot.exact_prefix_len == result.sequence.cached:
                slot.exact_prefix_len += 1 + result.accepted_first_choices
            result.sequence.cached += len(result.tokens)
            result.sequence.stats.engine_seconds = (
                self._engine_seconds - result.sequence.engine_seconds_before
            )
            slot.num_drafts, slot.source = plan.next_draft_depth(result.last_row), "lookahead"
        self.staged_plan = plan.next
        return results, seconds

    def time_masked_pass(self, kind: PassKind, *, tail: bool = True) -> tuple[float, float]:
        """Run a pass with all slots masked, which changes no sequence. Return the seconds of the
        trunk and of the tail. tail: whether to run the tail."""
        self._stage_masked(kind)
        started = time.perf_counter()
        self.backend.run_trunk(kind.plan, kind.batch)
        trunk_ended = time.perf_counter()
        if tail:
            self.backend.run_tail(kind)
        ended = time.perf_counter()
        self._engine_seconds += ended - started
        return trunk_ended - started, ended - trunk_ended

    def run_masked(self, kind: PassKind, runs: int) -> None:
        """Run a pass `runs` times with all slots masked, which changes no sequence."""
        self._stage_masked(kind)
        for _ in range(runs):
            self.backend.run(kind)

    def run_prefill(self, slot: Slot, width: int, runs: int) -> None:
        """Run a prompt chunk of `width` rows `runs` times, after the tokens of a free slot."""
        for _ in range(runs):
            self.backend.prefill(slot.number, slot.cached, [0], width)

    def _stage_masked(self, kind: PassKind) -> None:
        """Stage some window in every slot of the pass, and mask the slot."""
        self.make_room(kind.plan, kind.batch)
        self.staged_plan = None
        for slot in self.slots[: kind.batch]:
            self.backend.stage(slot.number, kind.plan, slot.cached, 0)
            self._mask(slot)

    def compact(self) -> list[Slot]:
        """Move sequences to lower slots if the batch can shrink. Return the slots that decode."""
        batch_size = self.backend.capabilities.batch_size
        while active := self.decoding:
            source = active[-1]
            lower = [slot for slot in self.slots[: source.number] if slot.sequence is None]
            if not lower or batch_size(len(active)) == batch_size(source.number + 1):
                break
            self._move(source, lower[0])
        return active

    def batch(self, active: Sequence[Slot]) -> int:
        """Return the batch size of a pass over the slots `active`."""
        return self.backend.capabilities.batch_size(active[-1].number + 1)

    def sampler(self, active: Sequence[Slot]) -> Sampler:
        """Return the cheapest sampler for all slots `active`."""
        return max((slot.current.request.sampling.sampler for slot in active), key=SAMPLERS.index)

    def _kind(self, plan: Plan, active: Sequence[Slot]) -> PassKind:
        logprobs = any(slot.current.request.logprobs is not None for slot in active)
        list_size = max(slot.current.list_size(plan.drafts) for slot in active)
        batch, sampler = self.batch(active), self.sampler(active)
        return PassKind(plan, batch, sampler, logprobs, list_size, self.processed_logprobs)

    def _process(self, kind: PassKind, active: Sequence[Slot]) -> None:
        """Set what the logits processors do in a pass whose windows are staged."""
        drafts = self.backend.drafts(kind.plan, kind.batch)
        vocab_size = self.backend.capabilities.vocab_size
        unchanged = no_processing(vocab_size, kind.plan.drafts + 1, kind.touched)
        for slot in self.slots[: kind.batch]:
            rows = None
            if slot in active:
                rows = slot.current.processor_rows(drafts[slot.number], kind.touched)
            self.backend.set_processors(slot.number, unchanged if rows is None else rows)

    def _stage(
        self, plan: Plan, active: Sequence[Slot], drafts: Sequence[Drafts | None], batch: int
    ) -> None:
        """Write the windows that differ from those on the device, and mask the other slots."""
        for slot in self.slots[:batch]:
            if slot not in active and not slot.masked:
                self._mask(slot)
        for slot, ngram in zip(active, drafts, strict=True):
            if self.staged_plan == plan and slot.staged and ngram is None:
                continue
            slot.staged = False
            self.backend.stage(slot.number, plan, slot.cached, slot.current.tokens[-1], ngram or ())
            slot.num_drafts, slot.source = len(ngram or ()), slot.proposed_by
            slot.staged, slot.masked = True, False

    def _mask(self, slot: Slot) -> None:
        slot.staged = slot.masked = False  # in case the backend fails
        self.backend.mask(slot.number, slot.cached)
        slot.masked = True

    @staticmethod
    def _result(slot: Slot, emitted: Emitted, logprobs: Logprobs | None) -> SlotResult:
        """Return the result of a pass for the sequence of a slot, and change no state."""
        sequence, ids = slot.current, emitted.tokens
        # Row 0 is the root, and row i the first choice at depth i.
        first_choices = sum(row == depth for depth, row in enumerate(emitted.rows)) - 1
        sources: list[TokenSource] = [slot.source] * (len(ids) - 1) + ["model"]
        token_logprobs = _logprobs(logprobs, slot.number, ids, sequence.request.logprobs)
        tokens = tuple(map(Token, ids, sources, token_logprobs))
        last_row = emitted.rows[-1]
        return SlotResult(sequence, slot.num_drafts, slot.source, tokens, first_choices, last_row)

    def _reserve(self, tokens: int) -> None:
        """Grow the KV capacity to at least `tokens`."""
        if tokens > self.backend.capacity:
            self.resize(self.backend.capabilities.capacity(tokens))

    def _shrink(self, tokens: int, slot: Slot, reused: int) -> None:
        """Shrink a KV cache that is longer than the sequences need, as its length costs time in
        every pass. Tokens of free slots that do not fit any more are dropped. tokens: the length,
        with the next token, of a sequence that joins in `slot` and reuses `reused` tokens there."""
        self._set_kept(slot, slot.kept[:reused])
        longest = max((len(slot.current.tokens) + 1 for slot in self.busy), default=0)
        capabilities = self.backend.capabilities
        capacity = capabilities.capacity(min(max(tokens, longest), capabilities.max_capacity))
        if capacity < self.backend.capacity:
            for other in self.slots:
                self._set_kept(other, other.kept[:capacity])
            self.resize(capacity)

    def _set_kept(self, slot: Slot, tokens: list[int]) -> None:
        """Set the tokens that a free slot keeps. If some are dropped, save the K/V of the first
        `exact_prefix_len`. The slot must then be staged or masked again: otherwise the next pass
        would write a window after the old length."""
        if self._store and len(tokens) < len(slot.kept):
            self._store.save(slot.number, slot.kept[: slot.exact_prefix_len], slot.salt)
        slot.kept, slot.staged, slot.masked = tokens, False, False

    def resize(self, capacity: int) -> None:
        """Change the KV capacity. It must be enough for the tokens that each slot has cached."""
        self.backend.resize(capacity, [slot.cached for slot in self.slots])

    def _reusable(self, slot: Slot, request: Request) -> int:
        """Return for how many tokens of its prompt `request` may use the K/V in `slot`. On engines
        with `same_entries` only K/V that are bit-identical to a prefill's are used. Requests with
        the same prompt object share the whole prompt. Others share whole blocks, and only if there
        is a prefix store or `request` has `reuse_prefix`. Log-probabilities of a prompt are
        from its prefill, so such a request uses none."""
        if slot.salt != request.cache_salt or request.prompt_logprobs is not None:
            return 0
        usable = slot.cached
        if self.backend.capabilities.same_entries:
            usable = min(usable, slot.exact_prefix_len)
        if slot.prompt is request.prompt_ids:
            return min(usable, len(request.prompt_ids) - 1)
        if not self._store and not request.reuse_prefix:
            return 0
        return rounded_to_blocks(min(usable, common_prefix(slot.held, request.prompt_ids[:-1])))

    def _saved_prefix(self, request: Request) -> tuple[SavedPrefix | None, int]:
        """Return the saved prefix that has the most of the prompt of `request`, and how many tokens
        of the prompt it has, in whole blocks."""
        if not self._store or request.prompt_logprobs is not None:
            return None, 0
        saved, count = self._store.match(request.prompt_ids[:-1], request.cache_salt)
        return saved, rounded_to_blocks(count)

    def _move(self, source: Slot, target: Slot) -> None:
        sequence = source.current
        self._set_kept(target, [])
        self.backend.cache.copy_slot(source.number, target.number, sequence.cached)
        self.backend.set_sampling(target.number, sequence.request.sampling)
        target.sequence, source.sequence = sequence, None
        target.prompt, target.salt = source.prompt, source.salt
        target.exact_prefix_len = source.exact_prefix_len
        target.num_drafts = 0  # The drafts were in the window of `source`.
        self._set_kept(source, [])

    def _chunk(
        self, start: int, stop: int, max_rows: int | None, scored: bool = False
    ) -> tuple[int, int]:
        """Return how many tokens the next prompt chunk has, and how many rows its window has.
        start, stop: the part of the prompt that is left. scored: see `Backend.prefill`.

        The window is the widest that the rest of the prompt fills. But if the rest fits a wider
        window of which it fills three quarters, or if all narrower windows have one row, it is read
        at once: the padding then takes less time than more chunks."""
        remaining = stop - start
        backend = self.backend
        offered = backend.capabilities.chunks(start, backend.capacity, scored=scored)
        widths = [each for each in offered if max_rows is None or each <= max_rows] or offered[-1:]
        fitting = [width for width in widths if width >= remaining]
        filled = [width for width in widths if width <= remaining]
        if fitting and (4 * remaining >= 3 * fitting[-1] or filled[0] == 1):
            return remaining, fitting[-1]
        return filled[0], filled[0]


def _logprobs(
    logprobs: Logprobs | None, slot: int, ids: Sequence[int], count: int | None
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of each token `ids` that a slot emitted, with those of the
    `count` likeliest tokens there; None for each if `count` is None."""
    if logprobs is None or count is None:
        return [None] * len(ids)
    chosen = logprobs.chosen[slot].tolist()
    top_ids = logprobs.ids[slot, :, :count].tolist()
    top_values = logprobs.values[slot, :, :count].tolist()
    return [
        TokenLogprobs(chosen[i], tuple(zip(top_ids[i], top_values[i], strict=True)))
        for i in range(len(ids))
    ]
