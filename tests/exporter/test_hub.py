"""Models of the Hugging Face hub: revisions, cached files, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import transformers
from checkpoints import LFS_POINTER, add_adapter, changed_copy
from export_process import command
from fake_hub import fake_hub, hub_that_hangs_up
from test_checkpoints import QUANTIZED

from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import PassError, read_manifest

REPO = "somebody/tiny"


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
def test_a_revision_is_fetched_once(
    hub: tuple[str, list[str]], reach: Callable[[str], None], tmp_path: Path
):
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
        (
            "nobody/such",
            None,
            "no directory nobody/such, and no such model on the Hugging Face hub",
        ),
        ("nobody/such model", None, "is no id of the Hugging Face hub"),
    ],
    ids=["revision", "model", "no id"],
)
def test_models_and_revisions_that_the_hub_lacks_are_refused(
    hub: tuple[str, list[str]],
    reach: Callable[[str], None],
    repo: str,
    revision: str | None,
    expected: str,
):
    reach(hub[0])
    with pytest.raises(PassError, match=expected):
        load_model(resolve(repo, revision), "fp32")


def test_an_adapter_of_the_hub_is_refused(
    tiny_model: Path, tmp_path: Path, reach: Callable[[str], None]
):
    model = changed_copy(tiny_model, tmp_path / "model", add_adapter)
    with fake_hub(REPO, "v1", model, without="config.json") as (address, _):
        reach(address)
        with pytest.raises(PassError, match=f"{REPO} is a PEFT adapter"):
            load_model(resolve(REPO, "v1"), "fp32")


@pytest.mark.parametrize("case", ["ModelOpt", "NVFP4's tensors", "MLX"])
def test_a_quantized_model_of_the_hub_is_refused(
    tiny_model: Path, tmp_path: Path, reach: Callable[[str], None], case: str
):
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


def test_a_path_is_not_requested_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(PassError, match="the directory models has no directory tiny"):
        resolve("models/tiny")
    assert resolve("somebody/tiny").location == "somebody/tiny"


def test_a_revision_of_a_directory_is_refused(tiny_model: Path):
    with pytest.raises(PassError, match="--revision is for models of the Hugging Face hub, which"):
        resolve(str(tiny_model), "v1")
    assert resolve("llama-7b", "v1").description == "hub:huggyllama/llama-7b@v1"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", b'{"version": "1', "is cut off"),
        ("model.safetensors", LFS_POINTER, "git lfs pull"),
    ],
)
def test_a_damaged_file_of_the_hub_is_refused_by_name(
    tiny_model: Path,
    tmp_path: Path,
    reach: Callable[[str], None],
    name: str,
    content: bytes,
    expected: str,
):
    model = changed_copy(
        tiny_model, tmp_path / "model", lambda directory: (directory / name).write_bytes(content)
    )
    with fake_hub(REPO, "v1", model) as (address, _):
        reach(address)
        with pytest.raises(PassError, match=expected) as caught:
            load_model(resolve(REPO, "v1"), "fp32")
    assert f"/{name} " in str(caught.value)
    assert f"hf download {REPO} --force-download" in str(caught.value)
