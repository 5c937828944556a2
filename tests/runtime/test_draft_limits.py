"""When nothing drafts, whatever plans requests name; the text stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from reciting import runner_of

from pass_runtime import GenerateOptions, load


@pytest.mark.parametrize(("limit", "most_rows"), [(None, 5), (2, 5), (0, 1)])
def test_many_at_a_time_are_decoded_plainly(tiny_bundle: Path, limit: int | None, most_rows: int):
    """Above `speculative_max_concurrency` nothing drafts; the text is always the same."""
    options = GenerateOptions(24, plan="two-pass", lookahead=4, ignore_eos=True)
    with load(
        tiny_bundle, "cpu", threads=1, max_batch_size=4, speculative_max_concurrency=limit
    ) as session:
        rows: list[tuple[int, int]] = []
        run = runner_of(session).run

        def noted(plan, drafts):
            rows.append((len(runner_of(session).decoding), plan.width))
            return run(plan, drafts)

        runner_of(session).run = noted
        alone = session.generate_ids([5, 6, 7], options).result().token_ids
        assert max(width for _, width in rows) == most_rows
        rows.clear()
        together = session._worker.call(
            lambda: [session.generate_ids([5, 6, 7], options) for _ in range(4)]
        )
        assert all(stream.result().token_ids == alone for stream in together)
        most = 4 if limit is None else limit
        assert all(width == 1 or count <= most for count, width in rows)
