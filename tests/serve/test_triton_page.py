"""docs/triton.md names every flag, parameter, tensor and metric there is, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from pass_exporter.cli import main
from pass_server.metrics import GAUGES, RECORDED
from pass_server.triton.config import PARAMETER_TYPES, inputs, outputs

PAGE = (Path(__file__).parents[2] / "docs" / "triton.md").read_text(encoding="utf-8")


def first_column(heading: str) -> set[str]:
    """The names in the first cells of the table below `| heading |`."""
    rows = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w:.-]+)", row.split(" | ")[0])}


def test_flags_and_parameters():
    flags = {name for name in first_column("flag") if name.startswith("--")}
    said = CliRunner().invoke(main, ["triton", "--help"]).output
    there = set(re.findall(r"^\s+(?:-o, )?(--[a-z-]+)(?:, | / | |$)", said, re.MULTILINE)) - {
        "--output",
        "--force",
        "--help",
    }
    assert {"--text", "--reference"} <= flags
    assert flags - {"--tokens", "--copy"} == there - {"--tokens", "--copy"}
    documented = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    assert set(PARAMETER_TYPES) <= documented


def test_tensors():
    documented = first_column("input")
    assert {
        field.name for tokens in (False, True) for field in inputs(tokens=tokens)
    } - documented == {
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_statistics",
    }
    returned = {field.name for tokens in (False, True) for field in outputs(tokens=tokens)}
    assert first_column("output") == returned
    assert {f"return_{name}" for name in returned} >= {
        field.name for field in inputs(tokens=True) if field.name.startswith("return_")
    }


def test_metrics():
    """The page points to the table of docs/serving.md, whose test compares it with a server's
    /metrics."""
    assert "(serving.md#metrics)" in PAGE and "`pass:http_responses_total`" in PAGE
    listed = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [metric.name for metric in (*RECORDED, *GAUGES) if metric.name not in listed] == []
