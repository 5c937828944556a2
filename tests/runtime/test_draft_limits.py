"""`speculative_max_concurrency`: if more sequences decode at a time, none of them drafts, whatever
plan its request names."""

from __future__ import annotations

from pathlib import Path

import pytest
from reciting import engine_of

from pass_runtime import GenerateOptions, load


@pytest.mark.parametrize(("limit", "max_rows"), [(None, 5), (2, 5), (0, 1)])
def test_more_sequences_than_the_limit_are_decoded_plainly(
    tiny_bundle: Path, limit: int | None, max_rows: int
):
    options = GenerateOptions(24, plan="two-pass", lookahead=4, ignore_eos=True)
    limits = {"max_batch_size": 4, "speculative_max_concurrency": limit}
    with load(tiny_bundle, "cpu", threads=1, **limits) as session:
        passes: list[tuple[int, int]] = []  # sequences, rows of a window
        run = engine_of(session).backend.run

        def record_and_run(batch):
            passes.append((len(batch.slots), batch.window.width))
            return run(batch)

        engine_of(session).backend.run = record_and_run
        alone = session.generate_ids([5, 6, 7], options).result().token_ids
        assert max(rows for _, rows in passes) == max_rows
        passes.clear()
        together = session._worker.call(
            lambda: [session.generate_ids([5, 6, 7], options) for _ in range(4)]
        )
        assert all(stream.result().token_ids == alone for stream in together)
        max_drafting = 4 if limit is None else limit
        assert all(rows == 1 or sequences <= max_drafting for sequences, rows in passes)
