"""Finds the tokens with which a model ends a text or a turn.

Several files of a checkpoint state some of these tokens each. As in vLLM and llama.cpp, all of them
are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.model.checkpoint import generation_eos
from pass_runtime.errors import PassError
from pass_runtime.text.chat_template import ChatTemplate

GGUF_ENDS = ("eos", "eot", "eom")
"""Keys `tokenizer.ggml.{}_token_id` of a .gguf file: the ends of a text, turn and message."""
SAMPLE_QUESTION, SAMPLE_ANSWER = "Is it raining?", "It is a sunny day"


def end_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    location: str,
    kwargs: dict[str, Any],
) -> tuple[int, ...]:
    """Return the ids that end a text or a turn, those of the generation config first.

    location, kwargs: the arguments of `from_pretrained`. Ids beyond the vocabulary are left out,
    because the model cannot emit them.
    """
    stated: list[Any] = [generation_eos(model)]
    if "gguf_file" in kwargs:
        fields = gguf.GGUFReader(str(Path(location) / kwargs["gguf_file"])).fields
        stated += [
            fields[key].contents()
            for end in GGUF_ENDS
            if (key := f"tokenizer.ggml.{end}_token_id") in fields
        ]
    else:
        # The raw file: an object of a configuration class has a default end token if the file
        # states none.
        stated.append(PretrainedConfig.get_config_dict(location, **kwargs)[0].get("eos_token_id"))
    stated += [tokenizer.eos_token_id, list(_template_ends(tokenizer))]
    found = dict.fromkeys(token for ids in stated for token in _as_sequence(ids))
    return tuple(
        token for token in found if isinstance(token, int) and 0 <= token < model.config.vocab_size
    )


def _as_sequence(ids: Any) -> Iterable[Any]:
    return () if ids is None else ids if isinstance(ids, list | tuple) else (ids,)


def _template_ends(tokenizer: PreTrainedTokenizerFast) -> Iterator[int]:
    """Yield the id of the added token that each chat template writes right after an answer."""
    templates: Any = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        if template and (end := _template_end(tokenizer, template)) is not None:
            yield end


def _template_end(tokenizer: PreTrainedTokenizerFast, template: str) -> int | None:
    """Return the id of the added token after the sample answer, unless it opens the next turn."""
    ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    if not ids:
        return None
    added = re.compile("|".join(re.escape(text) for text in sorted(ids, key=len, reverse=True)))
    asked = {"role": "user", "content": SAMPLE_QUESTION}
    answered = {"role": "assistant", "content": SAMPLE_ANSWER}
    # It renders in a child process, with limits on time and memory.
    chat = ChatTemplate(template, dict(tokenizer.special_tokens_map))

    def rendered(*messages: dict[str, str], generation_prompt: bool = False) -> str:
        return chat.render(messages, add_generation_prompt=generation_prompt)

    try:
        before, found, after = rendered(asked, answered).rpartition(SAMPLE_ANSWER)
        opening = set(added.findall(rendered(asked, generation_prompt=True))) - set(
            added.findall(rendered(asked))
        )
    except PassError:  # a template may refuse such a conversation
        return None
    finally:
        chat.close()
    end = added.match(after.lstrip()) if found else None
    # A template may open the next turn after every message. Then the same token stands right before
    # the answer, so the last token there is no end.
    opening.update(added.findall(before)[-1:])
    return None if end is None or end[0] in opening else ids[end[0]]
