"""Turns `GenerateOptions` into requests, and refuses what the bundle's graphs and engines lack."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from threading import Lock

from tokenizers import Tokenizer

from pass_runtime.backends.base import Backend
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import Plan, make_plan
from pass_runtime.decode.processors import Processing
from pass_runtime.decode.sequence import Request
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.text.bad_words import BadWords, TokenIndex
from pass_runtime.text.detokenizer import Vocabulary
from pass_runtime.text.grammar import Grammars

MAX_CACHED_BAD_WORD_LISTS = 8
"""Requests often repeat a list."""


class Resolver:
    """Any thread may call its methods."""

    def __init__(
        self, manifest: Manifest, backend: Backend, tokenizer: Tokenizer, vocabulary: Vocabulary
    ) -> None:
        self._manifest, self._backend, self._vocabulary = manifest, backend, vocabulary
        self._bad_words = lru_cache(maxsize=MAX_CACHED_BAD_WORD_LISTS)(self._make_bad_words)
        self._index_lock = Lock()
        self.grammars = Grammars(tokenizer, manifest.model.vocab_size, manifest.model.eos_token_ids)

    def resolve(self, options: GenerateOptions) -> Request:
        """With an empty prompt. Raises PassError if the bundle cannot run it."""
        max_lookahead = self._manifest.lookahead.length
        lookahead = max_lookahead if options.lookahead is None else options.lookahead
        if not 0 <= lookahead <= max_lookahead:
            raise PassError(
                f"look-ahead must be 0 to {max_lookahead}, the look-ahead of the bundle, not "
                f"{lookahead}"
            )
        fixed = self._backend.capabilities.fixed_lookahead
        if fixed is not None and (options.plan.startswith("fused:") or lookahead not in (0, fixed)):
            raise PassError(
                f"the engines run only look-ahead {fixed} without group sizes; use --plan fused, "
                f"--lookahead {fixed} or 0"
            )
        plan_name, plan, lookahead_drafts, ngram_drafts = choose_drafts(
            options.plan, lookahead, options.draft, self._longest_copy(options.lookahead)
        )
        if lookahead_drafts > max_lookahead:
            raise PassError(
                f"{options.plan} has more drafts than the bundle's {max_lookahead}; use --plan "
                "fused"
            )
        return Request(
            prompt_ids=(),
            sampling=options.sampling.resolved(),
            max_new_tokens=options.max_new_tokens,
            plan_name=plan_name,
            plan=plan,
            lookahead_drafts=lookahead_drafts,
            ngram_drafts=ngram_drafts,
            stop_token_ids=self._stop_token_ids(options),
            stop=tuple(options.stop),
            reuse_prefix=options.reuse_prefix,
            cache_salt=options.cache_salt,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            processing=self._processing(options),
            shown_special_tokens=tuple(options.shown_special_tokens),
        )

    def _longest_copy(self, lookahead: int | None) -> int:
        verifying = self._backend.capabilities.verifying
        longest = verifying[-1].drafts if verifying else self._manifest.lookahead.length
        return longest if lookahead is None else lookahead

    def _stop_token_ids(self, options: GenerateOptions) -> frozenset[int]:
        model_ids = () if options.ignore_eos else self._manifest.model.eos_token_ids
        return frozenset((*options.stop_token_ids, *model_ids))

    def _processing(self, options: GenerateOptions) -> Processing | None:
        sampling, lists = options.sampling, (options.bad_words, options.allowed_token_ids)
        changes = (sampling.logit_bias, sampling.penalizes, options.constraint, options.min_tokens)
        if not any((*changes, *lists)):
            return None
        return Processing(
            self._manifest.model.vocab_size,
            sampling,
            None if options.constraint is None else self.grammars.start(options.constraint),
            options.min_tokens,
            self._stop_token_ids(options),
            self._bad_words(tuple(options.bad_words)) if options.bad_words else None,
            tuple(options.allowed_token_ids),
        )

    def _make_bad_words(self, words: tuple[str, ...]) -> BadWords:
        with self._index_lock:  # A cached property does not lock itself.
            index = self._token_index
        return BadWords(index, [word.encode() for word in words])

    @cached_property
    def _token_index(self) -> TokenIndex:
        return TokenIndex(self._vocabulary.all_bytes(self._manifest.model.vocab_size))

    def request(self, prompt_ids: tuple[int, ...], options: GenerateOptions) -> Request:
        """Raises PassError if a token is not in the vocabulary, or the prompt is empty or too
        long."""
        model, capacity = self._manifest.model, self._backend.capabilities.max_capacity
        if not prompt_ids:
            raise PassError("the prompt has no tokens")
        others = (*options.stop_token_ids, *options.allowed_token_ids, *options.sampling.logit_bias)
        for token in (*prompt_ids, *others):
            if not 0 <= token < model.vocab_size:
                raise PassError(f"token id {token} is not in the vocabulary of {model.vocab_size}")
        if len(prompt_ids) > capacity:
            raise PassError(
                f"the prompt has {len(prompt_ids)} tokens, more than the KV capacity of "
                f"{capacity}; shorten it"
            )
        return replace(self.resolve(options), prompt_ids=prompt_ids)


def choose_drafts(
    name: str, max_drafts: int, draft: str | None, longest_copy: int
) -> tuple[str, Plan | None, int, int]:
    """Return the fields of a `Request`. name, max_drafts: as for `make_plan`, or "auto". draft:
    None is "both" for "auto", else "lookahead"."""
    if name == "auto" and max_drafts:
        lookahead_drafts = 0 if draft == "ngram" else max_drafts
        return "auto", None, lookahead_drafts, 0 if draft == "lookahead" else longest_copy
    plan = make_plan("ar" if name == "auto" else name, max_drafts)
    if draft in (None, "lookahead") or max_drafts == 0:
        return plan.name, plan, plan.drafts, 0
    if name == "ar":
        raise PassError(
            f"the plan ar takes no drafts, so --draft {draft} needs another one: two-pass, "
            "fused or auto"
        )
    if draft == "ngram":
        return "ngram", make_plan("ar", 0), 0, longest_copy
    return f"{plan.name}+ngram", plan, plan.drafts, longest_copy
