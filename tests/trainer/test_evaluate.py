"""`pass-train evaluate`: its texts, its drafts and its passes are those of the runtime."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training import Silent

from pass_exporter.model.head import new_head
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_runtime import load
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import first_difference
from pass_runtime.measuring.real_use import (
    ALL_KINDS,
    CONTINUED_KINDS,
    CORE_KINDS,
    EXTRA_TOKENS,
    KINDS,
    PassCounts,
    Prompt,
    encode,
    read_prompt_set,
)
from pass_runtime.options import GenerateOptions
from pass_trainer.drafter import Drafter
from pass_trainer.evaluation import answers
from pass_trainer.evaluation import evaluate as evaluation
from pass_trainer.evaluation.counts import (
    DraftCounts,
    by_kind,
    count_drafts,
    fused_sizes,
    right_in_row,
    two_pass_sizes,
)
from pass_trainer.evaluation.drafts import SKIPPED_DRAFT, drafts_of
from pass_trainer.evaluation.evaluate import PROMPTS, EvaluateConfig, evaluate
from pass_trainer.evaluation.table import HEADINGS, markdown, rows_of

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


@pytest.fixture(scope="module")
def bench_peers() -> ModuleType:
    """The script that counts passes of the runtime."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("bench_peers")


def count_in_runtime(script, session, prompts, temperature, top_k=0):
    """Return two counts of passes, by kind of prompt and plan: outside loops, and in loops."""
    main, looping = (
        {kind: dict.fromkeys(PLANS, PassCounts()) for kind in (*CORE_KINDS, ALL_KINDS)}
        for _ in range(2)
    )
    decode = importlib.import_module("bench_engines").decode
    for prompt, plan in itertools.product(prompts, PLANS):
        options = {"temperature": temperature, "top_k": top_k, "seed": prompt.seed}
        options |= {"plan": plan, "lookahead": LOOKAHEAD}
        text = decode(session, encode(session, prompt), TOKENS + EXTRA_TOKENS, **options)
        for sums, counts in zip((main, looping), script.passes_of(text, TOKENS), strict=True):
            for kind in (prompt.kind, ALL_KINDS):
                sums[kind][plan] += counts
    return main, looping


def passes(counts: DraftCounts) -> dict[str, PassCounts]:
    return {"two-pass": counts.two_pass, "fused": counts.fused}


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.8, 0), (2.0, 7), (9.0, 0)])
def test_the_passes_are_those_of_the_runtime(
    bench_peers, config, adapter_bundle, prompts, temperature, top_k
):
    """Exactly, since these texts have no near-tie in fp32. At high temperatures the noise, which
    drafts share, decides each token, so that more drafts are right."""
    config = EvaluateConfig(**{**vars(config), "temperatures": (temperature,), "top_k": top_k})
    (expected,) = evaluate(config, Silent()).values()
    with load(adapter_bundle) as session:
        main, looping = count_in_runtime(
            bench_peers, session, read_prompt_set(prompts), temperature, top_k
        )
    assert list(main) == list(expected) == [*CORE_KINDS, ALL_KINDS]
    for kind, counts in expected.items():
        assert main[kind] == passes(counts.outside_loops)
        assert looping[kind] == passes(counts.in_loops)
    right = expected[ALL_KINDS].outside_loops.right
    assert right[0] > 0 and (temperature < 9 or right[2] > 10)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8, 9.0])
def test_the_passes_with_a_head_are_those_of_the_runtime(
    bench_peers, config, subset_bundle, prompts, temperature
):
    """The head's candidates are half of the vocabulary."""
    directory = subset_bundle.parent
    changed = {"model": str(directory / "model"), "weights": directory / "lookahead.safetensors"}
    config = EvaluateConfig(**{**vars(config), **changed, "temperatures": (temperature,)})
    (expected,) = evaluate(config, Silent()).values()
    with load(subset_bundle) as session:
        main, _ = count_in_runtime(bench_peers, session, read_prompt_set(prompts), temperature)
    for kind, counts in expected.items():
        assert main[kind] == passes(counts.outside_loops)
    assert temperature < 9 or expected[ALL_KINDS].outside_loops.right[0] > 10


