"""pass-cpp reports nothing to ONNX Runtime's maker, unless its user wants it to."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpp_programs import program_at
from empty_home import SETTING, Home

COMMAND = "generate {bundle} --device cpu --threads 1 --max-new-tokens 2"
PROMPTS = {"ids": ["--prompt-ids", "5,6"], "text": ["--prompt", "a"]}
"""Text is encoded by onnxruntime-genai, which reports by itself."""


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("setting", [{}, {SETTING: ""}, {SETTING: "0"}], ids=repr)
def test_the_home_directory_stays_empty(
    tiny_bundle: Path, tmp_path: Path, prompt: str, setting: dict[str, str]
):
    home, arguments = Home(tmp_path), COMMAND.format(bundle=tiny_bundle).split()
    home.stderr_of([program_at("pass-cpp"), *arguments, *PROMPTS[prompt]], **setting)
    assert any("Microsoft" in str(path) for path in home.content) == (setting.get(SETTING) == "0")
    assert setting.get(SETTING) == "0" or home.content == []


def test_a_home_that_cannot_be_written_is_no_reason_to_warn(tiny_bundle: Path, tmp_path: Path):
    command = [program_at("pass-cpp"), *COMMAND.format(bundle=tiny_bundle).split()]
    errors = Home(tmp_path).stderr_of([*command, *PROMPTS["ids"]], HOME="/proc/none")
    assert "telemetry" not in errors.lower()
