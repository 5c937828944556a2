"""What the prefix cache saves: time to the first token after a long system prompt, and whether texts stay the same.

    python scripts/prefix_cache.py BUNDLE [--rounds 5] [--threads 2]
    python scripts/prefix_cache.py BUNDLE --requests 2000 [--slots 4]

With --requests so many chats with a few shared system prompts are answered by two sessions, with the cache and without.
Exit status 1 if a text differs.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter

import click

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.generation import TokenStream

RULES = (
    "You are the assistant of a public library. Answer in one short paragraph.",
    "Name the shelf, the author and the year of every book that you mention.",
    "Never invent a title. If you do not know a book, say so and suggest the catalogue.",
    "Opening hours are 9 to 18 on weekdays and 10 to 14 on Saturdays; the reading room closes an hour earlier.",
    "Loans last four weeks and can be extended twice, unless somebody has reserved the book.",
    "Be polite, use plain words, and do not give legal or medical advice.",
)
QUESTIONS = ("Do you have a book on bees?", "When are you open?", "Can I extend a loan?", "Who wrote Emma?", "Hello!")


def system_prompt(session: Session, tokens: int, first: int = 0) -> str:
    """Rules of about so many tokens."""
    text = ""
    for rule in islice(cycle(RULES), first, None):
        if len(session.encode(text)) >= tokens:
            return text
        text += rule + " "
    return text


def prompt_of(session: Session, system: str, question: str) -> list[int]:
    return session.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": question}])


def first_token_seconds(session: Session, prompt: list[int]) -> float:
    started = perf_counter()
    session.generate_ids(prompt, GenerateOptions(1, plan="ar")).result()
    return perf_counter() - started


def compare_texts(on: Session, off: Session, count: int) -> int:
    """How many of `count` texts differ between the sessions. A few requests are under way at a time."""
    systems = [system_prompt(on, 60 + 40 * i, i) for i in range(5)]
    requests = []
    for i in range(count):
        sampling = SamplingParams(0.8 if i % 2 else 0.0, seed=i)
        plan = ("ar", "fused", "two-pass", "auto")[i % 4]
        prompt = prompt_of(on, systems[i % 5], QUESTIONS[i % 7 % 5] + f" ({i % 11})")
        requests.append((prompt, GenerateOptions(8 + i % 17, sampling, plan=plan)))
    texts = []
    for session in (on, off):
        under_way, found = deque[TokenStream](), []
        for prompt, options in requests:
            under_way.append(session.generate_ids(prompt, options))
            if len(under_way) == 8:
                found.append(under_way.popleft().result().token_ids)
        texts.append(found + [stream.result().token_ids for stream in under_way])
    return sum(a != b for a, b in zip(*texts, strict=True))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--tokens", default=400, show_default=True, help="Of the system prompt.")
@click.option("--requests", type=int, help="Compare so many texts instead.")
@click.option("--slots", default=4, show_default=True, help="With --requests.")
def main(bundle: Path, rounds: int, threads: int, tokens: int, requests: int | None, slots: int) -> None:
    """Measure, or compare texts."""
    size = slots if requests else 1
    on, off = (load(bundle, "cpu", threads=threads, max_batch_size=size, prefix_cache=use) for use in (True, False))
    if requests:
        different = compare_texts(on, off, requests)
        click.echo(f"{requests} texts, {different} differ")
        raise SystemExit(different > 0)
    system = system_prompt(on, tokens)
    seconds: dict[str, list[float]] = {"read anew": [], "shared": []}
    first_token_seconds(on, prompt_of(on, system, QUESTIONS[-1]))
    for question in islice(cycle(QUESTIONS[:-1]), rounds):
        prompt = prompt_of(on, system, question)
        for name, session in (("read anew", off), ("shared", on)):
            seconds[name].append(first_token_seconds(session, prompt))
    for name, found in seconds.items():
        click.echo(f"{name:<10} {statistics.median(found) * 1e3:7.1f} ms to the first token of {len(prompt)}")
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    click.echo(f"median ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
