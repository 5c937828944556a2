"""A manifest that contradicts itself or its graphs is refused in one line that names the number."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import (
    at,
    linked,
    one_of_each_kind,
    paths,
    real_document,
    refusal,
    replace,
    write_manifest,
)

from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import run_tokens
from pass_runtime.options import GenerateOptions
from pass_runtime.session import load

HARMLESS = {
    # Which tokens begin and end a text is up to the model.
    ("model", "bos_token_id"): range(320),
    ("model", "eos_token_ids", 0): range(320),
    # The runtime does not compute with these two; they describe the graphs.
    ("lookahead", "adapter_rank"): range(2**41),
    ("lookahead", "head", "blocks"): range(1, 2**41),
}
"""Paths of the integers that may have another value than in the export, and which values."""


@pytest.fixture(scope="module", params=["tiny_bundle", "adapter_bundle", "head_bundle"])
def original(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def bundle(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the files of `original`; every example writes a manifest of its own."""
    return linked(original, tmp_path_factory.mktemp("bundle"))


def changed(document: dict, path: tuple, value) -> dict:
    document = copy.deepcopy(document)
    at(document, path[:-1])[path[-1]] = value
    return document


def refusal_of(bundle: Path, document: dict) -> str:
    write_manifest(bundle, document)
    return refusal(load, bundle, "cpu", verify=False)


def checked_integers(document: dict) -> list[tuple]:
    """Return the paths of the integers that are checked at load. Those of a plan's drafts, groups
    and constants are not read: the runtime derives them from the plan's name. (The exporter's
    test_bundle.py compares them.) Those of a tail are checked when a request opens the tail."""

    def is_unchecked(path: tuple) -> bool:
        of_plan = path[0] == "plans" and path[2] in ("drafts", "groups", "constants", "tails")
        return of_plan or path[0] in ("logprobs", "processors")

    integers = [path for path in paths(document) if type(at(document, path)) is int]
    return [path for path in integers if not is_unchecked(path)]


def is_harmless(path: tuple, value: int) -> bool:
    return value in HARMLESS.get(path, ())


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=150)
@given(data=st.data())
def test_a_changed_number_is_refused_or_harmless(original: Path, bundle: Path, data: st.DataObject):
    document = real_document(original)
    path = data.draw(st.sampled_from(checked_integers(document)))
    old = at(document, path)
    near = st.sampled_from([old - 1, old + 1, 2 * old, old // 2, old + 4, 0, 1, -1, 2**40])
    value = data.draw(st.one_of(near, st.integers(0, 2000)).filter(lambda value: value != old))
    changed_document = changed(document, path, value)
    if is_harmless(path, value):
        write_manifest(bundle, changed_document)
        load(bundle, "cpu", threads=1, verify=False).close()
    else:
        refusal_of(bundle, changed_document)


@pytest.mark.slow
def test_every_kind_of_number_is_checked(original: Path, bundle: Path):
    """The test above draws its examples; this one has an example of each field."""
    document = real_document(original)
    integers = checked_integers(document)
    one_file = [path for path in integers if path[0] != "files" or path[1] == "trunk.onnx"]
    assert len(one_of_each_kind(one_file)) > 15
    for path in one_of_each_kind(one_file):
        for value in (at(document, path) + 1, at(document, path) + 4, 2**40):
            if not is_harmless(path, value):
                refusal_of(bundle, changed(document, path, value))


TAIL, TAIL_FILE = ("plans", 2, "tails", "sample"), "tail.verify-1.sample.onnx"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("version",), 1, "version 1"),
        (("model", "vocab_size"), 328, "vocab_size"),
        (("model", "hidden_size"), 128, "model.hidden_size 128"),
        (("model", "layers"), 3, "model.layers is 3"),
        (("model", "heads"), 8, "model.heads 8 and trunk"),
        (("model", "kv_heads"), 4, "model.kv_heads"),
        (("model", "kv_heads"), 3, "model.kv_heads 3"),
        (("model", "head_dim"), 32, "model.head_dim"),
        (("model", "max_capacity"), 1024, "model.max_capacity 1024"),
        (("model", "dtype"), "float16", "model.dtype float16"),
        (("model", "weights"), "int8", "model.weights int8"),
        (("model", "eos_token_ids"), [320], "token 320"),
        (("lookahead", "length"), 5, "lookahead.length 5"),
        *(
            (("lookahead", name), [0.5] * 9, f"lookahead.{name}")
            for name in ("acceptance_per_position", "acceptance_per_position_sampled")
        ),
        (("rule",), "rejection", "rule rejection"),
        ((*TAIL, "inputs", 0, "dtype"), "float16", f"logits of {TAIL_FILE}"),
        ((*TAIL, "inputs", 0, "shape", 2), 328, f"logits of {TAIL_FILE}"),
        ((*TAIL, "outputs", 0, "shape"), [3], f"emitted of {TAIL_FILE}"),
        (("logprobs", "inputs", 0, "shape", 1), "rows", "unknown size rows"),
        (("trunk", "inputs", 0, "dtype"), "float32", "input_ids"),
        (("noise", "bits"), 29, "noise"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_the_error_names_the_wrong_field(
    tiny_bundle: Path, tmp_path: Path, path: tuple, value, named: str
):
    document = changed(real_document(tiny_bundle), path, value)
    assert named in refusal_of(linked(tiny_bundle, tmp_path), document)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (
            ("plans", 0, "tails", "greedy", "outputs", 0, "shape", 1),
            3,
            "tail.ar.greedy.onnx differ in emitted",
        ),
        (("logprobs", "outputs", 1, "shape", 2), 21, "tail.logprobs.onnx differ in top_ids"),
    ],
)
def test_a_tail_that_differs_from_the_manifest_fails_its_first_request(
    tiny_bundle: Path, tmp_path: Path, path: tuple, value: int, named: str
):
    bundle = linked(tiny_bundle, tmp_path)
    write_manifest(bundle, changed(real_document(tiny_bundle), path, value))
    with load(bundle, "cpu", threads=1, verify=False) as session:
        with pytest.raises(PassError, match=named):
            session.generate_ids([5, 6, 7], GenerateOptions(2, plan="ar", logprobs=0)).result()
        assert not session.closed


