"""`pass-train evaluate`: its answers, drafts and numbers of passes are those of the runtime."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import bench_peers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training import Silent

from pass_exporter.model.draft_head import new_head
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import load
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import (
    ALL_KINDS,
    CONTINUED_KINDS,
    COPYING_KINDS,
    CORE_KINDS,
    EXTRA_TOKENS,
    KINDS,
    PassCounts,
    Prompt,
    encode,
    read_prompt_set,
)
from pass_trainer.config import PROMPTS, EvaluateConfig
from pass_trainer.drafter import Drafter
from pass_trainer.evaluation import answers
from pass_trainer.evaluation.card import HEADINGS, markdown, rows_of
from pass_trainer.evaluation.counts import (
    DraftCounts,
    by_kind,
    count_drafts,
    right_in_row,
)
from pass_trainer.evaluation.evaluate import (
    PADDING_TOKEN,
    SKIPPED_DRAFT,
    drafts_of,
    evaluate,
)

TOKENS, LOOKAHEAD, PLANS = 40, 4, ("two-pass", "fused")

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["who is the fox?", "The quick brown", "def add(a, b):", "Tell me of the dog", "Über"]
    lines = [
        {"id": f"{i}", "kind": CORE_KINDS[i % 3], "prompt": text}
        for i, text in enumerate([*texts, "for i in"])
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def config(tiny_model: Path, adapter_weights: Path, prompts: Path) -> EvaluateConfig:
    files = (str(tiny_model), adapter_weights, prompts)
    return EvaluateConfig(*files, TOKENS, (0.0, 0.8), lookahead=LOOKAHEAD, device="cpu")


def count_in_runtime(session, prompts, temperature, top_k=0):
    """Return the counts outside loops and in loops, by kind and plan."""
    outside_loops, in_loops = (
        {kind: dict.fromkeys(PLANS, PassCounts()) for kind in (*CORE_KINDS, ALL_KINDS)}
        for _ in range(2)
    )
    for prompt, plan in itertools.product(prompts, PLANS):
        options = {"temperature": temperature, "top_k": top_k, "seed": prompt.seed}
        options |= {"plan": plan, "lookahead": LOOKAHEAD}
        text = bench_peers.decode(
            session, encode(session, prompt), TOKENS + EXTRA_TOKENS, **options
        )
        outside, inside = bench_peers.passes_of(text, TOKENS)
        for kind in (prompt.kind, ALL_KINDS):
            outside_loops[kind][plan] += outside
            in_loops[kind][plan] += inside
    return outside_loops, in_loops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bundle", "temperature", "top_k"),
    [
        *(("adapter_bundle", *values) for values in ((0.0, 0), (0.8, 0), (2.0, 7), (9.0, 0))),
        *(("subset_bundle", temperature, 0) for temperature in (0.0, 0.8, 9.0)),
    ],
)
def test_the_numbers_of_passes_are_those_of_the_runtime(
    request, config, prompts, bundle, temperature, top_k
):
    """At high temperatures the noise, which drafts share, makes more of them right."""
    directory = request.getfixturevalue(bundle)
    changed = {"temperatures": (temperature,), "top_k": top_k}
    if bundle == "subset_bundle":
        changed["model"] = str(directory.parent / "model")
        changed["weights"] = directory.parent / "lookahead.safetensors"
    (expected,) = evaluate(EvaluateConfig(**(vars(config) | changed)), Silent()).values()
    with load(directory) as session:
        outside_loops, in_loops = count_in_runtime(
            session, read_prompt_set(prompts), temperature, top_k
        )
    assert list(outside_loops) == list(expected) == [*CORE_KINDS, ALL_KINDS]
    for kind, split in expected.items():
        for passes, counts in ((outside_loops, split.outside_loops), (in_loops, split.in_loops)):
            assert passes[kind] == {"two-pass": counts.two_pass, "fused": counts.fused}
    right = expected[ALL_KINDS].outside_loops.right  # drafts; without any, equality shows little
    if bundle == "adapter_bundle":
        assert right[0] > 0 and (temperature < 9 or right[2] > 10)
    else:
        assert temperature < 9 or right[0] > 10


def test_answers_are_cached_and_a_damaged_file_of_answers_is_refused(config, monkeypatch, cache):
    report = evaluate(config, Silent())
    monkeypatch.setattr(answers.AnswerWriter, "_write", lambda *_: pytest.fail("written again"))
    assert evaluate(config, Silent()) == report
    of_kind = evaluate(EvaluateConfig(**{**vars(config), "kinds": ("code",)}), Silent())
    for temperature, counts in report.items():
        assert of_kind[temperature] == {"code": counts["code"], ALL_KINDS: counts["code"]}
    untrained = EvaluateConfig(**{**vars(config), "weights": None})
    assert evaluate(untrained, Silent()) != report
    for path in cache.glob("written/*.json"):
        path.write_text("[")
    with pytest.raises(PassError, match="damaged"):
        evaluate(config, Silent())
    for path in cache.glob("written/*.json"):  # other tests of this file share the cache
        path.unlink()


def test_the_chat_template_is_used_for_all_but_the_continued_kinds_of_prompts(config):
    tokenizer = load_model(resolve(config.model), "fp32").tokenizer
    plain = answers.encode(tokenizer, Prompt("a", "text", "who is the fox?"))
    for kind in KINDS:
        ids = answers.encode(tokenizer, Prompt("a", kind, "who is the fox?"))
        assert (ids == plain) == (kind in CONTINUED_KINDS)


def test_the_size_of_batches_does_not_change_answers(config, monkeypatch):
    texts = []
    for size in (40, 4):
        monkeypatch.setattr(answers, "BATCH_PROMPTS", size)
        loaded = load_model(resolve(config.model), "fp32")
        prompts = [
            answers.SeededPrompt(
                answers.encode(loaded.tokenizer, prompt), SamplingParams(0.8, seed=prompt.seed)
            )
            for prompt in read_prompt_set(config.prompts)
        ]
        writer = answers.AnswerWriter(loaded.model, loaded.eos_token_ids, 20, "")
        texts.append(writer._write(prompts, lambda *_: None))
    assert texts[0] == texts[1] and len(set(map(tuple, texts[0]))) == len(texts[0])


def greedy(logits, _positions):
    return logits.argmax(-1)


def test_the_head_reads_the_drafts_before_a_draft_and_not_the_text(tiny_model: Path):
    base = load_model(resolve(str(tiny_model)), "fp32").model
    drafter = Drafter(base, torch.randn(3, 64, generator=torch.Generator().manual_seed(2)), None)
    head = new_head(base.get_input_embeddings().weight, 8, 16, torch.Generator().manual_seed(0))
    tokens = torch.randint(2, 300, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    anchors = range(4, 12)
    plain = drafts_of(drafter, tokens, anchors, 3, greedy)
    drafter.head = head
    with_new_head = drafts_of(drafter, tokens, anchors, 3, greedy)  # a new head adds 0
    assert np.array_equal(with_new_head, plain)
    with torch.no_grad():
        head.out.normal_(std=20, generator=torch.Generator().manual_seed(1))
    with_head = drafts_of(drafter, tokens, anchors, 3, greedy)
    assert not np.array_equal(with_head, plain)
    for row, anchor in enumerate(anchors):
        text = torch.tensor(tokens[: anchor + 1])
        embeddings = torch.cat([base.get_input_embeddings()(text), drafter.embeddings[:3]])
        hidden = base.model(inputs_embeds=embeddings[None]).last_hidden_state[:, -3:]
        before = torch.tensor([[tokens[anchor + 1], *with_head[row, :2]]])
        ids, logits = head(hidden, base.lm_head(hidden), before, torch.arange(3)[None])
        likeliest = ids[0].gather(-1, logits[0].argmax(-1)[:, None])[:, 0]
        assert likeliest.tolist() == with_head[row].tolist()


def test_drafts_after_a_wrong_one_are_skipped(tiny_model: Path):
    base = load_model(resolve(str(tiny_model)), "fp32").model
    generator = torch.Generator().manual_seed(1)
    head = new_head(base.get_input_embeddings().weight, 8, 16, generator)
    with torch.no_grad():
        head.out.normal_(std=20, generator=generator)
    drafter = Drafter(base, torch.randn(4, 64, generator=generator), None, head)
    tokens = torch.randint(2, 300, (24,), generator=generator).tolist()
    anchors = range(4, 20)
    # Make the first three drafts of anchor 10, for tokens 12 to 14, right.
    tokens[12:15] = drafts_of(drafter, tokens, anchors, 4, greedy)[6, :3].tolist()
    drafts = drafts_of(drafter, tokens, anchors, 4, greedy)
    with_skipped = drafts_of(drafter, tokens, anchors, 4, greedy, stop_at_wrong=True)
    for row, anchor in enumerate(anchors):
        text = [*tokens[anchor + 2 :], *[PADDING_TOKEN] * 4]
        made = len(right_in_row(drafts[row].tolist(), text))
        assert with_skipped[row, :made].tolist() == drafts[row, :made].tolist()
        assert (with_skipped[row, made:] == SKIPPED_DRAFT).all()
    assert (with_skipped[6, :3] == drafts[6, :3]).all()
    assert (with_skipped == SKIPPED_DRAFT).sum() > 20


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(2, 50), st.data())
def test_right_drafts_are_counted_as_the_definition_says(written, tokens, data):
    anchors = min(len(written), tokens) - 1
    drafts = np.array(
        [data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3)) for _ in range(anchors)]
    )
    counts = count_drafts(drafts, written, tokens)
    both = counts.outside_loops + counts.in_loops
    for j, (tried, right) in enumerate(zip(both.tried, both.right, strict=True)):
        reached = [
            k
            for k in range(anchors)
            if k + 1 + j < len(written)
            and all(drafts[k, i] == written[k + 1 + i] for i in range(j))
        ]
        assert tried == len(reached)
        assert right == sum(drafts[k, j] == written[k + 1 + j] for k in reached)
    sums = by_kind(["chat", "code", "chat"], [counts, counts, counts])
    assert list(sums) == ["chat", "code", ALL_KINDS]
    assert sums[ALL_KINDS] == sums["chat"] + sums["code"]
    assert sums[ALL_KINDS].outside_loops.places == 3 * counts.outside_loops.places


def test_acceptance_and_tau_follow_from_counts():
    figures = DraftCounts((10, 5, 2), (5, 2, 0), PassCounts(10, 12), PassCounts(8, 12))
    assert figures.conditional == [0.5, 0.4, 0.0] and figures.cumulative == [0.5, 0.2, 0.0]
    assert figures.accepted == pytest.approx(0.7) and figures.places == 10
    assert figures.as_json()["tau"] == {"two-pass": 1.2, "fused": 1.5}
    none = DraftCounts((0, 0), (0, 0), PassCounts(), PassCounts())
    assert none.cumulative == [0.0, 0.0]


def test_a_table_has_a_row_for_each_temperature_and_kind(config):
    temperatures = {
        temperature: {ALL_KINDS: counts[ALL_KINDS].as_json()}
        for temperature, counts in evaluate(config, Silent()).items()
    }
    report = config.as_json() | {"temperatures": temperatures}
    rows = rows_of(report)
    assert [row[0] for row in rows] == ["greedy", "T=0.8"]
    assert {len(row) for row in rows} == {len(HEADINGS)}
    table = markdown(report)
    assert table.startswith("| decoding |") and table.splitlines()[2].startswith("| greedy |")
    assert "6 prompts" in table and "L = 4" in table


def test_the_prompt_set_that_the_trainer_ships():
    prompts = read_prompt_set(PROMPTS)
    counts = [sum(prompt.kind == kind for prompt in prompts) for kind in KINDS]
    assert counts == [40, 20, 20, *[17] * 6, 18]
    for values in ({prompt.seed for prompt in prompts}, {prompt.text for prompt in prompts}):
        assert len(values) == 200
    copying = read_prompt_set(PROMPTS, COPYING_KINDS)
    assert [sum(prompt.kind == kind for prompt in copying) for kind in COPYING_KINDS] == [12] * 3
    assert all(prompt.id.startswith(prompt.kind) for prompt in [*prompts, *copying])
    assert read_prompt_set(PROMPTS, CORE_KINDS) == prompts[:80]
    assert [prompt.id for prompt in read_prompt_set(PROMPTS, CORE_KINDS, each=1)] == [
        next(prompt.id for prompt in prompts if prompt.kind == kind) for kind in CORE_KINDS
    ]
    assert [prompt.is_message for prompt in prompts] == [
        prompt.kind not in ("text", "code") for prompt in prompts
    ]
    assert Prompt("a", "chat", "b").seed == Prompt("a", "text", "c").seed  # the id alone decides


@pytest.mark.parametrize(
    "change", [{"tokens": 1}, {"lookahead": 0}, {"temperatures": (-1.0,)}, {"top_k": -2}]
)
def test_wrong_settings_are_refused(config, change):
    with pytest.raises(PassError):
        EvaluateConfig(**{**vars(config), **change})
