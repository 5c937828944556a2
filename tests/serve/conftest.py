"""Servers that tests share, and the session that says what they should write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Server, slow_pass_run

from pass_runtime import Session, load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serve)


@pytest.fixture(scope="session")
def server(random_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Four slots, and a queue that nothing fills. Its drafts are nonsense, some of which is accepted."""
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(random_bundle, log, "--max-batch-size", 4) as running:
        yield running


@pytest.fixture(scope="session")
def slow_server(random_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One slot and room for one more; a pass takes 50 ms."""
    log = tmp_path_factory.mktemp("slow-server") / "log"
    arguments = ("--max-batch-size", 1, "--max-queue", 1)
    with Server(random_bundle, log, *arguments, command=slow_pass_run(0.05)) as running:
        yield running


@pytest.fixture(scope="session")
def session(random_bundle: Path) -> Iterator[Session]:
    """What the server does, without a server."""
    with load(random_bundle, threads=1) as opened:
        yield opened
