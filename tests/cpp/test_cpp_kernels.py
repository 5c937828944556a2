"""The C++ runtime finds the library of CPU kernels, and without it runs the portable trunk."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from cpp_programs import BUILD, generate
from manifests import real_document, write_manifest

from pass_runtime import GenerateOptions, load

LIBRARY = "libpass_kernels.so"
HOW_TO_GET = "run scripts/build_cpp.sh, or set PASS_KERNELS to the path of a libpass_kernels.so\n"


def tokens(bundle: Path, *flags: str) -> tuple[list[int], str]:
    """Return the tokens of a text, and what was written to standard error."""
    done = generate(bundle, 12, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["token_ids"], done.stderr


@pytest.mark.parametrize("variant", [None, "plain"])
def test_the_text_is_that_of_python(
    random_bundle: Path, variant: str | None, monkeypatch: pytest.MonkeyPatch
):
    with load(random_bundle, "cpu", threads=1) as session:
        options = GenerateOptions(12, plan="fused", ignore_eos=True)
        expected = session.generate_ids([5, 6, 7], options).result().token_ids
    if variant is not None:
        monkeypatch.setenv("PASS_KERNELS_CPU", variant)
    written, logged = tokens(random_bundle, "--verbose")
    assert written == expected
    assert (
        f"pass: kernels {variant or ''}" in logged
        and f" of {BUILD.resolve() / LIBRARY}\n" in logged
    )
    assert tokens(random_bundle)[1] == ""


def test_an_installed_program_finds_the_installed_library(random_bundle: Path, tmp_path: Path):
    """The test `consumer` of ctest installs the package."""
    installed = BUILD / "consumer/installed"
    if not (installed / "bin/pass-cpp").exists():
        pytest.skip("nothing is installed: run scripts/build_cpp.sh")
    shutil.copytree(installed, tmp_path / "installed")
    done = generate(random_bundle, 4, "--verbose", program=tmp_path / "installed/bin/pass-cpp")
    [library] = (tmp_path / "installed").rglob(LIBRARY)
    assert f" of {library}\n" in done.stderr


@pytest.mark.parametrize("setting", ["off", "/nowhere.so", "libm.so.6"])
def test_without_kernels_one_line_says_so(
    random_bundle: Path, setting: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PASS_KERNELS", setting)
    written, logged = tokens(random_bundle)
    assert len(written) == 12
    assert re.fullmatch(
        r"pass: ONNX Runtime's kernels run in place of ours, which are missing \(.*"
        f"{re.escape(setting)}.*"
        rf"\): passes are slower, and near-ties may flip; {HOW_TO_GET}",
        logged,
    ), logged


def test_a_bundle_for_the_cpu_alone_needs_kernels(
    random_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bundle = shutil.copytree(random_bundle, tmp_path / "bundle")
    document = real_document(bundle)
    del document["files"]["trunk.onnx"]
    write_manifest(bundle, document)
    (bundle / "trunk.onnx").unlink()
    assert tokens(bundle) == tokens(random_bundle)
    monkeypatch.setenv("PASS_KERNELS", "off")
    done = generate(bundle, 1)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {bundle} cannot run: its kernels are missing (PASS_KERNELS is off): {HOW_TO_GET}"
    )
