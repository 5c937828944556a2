"""What constraints and penalties cost, and what forced tokens bring: tokens per second beside unconstrained decoding.

    python scripts/constrained_speed.py BUNDLE [--genai DIRECTORY] [--rounds 5] [--threads 2]

First the price of a pass: a grammar that allows every text, penalties that change nothing that is drawn, and both,
relative to the same text without. Then JSON of schemas with the prompts of a user: plain decoding with the constraint,
`auto` with it, and `auto` without. genai: a model directory of onnxruntime-genai, whose guidance then takes part.
Engines take turns; figures are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import click

from pass_runtime import Constraint, GenerateOptions, SamplingParams, Session, load
from pass_runtime.measuring.real_use import in_turns

ANY = Constraint(regex="(?s:.*)")
PENALTIES = SamplingParams(logit_bias=dict.fromkeys(range(300, 340), -0.0001), frequency_penalty=1e-6)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string"},
        "hobbies": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "country": {"type": "string"}},
            "required": ["street", "city", "country"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "hobbies", "address"],
    "additionalProperties": False,
}
INVOICE = {
    "type": "object",
    "properties": {
        "invoice_number": {"type": "string", "maxLength": 12},
        "customer": {"type": "string"},
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"description": {"type": "string"}, "quantity": {"type": "integer"}},
                "required": ["description", "quantity"],
                "additionalProperties": False,
            },
        },
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "paid": {"type": "boolean"},
    },
    "required": ["invoice_number", "customer", "items", "currency", "paid"],
    "additionalProperties": False,
}
ASKED = [
    ("Describe a person called Anna who lives in Lisbon.", PERSON),
    ("Make up a person for a novel that is set in Norway.", PERSON),
    ("Write the invoice for two chairs and a desk, sold to Mr Brown.", INVOICE),
    ("Write an invoice of a bakery for a wedding cake and fifty rolls.", INVOICE),
]
TOKENS = 160
Rate = Callable[[], float]
"""Decodes, and returns tokens per second."""


def session_rate(session: Session, prompt: list[int], options: GenerateOptions) -> float:
    stream = session.generate_ids(prompt, options).result()
    return stream.stats.generated_tokens / stream.stats.decode_seconds


def genai_rate(directory: Path, threads: int) -> Callable[[list[int], str], float]:
    """Greedy decoding with onnxruntime-genai's guidance."""
    import onnxruntime_genai as og

    config = og.Config(str(directory))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)

    def rate(prompt: list[int], schema: str) -> float:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + TOKENS, do_sample=False)
        params.set_guidance("json_schema", schema)
        generator = og.Generator(model, params)
        generator.append_tokens(prompt)
        started, written = perf_counter(), 0
        while written < TOKENS and not generator.is_done():
            generator.generate_next_token()
            written += 1
        return written / (perf_counter() - started)

    return rate


def show(title: str, calls: dict[str, Rate], base: str, rounds: int) -> None:
    """Print tokens per second, and the ratio to `base`."""
    *_, found = in_turns(calls, rounds)
    click.echo(title)
    for name, rates in found.items():
        ratio = statistics.median(a / b for a, b in zip(rates, found[base], strict=True))
        click.echo(f"  {name:<34} {statistics.median(rates):7.1f} tokens/s   {ratio:5.2f}")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--genai", type=click.Path(path_type=Path, exists=True), help="A model directory of onnxruntime-genai.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(bundle: Path, genai: Path | None, rounds: int, threads: int) -> None:
    """Measure what constraints cost and bring."""
    session = load(bundle, "cpu", threads=threads)
    prompt = session.encode_chat([{"role": "user", "content": "Tell me about the history of Rome."}])
    for plan in ("ar", "fused"):
        ways = {
            "nothing": GenerateOptions(TOKENS, plan=plan),
            "a grammar": GenerateOptions(TOKENS, plan=plan, constraint=ANY),
            "penalties": GenerateOptions(TOKENS, PENALTIES, plan=plan),
            "both": GenerateOptions(TOKENS, PENALTIES, plan=plan, constraint=ANY),
        }
        calls = {name: partial(session_rate, session, prompt, options) for name, options in ways.items()}
        show(f"the same text, --plan {plan}", calls, "nothing", rounds)
    guided = None if genai is None else genai_rate(genai, threads)
    for text, schema in ASKED:
        prompt = session.encode_chat([{"role": "user", "content": f"{text} Answer with JSON."}])
        constraint = Constraint(json_schema=schema)
        calls = {
            "auto, unconstrained": partial(session_rate, session, prompt, GenerateOptions(TOKENS)),
            "plain, constrained": partial(
                session_rate, session, prompt, GenerateOptions(TOKENS, plan="ar", constraint=constraint)
            ),
            "auto, constrained": partial(session_rate, session, prompt, GenerateOptions(TOKENS, constraint=constraint)),
        }
        if guided is not None:
            calls["onnxruntime-genai, constrained"] = partial(guided, prompt, json.dumps(schema))
        show(text, calls, "auto, unconstrained", rounds)


if __name__ == "__main__":
    main()
