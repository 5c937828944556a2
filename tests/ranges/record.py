"""Exports bundles, and records what they decode to with the newest dependencies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnxruntime
from decodings import BUNDLES, PROMPT, directory, logits_after, requests, tokens_file

from conftest import export_bundle
from pass_runtime import load
from pass_runtime.measuring.lossless import run_tokens


def test_record(
    tiny_model: Path,
    tiny_bundle: Path,
    random_bundle: Path,
    adapter_bundle: Path,
    head_bundle: Path,
    tmp_path: Path,
):
    int4 = export_bundle(tiny_model, tmp_path / "int4", lookahead=6, weights="int4")
    tokens, logits = {}, {}
    bundles = (tiny_bundle, random_bundle, adapter_bundle, head_bundle, int4)
    for name, bundle in zip(BUNDLES, bundles, strict=True):
        target = directory() / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(bundle, target)
        with load(target, "cpu") as session:
            prompt = session.encode(PROMPT)
            tokens[name] = {
                key: run_tokens(session, prompt, options).token_ids
                for key, options in requests().items()
            }
            logits[name] = logits_after(session, tokens[name])
    # The texts differ by bundle and sampling, so that comparing them says something.
    assert len({tuple(text) for texts in tokens.values() for text in texts.values()}) >= 6
    record = {"onnxruntime": onnxruntime.__version__, "tokens": tokens, "logits": logits}
    tokens_file().write_text(json.dumps(record), encoding="utf-8")
