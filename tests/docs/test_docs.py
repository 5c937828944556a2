"""The documentation is true: its links lead somewhere, the line counts are right, its Python runs,
and the picture of windows shows the plans."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(
        r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_line_counts_are_true():
    """They may be wrong by 100 lines and 3 files per room. scripts/line_counts.py renews them."""
    if subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    script = load_script("line_counts")
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split(script.MARKERS[0])[1].split(script.MARKERS[1])[0]
    rows = re.findall(r"^\| `([\w/]+)/` \| ([\d,]+) \| (\d+) \| ([^|]+) \|$", table, re.MULTILINE)
    assert all(words.strip() for *_, words in rows), "a room has no description"
    shown = {room: (int(lines.replace(",", "")), int(files)) for room, lines, files, _ in rows}
    counts = script.count()
    assert set(shown) == set(counts) and "runtime/pass_runtime/decode" in counts
    for room, (lines, files) in counts.items():
        assert abs(shown[room][0] - lines) <= 100 and abs(shown[room][1] - files) <= 3, room


def test_the_readme_begins_with_the_commands_for_a_fresh_machine():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert section.startswith("Try it\n")
    commands = re.findall(r"^    \$ (\S+)", section, re.MULTILINE)
    assert commands[:2] == ["scripts/demo.sh", "scripts/test.sh"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands[:2])


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def examples() -> list[tuple[str, str]]:
    """Return (page, code) of every Python example in the README and docs/python.md."""
    pairs = []
    for name in ("README.md", "docs/python.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        codes = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert codes, name
        pairs += [(name, code) for code in codes]
    return pairs


@pytest.mark.parametrize(("name", "code"), examples())
def test_python_runs_as_printed(name, code, tiny_bundle, capsys):
    assert '"build/smollm2-135m"' in code
    exec(compile(code.replace("build/smollm2-135m", str(tiny_bundle)), name, "exec"), {})
    assert capsys.readouterr().out


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_picture_shows_the_plans():
    matplotlib = pytest.importorskip("matplotlib")
    script = load_script("draw_windows")
    committed = script.PICTURE.read_text(encoding="utf-8")
    if script.drawn_by(committed) != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {script.drawn_by(committed)}")
    assert script.render() == committed
