"""Above a number of sequences nothing drafts, whatever plans requests name."""

from __future__ import annotations

from pathlib import Path

import pytest
from reciting import runner_of

from pass_runtime import GenerateOptions, load


@pytest.mark.parametrize(("limit", "max_rows"), [(None, 5), (2, 5), (0, 1)])
def test_many_at_a_time_are_decoded_plainly(tiny_bundle: Path, limit: int | None, max_rows: int):
    """Above `speculative_max_concurrency` nothing drafts; the text is always the same."""
    options = GenerateOptions(24, plan="two-pass", lookahead=4, ignore_eos=True)
    limits = {"max_batch_size": 4, "speculative_max_concurrency": limit}
    with load(tiny_bundle, "cpu", threads=1, **limits) as session:
        rows: list[tuple[int, int]] = []
        run = runner_of(session).run

        def noted(plan, drafts):
            rows.append((len(runner_of(session).decoding), plan.width))
            return run(plan, drafts)

        runner_of(session).run = noted
        alone = session.generate_ids([5, 6, 7], options).result().token_ids
        assert max(width for _, width in rows) == max_rows
        rows.clear()
        together = session._worker.call(
            lambda: [session.generate_ids([5, 6, 7], options) for _ in range(4)]
        )
        assert all(stream.result().token_ids == alone for stream in together)
        drafting = 4 if limit is None else limit
        assert all(width == 1 or sequences <= drafting for sequences, width in rows)
