"""Checkpoints of Llama and Gemma with a sentencepiece tokenizer.model and no tokenizer.json."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from conftest import CORPUS, export_bundle, make_model
from pass_runtime import GenerateOptions, load

SPECIAL_IDS = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
GEMMA = {
    **SPECIAL_IDS,
    "user_defined_symbols": "<mask>",
    **{f"{name[:3]}_piece": f"<{name[:3]}>" for name in SPECIAL_IDS},
    "add_dummy_prefix": False,
}
FAMILIES = {"LlamaTokenizer": {"bos_id": 1, "eos_id": 2}, "GemmaTokenizer": GEMMA}
"""By the class in tokenizer_config.json, settings with which sentencepiece trains a tokenizer."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bundle_encodes_and_decodes_as_tokenizer_model_does(tmp_path: Path, family: str):
    trained = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 320,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        **FAMILIES[family],
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=trained, **settings
    )
    pieces = SentencePieceProcessor(model_proto=trained.getvalue())
    ends = {"bos_token_id": pieces.bos_id(), "eos_token_id": pieces.eos_id(), "pad_token_id": None}
    model = make_model(tmp_path / "model", vocab_size=pieces.vocab_size(), **ends)
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        (model / name).unlink(missing_ok=True)
    (model / "tokenizer.model").write_bytes(trained.getvalue())
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": family, "add_bos_token": True})
    )
    with load(export_bundle(model, tmp_path / "bundle", lookahead=2)) as session:
        for text in (*CORPUS, "two  spaces", "caf\u00e9 \U0001f600", "\ta"):
            assert session.encode(text, add_special_tokens=False) == pieces.encode(text), text
            assert session.decode(pieces.encode(text)) == text
        assert session.encode("a")[0] == pieces.bos_id()
        assert session.generate("The quick", GenerateOptions(max_new_tokens=4)).result().token_ids
