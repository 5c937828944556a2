"""A bundle is replaced, removed or written into while a session is open: the session goes on with
what it opened, or ends with an error that says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_sessions import PROMPT, SAMPLINGS, Gpu, add_fake_engines
from replacing import REPLACEMENTS, copy_bundle, export_again, write_into

from pass_runtime import Constraint, GenerateOptions, PassError, SamplingParams, Session, load
from pass_runtime import session as session_module
from pass_runtime.bundle.head import HEAD_FILE
from pass_runtime.bundle.noise import TABLES_FILE

FIRST = GenerateOptions(8, plan="ar", ignore_eos=True)
"""What a session decodes before its bundle changes."""
LATER = [
    *(
        GenerateOptions(8, sampling, plan=plan, ignore_eos=True)
        for sampling in SAMPLINGS
        for plan in ("ar", "two-pass", "fused", "auto")
    ),
    GenerateOptions(8, plan="fused", ignore_eos=True, logprobs=2),
    GenerateOptions(8, SamplingParams(logit_bias={7: 3.0}), ignore_eos=True),
    GenerateOptions(8, constraint=Constraint(regex="[a-z ]+")),
]
"""Requests that need further graphs."""


def tokens(session: Session, options: GenerateOptions) -> list[int]:
    return session.generate_ids(PROMPT, options).result().token_ids


@pytest.fixture(scope="module")
def expected(head_bundle: Path) -> list[list[int]]:
    with load(head_bundle, "cpu", threads=1) as session:
        return [tokens(session, options) for options in LATER]


@pytest.fixture
def bundle(head_bundle: Path, tmp_path: Path) -> Path:
    return copy_bundle(head_bundle, tmp_path)


@pytest.fixture
def session(bundle: Path) -> Iterator[Session]:
    with load(bundle, "cpu", threads=1) as session:
        tokens(session, FIRST)
        yield session


@pytest.mark.parametrize("way", REPLACEMENTS)
def test_a_session_goes_on_with_the_bundle_that_it_opened(
    bundle: Path, session: Session, subset_bundle: Path, expected: list[list[int]], way: str
):
    REPLACEMENTS[way](bundle, subset_bundle)
    assert [tokens(session, options) for options in LATER] == expected
    assert not session.closed


@pytest.mark.parametrize("name", ["trunk.onnx.data", TABLES_FILE, HEAD_FILE])
def test_a_session_ends_when_somebody_writes_into_a_file_of_its_bundle(bundle, session, name):
    write_into(bundle / name)
    assert session.closed
    for _ in range(2):
        with pytest.raises(PassError, match=rf"^the bundle has changed \({name} .*open it again$"):
            tokens(session, FIRST)
    with pytest.raises(PassError, match="does not match its SHA-256"):
        load(bundle, "cpu")


def test_requests_under_way_end_with_the_session(bundle: Path, session: Session):
    streams = [session.generate_ids(PROMPT, GenerateOptions(400, ignore_eos=True)) for _ in "12"]
    next(streams[0])
    with (bundle / "trunk.onnx.data").open("ab") as file:
        file.write(b"\0")
    for stream in streams:
        with pytest.raises(PassError, match="the bundle has changed"):
            stream.result()
        assert stream.finish_reason == "error"


def test_graphs_may_be_written_over(bundle, session, expected, subset_bundle):
    for path in subset_bundle.glob("*.onnx"):
        shutil.copyfile(path, bundle / path.name)
    assert [tokens(session, options) for options in LATER] == expected


MOMENTS = ("read_manifest", "verify_files", "read_tokenizer", "open_backend")
"""Functions that `load` calls, one after the other."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_bundle_that_is_replaced_while_it_is_opened_is_refused(
    bundle: Path, head_bundle: Path, monkeypatch: pytest.MonkeyPatch, moment: str, verify: bool
):
    """The other bundle has the same content, so nothing but the change itself can be noticed."""
    function: Callable[..., object] = getattr(session_module, moment)

    def call_and_replace(*arguments: object, **options: object) -> object:
        result = function(*arguments, **options)
        export_again(bundle, head_bundle)
        return result

    monkeypatch.setattr(session_module, moment, call_and_replace)
    with pytest.raises(PassError, match=r"^the bundle has changed .*while it was opened.*again$"):
        load(bundle, "cpu", threads=1, verify=verify)
    monkeypatch.undo()
    load(bundle, "cpu", threads=1, verify=verify).close()


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt-rtx"])
def test_a_session_goes_on_with_the_engines_that_it_opened(bundle, monkeypatch, library):
    add_fake_engines(bundle, capacity=640, least_width=2, library=library)
    gpu, options = Gpu(bundle, monkeypatch), LATER[:8]
    with gpu.open() as session:
        expected = [tokens(session, each) for each in options]
    with gpu.open() as session:
        tokens(session, FIRST)
        shutil.rmtree(bundle / "engines")
        assert [tokens(session, each) for each in options] == expected


def test_a_session_ends_when_somebody_writes_into_an_engine(bundle, monkeypatch):
    add_fake_engines(bundle, capacity=640)
    with Gpu(bundle, monkeypatch).open() as session:
        tokens(session, FIRST)
        write_into(next(bundle.glob("engines/*/*.engine")))
        with pytest.raises(PassError, match="the bundle has changed"):
            tokens(session, FIRST)
        assert session.closed
