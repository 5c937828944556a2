"""Templates with the constructs of published ones give the ids that transformers gives."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import pytest
from chat_constructs import ADDED, CONSTRUCTS, SPECIAL, TALKS
from test_special_text import byte_level, metaspace
from tokenizers import AddedToken, Tokenizer, trainers
from transformers import PreTrainedTokenizerFast

from pass_runtime.errors import PassError
from pass_runtime.text.chat_template import ChatTemplate, SpecialTokens
from pass_runtime.text.special import ChatEncoder

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
NAMED |= {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "sep")}


def trained(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    texts = [*CONSTRUCTS.values(), *(str(talk) for talk in TALKS.values())]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if tokenizer.model.byte_fallback else []
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=of_bytes, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_specific_special_tokens={"image_token": "<|image|>"},
        **NAMED,
    )


TOKENIZERS = {"byte-level": trained(byte_level()), "metaspace": trained(metaspace())}


@cache
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer, SpecialTokens(tokenizer))


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_ids_are_those_of_transformers(construct: str):
    """For every conversation that transformers can render. Others are refused."""
    template, rendered = CONSTRUCTS[construct], 0
    for kind, fast in TOKENIZERS.items():
        ours = ChatTemplate(template, fast.special_tokens_map)
        for talk, (messages, variables) in TALKS.items():
            given = [messages, variables]
            options = {"chat_template": template, "add_generation_prompt": True}
            try:
                theirs = fast.apply_chat_template(
                    messages, return_dict=False, **options, **variables
                )
            except Exception:
                with pytest.raises(PassError, match=r"^the chat template refuses these messages: "):
                    ours.render(messages, **variables)
                continue
            ids = encoder(fast.backend_tokenizer).encode(
                given, lambda parts, of=ours: of.render(parts[0], **parts[1])
            )
            assert ids == theirs, (kind, talk)
            rendered += 1
        ours.close()
    assert rendered >= 4


def test_every_conversation_is_rendered_in_many_ways():
    """So that no conversation is superfluous: a third of the 50 templates render it differently."""
    assert len(CONSTRUCTS) >= 50
    fast = TOKENIZERS["byte-level"]
    for talk, (messages, variables) in TALKS.items():
        texts = set()
        for template in CONSTRUCTS.values():
            options = {"chat_template": template, "tokenize": False}
            with suppress(Exception):
                texts.add(fast.apply_chat_template(messages, **options, **variables))
        assert len(texts) > len(CONSTRUCTS) / 3, talk
