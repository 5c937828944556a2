"""Counts the lines and files of each room, a folder that has a row in docs/architecture.md.

python scripts/line_counts.py      # writes the numbers into docs/architecture.md
"""

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
"""Packages whose folders are rooms. Each of WHOLE_FOLDERS is one room."""
WHOLE_FOLDERS = (
    *("runtime/pass_server", "exporter/pass_trainer", "runtime/cpp", "runtime/kernels"),
    *("scripts", "tests"),
)
SUFFIXES = {".py", ".sh", ".cpp", ".h", ".hpp", ".c", ".cmake"}


def count() -> dict[str, tuple[int, int]]:
    """Return (lines, files) by room."""
    lines, files = Counter[str](), Counter[str]()
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        path = Path(name)
        whole = [room for room in WHOLE_FOLDERS if path.is_relative_to(room)]
        room = whole[0] if whole else "/".join(path.parts[:-1][:3])
        is_source = path.suffix in SUFFIXES and (ROOT / path).is_file()
        if is_source and room.startswith(SPLIT_PACKAGES + WHOLE_FOLDERS):
            lines[room] += len((ROOT / path).read_bytes().splitlines())
            files[room] += 1
    return {room: (lines[room], files[room]) for room in sorted(lines)}


def with_counts(page: str, counts: Mapping[str, tuple[int, int]]) -> str:
    """Return the page with these counts in the table between MARKERS; the last column stays."""
    before, _, rest = page.partition(MARKERS[0])
    table, _, after = rest.partition(MARKERS[1])
    remarks = dict(re.findall(r"^\| `([\w/]+)/` .*\| ([^|]*) \|$", table, re.MULTILINE))
    rows = [
        f"| `{room}/` | {round(n, -2):,} | {files} | {remarks.get(room, '')} |"
        for room, (n, files) in counts.items()
    ]
    head = "| room | lines | files | |\n|---|---|---|---|\n"
    return before + MARKERS[0] + head + "\n".join(rows) + "\n" + MARKERS[1] + after


if __name__ == "__main__":
    counts = count()
    written = with_counts(PAGE.read_text(encoding="utf-8"), counts)
    PAGE.write_text(written, encoding="utf-8")
    print(written.partition(MARKERS[0])[2].partition(MARKERS[1])[0], end="")
