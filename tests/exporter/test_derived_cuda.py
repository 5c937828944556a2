"""The trunks for CUDA compute what trunk.onnx does, of few nodes, and can be captured."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from checkpoints import load_path
from cuda_kernels import copied_values, missing_kernels
from replacing import REPLACEMENTS, copy_bundle
from trunk_graphs import FAMILIES, make_family, random_feed

from conftest import export_bundle, make_model, write_random_weights
from pass_exporter.derived import cuda
from pass_exporter.derived.cuda import write_trunks_for_cuda
from pass_exporter.export import TRUNK_FILE
from pass_exporter.model.lookahead import read_lookahead
from pass_exporter.trunk.graph import save
from pass_exporter.trunk.trace import trace_trunk
from pass_runtime import PassError
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.session import Trunks as OpenTrunks
from pass_runtime.backends.ort.session import open_session, open_trunk
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.plan import make_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.window import Window, prefill_window
from pass_runtime.measuring.lossless import run_tokens
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session, read_tokenizer
from same_text import assert_same_text

WINDOWS = [
    *make_plan("fused", 2).windows,
    *make_plan("two-pass", 2).windows,
    *make_plan("ar", 0).windows,
    prefill_window(30),
]
SINGLE = ("trunk.cuda.one.onnx", "trunk.cuda.one.plain.onnx")
BATCHED = ("trunk.cuda.onnx", "trunk.cuda.plain.onnx")
"""The files for one sequence and for batches: with the adapter, and without."""
BATCHES = {SINGLE: 1, BATCHED: 2}
"""The number of sequences with which each pair of files is tested."""
LENGTHS, CAPACITY = (33, 20), 80
"""The number of cache entries before the window of each sequence, and the capacity."""
EXACT_FILE = "trunk.fp32.onnx"
"""The portable trunk in fp32, beside the portable trunk in fp16, TRUNK_FILE."""
NODES = {
    "llama": (48, 35, 116, 103),
    "mistral": (48, 35, 116, 103),
    "qwen2": (50, 37, 118, 105),
    "qwen3": (62, 49, 129, 116),
    "phi3": (48, 35, 116, 103),
    "gemma": (52, 39, 120, 107),
    "gemma3_text": (76, 63, 168, 155),
    "olmo2": (57, 44, 132, 119),
}
"""Numbers of nodes by family, of SINGLE and BATCHED trunks with two layers and four adapted places
(docs/bundle.md)."""


@dataclass(frozen=True)
class Trunks:
    family: str
    directory: Path

    def run(
        self, file: str, window: Window, batch: int = 1, *, adapter: bool = True
    ) -> dict[str, np.ndarray]:
        if not adapter:
            file = self.without_adapter(file)
        session = open_session(self.directory / file, "cpu")
        feed = random_feed(session, window, LENGTHS, range(batch), CAPACITY)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, feed), strict=True))

    def without_adapter(self, file: str) -> str:
        model = ir.load(self.directory / file)
        for name, value in model.graph.initializers.items():
            if "lora_B" in name and value.const_value is not None:
                value.const_value = ir.tensor(np.zeros_like(value.const_value.numpy()), name=name)
        ir.save(model, self.directory / f"zeroed.{file}")
        return f"zeroed.{file}"


@pytest.fixture(scope="module", params=FAMILIES)
def trunks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trunks:
    directory = tmp_path_factory.mktemp(request.param)
    path = make_family(directory / "model", request.param)
    weights = write_random_weights(path, directory / "lookahead.safetensors", 2)
    for dtype, file in (("fp32", EXACT_FILE), ("fp16", TRUNK_FILE)):
        loaded = load_path(path, dtype)
        trunk, _ = trace_trunk(loaded.model, read_lookahead(weights, 2, loaded.model))
        save(trunk, directory / file)
    written = write_trunks_for_cuda(trunk, directory, loaded.geometry)
    assert tuple(each.file for each in written) == (*SINGLE, *BATCHED)
    return Trunks(request.param, directory)


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.name)
@pytest.mark.parametrize("files", BATCHES, ids=["one", "batch"])
def test_trunks_for_cuda_compute_what_the_portable_trunk_does(trunks, files, window):
    """Squared errors against the fp32 trunk are at most four times those of the portable fp16
    trunk."""
    batch = BATCHES[files]
    exact, portable = (trunks.run(file, window, batch) for file in (EXACT_FILE, TRUNK_FILE))
    for file in files[:1] if len(window.lookahead_rows) else files:
        derived = trunks.run(file, window, batch)
        assert exact.keys() == derived.keys()
        for name, values in exact.items():
            end = None if name == "logits" else min(LENGTHS[:batch]) + window.width
            portable_error, error = (
                np.square(results[name][:, :, :end] - values[:, :, :end]).mean()
                for results in (portable, derived)
            )
            scale = np.square(values[:, :, :end]).mean()
            assert error <= 4 * portable_error + 1e-6 * scale, (file, name)


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.name)
@pytest.mark.parametrize("files", BATCHES, ids=["one", "batch"])
def test_the_adapter_changes_look_ahead_rows_alone(trunks, files, window):
    batch = BATCHES[files]
    adapted, zeroed = (
        trunks.run(files[0], window, batch, adapter=adapter)["logits"] for adapter in (True, False)
    )
    token_rows = window.width - len(window.lookahead_rows)  # the first rows of the window
    np.testing.assert_array_equal(adapted[:, :token_rows], zeroed[:, :token_rows])
    changed = not np.array_equal(adapted[:, token_rows:], zeroed[:, token_rows:])
    assert changed == (len(window.lookahead_rows) > 0)
    # The CPU does not round to float16 between some nodes. For OLMo2, these nodes differ in the
    # graphs with and without the adapter.
    if trunks.family != "olmo2":
        plain = trunks.run(files[1], window, batch)["logits"]
        np.testing.assert_array_equal(adapted[:, :token_rows], plain[:, :token_rows])


def count_nodes(file: Path) -> int:
    """Leave out nodes that compute with constants alone: ONNX Runtime runs them once."""
    graph = ir.load(file).graph
    constants, nodes = {*graph.initializers.values(), None}, 0
    for node in graph:
        if node.inputs and constants.issuperset(node.inputs):
            constants.update(node.outputs)
        else:
            nodes += 1
    return nodes


def test_trunks_for_cuda_have_few_nodes(trunks: Trunks):
    counts = [count_nodes(trunks.directory / file) for file in (*SINGLE, *BATCHED)]
    assert tuple(counts) == NODES[trunks.family]


def test_every_node_has_a_kernel_and_copies_no_value_to_the_host(trunks: Trunks):
    for name in (EXACT_FILE, TRUNK_FILE, *SINGLE, *BATCHED):
        assert missing_kernels(trunks.directory / name) == []
        if name not in (EXACT_FILE, TRUNK_FILE):
            assert copied_values(trunks.directory / name) == []


@pytest.fixture(scope="module")
def bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("fp16")


def test_an_fp16_bundle_has_trunks_for_one_slot_and_for_batches(bundle: Path):
    manifest = read_manifest(bundle)
    assert [(each.device, each.batch) for each in manifest.derived] == [("cuda", 1)] * 2 + [
        ("cuda", None)
    ] * 2
    for files, slots in BATCHES.items():
        assert files == tuple(
            manifest.trunk_file("cuda", slots, lookahead_rows=rows) for rows in (True, False)
        )
    assert manifest.trunk_file("cpu", 1) == TRUNK_FILE and {*SINGLE, *BATCHED} < {*manifest.files}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def open_on_cpu(path: Path, device: str, threads: int, *, files: OpenFiles) -> Any:
        assert device == "cuda"
        names.append(path.name)
        return open_session(path, "cpu", threads, files=files)

    monkeypatch.setattr("pass_runtime.backends.ort.session.open_session", open_on_cpu)
    return names


def open_trunks(bundle: Path, slots: int) -> OpenTrunks:
    manifest = read_manifest(bundle)
    files = OpenFiles.of_graphs(bundle, manifest)
    return open_trunk(files, manifest, "cuda", slots, threads=1)


@pytest.mark.parametrize("files", BATCHES, ids=["one", "batch"])
def test_the_trunk_with_the_adapter_is_opened_by_the_first_plan_with_look_ahead_rows(
    bundle: Path, opened: list[str], files: tuple[str, str]
):
    (ar,), (fused,) = make_plan("ar", 0).windows, make_plan("fused", 2).windows
    trunks = open_trunks(bundle, slots=BATCHES[files])
    assert trunks.of(ar).file == files[1] and opened == [files[1]]
    assert trunks.of(fused).file == files[0] and opened == [files[1], files[0]]


@pytest.mark.parametrize("way", REPLACEMENTS)
@pytest.mark.usefixtures("opened")
def test_both_trunks_are_of_the_bundle_that_was_opened(bundle: Path, tmp_path: Path, way: str):
    other, copy = tmp_path / "other", copy_bundle(bundle, tmp_path)
    shutil.copytree(bundle, other)
    weights = np.fromfile(other / f"{TRUNK_FILE}.data", np.float16)
    (weights[::-1] / 2).tofile(other / f"{TRUNK_FILE}.data")
    manifest, prompt = read_manifest(copy), [5, 6, 7, 8]
    backend = OrtBackend(copy, manifest, trunks=open_trunks(copy, slots=1))
    with Session(manifest, backend, read_tokenizer(copy)) as session:
        options = GenerateOptions(40, plan="ar", ignore_eos=True)
        plain = run_tokens(session, prompt, options).token_ids
        REPLACEMENTS[way](copy, other)
        assert_same_text(session, prompt, replace(options, plan="fused"), plain)


def test_models_with_large_weights_have_no_trunks_without_the_adapter(
    bundle: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cuda, "PLAIN_MAX_BYTES", 1000)
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    sizes = load_path(tiny_model, "fp16").geometry
    derived = write_trunks_for_cuda(ir.load(copy / TRUNK_FILE), copy, sizes)
    assert [each.file for each in derived] == [SINGLE[0], BATCHED[0]]


@pytest.mark.slow
def test_trunks_for_cuda_need_a_supported_head_size_and_can_be_left_out(tmp_path: Path):
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    odd = make_model(tmp_path / "odd", num_hidden_layers=1, head_dim=20)
    for each, options in ((model, {"cuda_attention": "attention"}), (odd, {})):
        bundle = export_bundle(each, tmp_path / f"{each.name}.bundle", dtype="fp16", **options)
        assert read_manifest(bundle).derived == ()
    with pytest.raises(PassError, match="cannot compute this model's attention; leave the option"):
        export_bundle(odd, tmp_path / "other", dtype="fp16", cuda_attention="group-query")
