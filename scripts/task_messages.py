"""Typical messages of users to a chat model, which ask for lists, mail, dialogue, JSON, tables,
code, and so on.

`fetch_corpus.py` writes them as training text. A message is a template with a topic or the head of
a Python function.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator

TEMPLATES = (
    "Give me a list of ten facts about {}.",
    "List the advantages and disadvantages of {} as bullet points.",
    "Make a checklist for someone who is new to {}.",
    "name 5 things i should know about {}",
    "Write a numbered, step by step guide to {} for beginners.",
    "Write an email to a colleague in which you suggest {} as the subject of next week's meeting.",
    "Write a short, polite email that declines an invitation to an event about {}.",
    "draft a mail to my teacher, i missed the class on {} and need the notes",
    "Write a formal letter of complaint to a company about a course on {} that was cancelled.",
    "Write a dialogue between two friends who disagree about {}.",
    "Write an interview with an expert on {}: three questions, with answers.",
    "Write a short scene for a play in which a grandmother explains {} to a child.",
    "Write a JSON object that describes {}, with the keys name, category, summary and keywords.",
    "Return a JSON array of five quiz questions about {}, each with a question, four options "
    "and the answer.",
    "Make up three products that have to do with {} and print them as JSON with name, price "
    "and stock.",
    "Write a YAML file with the settings of an app about {}.",
    "Make a markdown table with five rows that compares kinds of {}.",
    "Write a README in markdown for a small project about {}, with headings and a list of "
    "features.",
    "Write a one-page summary of {} in markdown with a heading for each section.",
    "Explain {} in simple words.",
    "What is {}, and why does it matter?",
    "How does {} work? Answer in two paragraphs.",
    "Write a short story that begins with {}.",
    "Write a poem of eight lines about {}.",
    "Write three headlines for a newspaper article about {}.",
    "Write a product description for a book about {}.",
    "What are common mistakes people make with {}?",
    "Plan a week of learning about {}, day by day.",
    "Write a Python class that stores information about {} and prints it.",
    "Write a SQL table definition and two queries for a database about {}.",
    "Write an HTML page with a heading, a paragraph and a list about {}.",
    "Write a bash script that creates folders for notes on {}.",
)
# Fmt: skip
TOPICS = (
    "baking bread",
    "first aid",
    "houseplants",
    "personal budgets",
    "bicycle repair",
    "public speaking",
    "sleep",
    "solar power",
    "chess openings",
    "dog training",
    "home networks",
    "job interviews",
    "watercolour painting",
    "time management",
    "electric cars",
    "coffee",
    "camping",
    "recycling",
    "password security",
    "yoga",
    "volcanoes",
    "the water cycle",
    "black holes",
    "vaccines",
    "inflation",
    "remote work",
    "open source software",
    "photography",
    "gardening in small spaces",
    "city buses",
    "vegetarian cooking",
    "marathon training",
    "learning a language",
    "renting a flat",
    "moving to another country",
    "birthday parties",
    "board games",
    "weather forecasts",
    "bees",
    "healthy breakfasts",
    "spreadsheets",
    "version control",
    "databases",
    "machine learning",
    "unit tests",
    "insurance",
    "cleaning a kitchen",
    "saving energy",
    "knitting",
    "the Roman Empire",
    "jazz",
    "classical music",
    "football",
    "swimming",
    "dinosaurs",
    "photosynthesis",
    "the stock market",
    "elections",
    "museums",
    "trains",
    "airports",
    "online shopping",
    "mental health at work",
    "teaching children to read",
    "writing a novel",
    "podcasts",
    "tea",
)
MAX_HEAD_CHARACTERS = 600
"""The most characters of a function's head (signature and docstring) in a message."""


def task_messages(
    titles: Iterable[str], modules: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield (name, message). titles: more topics. modules: (name, source) of functions."""
    for number, (template, topic) in enumerate(itertools.product(TEMPLATES, (*TOPICS, *titles))):
        yield f"task-{number}", template.format(topic)
    for name, source in modules:
        for number, head in enumerate(function_heads(source)):
            yield f"{name}-{number}", f"Complete this Python function:\n\n{head}"


def function_heads(source: str) -> Iterator[str]:
    """Yield signature and docstring of a module's public functions and methods."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.FunctionDef)
            and not node.name.startswith("_")
            and ast.get_docstring(node)
        ):
            head = "\n".join(
                line[node.col_offset :] for line in lines[node.lineno - 1 : node.body[0].end_lineno]
            )
            if len(head) <= MAX_HEAD_CHARACTERS:
                yield head
