"""Random models of every family, as directories and as .gguf files, have the logits and texts of
transformers, or are refused in one line."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_models import Case, cases, save, save_gguf, tokenizer_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from conftest import export_bundle
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import GenerateOptions, PassError, load
from pass_runtime.measuring.lossless import run_tokens
from same_text import assert_same_text, greedy_text

TEXT = "The quick brown fox in the lazy café jumps 12 times.\n"
MESSAGES = [
    {"role": "user", "content": "the fox in"},
    {"role": "assistant", "content": "def"},
    {"role": "user", "content": TEXT},
]
TOKENS = 12
STREAMED = ("metaspace", "wordpiece")
"""Kinds of tokenizers without byte tokens: a text never ends in the middle of a character."""
REFUSALS = (
    "rope_freqs.weight",
    "rotary type 'dynamic'",
    "rope.scaling.type = 'dynamic'",
    "rope.scaling.type = 'yarn'",
    "final_logit_softcapping",
    "attention.sliding_window",
    "tokenizer 'bert'",
    "tokenizer.ggml.model = 't5'",
    "add_space_prefix",
)
"""Settings for which an export may refuse a model, as its errors name them."""
EXAMPLES = int(os.environ.get("LOADING_EXAMPLES", 60))
OPTIONS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@contextmanager
def saved(case: Case) -> Iterator[tuple[Path, Path]]:
    """Save the model; give its directory, and what is exported: the directory, or a .gguf file."""
    with tempfile.TemporaryDirectory() as folder:
        directory = source = save(case, Path(folder) / "model")
        if case.as_gguf:
            source = save_gguf(case, directory, Path(folder) / "model.gguf")
        yield directory, source


def refused_setting(error: PassError) -> str:
    settings = [name for name in REFUSALS if name in str(error)]
    assert len(str(error).splitlines()) == 1 and settings, error
    return settings[0]


def reference(case: Case, directory: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer to compare with: for a .gguf file as it was made, for a directory as
    transformers loads it."""
    return tokenizer_of(case) if case.as_gguf else AutoTokenizer.from_pretrained(directory)


def check_loading(case: Case) -> str:
    with saved(case) as (directory, source):
        try:
            loaded = load_model(resolve(str(source)), "fp32")
        except PassError as error:
            return refused_setting(error)
        tokenizer = reference(case, directory)
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        assert loaded.tokenizer(TEXT).input_ids == ids[0].tolist()
        assert loaded.eos_token_ids == (2, tokenizer.convert_tokens_to_ids("<|im_end|>"))
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        long_ids = ids.repeat(1, 2)
        with torch.no_grad():
            logits, expected_logits = loaded.model(long_ids).logits, expected(long_ids).logits
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    return "equal"


def check_decoding(case: Case) -> str:
    with saved(case) as (directory, source):
        try:
            bundle = export_bundle(source, directory.with_name("bundle"), lookahead=1)
        except PassError as error:
            return refused_setting(error)
        tokenizer = reference(case, directory)
        prompt = tokenizer(TEXT).input_ids
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        expected_ids = greedy_text(expected, prompt, TOKENS)
        with load(bundle, "cpu", threads=1) as session:
            assert session.encode(TEXT) == prompt
            chat = tokenizer.apply_chat_template(
                MESSAGES, add_generation_prompt=True, return_dict=False
            )
            assert session.encode_chat(MESSAGES) == chat
            options = GenerateOptions(max_new_tokens=TOKENS, ignore_eos=True)
            ids = run_tokens(session, prompt, options).token_ids
            assert_same_text(session, prompt, options, expected_ids, ids)
            text, prompt_text, whole_text = (
                tokenizer.decode(each, skip_special_tokens=True)
                for each in (ids, prompt, [*prompt, *ids])
            )
            assert session.tokenizer.decode(ids) == text
            if case.tokenizer in STREAMED:
                streamed = session.generate(prompt, options).result().text
                assert streamed == whole_text.removeprefix(prompt_text)
    return "equal"


@pytest.mark.slow
@settings(max_examples=20, **OPTIONS)
@given(cases())
def test_a_random_model_loads_as_transformers_loads_it(case: Case):
    check_loading(case)


@pytest.mark.slow
@settings(max_examples=3, **OPTIONS)
@given(cases())
def test_a_random_model_decodes_as_in_transformers(case: Case):
    check_decoding(case)


@pytest.mark.slow
@pytest.mark.seldom
@pytest.mark.timeout(0)
def test_many_random_models_decode_as_in_transformers():
    """Decode LOADING_EXAMPLES models, and print how many were refused for which setting."""
    results: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, **OPTIONS)
    @given(cases())
    def decode(case: Case) -> None:
        results[check_decoding(case)] += 1

    decode()
    print(*results.most_common(), sep="\n")
