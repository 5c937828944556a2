"""A process that was forked cannot use the session of its parent: calls raise an error that says
so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

REFUSED = "this session was opened before the process was forked; load the bundle in this process"
PROGRAM = """
import os, sys
from pass_runtime import GenerateOptions, PassError, load

session = load(sys.argv[1], "cpu", threads=2)
session.generate("a", GenerateOptions(4, plan="ar")).result()
before = session.encode_chat([{"role": "user", "content": "a"}])
under_way = session.generate("a", GenerateOptions(200, plan="ar", ignore_eos=True))
next(under_way)
if (child := os.fork()) == 0:
    calls = {
        "generate": lambda: session.generate("b"),
        "warm_up": session.warm_up,
        "chat": lambda: session.encode_chat([{"role": "user", "content": "a"}]),
        "next": lambda: next(under_way),
        "result": under_way.result,
        "close": session.close,
    }
    for name, call in calls.items():
        try:
            call()
            print(name, "is done")
        except PassError as error:
            print(name, error)
    print("closed", session.closed)
    del session, calls, under_way
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
again = session.encode_chat([{"role": "user", "content": "a"}])
print("parent", len(under_way.result().token_ids), again == before)
"""


@pytest.mark.slow
def test_a_forked_process_cannot_use_the_session_and_can_end(tiny_bundle: Path):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == [
        *(f"{name} {REFUSED}" for name in ("generate", "warm_up")),
        "chat is done",
        *(f"{name} {REFUSED}" for name in ("next", "result")),
        "close is done",
        "closed True",
        "child 7",
        "parent 200 True",
    ]
    assert (done.returncode, done.stderr) == (0, "")
