"""The oldest end: the same bundles, and token for token what the newest end decoded."""

from __future__ import annotations

import importlib.util
import json

import onnxruntime
import pytest
from decodings import BUNDLES, PROMPT, directory, requests, tokens_file

from pass_runtime import load
from pass_runtime.measuring.lossless import first_difference, run_tokens

RECORD = json.loads(tokens_file().read_text(encoding="utf-8"))


def test_these_are_the_two_ends():
    assert onnxruntime.__version__ != RECORD["onnxruntime"]
    assert importlib.util.find_spec("torch") is None


@pytest.mark.parametrize("name", BUNDLES)
def test_the_tokens_are_those_of_the_newest_versions(name: str):
    with load(directory() / name, "cpu") as session:
        prompt = session.encode(PROMPT)
        for key, options in requests().items():
            tokens = run_tokens(session, prompt, options).token_ids
            difference = first_difference(session, prompt, options, RECORD["tokens"][name][key], tokens)
            assert difference is None or difference.is_near_tie, f"{key}: {difference}"
