"""Random models of every family, as directories and as .gguf files: what transformers makes of
them, or one refusal."""

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
from pass_runtime.measuring.lossless import first_difference, run_tokens

TEXT = "The quick brown fox in the lazy café jumps 12 times.\n"
MESSAGES = [
    {"role": "user", "content": "the fox in"},
    {"role": "assistant", "content": "def"},
    {"role": "user", "content": TEXT},
]
TOKENS = 12
STREAMED = ("metaspace", "wordpiece")
"""Tokenizers whose texts have no stray bytes."""
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
EXAMPLES = int(os.environ.get("LOADING_EXAMPLES", 60))
OPTIONS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@contextmanager
def saved(case: Case) -> Iterator[tuple[Path, Path]]:
    """The case's directory, and what is loaded: that or a .gguf file."""
    with tempfile.TemporaryDirectory() as folder:
        directory = save(case, Path(folder) / "model")
        yield (
            directory,
            save_gguf(case, directory, Path(folder) / "model.gguf") if case.as_gguf else directory,
        )


def refused(error: PassError) -> str:
    """What the refusal names. A refusal is one line, and names one of the settings that may be
    refused."""
    found = [name for name in REFUSALS if name in str(error)]
    assert len(str(error).splitlines()) == 1 and found, error
    return found[0]


def reference(case: Case, directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that the file was made from; of a directory, the one that transformers chooses
    for its family."""
    made = tokenizer_of(case)
    return made if case.as_gguf else AutoTokenizer.from_pretrained(directory)


def loads(case: Case) -> str:
    with saved(case) as (directory, source):
        try:
            loaded = load_model(resolve(str(source)), "fp32")
        except PassError as error:
            return refused(error)
        tokenizer = reference(case, directory)
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        assert loaded.tokenizer(TEXT).input_ids == ids[0].tolist()
        assert loaded.eos_token_ids == (2, tokenizer.convert_tokens_to_ids("<|im_end|>"))
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        long = ids.repeat(1, 2)
        with torch.no_grad():
            torch.testing.assert_close(
                loaded.model(long).logits, expected(long).logits, rtol=1e-4, atol=1e-4
            )
    return "equal"


def decodes(case: Case) -> str:
    with saved(case) as (directory, source):
        try:
            bundle = export_bundle(source, directory.with_name("bundle"), lookahead=1)
        except PassError as error:
            return refused(error)
        tokenizer = reference(case, directory)
        prompt = tokenizer(TEXT).input_ids
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        expected.generation_config.eos_token_id = None
        ids = torch.tensor([prompt])
        theirs = expected.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=TOKENS,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        with load(bundle, "cpu", threads=1) as session:
            assert session.encode(TEXT) == prompt
            chat = tokenizer.apply_chat_template(
                MESSAGES, add_generation_prompt=True, return_dict=False
            )
            assert session.encode_chat(MESSAGES) == chat
            options = GenerateOptions(max_new_tokens=TOKENS, ignore_eos=True)
            ours = run_tokens(session, prompt, options).token_ids
            difference = first_difference(session, prompt, options, theirs, ours)
            assert difference is None or difference.is_near_tie, difference
            assert session.tokenizer.decode(ours) == tokenizer.decode(
                ours, skip_special_tokens=True
            )
            if case.tokenizer in STREAMED:
                before, whole = (
                    tokenizer.decode(each, skip_special_tokens=True)
                    for each in (prompt, [*prompt, *ours])
                )
                assert session.generate(prompt, options).result().text == whole.removeprefix(before)
    return "equal"


@settings(max_examples=20, **OPTIONS)
@given(cases())
def test_a_random_model_loads_as_transformers_loads_it(case: Case):
    loads(case)


@settings(max_examples=3, **OPTIONS)
@given(cases())
def test_a_random_model_decodes_as_in_transformers(case: Case):
    decodes(case)


@pytest.mark.slow
@pytest.mark.seldom
@pytest.mark.timeout(0)
def test_many_random_models():
    """LOADING_EXAMPLES models; what became of them is printed."""
    found: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, **OPTIONS)
    @given(cases())
    def each(case: Case) -> None:
        found[decodes(case)] += 1

    each()
    print(*found.most_common(), sep="\n")