def test_the_drafts_are_those_of_the_runtime(config, adapter_bundle, monkeypatch):
    """Each pass accepts as many drafts as are right among those that the trainer made there."""
    seen = []
    monkeypatch.setattr(
        evaluation, "count_drafts", lambda drafts, written, tokens: seen.append((drafts, written))
    )
    monkeypatch.setattr(evaluation, "by_kind", lambda *_: {})
    evaluate(config, Silent())
    greedy, sampled = seen[:6], seen[6:]
    session, asked = load(adapter_bundle), read_prompt_set(config.prompts)
    for temperature, texts in ((0.0, greedy), (0.8, sampled)):
        for prompt, (drafts, written) in zip(asked, texts, strict=True):
            sampling = SamplingParams(temperature, seed=prompt.seed)
            options = GenerateOptions(TOKENS + EXTRA_TOKENS, sampling, "fused", lookahead=LOOKAHEAD)
            ids = encode(session, prompt)
            stream = session.generate_ids(ids, options)
            begin = 0
            for emitted in stream:
                if begin and begin - 1 < len(drafts):
                    right = sum(right_in_row(drafts[begin - 1].tolist(), written[begin:]))
                    assert len(emitted) == min(1 + right, len(written) - begin)
                begin += len(emitted)
            assert first_difference(session, ids, options, written, stream.token_ids) is None
    session.close()


def test_answers_are_kept_and_a_damaged_file_of_them_is_refused(config, monkeypatch, cache):
    found = evaluate(config, Silent())
    monkeypatch.setattr(answers.AnswerWriter, "_write", lambda *_: pytest.fail("written again"))
    assert evaluate(config, Silent()) == found
    baseline = EvaluateConfig(**{**vars(config), "weights": None})
    assert evaluate(baseline, Silent()) != found
    for path in cache.glob("written/*.json"):
        path.write_text("[")
    with pytest.raises(PassError, match="damaged"):
        evaluate(config, Silent())
    for path in cache.glob("written/*.json"):
        path.unlink()


@pytest.mark.slow
def test_answers_to_one_kind_are_those_of_all_kinds(config, monkeypatch):
    whole = evaluate(config, Silent())
    monkeypatch.setattr(answers.AnswerWriter, "_write", lambda *_: pytest.fail("written again"))
    for kind in CORE_KINDS:
        for temperature, found in evaluate(
            EvaluateConfig(**{**vars(config), "kinds": (kind,)}), Silent()
        ).items():
            assert found == {kind: whole[temperature][kind], ALL_KINDS: whole[temperature][kind]}


def test_prompts_that_are_not_continued_go_through_the_chat_template(config):
    tokenizer = load_model(resolve(config.model), "fp32").tokenizer
    plain = answers.encode(tokenizer, Prompt("a", "text", "who is the fox?"))
    for kind in KINDS:
        ids = answers.encode(tokenizer, Prompt("a", kind, "who is the fox?"))
        assert (ids == plain) == (kind in CONTINUED_KINDS)


def test_batches_do_not_change_what_is_written(config, monkeypatch):
    texts = []
    for size in (40, 4):
        monkeypatch.setattr(answers, "BATCH_PROMPTS", size)
        loaded = load_model(resolve(config.model), "fp32")
        asked = [
            answers.SeededPrompt(
                answers.encode(loaded.tokenizer, prompt), SamplingParams(0.8, seed=prompt.seed)
            )
            for prompt in read_prompt_set(config.prompts)
        ]
        writer = answers.AnswerWriter(loaded.model, loaded.eos_token_ids, 20, "")
        texts.append(writer._write(asked, lambda *_: None))
    assert texts[0] == texts[1] and len(set(map(tuple, texts[0]))) == len(texts[0])


