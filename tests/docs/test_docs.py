"""What the documentation says of the repository: links, the annotated tree, its Python, the picture
of windows."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text(encoding="utf-8")))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def number(text: str) -> int:
    """35,500 -> 35500"""
    return int(text.replace(",", ""))


def test_the_line_counts_are_true():
    """To a hundred lines and a few files. If not: run scripts/line_counts.py."""
    tracked()
    script = load_script("line_counts")
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split(script.MARKERS[0])[1].split(script.MARKERS[1])[0]
    rows = re.findall(r"^\| `([\w/]+)/` \| ([\d,]+) \| (\d+) \| ([^|]+) \|$", table, re.MULTILINE)
    assert all(words.strip() for *_, words in rows), "a room has no description"
    shown = {room: (number(lines), int(files)) for room, lines, files, _ in rows}
    found = script.count()
    assert set(shown) == set(found) and "runtime/pass_runtime/decode" in found
    off = {
        room: (shown[room], found[room])
        for room in found
        if abs(shown[room][0] - found[room][0]) > 100 or abs(shown[room][1] - found[room][1]) > 3
    }
    assert not off


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def examples() -> list[tuple[str, str]]:
    """(file, Python), of the pages that tell of the library."""
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/python.md")
    }
    found = {
        name: re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for name, text in texts.items()
    }
    assert all(found.values())
    return [(name, code) for name, codes in found.items() for code in codes]


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


def test_the_picture_is_what_the_plans_look_like():
    matplotlib = pytest.importorskip("matplotlib")
    script = load_script("draw_windows")
    committed = script.PICTURE.read_text(encoding="utf-8")
    if script.drawn_by(committed) != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {script.drawn_by(committed)}")
    assert script.render() == committed
