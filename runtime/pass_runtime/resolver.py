"""Turns options into requests for one bundle, and refuses what its graphs and engines cannot do."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from threading import Lock

from tokenizers import Tokenizer

from pass_runtime.backends.base import Backend
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import Plan
from pass_runtime.decode.draft_policy import choose_drafts
from pass_runtime.decode.processors import Processing
from pass_runtime.decode.sequence import Request
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.text.bad_words import BadWords, TokenIndex
from pass_runtime.text.detokenizer import Vocabulary
from pass_runtime.text.grammar import Grammars

MAX_CACHED_BAD_WORD_LISTS = 8
"""How many compiled lists of bad words are kept."""


class Resolver:
    """Makes the requests of one session. Any thread may call it."""

    def __init__(
        self, manifest: Manifest, backend: Backend, tokenizer: Tokenizer, vocabulary: Vocabulary
    ) -> None:
        self._manifest, self._backend, self._vocabulary = manifest, backend, vocabulary
        self._bad_words = lru_cache(maxsize=MAX_CACHED_BAD_WORD_LISTS)(self._make_bad_words)
        self._index_lock = Lock()
        self.grammars = Grammars(tokenizer, manifest.model.vocab_size, manifest.model.eos_token_ids)

    def resolve(self, options: GenerateOptions) -> Request:
        """The request for `options`, without its prompt. Raises PassError if the bundle cannot run
        it."""
        longest = self._manifest.lookahead.length
        wanted = longest if options.lookahead is None else options.lookahead
        if not 0 <= wanted <= longest:
            raise PassError(
                f"look-ahead must be 0 to {longest}, the look-ahead of the bundle, not {wanted}"
            )
        fixed = self._backend.capabilities.fixed_lookahead
        if fixed is not None and (
            options.plan.startswith(("fused:", "tree:")) or wanted not in (0, fixed)
        ):
            raise PassError(
                f"the engines run only look-ahead {fixed} without group sizes; use --plan fused, "
                f"--lookahead {fixed} or 0"
            )
        mode, cycle, lookahead_drafts, ngram_drafts = choose_drafts(
            options.plan, wanted, options.draft
        )
        if cycle is not None and cycle.is_tree:
            self._check_tree(cycle.plans[0])
        if max(lookahead_drafts, ngram_drafts) > longest:
            raise PassError(
                f"{options.plan} has more drafts than the bundle's {longest}; use --plan fused"
            )
        stops = () if options.ignore_eos else self._manifest.model.eos_token_ids
        return Request(
            prompt_ids=(),
            sampling=options.sampling.seeded(),
            max_new_tokens=options.max_new_tokens,
            mode=mode,
            cycle=cycle,
            lookahead_drafts=lookahead_drafts,
            ngram_drafts=ngram_drafts,
            stop_token_ids=frozenset((*options.stop_token_ids, *stops)),
            stop=options.stop_strings,
            reuse_prefix=options.reuse_prefix,
            cache_salt=options.cache_salt,
            logprobs=options.logprobs,
            processing=self._processing(options),
            shown_special_tokens=tuple(options.shown_special_tokens),
        )

    def _check_tree(self, plan: Plan) -> None:
        """Raise PassError if this tree of drafts cannot run on the backend."""
        capabilities = self._backend.capabilities
        if plan.drafts not in capabilities.trees:
            raise PassError(
                f"there is no {plan.tail} here: trees of drafts need the exact-match rule, a draft "
                "head, a vocabulary that is a multiple of 8, and a bundle and engines of this "
                "version; use --plan fused"
            )
        if plan.drafts not in capabilities.exact_trees:
            raise PassError(
                f"the plan {plan.name} could change texts: activations are rounded to 8 bits here, "
                "and some drafts of a tree round differently than in plain decoding; use --plan "
                "fused"
            )

    def _processing(self, options: GenerateOptions) -> Processing | None:
        """What `options` do to logits, or None. Raises PassError for an invalid constraint."""
        changes = (
            *(options.sampling.changes_logits, options.constraint, options.min_tokens),
            *(options.bad_words, options.allowed_token_ids),
        )
        if not any(changes):
            return None
        _ = self._backend.processors  # raises PassError if the bundle has none
        stops = () if options.ignore_eos else self._manifest.model.eos_token_ids
        return Processing(
            self._manifest.model.vocab_size,
            options.sampling,
            None if options.constraint is None else self.grammars.start(options.constraint),
            options.min_tokens,
            frozenset((*options.stop_token_ids, *stops)),
            self._bad_words(tuple(options.bad_words)) if options.bad_words else None,
            tuple(options.allowed_token_ids),
        )

    def _make_bad_words(self, words: tuple[str, ...]) -> BadWords:
        with self._index_lock:
            index = self._token_index
        return BadWords(index, [word.encode() for word in words])

    @cached_property
    def _token_index(self) -> TokenIndex:
        """Made at first use: it takes up to a second, and as much memory as the tokenizer."""
        return TokenIndex(self._vocabulary.all_bytes(self._manifest.model.vocab_size))

    def request(self, prompt_ids: tuple[int, ...], options: GenerateOptions) -> Request:
        """The request for a prompt. Raises PassError if a token is unknown, or the prompt is empty
        or too long."""
        model, capacity = self._manifest.model, self._backend.capabilities.max_capacity
        if not prompt_ids:
            raise PassError("the prompt has no tokens")
        listed = (*options.stop_token_ids, *options.allowed_token_ids, *options.sampling.logit_bias)
        for token in (*prompt_ids, *listed):
            if not 0 <= token < model.vocab_size:
                raise PassError(f"token id {token} is not in the vocabulary of {model.vocab_size}")
        if len(prompt_ids) > capacity:
            raise PassError(
                f"the prompt has {len(prompt_ids)} tokens, more than the KV capacity of "
                f"{capacity}; shorten it"
            )
        return replace(self.resolve(options), prompt_ids=prompt_ids)
