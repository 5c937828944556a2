"""The documentation is true: its links lead somewhere, and its Python runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

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


def test_the_tree_names_rooms_that_exist():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| `(\S+/)` \|", page, re.MULTILINE)
    assert len(rooms) > 20 and [room for room in rooms if not (ROOT / room).is_dir()] == []
    for folder in ("exporter/pass_exporter", "runtime/pass_runtime"):
        packages = {f"{path.parent.relative_to(ROOT)}/" for path in ROOT.glob(f"{folder}/*/*.py")}
        assert packages <= set(rooms)
