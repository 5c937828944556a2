"""scripts/step_time.py on the CPU and on a fake GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from pass_runtime.backends.cuda import find_device
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import EngineSet

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}
CELLS = [(rows, capacity) for capacity in (64, 128) for rows in (1, 5, 9)]
FLAGS = [f"--{name.replace('_', '-')}={size}" for name, size in TINY.items()]
FLAGS += ["--rows=9", "--rows=1", "--rows=5", "--capacity=64", "--capacity=128", "--rounds=2"]


def load_script(name: str) -> ModuleType:
    """scripts/ is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def step_time(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, Path]:
    """The script, with nothing that outlives a test, and a directory with a tiny trunk."""
    module, keep = load_script("step_time"), tmp_path_factory.mktemp("keep")
    module.COPIED = {"gpu": 1 << 20, "cpu": 1 << 20}
    module.write_trunk(keep, module.Shape(**TINY))
    return module, keep


def test_rows_in_torch(step_time: tuple[ModuleType, Path], tmp_path: Path) -> None:
    """What the GPU check measures where no engine runs: the same table, and passes that are Llama's passes."""
    sys.path.insert(0, str(ROOT / "scripts"))
    module = load_script("torch_rows")
    module.COPIED = {"gpu": 1 << 20, "cpu": 1 << 20}
    done = CliRunner().invoke(module.main, ["--device", "cpu", *FLAGS, "-o", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(cell["rows"], cell["capacity"]) for cell in report["cells"]] == CELLS
    assert all(cell["milliseconds"] > 0 for cell in report["cells"]) and "S=64: ms" in done.output


def test_torch_passes_read_the_cache_up_to_their_row() -> None:
    import torch

    sys.path.insert(0, str(ROOT / "scripts"))
    module, capacity = load_script("torch_rows"), 64
    with torch.inference_mode():
        passes = module.Passes(load_script("step_time").Shape(**TINY), capacity, "cpu")
        window = passes.window(3)
        before = window().clone()
        assert torch.equal(window(), before), "a pass changed what the next one reads"
        passes.layers[0]["cache"][:, :, 5] = 1.0
        after = window()
        assert (after != before).any(dim=1).all()
        hidden, _ = window.args
        hidden[2] += 1  # the last row is seen by no other
        assert torch.equal(window()[:2], after[:2]) and not torch.equal(window()[2], after[2])


def cells(module: ModuleType, keep: Path, engine: str, output: Path) -> list[dict[str, float]]:
    done = CliRunner().invoke(module.main, ["--engine", engine, *FLAGS, "--keep", str(keep), "-o", str(output)])
    assert done.exit_code == 0, done.output
    report = json.loads(output.read_text())
    assert report["copy_bandwidth"] > 0 and report["shape"] == TINY
    assert "S=64: ms, ratio, of the bound" in done.output
    return report["cells"]


@pytest.mark.slow
def test_step_times_on_the_cpu(step_time: tuple[ModuleType, Path], tmp_path: Path):
    found = cells(*step_time, "cpu", tmp_path / "out.json")
    assert [(cell["rows"], cell["capacity"]) for cell in found] == CELLS
    assert all(cell["milliseconds"] > 0 and cell["bound_fraction"] > 0 for cell in found)
    assert [cell["ratio"] for cell in found if cell["rows"] == 1] == [1.0, 1.0]
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_step_times_on_a_fake_gpu(
    step_time: tuple[ModuleType, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
):
    """The engine's profiles, bindings and captured passes; building it is what only a real TensorRT can."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/runtime"))
    from fake_gpu import FakeCuda, FakeTensorRT, FakeTensorRTX, _session, _write_plan

    module, keep = step_time
    gpu = FakeCuda(target=(8, 9))
    fake = FakeTensorRTX if LIBRARIES[library].compiles_kernels else FakeTensorRT
    monkeypatch.setitem(sys.modules, LIBRARIES[library].module, fake(gpu))
    monkeypatch.setattr(module, "import_api", lambda: gpu)
    monkeypatch.setattr(module, "find_device", lambda: find_device(gpu))

    def build(directory, source, library, targets, capacities) -> EngineSet:
        engines = EngineSet.model_construct(
            directory=f"{library.name}-{capacities[-1]}",
            library=library.name,
            version="fake",
            lookahead=1,
            prefill_widths=(),
            max_batch_size=1,
        )
        engines.path(directory).mkdir(parents=True)
        _session.cache_clear()  # the graph of another capacity is written over this one's file
        file = _write_plan(directory, engines.path(directory), source)
        return engines.model_copy(update={"capacities": capacities, "engines": (file,)})

    monkeypatch.setattr(module, "build_engine", build)
    found = cells(module, keep, library, tmp_path / "out.json")
    assert [(cell["rows"], cell["capacity"]) for cell in found] == CELLS
    own = [cell["capacity"] for cell in found if "own_cache_milliseconds" in cell]
    assert own == [capacity for _, capacity in CELLS if capacity < CELLS[-1][1]] != []
    assert gpu.captures == len(CELLS) + len(own) and not gpu.blocks and not gpu.streams


@pytest.mark.slow
def test_what_counts_as_read(step_time: tuple[ModuleType, Path]):
    """All parameters but the embeddings, random ones; every weight starts elsewhere in the pool."""
    module, _ = step_time
    shape = module.Shape(**TINY)
    parameters = dict(module.random_llama(shape).named_parameters())
    embeddings = parameters.pop("model.embed_tokens.weight")
    assert shape.weight_bytes == sum(2 * parameter.numel() for parameter in parameters.values())
    assert abs(float(embeddings.float().std()) - 0.02) < 1e-3
    places = [parameter.data_ptr() for parameter in parameters.values() if parameter.ndim == 2]
    assert len(set(places)) == len(places)
