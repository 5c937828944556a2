from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reciting import engine_of

from pass_runtime.session import Session, load


@pytest.fixture(scope="module")
def session(tiny_bundle):
    with load(tiny_bundle, "cpu", threads=1) as session:
        yield session


def chunks(session: Session, tokens: int, limit: int | None = None) -> list[tuple[int, int]]:
    windows: list[tuple[int, int]] = []
    while (start := sum(count for count, _ in windows)) < tokens:
        windows.append(engine_of(session)._chunk(start, tokens, limit, scored=False))
    return windows


@pytest.mark.parametrize(
    ("tokens", "widths"),
    [
        (1, [1]),
        (2, [16]),
        (10, [16]),
        (17, [16, 1]),
        (20, [16, 16]),
        (47, [16, 16, 16]),
        (48, [64]),
        (63, [64]),
        (70, [64, 16]),
        (191, [64, 64, 64]),
        (192, [256]),
        (300, [256, 16, 16, 16]),
    ],
)
def test_the_widths_in_which_a_prompt_is_read(session: Session, tokens: int, widths: list[int]):
    assert [width for _, width in chunks(session, tokens)] == widths


@settings(deadline=None)
@given(st.integers(1, 400), st.sampled_from([None, 64]))
def test_only_the_last_window_is_padded_and_none_is_wider_than_the_limit(
    session: Session, tokens: int, limit: int | None
):
    windows = chunks(session, tokens, limit)
    assert sum(count for count, _ in windows) == tokens
    assert all(count == width for count, width in windows[:-1])
    assert all(count <= width <= (limit or 256) for count, width in windows)
