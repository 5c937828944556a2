"""Counts lines and files of source by folder, and writes the table into docs/architecture.md between MARKERS."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
MARKERS = ("<!-- lines -->\n", "<!-- end of lines -->\n")
SPLIT_PACKAGES = ("runtime/pass_runtime", "exporter/pass_exporter")
"""Packages that have a table row for each of their folders. Each of WHOLE_FOLDERS has one row."""
WHOLE_FOLDERS = ("runtime/pass_server", "exporter/pass_trainer", "runtime/cpp", "scripts", "tests")
SUFFIXES = {".py", ".sh", ".cpp", ".h", ".hpp", ".c", ".cmake"}


def count() -> dict[str, tuple[int, int]]:
    """Return (lines, files) by folder."""
    lines, files = Counter[str](), Counter[str]()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in map(Path, listed.splitlines()):
        inside = [room for room in WHOLE_FOLDERS if path.is_relative_to(room)]
        room = inside[0] if inside else "/".join(path.parts[:-1][:3])
        if room.startswith(SPLIT_PACKAGES + WHOLE_FOLDERS) and path.suffix in SUFFIXES and (ROOT / path).is_file():
            lines[room] += len((ROOT / path).read_bytes().splitlines())
            files[room] += 1
    return {room: (lines[room], files[room]) for room in sorted(lines)}


if __name__ == "__main__":
    rows = [f"| `{room}/` | {round(lines, -2):,} | {files} |" for room, (lines, files) in count().items()]
    table = "\n".join(["| room | lines | files |", "|---|---|---|", *rows]) + "\n"
    print(table, end="")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKERS[0])
    PAGE.write_text(before + MARKERS[0] + table + MARKERS[1] + rest.partition(MARKERS[1])[2], encoding="utf-8")