def test_the_head_reads_the_drafts_before_and_not_the_text(tiny_model: Path):
    base = load_model(resolve(str(tiny_model)), "fp32").model
    drafter = Drafter(base, torch.randn(3, 64, generator=torch.Generator().manual_seed(2)), None)
    head = new_head(base.get_input_embeddings().weight, 8, 16, torch.Generator().manual_seed(0))
    tokens = torch.randint(2, 300, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    anchors, greedy = range(4, 12), lambda logits, _positions: logits.argmax(-1)
    plain = drafts_of(drafter, tokens, anchors, 3, greedy)
    drafter.head = head
    without_effect = drafts_of(drafter, tokens, anchors, 3, greedy)  # a new head adds 0
    assert np.array_equal(without_effect, plain)
    with torch.no_grad():
        head.out.normal_(std=20, generator=torch.Generator().manual_seed(1))
    with_head = drafts_of(drafter, tokens, anchors, 3, greedy)
    assert not np.array_equal(with_head, plain)
    for place, anchor in enumerate(anchors):
        text = torch.tensor(tokens[: anchor + 1])
        embeddings = torch.cat([base.get_input_embeddings()(text), drafter.embeddings[:3]])
        hidden = base.model(inputs_embeds=embeddings[None]).last_hidden_state[:, -3:]
        before = torch.tensor([[tokens[anchor + 1], *with_head[place, :2]]])
        ids, logits = head(hidden, base.lm_head(hidden), before, torch.arange(3)[None])
        best = ids[0].gather(-1, logits[0].argmax(-1)[:, None])[:, 0]
        assert best.tolist() == with_head[place].tolist()


def test_drafts_after_a_wrong_one_are_skipped(tiny_model: Path):
    base = load_model(resolve(str(tiny_model)), "fp32").model
    generator = torch.Generator().manual_seed(1)
    head = new_head(base.get_input_embeddings().weight, 8, 16, generator)
    with torch.no_grad():
        head.out.normal_(std=20, generator=generator)
    drafter = Drafter(base, torch.randn(4, 64, generator=generator), None, head)
    tokens = torch.randint(2, 300, (24,), generator=generator).tolist()
    greedy = lambda logits, _positions: logits.argmax(-1)  # noqa: E731
    for _ in range(2):  # the text becomes what is drafted at some of its places
        whole = drafts_of(drafter, tokens, range(4, 20), 4, greedy)
        tokens[12:15] = whole[6, :3].tolist()
    whole = drafts_of(drafter, tokens, range(4, 20), 4, greedy)
    part = drafts_of(drafter, tokens, range(4, 20), 4, greedy, stop_at_wrong=True)
    for place, anchor in enumerate(range(4, 20)):
        made = len(right_in_row(whole[place].tolist(), [*tokens[anchor + 2 :], *[-2] * 4]))
        assert part[place, :made].tolist() == whole[place, :made].tolist()
        assert (part[place, made:] == SKIPPED_DRAFT).all()
    assert (part[6, :3] == whole[6, :3]).all() and (part == SKIPPED_DRAFT).sum() > 20


def reference_walk(accepted: list[int], length: int, *, two_pass: bool) -> list[int]:
    """Return the tokens of each pass, counted as a runtime does. accepted: the right drafts at each
    place. right: the number of right drafts that the next pass verifies; None if it drafts only."""
    sizes, written, right = [], 0, None
    while written < length:
        sizes.append(min(1 + (right or 0), length - written))
        written += sizes[-1]
        drafts = not two_pass or right is None
        if drafts and written > len(accepted):
            break
        right = accepted[written - 1] if drafts else None
    return sizes


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=40), st.integers(1, 60))
def test_sizes_of_passes(accepted, length):
    accepted = [
        min(count, length - 1 - place) for place, count in enumerate(accepted[: length - 1])
    ]
    assert list(fused_sizes(accepted, length)) == reference_walk(accepted, length, two_pass=False)
    assert list(two_pass_sizes(accepted, length)) == reference_walk(accepted, length, two_pass=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(2, 50), st.data())
