"""The end tokens of a model: from its configurations, its tokenizer and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import change_settings, changed_copy, load_path
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from conftest import EOS, make_tokenizer
from pass_exporter.model.end_tokens import end_tokens

SPECIAL_TOKENS = "<|im_start|> <|im_end|> [INST] [/INST] <|user|> <|assistant|> <|end|> <tool>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "ChatML": (CHATML, ["<|im_end|>"]),
    "ChatML with a system message of its own": (SYSTEM + CHATML, ["<|im_end|>"]),
    "ChatML that always opens a turn": (
        CHATML[: CHATML.index("{% if")] + "<|im_start|>assistant\n",
        ["<|im_end|>"],
    ),
    "Phi-3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ["<|end|>"],
    ),
    "Llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        ["<eos>"],
    ),
    "no ends": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        [],
    ),
    "no ends, and a turn that is always open": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
        [],
    ),
    "plain text": ("{% for m in messages %}{{ m.role }}: {{ m.content }}###\n{% endfor %}", []),
    "thinks first": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n<tool></tool>{{ m.content "
        "}}<|im_end|>{% endfor %}",
        ["<|im_end|>"],
    ),
    "refuses": ("{{ raise_exception('system first') }}", []),
    "is broken": ("{% for %}", []),
    "leaves answers out": ("{{ messages[0].content }}<|end|>", []),
}
"""Chat templates, and the end tokens that each of them has besides <eos>."""


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load_path(tiny_model).model


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_after_an_answer_is_an_end_token(tiny_model, model, name):
    template, expected = TEMPLATES[name]
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS.split()])
    model.config.vocab_size = len(tokenizer)
    expected_ids = tuple(dict.fromkeys((EOS, *tokenizer.convert_tokens_to_ids(expected))))
    for chat_template in (template, {"default": "{{ 1 }}", "tool_use": template}):
        tokenizer.chat_template = chat_template
        assert end_tokens(model, tokenizer, str(tiny_model), {}) == expected_ids


IDS = st.integers(0, 20) | st.lists(st.integers(0, 20), max_size=3) | st.none()
"""What `eos_token_id` may be in a configuration."""


@settings(max_examples=12, deadline=None)
@given(generation=IDS, config=IDS, own=st.sampled_from([None, "<bos>", "<eos>", "a"]))
def test_the_end_tokens_of_all_configurations_are_used(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, generation, config, own
):
    directory = changed_copy(
        tiny_model, tmp_path_factory.mktemp("ends") / "model", change_settings(eos_token_id=config)
    )
    change_settings("generation_config.json", eos_token_id=generation)(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": own}))
    expected: dict[int, None] = {}
    for ids in (generation, config, AutoTokenizer.from_pretrained(directory).eos_token_id):
        expected |= dict.fromkeys(ids if isinstance(ids, list) else [] if ids is None else [ids])
    assert load_path(directory).eos_token_ids == tuple(expected)


def test_the_default_end_token_of_a_configuration_class_is_not_used(tiny_model, tmp_path):
    """LlamaConfig's is 2."""
    model = changed_copy(
        tiny_model, tmp_path / "model", change_settings("generation_config.json", eos_token_id=5)
    )
    path = model / "config.json"
    config = json.loads(path.read_text())
    del config["eos_token_id"]
    path.write_text(json.dumps(config))
    assert load_path(model).eos_token_ids == (5, EOS)
