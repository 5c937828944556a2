"""The bundle of an open session is replaced, removed or written into."""

from __future__ import annotations

from pathlib import Path

import pytest
from c_api import CSession
from replacing import REPLACEMENTS, copy_bundle, write_into

LATER: list[dict[str, object]] = [
    {"plan": b"fused"},
    {"plan": b"two-pass", "temperature": 0.9},
    {"plan": b"ar", "temperature": 0.9, "top_k": 50},
    {"plan": b"ar", "logprobs": 2},
    {"plan": b"ar", "presence_penalty": 1.5},
]
"""Requests that need further graphs than plain greedy decoding."""


def write(session: CSession, **fields: object) -> list[int]:
    return session.write(**fields, max_new_tokens=8, has_seed=1, seed=1)


@pytest.fixture
def bundle(head_bundle: Path, tmp_path: Path) -> Path:
    return copy_bundle(head_bundle, tmp_path)


@pytest.mark.parametrize("way", REPLACEMENTS)
def test_a_session_goes_on_with_the_bundle_that_it_opened(
    bundle: Path, head_bundle: Path, subset_bundle: Path, way: str
):
    with CSession(head_bundle) as session:
        expected = [write(session, **fields) for fields in LATER]
    with CSession(bundle) as session:
        write(session, plan=b"ar")
        REPLACEMENTS[way](bundle, subset_bundle)
        assert [write(session, **fields) for fields in LATER] == expected
    assert all(len(tokens) == 8 for tokens in expected), expected


@pytest.mark.parametrize("name", ["trunk.onnx.data", "tail.noise.data", "tail.head.data"])
def test_a_session_ends_when_somebody_writes_into_a_file_of_its_bundle(bundle: Path, name: str):
    with CSession(bundle) as session:
        assert len(write(session, plan=b"ar")) == 8
        write_into(bundle / name)
        with pytest.raises(RuntimeError) as error:
            write(session, plan=b"ar")
    how = f"{name} was written while the bundle was open"
    assert str(error.value) == f"the bundle has changed ({how}): open it again"
