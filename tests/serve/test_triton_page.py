"""docs/triton.md names every flag, parameter, tensor and metric there is, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from pass_exporter.cli import main
from pass_server.metrics import GAUGES, RECORDED
from pass_server.triton.config import PARAMETERS, inputs, outputs

PAGE = (Path(__file__).parents[2] / "docs" / "triton.md").read_text(encoding="utf-8")


def first_column(heading: str) -> set[str]:
    rows = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w:.-]+)", row.split(" | ")[0])}


def test_the_page_lists_all_flags_and_parameters():
    flags = {name for name in first_column("flag") if name.startswith("--")}
    printed = CliRunner().invoke(main, ["triton", "--help"]).output
    options = set(re.findall(r"(?m)^\s+(?:-o, )?(--[a-z-]+)(?:, | / | |$)", printed))
    options -= {"--output", "--force", "--help"}
    assert {"--text", "--reference"} <= flags
    opposites = {"--tokens", "--copy"}  # of --text and --reference, which the page lists
    assert flags - opposites == options - opposites
    documented = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}
    assert set(PARAMETERS) <= documented


def test_the_page_lists_all_inputs_and_outputs():
    """The inputs `return_NAME` are not listed, but documented with the outputs `NAME`."""
    accepted = {field.name for tokens in (False, True) for field in inputs(tokens=tokens)}
    returned = {field.name for tokens in (False, True) for field in outputs(tokens=tokens)}
    names = (
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
        "statistics",
    )
    assert accepted - first_column("input") == {f"return_{name}" for name in names}
    assert first_column("output") == returned
    flags = {name for name in accepted if name.startswith("return_")}
    assert flags <= {f"return_{name}" for name in returned}


def test_the_page_links_to_the_table_of_all_metrics():
    """The table in docs/serving.md is that of the HTTP server, too (test_serving_page.py)."""
    assert "(serving.md#metrics)" in PAGE and "`pass:http_responses_total`" in PAGE
    listed = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [metric.name for metric in (*RECORDED, *GAUGES) if metric.name not in listed] == []
