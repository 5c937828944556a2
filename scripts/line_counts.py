"""Counts lines and files by room, a folder with a row in docs/architecture.md."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
MARKERS = ("<!-- lines -->\n", "<!-- end of lines -->\n")
SPLIT_PACKAGES = ("runtime/pass_runtime", "exporter/pass_exporter")
"""Packages that have a table row for each of their folders. Each of WHOLE_FOLDERS has one row."""
WHOLE_FOLDERS = ("runtime/pass_server", "exporter/pass_trainer", "runtime/cpp", "scripts", "tests")
SUFFIXES = {".py", ".sh", ".cpp", ".h", ".hpp", ".c", ".cmake"}


def count() -> dict[str, tuple[int, int]]:
    """Return (lines, files) by room."""
    lines, files = Counter[str](), Counter[str]()
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for path in map(Path, listed.splitlines()):
        inside = [room for room in WHOLE_FOLDERS if path.is_relative_to(room)]
        room = inside[0] if inside else "/".join(path.parts[:-1][:3])
        if (
            room.startswith(SPLIT_PACKAGES + WHOLE_FOLDERS)
            and path.suffix in SUFFIXES
            and (ROOT / path).is_file()
        ):
            lines[room] += len((ROOT / path).read_bytes().splitlines())
            files[room] += 1
    return {room: (lines[room], files[room]) for room in sorted(lines)}


def with_counts(page: str, counts: Mapping[str, tuple[int, int]]) -> str:
    """Return the page with these counts in the table between MARKERS, whose last column stays."""
    before, _, rest = page.partition(MARKERS[0])
    table, _, after = rest.partition(MARKERS[1])
    words = dict(re.findall(r"^\| `([\w/]+)/` .*\| ([^|]*) \|$", table, re.MULTILINE))
    rows = [
        f"| `{room}/` | {round(n, -2):,} | {files} | {words.get(room, '')} |"
        for room, (n, files) in counts.items()
    ]
    head = "| room | lines | files | |\n|---|---|---|---|\n"
    return before + MARKERS[0] + head + "\n".join(rows) + "\n" + MARKERS[1] + after


if __name__ == "__main__":
    counts = count()
    written = with_counts(PAGE.read_text(encoding="utf-8"), counts)
    PAGE.write_text(written, encoding="utf-8")
    print(written.partition(MARKERS[0])[2].partition(MARKERS[1])[0], end="")
