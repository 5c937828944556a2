from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.bundle.window import Window
from pass_trainer.windows import full_groups, make_windows, sample_groups


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 8), st.data())
def test_a_batch_is_laid_out_as_windows(width, batch, lookahead, data):
    """Padding rows see the first token alone."""
    sizes = st.lists(st.integers(0, lookahead), min_size=1, max_size=width)
    groups = [np.array(data.draw(sizes)) for _ in range(batch)]
    made = make_windows(groups, width)
    windows = [Window("train", width - 1, tuple(each.tolist())) for each in groups]
    rows = max([1, *(window.width - width for window in windows)])
    assert made.mask.shape == (batch, 1, rows, width + rows)
    valid = np.zeros((batch, rows), np.bool_)
    valid.flat[made.rows.numpy()] = True
    for b, window in enumerate(windows):
        used = window.width - width
        assert valid[b].tolist() == [True] * used + [False] * (rows - used)
        assert made.anchors[b] == np.count_nonzero(groups[b])
        padding = [0] * (rows - used)
        assert made.lookahead_index[b].tolist() == window.lookahead_ids(0).tolist() + padding
        assert made.position[b].tolist() == window.row_position[width:].tolist() + padding
        expected = np.zeros((rows, width + rows), np.bool_)
        expected[:used, : window.width] = window.window_mask[width:]
        expected[used:, 0] = True
        np.testing.assert_array_equal(made.mask[b, 0].numpy(), expected)


@settings(deadline=None)
@given(
    *(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 20), st.integers(1, 8)),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_sampled_groups_predict_tokens_after_the_prompt_only(
    seed: int, length: int, anchors: int, lookahead: int, decay: float
):
    rng = np.random.default_rng(seed)
    prompt_length = int(rng.integers(0, length + 1))
    groups = sample_groups(rng, prompt_length, length, anchors, lookahead, decay)
    assert len(groups) == length
    sampled = [anchor for anchor, size in enumerate(groups) if size]
    # Anchors are the prompt's last token and those after it, but not the last token of the text.
    assert len(sampled) == min(anchors, max(0, length - 1 - max(prompt_length - 1, 0)))
    for anchor in sampled:
        assert anchor >= prompt_length - 1 and groups[anchor] <= lookahead
        assert anchor + groups[anchor] <= length - 1


def test_deeper_rows_are_sampled_less_often():
    rng = np.random.default_rng(0)
    sizes = np.array([sample_groups(rng, 0, 200, 1, 4, 0.8) for _ in range(4000)]).max(1)
    shares = [(sizes > i).mean() for i in range(4)]
    np.testing.assert_allclose(shares, [1, 0.8, 0.64, 0.512], atol=0.05)


def test_full_groups_end_within_the_text():
    assert full_groups(3, 12, 3, 4).tolist() == [0, 0, 4, 0, 0, 4, 0, 0, 0, 0, 0, 0]
    assert not full_groups(1, 4, 1, 4).any() and not full_groups(3, 2, 1, 4).any()