def test_counts_of_right_drafts(written, tokens, data):
    """They are those of a count by hand, and the counts of texts add up to that of all texts."""
    places = min(len(written), tokens) - 1
    drafts = np.array(
        [data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3)) for _ in range(places)]
    )
    found = count_drafts(drafts, written, tokens)
    both = found.outside_loops + found.in_loops
    for j, (tried, right) in enumerate(itertools.zip_longest(both.tried, both.right)):
        reached = [
            k
            for k in range(places)
            if k + 1 + j < len(written)
            and all(drafts[k, i] == written[k + 1 + i] for i in range(j))
        ]
        assert tried == len(reached)
        assert right == sum(drafts[k, j] == written[k + 1 + j] for k in reached)
    sums = by_kind(["chat", "code", "chat"], [found, found, found], 3)
    assert list(sums) == ["chat", "code", ALL_KINDS]
    assert sums[ALL_KINDS] == sums["chat"] + sums["code"]
    assert sums[ALL_KINDS].outside_loops.places == 3 * found.outside_loops.places


def test_shares_of_right_drafts_and_tau():
    figures = DraftCounts((10, 5, 2), (5, 2, 0), PassCounts(10, 12), PassCounts(8, 12))
    assert figures.conditional == [0.5, 0.4, 0.0] and figures.cumulative == [0.5, 0.2, 0.0]
    assert figures.accepted == pytest.approx(0.7) and figures.places == 10
    assert figures.as_json()["tau"] == {"two-pass": 1.2, "fused": 1.5}
    assert DraftCounts.zero(2).cumulative == [0.0, 0.0]


def test_a_table_of_one_report_or_two(config):
    report = {
        name: {ALL_KINDS: found[ALL_KINDS].as_json()}
        for name, found in evaluate(config, Silent()).items()
    }
    whole = config.as_json() | {"temperatures": report}
    rows = rows_of(whole)
    assert [row[0] for row in rows] == ["greedy", "T=0.8"]
    assert {len(row) for row in rows} == {len(HEADINGS)}
    one, two = markdown({"a": whole}).splitlines(), markdown({"a": whole, "b": whole}).splitlines()
    assert one[0].startswith("| decoding |") and two[0].startswith("| weights | decoding |")
    assert [line.split(" | ")[0] for line in two[2:6]] == ["| a", "| a", "| b", "| b"]
    assert "6 prompts" in "\n".join(one) and "L = 4" in "\n".join(one)


def test_the_prompts_that_come_with_it():
    prompts = read_prompt_set(PROMPTS)
    counts = [sum(prompt.kind == kind for prompt in prompts) for kind in KINDS]
    assert counts == [40, 20, 20, *[17] * 6, 18]
    for values in ({prompt.seed for prompt in prompts}, {prompt.text for prompt in prompts}):
        assert len(values) == 200
    assert all(prompt.id.startswith(prompt.kind) for prompt in prompts)
    assert read_prompt_set(PROMPTS, CORE_KINDS) == prompts[:80]
    assert [prompt.id for prompt in read_prompt_set(PROMPTS, CORE_KINDS, each=1)] == [
        next(prompt.id for prompt in prompts if prompt.kind == kind) for kind in CORE_KINDS
    ]
    assert [prompt.is_message for prompt in prompts] == [
        prompt.kind not in ("text", "code") for prompt in prompts
    ]
    assert Prompt("a", "chat", "b").seed == Prompt("a", "text", "c").seed  # of the id alone


@pytest.mark.parametrize(
    "change", [{"tokens": 1}, {"lookahead": 0}, {"temperatures": (-1.0,)}, {"top_k": -1}]
)
def test_wrong_settings_are_refused(config, change):
    with pytest.raises(PassError):
        EvaluateConfig(**{**vars(config), **change})
