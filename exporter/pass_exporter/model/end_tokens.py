"""Finds the tokens that end a text or a turn: those of all files, as in vLLM and llama.cpp."""

from __future__ import annotations

import re
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.model.checkpoint import generation_eos
from pass_exporter.model.gguf_reader import GgufReader
from pass_runtime.errors import PassError
from pass_runtime.text.templates import ChatTemplate

GGUF_ENDS = ("eos", "eot", "eom")
SAMPLE_QUESTION, SAMPLE_ANSWER = "Is it raining?", "It is a sunny day"


def end_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    location: str,
    kwargs: dict[str, Any],
    gguf_file: GgufReader | None = None,
) -> tuple[int, ...]:
    """Return the ids that end a text or a turn, the generation config's first. location, kwargs:
    the arguments of `from_pretrained`."""
    stated: list[Any] = [generation_eos(model)]  # an id, ids, or None, for each source
    if gguf_file is not None:
        stated += [gguf_file.key(f"tokenizer.ggml.{end}_token_id") for end in GGUF_ENDS]
    else:
        # From the file itself, because a configuration object has a default end token if the file
        # states none.
        stated.append(PretrainedConfig.get_config_dict(location, **kwargs)[0].get("eos_token_id"))
    templates: Any = tokenizer.chat_template or {}
    templates = templates.values() if isinstance(templates, dict) else [templates]
    stated.append(tokenizer.eos_token_id)
    stated += [_template_end(tokenizer, template) for template in templates if template]
    lists = (ids if isinstance(ids, list | tuple) else [ids] for ids in stated)
    unique = dict.fromkeys(token for ids in lists for token in ids)
    vocab_size = model.config.vocab_size
    return tuple(token for token in unique if isinstance(token, int) and 0 <= token < vocab_size)


def _template_end(tokenizer: PreTrainedTokenizerFast, template: str) -> int | None:
    """Return the id of the added token right after the sample answer; None if it opens the next
    turn."""
    ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    if not ids:
        return None
    # Longer texts first, because the expression takes the first alternative that matches.
    added_token = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))))
    question = {"role": "user", "content": SAMPLE_QUESTION}
    answer = {"role": "assistant", "content": SAMPLE_ANSWER}
    chat = ChatTemplate(template, dict(tokenizer.special_tokens_map))
    try:
        conversation = chat.render([question, answer], add_generation_prompt=False)
        with_opening = chat.render([question], add_generation_prompt=True)
        without_opening = chat.render([question], add_generation_prompt=False)
    except PassError:  # A template may refuse such a conversation.
        return None
    before, matched, after = conversation.rpartition(SAMPLE_ANSWER)
    end = added_token.match(after.lstrip()) if matched else None
    opening = {*added_token.findall(with_opening)} - {*added_token.findall(without_opening)}
    # A template may write the next turn's opening after every message, not only for a generation
    # prompt. That opening also is the last added token before the answer.
    opening.update(added_token.findall(before)[-1:])
    return None if end is None or end[0] in opening else ids[end[0]]
