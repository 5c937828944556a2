"""Where a model ends its turn. Several places say so and all of them count, as in vLLM and llama.cpp: a place that
states one end does not mean that there is no other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.model.checkpoint import end_of_text
from pass_runtime.errors import PassError
from pass_runtime.text.chat_template import ChatTemplate

GGUF_ENDS = ("eos", "eot", "eom")
"""A .gguf file's `tokenizer.ggml.{}_token_id`: the ends of a text, of a turn and of a message."""
QUESTION, ANSWER = "Is it raining?", "It is a sunny day"


def end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, location: str, kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Return the ids that end a text or a turn, the generation config's first. Ids beyond the vocabulary, which the
    model cannot write, are left out."""
    places: list[Any] = [end_of_text(model)]
    if "gguf_file" in kwargs:
        fields = gguf.GGUFReader(str(Path(location) / kwargs["gguf_file"])).fields
        places += [fields[key].contents() for end in GGUF_ENDS if (key := f"tokenizer.ggml.{end}_token_id") in fields]
    else:  # as written: a class of configurations has an end of its own where the file states none
        places.append(PretrainedConfig.get_config_dict(location, **kwargs)[0].get("eos_token_id"))
    places += [tokenizer.eos_token_id, list(_template_ends(tokenizer))]
    found = dict.fromkeys(token for place in places for token in _listed(place))
    return tuple(token for token in found if isinstance(token, int) and 0 <= token < model.config.vocab_size)


def _listed(place: Any) -> Iterable[Any]:
    return () if place is None else place if isinstance(place, list | tuple) else (place,)


def _template_ends(tokenizer: PreTrainedTokenizerFast) -> Iterator[int]:
    """Yield the added token that each chat template writes right after an answer."""
    templates: Any = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        if template and (end := _template_end(tokenizer, template)) is not None:
            yield end


def _template_end(tokenizer: PreTrainedTokenizerFast, template: str) -> int | None:
    ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    if not ids:
        return None
    added = re.compile("|".join(re.escape(text) for text in sorted(ids, key=len, reverse=True)))
    asked, answered = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}

    chat = ChatTemplate(template, dict(tokenizer.special_tokens_map))  # in a child process, within limits

    def written(*messages: dict[str, str], opened: bool = False) -> str:
        return chat.render(messages, add_generation_prompt=opened)

    try:
        before, found, after = written(asked, answered).rpartition(ANSWER)
        opening = set(added.findall(written(asked, opened=True))) - set(added.findall(written(asked)))
    except PassError:  # a template may refuse such a conversation
        return None
    finally:
        chat.close()
    end = added.match(after.lstrip()) if found else None
    # Some templates open the next turn behind every message: what opens an answer does not end it.
    opening.update(added.findall(before)[-1:])
    return None if end is None or end[0] in opening else ids[end[0]]
