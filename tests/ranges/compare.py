"""With the oldest dependencies, bundles decode to what the newest ones wrote (record.py)."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import onnxruntime
import pytest
from decodings import BUNDLES, PROMPT, directory, logits_after, requests, tokens_file

from pass_runtime import load
from pass_runtime.measuring.lossless import first_difference, run_tokens

RECORD = json.loads(tokens_file().read_text(encoding="utf-8"))


def test_these_are_other_versions_and_there_is_no_torch():
    assert onnxruntime.__version__ != RECORD["onnxruntime"]
    assert importlib.util.find_spec("torch") is None


@pytest.mark.parametrize("name", BUNDLES)
def test_the_tokens_are_those_of_the_newest_versions(name: str):
    """In int4 ONNX Runtime rounds rows to 8 bits: a sum's last bit can change a logit by 0.1."""
    differing = []
    with load(directory() / name, "cpu") as session:
        prompt = session.encode(PROMPT)
        for key, options in requests().items():
            expected = RECORD["tokens"][name][key]
            written = run_tokens(session, prompt, options).token_ids
            difference = first_difference(session, prompt, options, expected, written)
            if difference is not None and not difference.is_near_tie:
                differing.append(f"{key}: {difference}")
        logits = logits_after(session, RECORD["tokens"][name])
    expected_logits = np.array(RECORD["logits"][name])
    tolerance = (0.05 if name == "int4" else 1e-4) * np.abs(expected_logits).max()
    np.testing.assert_allclose(logits, expected_logits, atol=tolerance)
    assert len(differing) <= (len(requests()) // 3 if name == "int4" else 0), differing
