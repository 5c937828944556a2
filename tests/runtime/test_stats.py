from __future__ import annotations

import json
import sys
import threading

import pytest

from pass_runtime.decode.stats import Stats


def two_pass_stats(accepted: list[int], lookahead: int = 4) -> Stats:
    stats = Stats(plan="two-pass", lookahead=lookahead)
    for count in accepted:
        stats.record(0, 1)
        stats.record(lookahead, count + 1)
    return stats


def test_figures_of_two_pass_plans():
    stats = two_pass_stats([4, 0, 2, 2, 1])
    assert (stats.passes, stats.steps, stats.drafted, stats.accepted) == (10, 5, 20, 9)
    # A token per draft pass, the accepted drafts, and a bonus token per verify pass.
    assert stats.emitted == 5 + 9 + 5
    assert stats.tau == pytest.approx(1.9)
    assert stats.mean_acceptance_length == pytest.approx(1 + 9 / 5)
    assert stats.draft_acceptance_rate == pytest.approx(9 / 20)
    assert stats.acceptance_histogram == [1, 1, 2, 0, 1]
    assert stats.acceptance_per_position == pytest.approx([4 / 5, 3 / 5, 1 / 5, 1 / 5])


def test_plain_decoding_has_no_steps():
    stats = Stats()
    assert stats.tau == stats.draft_acceptance_rate == 0
    for _ in range(7):
        stats.record(0, 1)
    assert (stats.passes, stats.steps, stats.tau, stats.mean_acceptance_length) == (7, 0, 1, 1)
    assert stats.acceptance_per_position == stats.acceptance_histogram == []


def test_narrower_windows_count_as_windows_of_the_requested_lookahead():
    """The last pass tries one draft, and the second and third count as not accepted."""
    stats = two_pass_stats([3], lookahead=3)
    stats.record(0, 1)
    stats.record(1, 2)
    assert stats.drafted == 4
    assert stats.acceptance_histogram == [0, 1, 0, 1]
    assert stats.acceptance_per_position == pytest.approx([1.0, 0.5, 0.5])
    assert stats.acceptance_of_tried == [1.0, 1.0, 1.0]
    stats = two_pass_stats([])
    stats.record(1, 1)
    stats.record(2, 2)
    assert stats.acceptance_of_tried == [0.5, 0.0, None, None]  # two drafts were never tried


def test_tokens_after_a_stop_string_do_not_count_in_tokens_per_second():
    stats = two_pass_stats([4])
    assert stats.decode_tokens_per_second == 0
    stats.generated_tokens, stats.decode_seconds = 3, 0.5
    assert stats.emitted == 6
    assert stats.decode_tokens_per_second == pytest.approx(6.0)


def test_as_dict_is_json_of_the_same_figures():
    stats = two_pass_stats([4, 0])
    figures = json.loads(json.dumps(stats.as_dict()))
    for name, value in figures.items():
        assert value == getattr(stats, name), name
    named = {"tau", "acceptance_per_position", "decode_tokens_per_second", "cached_tokens"}
    assert named <= set(figures)


def test_another_thread_may_read_figures_while_a_pass_is_recorded():
    """As a server does for a request that is cancelled during a pass."""
    stats, done = Stats(lookahead=6), threading.Event()

    def record() -> None:
        while not done.is_set():
            stats.steps_by_accepted.clear()
            for emitted in range(1, 8):
                stats.record(6, emitted)

    thread, interval = threading.Thread(target=record), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads take turns in the middle of statements
    try:
        thread.start()
        for _ in range(50_000):
            assert len(stats.acceptance_per_position) in (0, 6)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
