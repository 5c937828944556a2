"""A file of a checkpoint that is cut off, a pointer or of another kind is refused by its name."""

from __future__ import annotations

import json
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LFS_POINTER, load_path, write_gguf

from pass_exporter.model.gguf_reader import read_gguf
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import PassError

JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json"),
)
OTHER_FILES = ("chat_template.jinja", "model.safetensors")
DAMAGES_OF_ALL = ("LFS pointer", "annex pointer", "empty", "directory", "broken link")


def make_broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("not-there")


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "LFS pointer": (lambda path: path.write_bytes(LFS_POINTER), "git lfs pull"),
    "annex pointer": (
        lambda path: path.write_bytes(b"/annex/objects/SHA256E-s5--a.json\n"),
        "git annex get",
    ),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "cut off": (lambda path: os.truncate(path, path.stat().st_size // 2), "cut off"),
    "byte order mark": (
        lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
        "byte order mark",
    ),
    "UTF-16": (lambda path: path.write_bytes(path.read_text().encode("utf-16")), "byte order mark"),
    "binary": (lambda path: path.write_bytes(b"\x80\x81\x00"), "not UTF-8"),
    "a list": (lambda path: path.write_bytes(b"[1]"), "must hold a JSON object"),
    "directory": (make_directory, "is a directory"),
    "broken link": (make_broken_link, "is not there"),
}
"""How a file is damaged, and a part of the error."""


def refusal(model: Path) -> str:
    with pytest.raises(PassError) as caught:
        load_path(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage"),
    [*product(JSON_FILES, DAMAGES), *product(OTHER_FILES, DAMAGES_OF_ALL)],
)
def test_a_damaged_file_is_refused_by_name(tiny_model, tmp_path, name, damage):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / name
    if not path.exists():  # this content matters for the index alone
        path.write_text('{"weight_map": {"a": "model.safetensors"}}')
    do_damage, expected = DAMAGES[damage]
    do_damage(path)
    error = refusal(model)
    assert str(path) in error and expected in error


def test_an_index_of_missing_files_is_refused(tiny_model: Path, tmp_path: Path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    assert f"{path} names part-2.safetensors, which is not there" in refusal(model)


def test_the_suffix_of_a_gguf_file_may_be_in_capitals(tiny_model: Path, tmp_path: Path):
    path = write_gguf(tiny_model, tmp_path / "model.gguf")
    model = load_path(path)
    in_capitals = load_path(path.rename(tmp_path / "MODEL.GGUF"))
    assert in_capitals.eos_token_ids == model.eos_token_ids


def test_damaged_gguf_files_are_refused(tiny_model: Path, tmp_path: Path):
    valid = write_gguf(tiny_model, tmp_path / "model.gguf")
    content = valid.read_bytes()
    cases = {
        "is cut off": [
            *(content[: len(content) * percent // 100] for percent in (1, 20, 60, 99)),
            *(b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64),
        ],
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
    part = write_gguf(tiny_model, tmp_path / "p.gguf", keys={"split.no": 1, "split.count": 3})
    assert "is part 2 of 3 of a split file" in refusal(part)
    assert read_gguf(valid).tensors


@pytest.mark.parametrize(
    "split", [{"split_max_tensors": 9}, {"split_max_size": 50_000, "small_first_shard": True}]
)
def test_a_split_gguf_file_is_joined(tiny_model: Path, tmp_path: Path, split: dict[str, Any]):
    path = write_gguf(tiny_model, tmp_path / "whole.gguf")
    whole = load_path(path).model.state_dict()
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
    last = others[-1]
    os.truncate(last, last.stat().st_size - 50)
    assert f"{last} is cut off" in refusal(first)
    last.write_bytes(others[0].read_bytes())
    assert f"{last} is not part {len(others) + 1} of" in refusal(first)
    last.unlink()
    assert f"{last.name} is not beside it" in refusal(first)
