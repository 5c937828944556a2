"""Pools of child processes that call a function (`make` of this file) with limits of time, memory
and stack: what ends a child, and what a call raises."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pass_runtime.errors import PassError
from pass_runtime.text import child
from pass_runtime.text.child import ChildPool, ChildStopped, Limits

HERE = str(Path(__file__).parent)
MIB = 1 << 20


def make(setup):
    """Return the function that children call. They import `make` by its name."""
    if setup == "bad":
        raise PassError("bad setup")
    return lambda value: ACTIONS[value[0]](*value[1:])


def spin():
    while True:
        pass


def refuse():
    raise PassError("refused")


def fail():
    return 1 / 0


def overflow_stack():
    """Recurse in C until the stack overflows: Python's limit raises no error there."""
    callback = ctypes.CFUNCTYPE(None)
    sys.setrecursionlimit(1 << 30)

    @callback
    def again():
        again()

    again()


ACTIONS = {
    "echo": lambda value: value,
    "pid": os.getpid,
    "parent": os.getppid,
    "print": lambda: print("noise", flush=True),
    "spin": spin,
    "sleep": time.sleep,
    "allocate": lambda size: len(bytearray(size)),
    "refuse": refuse,
    "fail": fail,
    "overflow": overflow_stack,
}


@pytest.fixture(scope="module", autouse=True)
def importable():
    """Children find this module on the path of their parent."""
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture
def pool():
    pool = ChildPool(f"{__name__.rpartition('.')[2]}:make", None, Limits(0.5, 256 * MIB))
    yield pool
    pool.close()


def test_arguments_and_results_arrive_unchanged(pool):
    value = {"text": "Grüße \ud800 \0", "numbers": [1, 2.5, None, True]}
    assert pool.call(["echo", value]) == value
    assert len(pool.call(["echo", "x" * 10 * MIB])) == 10 * MIB


def test_a_child_that_prints_is_used_again(pool):
    first = pool.call(["pid"])
    assert pool.call(["print"]) is None
    assert pool.call(["pid"]) == first != os.getpid()


BEYOND_LIMITS = [
    (["spin"], "it takes more than 0.5 seconds"),
    (["allocate", 300 * MIB], "it needs more than 256 MiB of memory"),
    (["overflow"], "it is nested too deeply"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("action", "why"), BEYOND_LIMITS)
def test_a_call_beyond_its_limits_ends_its_child_only(pool, action, why):
    first = pool.call(["pid"])
    with pytest.raises(ChildStopped, match=why):
        pool.call(action)
    assert pool.call(["pid"]) != first  # the next call has a child of its own


def test_with_forks_a_call_beyond_its_limits_leaves_the_child_running():
    """Each call then runs in a fork of the child."""
    pool = ChildPool("test_child:make", None, Limits(0.5, 256 * MIB), forks=True)
    children = {pool.call(["parent"])}  # a fork's parent is the child
    for action, why in BEYOND_LIMITS:
        with pytest.raises(ChildStopped, match=why):
            pool.call(action)
        children.add(pool.call(["parent"]))
    with pytest.raises(PassError, match=r"^refused$"):
        pool.call(["refuse"])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        pool.call(["fail"])
    assert len(children | {pool.call(["parent"])}) == 1
    assert pool.call(["pid"]) != pool.call(["pid"])
    fork = pool.call(["pid"])
    pool.close()
    while _runs(*children) or _runs(fork):
        time.sleep(0.01)


def start_endless_call(pool: ChildPool) -> Future:
    """Begin an endless call in a thread of its own. Return the future of its error."""

    def wait() -> Exception:
        with pytest.raises(ChildStopped) as stopped:
            pool.call(["sleep", 1000])
        return stopped.value

    threads = ThreadPoolExecutor(1)
    error = threads.submit(wait)
    threads.shutdown(wait=False)
    return error


def test_close_ends_a_fork_too():
    pool = ChildPool("test_child:make", None, Limits(5, 256 * MIB), forks=True)
    child_pid, forks = pool.call(["parent"]), []
    error = start_endless_call(pool)
    while not forks:
        forks = Path(f"/proc/{child_pid}/task/{child_pid}/children").read_text().split()
    pool.close()
    assert error.result()
    while _runs(int(forks[0])):
        time.sleep(0.01)


def test_a_call_that_raises_ends_no_child(pool):
    first = pool.call(["pid"])
    with pytest.raises(PassError, match=r"^refused$"):
        pool.call(["refuse"])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        pool.call(["fail"])
    assert pool.call(["allocate", 100 * MIB]) == 100 * MIB
    assert pool.call(["pid"]) == first


def test_a_child_that_was_killed_is_replaced(pool):
    first = pool.call(["pid"])
    os.kill(first, signal.SIGKILL)
    while pool._children and any(each.alive for each in pool._children):
        time.sleep(0.01)
    assert pool.call(["pid"]) != first


def test_every_call_fails_if_the_setup_fails():
    pool = ChildPool("test_child:make", "bad", Limits(1, 256 * MIB))
    for _ in range(2):
        with pytest.raises(PassError, match=r"^bad setup$"):
            pool.call(["pid"])


def test_callers_at_once_share_the_children_and_get_their_own_answers():
    pool = ChildPool("test_child:make", None, Limits(5, 256 * MIB), size=2)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda n: pool.call(["echo", n]), range(200))) == list(range(200))
        pids = set(threads.map(lambda _: pool.call(["pid"]), range(50)))
    assert 1 <= len(pids) <= 2
    pool.close()


def test_an_interrupt_of_the_caller_ends_the_child(pool, monkeypatch):
    first = pool.call(["pid"])

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(child._Child, "_read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.call(["echo", 1])
    monkeypatch.undo()
    assert pool.call(["pid"]) != first


def test_close_ends_the_children_and_a_waiting_call(pool):
    pool.call(["pid"])
    error = start_endless_call(pool)
    while not pool._free.empty():
        time.sleep(0.01)
    pool.close()
    assert error.result()


def test_a_child_ends_with_its_parent():
    code = (
        "import sys, os; sys.path[:] = {path!r}\n"
        "from pass_runtime.text.child import ChildPool, Limits\n"
        "pool = ChildPool('test_child:make', None, Limits(1, 1 << 28))\n"
        "print(pool.call(['pid']), flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code.format(path=sys.path)]
    pid = int(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    while _runs(pid):
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Return whether the process exists and has not ended (a zombie has)."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_an_embedded_python_finds_an_interpreter(monkeypatch):
    child.interpreter.cache_clear()
    monkeypatch.setattr(sys, "executable", "")  # as in the process of Triton's Python backend
    assert child.interpreter()
    child.interpreter.cache_clear()
    monkeypatch.setattr(sys, "base_exec_prefix", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PassError, match="set PASS_PYTHON"):
        child.interpreter()
    monkeypatch.setenv("PASS_PYTHON", sys.prefix + "/bin/python")
    assert child.interpreter() == sys.prefix + "/bin/python"
    child.interpreter.cache_clear()
