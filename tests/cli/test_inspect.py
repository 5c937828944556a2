"""pass-run inspect prints the manifest, as lines or as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pass_run import bundle_copy, output, refusal

from pass_runtime import read_manifest
from pass_runtime.backends.ort.session import kernels_name
from pass_runtime.bundle.manifest import EngineFile, EngineSet
from pass_runtime.bundle.plan import make_plan


def test_json_is_the_manifest_as_plain_data(adapter_bundle: Path):
    printed = json.loads(output("inspect", adapter_bundle, "--json"))
    manifest = read_manifest(adapter_bundle)
    assert printed["model"]["name"] == manifest.model.name and printed["model"]["layers"] == 2
    kv_bytes = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head size, fp32
    assert printed["model"]["kv_bytes_per_token"] == kv_bytes
    assert printed["lookahead"]["length"] == 8 and printed["lookahead"]["adapter_rank"] == 4
    assert printed["rule"] == "match" and printed["engines"] == []
    assert printed["content"] == manifest.content_hash
    for name, info in printed["files"].items():
        assert info["bytes"] == (adapter_bundle / name).stat().st_size
    assert printed["bytes"] == sum(info["bytes"] for info in printed["files"].values())
    rows = {window["name"]: window["rows"] for window in printed["windows"]}
    names, lookaheads = ("ar", "two-pass", "fused"), range(1, 9)
    plans = [make_plan(name, lookahead) for name in names for lookahead in lookaheads]
    assert rows == {window.name: window.width for plan in plans for window in plan.windows}
    assert printed["kernels"] == (kernels_name() or "onnxruntime")
    assert printed["tools"]["onnxruntime"] and printed["verified"] is False


def test_lines_describe_the_bundle(adapter_bundle: Path):
    text = output("inspect", adapter_bundle)
    for line in (
        "model.family: llama",
        "model.layers: 2",
        "model.dtype: float32",
        "lookahead.length: 8",
        "lookahead.adapter_rank: 4",
        "lookahead.trained: true",
        "rule: match",
        f"kernels: {kernels_name() or 'onnxruntime'}",
    ):
        assert f"\n{line}\n" in text
    assert "files.trunk.onnx.data.bytes: " in text and "sha256" not in text
    assert "│ fused-8 " in text


def test_files_are_read_with_verify_only(tiny_bundle: Path, tmp_path: Path):
    name = "trunk.onnx.data"
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without=name)
    assert output("inspect", copy, "--json")
    assert "is missing" in refusal("inspect", copy, "--verify")
    content = bytearray((tiny_bundle / name).read_bytes())
    content[5] ^= 1  # one bit
    (copy / name).write_bytes(content)
    assert "SHA-256" in refusal("inspect", copy, "--verify")
    assert json.loads(output("inspect", tiny_bundle, "--verify", "--json"))["verified"] is True
    assert "verified: true" in output("inspect", tiny_bundle, "--verify")


def test_engines_are_listed_and_checked(tiny_bundle: Path, tmp_path: Path):
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without="pass_config.json")
    manifest = read_manifest(tiny_bundle)
    of_engine = {"sha256": "0" * 64, "bytes": 1500, "profiles": (), "aliases": {}}
    engine = EngineFile(graph="trunk.onnx", file="trunk.engine", **of_engine)
    engines = EngineSet(
        directory="set",
        library="tensorrt-rtx",
        version="1.2",
        targets=("sm89",),
        bundle=manifest.content_hash,
        lookahead=6,
        max_batch_size=1,
        capacities=(512, 1024),
        prefill_widths=(32,),
        engines=(engine,),
    )
    old = engines.model_copy(update={"bundle": "of other files"})
    listed = manifest.model_copy(update={"engines": (engines, old)})
    (copy / "pass_config.json").write_text(listed.text())
    current, other = json.loads(output("inspect", copy, "--json"))["engines"]
    assert (current["current"], other["current"]) == (True, False)
    assert current["targets"] == ["sm89"] and current["bytes"] == 1500
    assert current["capacities"] == [512, 1024]
    text = output("inspect", copy)
    assert 'engines.0.targets: ["sm89"]' in text and "engines.1.current: false" in text
    assert "trunk.engine is missing" in refusal("inspect", copy, "--verify")


def test_the_reason_why_kernels_are_missing(tiny_bundle: Path, monkeypatch):
    monkeypatch.setenv("PASS_KERNELS", "off")
    line = "kernels: onnxruntime (ours are missing: PASS_KERNELS is off)"
    assert line in output("inspect", tiny_bundle)
    assert json.loads(output("inspect", tiny_bundle, "--json"))["kernels"] == "onnxruntime"


def test_no_session_of_the_bundle_is_opened(tiny_bundle: Path):
    """ONNX Runtime is imported to load the kernels."""
    code = (
        "import sys; from click.testing import CliRunner; from pass_runtime.cli.main import main\n"
        f"assert CliRunner().invoke(main, ['inspect', {str(tiny_bundle)!r}]).exit_code == 0\n"
        "assert 'pass_runtime.backends.ort.backend' not in sys.modules and 'prompt_toolkit' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_directory_without_a_bundle_is_refused(tmp_path: Path):
    assert "is not a bundle" in refusal("inspect", tmp_path)
