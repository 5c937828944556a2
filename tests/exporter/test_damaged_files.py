"""A file of a checkpoint that is a stand-in, cut off or of another kind is named, with what to
do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LFS_POINTER, write_gguf

from pass_exporter.model import files
from pass_exporter.model.gguf_reader import read_gguf
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import PassError

NAMES = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ),
    *("added_tokens.json", "model.safetensors.index.json"),
)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("not-there")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "LFS pointer": (lambda path: path.write_bytes(LFS_POINTER), "git lfs pull"),
    "annex pointer": (
        lambda path: path.write_bytes(b"/annex/objects/SHA256E-s5--a.json\n"),
        "git annex get",
    ),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "cut off": (
        lambda path: path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2]),
        "cut off",
    ),
    "byte order mark": (
        lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
        "byte order mark",
    ),
    "UTF-16": (lambda path: path.write_bytes(path.read_text().encode("utf-16")), "byte order mark"),
    "binary": (lambda path: path.write_bytes(b"\x80\x81\x00"), "not UTF-8"),
    "a list": (lambda path: path.write_bytes(b"[1]"), "must hold a JSON object"),
    "directory": (directory, "is a directory"),
    "broken link": (link, "is not there"),
}


def refusal(model: Path) -> str:
    with pytest.raises(PassError) as caught:
        load_model(resolve(str(model)), "fp32")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tiny_model: Path, tmp_path: Path, name: str, damage: str):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / name
    if not path.exists():
        path.write_text(
            json.dumps({"weight_map": {"a": "model.safetensors"}} if "index" in name else {"a": 7})
        )
    change, expected = DAMAGES[damage]
    change(path)
    said = refusal(model)
    assert str(path) in said
    assert expected in said


@pytest.mark.parametrize("name", ["chat_template.jinja", "model.safetensors"])
@pytest.mark.parametrize(
    "damage", ["LFS pointer", "annex pointer", "empty", "directory", "broken link"]
)
def test_templates_and_weights_too(tiny_model: Path, tmp_path: Path, name: str, damage: str):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / name
    path.touch()
    change, expected = DAMAGES[damage]
    change(path)
    said = refusal(model)
    assert str(path) in said
    assert expected in said


def test_an_index_of_files_that_are_not_there(tiny_model: Path, tmp_path: Path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    assert f"{path} names part-2.safetensors, which is not there" in refusal(model)


def test_tokenizer_model_alone_needs_sentencepiece(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    monkeypatch.setattr(files, "find_spec", lambda _: None)
    assert "pip install sentencepiece" in refusal(model)


PART = {"split.no": 1, "split.count": 3}


def test_damaged_gguf_files(tiny_model: Path, tmp_path: Path):
    whole = write_gguf(tiny_model, tmp_path / "model.gguf")
    content = whole.read_bytes()
    upper = tmp_path / "MODEL.GGUF"
    shutil.copy(whole, upper)
    assert (
        load_model(resolve(str(upper)), "fp32").eos_token_ids
        == load_model(resolve(str(whole)), "fp32").eos_token_ids
    )
    cases = {
        "is cut off": [content[: len(content) * part // 100] for part in (1, 20, 60, 99)],
        "git lfs pull": [LFS_POINTER],
        "is empty": [b""],
        "is big-endian": [b"GGUF\0\0\0\3" + content[8:]],
        "is no GGUF file": [b"GGML" + content[4:], b"PK\3\4"],
    }
    for expected, contents in cases.items():
        for i, damaged in enumerate(contents):
            path = tmp_path / f"{i}.gguf"
            path.write_bytes(damaged)
            assert expected in refusal(path), (expected, i)
    part = write_gguf(tiny_model, tmp_path / "part.gguf", keys=PART)
    assert "is part 2 of 3 of a split file" in refusal(part)
    assert read_gguf(whole).tensors


@pytest.mark.parametrize(
    "split", [{"split_max_tensors": 9}, {"split_max_size": 50_000, "small_first_shard": True}]
)
def test_the_parts_of_a_gguf_file(tiny_model: Path, tmp_path: Path, split: dict[str, Any]):
    whole = load_model(
        resolve(str(write_gguf(tiny_model, tmp_path / "whole.gguf"))), "fp32"
    ).model.state_dict()
    write_gguf(tiny_model, tmp_path / "model.gguf", **split)
    first, *others = sorted(tmp_path.glob("model-0*.gguf"))
    assert len(others) > 1
    source = resolve(str(first))
    assert source.name == "model"
    joined = load_model(source, "fp32").model.state_dict()
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    assert f"is part 2 of {len(others) + 1} of a split file: give the joined file" in refusal(
        others[0]
    )
    renamed = shutil.copy(first, tmp_path / "renamed.gguf")
    assert "the first part beside the others" in refusal(renamed)
    content = others[-1].read_bytes()
    others[-1].write_bytes(content[:-50])
    assert f"{others[-1]} is cut off" in refusal(first)
    others[-1].write_bytes(others[0].read_bytes())
    assert f"{others[-1]} is not part {len(others) + 1} of" in refusal(first)
    others[-1].unlink()
    assert f"{others[-1].name} is not beside it" in refusal(first)
