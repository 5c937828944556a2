"""The constructs of published chat templates (chat_constructs.py) give the token ids that
transformers gives, for every conversation and two kinds of tokenizers."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from chat_constructs import ADDED, CONSTRUCTS, CONVERSATIONS, SPECIAL
from test_special_text import byte_level, metaspace
from tokenizers import AddedToken, Tokenizer, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from pass_runtime.errors import PassError
from pass_runtime.text.special import ChatEncoder
from pass_runtime.text.templates import ChatTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL_TOKENS |= {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "sep")}
"""What templates call the special tokens."""


def trained(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    texts = [*CONSTRUCTS.values(), *map(str, CONVERSATIONS.values())]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if tokenizer.model.byte_fallback else []
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=of_bytes, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_specific_special_tokens={"image_token": "<|image|>"},
        **SPECIAL_TOKENS,
    )


TOKENIZERS = {"byte-level": trained(byte_level()), "metaspace": trained(metaspace())}


encoder = cache(ChatEncoder)


def expected_ids(
    fast: PreTrainedTokenizerFast, template: str, messages: list[Any], variables: dict[str, Any]
) -> list[int]:
    """Return the ids that transformers gives. It leaves out content that is null. Here templates
    get an empty text, or null if they ask for it."""
    if re.search(r"content'?\]? is (not )?none", template):
        given = {"chat_template": template, "add_generation_prompt": True}
        given |= fast.special_tokens_map | variables
        texts, _ = render_jinja_template([messages], **given)
        return fast.encode(texts[0], add_special_tokens=False)
    empty = {"content": ""}
    messages = [each | (empty if each["content"] is None else {}) for each in messages]
    return fast.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_dict=False, **variables
    )


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_ids_are_those_of_transformers(construct: str):
    template, rendered = CONSTRUCTS[construct], 0
    for kind, fast in TOKENIZERS.items():
        ours = ChatTemplate(template, fast.special_tokens_map)
        for name, (messages, variables) in CONVERSATIONS.items():
            conversation = [messages, variables]
            try:
                theirs = expected_ids(fast, template, messages, variables)
            except Exception:
                with pytest.raises(PassError, match=r"^the chat template refuses these messages: "):
                    ours.render(messages, **variables)
                continue

            def render(parts, of=ours):
                return of.render(parts[0], **parts[1])

            ids = encoder(fast.backend_tokenizer).encode(conversation, render)
            assert ids == theirs, (kind, name)
            rendered += 1
    assert rendered >= 4  # so that no construct is refused everywhere
