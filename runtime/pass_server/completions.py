"""Fields of /v1/completions that chats do not have: `prompt`, `suffix`, `best_of`, `echo`."""

from __future__ import annotations

from typing import Any

from pass_runtime import Session
from pass_server.api_error import ApiError, not_supported
from pass_server.schemas import CompletionRequest


def prompt_list(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of the field `prompt`: text or token ids, of one prompt or of several."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def completion_ids(session: Session, request: CompletionRequest) -> list[list[int]]:
    """Return the token ids of each prompt. Raises ApiError if one has none, or an id is unknown."""
    prompts = [
        session.encode(each) if isinstance(each, str) else each
        for each in prompt_list(request.prompt)
    ]
    vocabulary = session.manifest.model.vocab_size
    if not prompts or not all(prompts):
        raise ApiError("the prompt has no tokens", param="prompt")
    if any(not 0 <= token < vocabulary for ids in prompts for token in ids):
        raise ApiError(
            f"a token id of the prompt is not in the vocabulary of {vocabulary}", param="prompt"
        )
    return prompts


def check_completion(request: CompletionRequest) -> None:
    """Raise ApiError if fields contradict each other, or one is not supported."""
    n, best_of = request.n or 1, request.best_of
    if request.suffix:
        why = "this model was trained to continue a text, not to fill a gap before a suffix"
        raise not_supported("suffix", request.suffix, why)
    if best_of is not None and best_of < n:
        problem = f"best_of is {best_of}, and n is {n}: it must be at least n"
        raise ApiError(problem, param="best_of")
    if request.stream and best_of is not None and best_of > n:
        problem = "best_of above n cannot be streamed: leave out stream or best_of"
        raise ApiError(problem, param="best_of")
    if request.echo and request.logprobs is not None:
        why = "there are no log-probabilities of the prompt: leave out echo or logprobs"
        raise ApiError(why, param="echo", code="unsupported_parameter")


def echoed_prompts(session: Session, request: CompletionRequest) -> tuple[str, ...]:
    """Return the text of each prompt if `echo` asks for it, else ()."""
    if not request.echo:
        return ()
    return tuple(
        each if isinstance(each, str) else session.decode(each, skip_special_tokens=True)
        for each in prompt_list(request.prompt)
    )