def test_what_the_runtime_derives_from_the_names_of_plans_is_not_read(
    tiny_bundle: Path, tmp_path: Path
):
    """The manifest lists it for runtimes in other languages."""
    document, bundle = real_document(tiny_bundle), linked(tiny_bundle, tmp_path)
    for info in document["plans"]:
        info |= {"drafts": 7, "groups": [1], "next": "other"}
        info["constants"] = {name: [] for name in info["constants"]}
    write_manifest(bundle, document | {"feeds": {"next_ids": "length"}})
    options = GenerateOptions(12, plan="fused", lookahead=2)
    with (
        load(bundle, "cpu", threads=1, verify=False) as damaged,
        load(tiny_bundle, "cpu", threads=1) as session,
    ):
        texts = [run_tokens(opened, [5, 6, 7], options).token_ids for opened in (damaged, session)]
    assert texts[0] == texts[1] and len(texts[0]) > 1


def test_a_plan_that_is_left_out_is_refused(tiny_bundle: Path, tmp_path: Path):
    document = real_document(tiny_bundle)
    del document["plans"][4]
    assert "lookahead.length" in refusal_of(linked(tiny_bundle, tmp_path), document)


def test_a_manifest_of_another_model_is_refused(
    tiny_bundle: Path, adapter_bundle: Path, tmp_path: Path
):
    """The manifest agrees with itself, and not with the graphs."""
    linked(adapter_bundle, tmp_path)
    replace(tmp_path / FILE_NAME, (tiny_bundle / FILE_NAME).read_bytes())
    with pytest.raises(PassError):
        load(tmp_path, "cpu", verify=False)


def test_a_manifest_of_an_older_export_has_no_sampled_acceptance(tiny_bundle: Path, tmp_path: Path):
    document, bundle = real_document(tiny_bundle), linked(tiny_bundle, tmp_path)
    del document["lookahead"]["acceptance_per_position_sampled"]
    write_manifest(bundle, document)
    with load(bundle, "cpu", threads=1, verify=False) as session:
        assert session.manifest.lookahead.acceptance_per_position_sampled == ()
