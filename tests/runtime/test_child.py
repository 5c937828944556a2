from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pass_runtime.errors import PassError
from pass_runtime.text import child
from pass_runtime.text.child import Child, ChildStopped, Limits

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
def process():
    made = Child("test_child:make", None, Limits(0.5, 256 * MIB))
    yield made
    made.close()


def test_arguments_and_results_arrive_unchanged(process):
    value = {"text": "Grüße \ud800 \0", "numbers": [1, 2.5, None, True]}
    assert process.call(["echo", value]) == value
    assert len(process.call(["echo", "x" * 10 * MIB])) == 10 * MIB
    assert process.call(["print"]) is None
    assert process.call(["allocate", 100 * MIB]) == 100 * MIB


def test_calls_in_threads_get_their_own_answers(process):
    with ThreadPoolExecutor(8) as threads:
        numbers = threads.map(lambda n: process.call(["echo", n]), range(100))
        assert list(numbers) == list(range(100))


def test_a_call_that_fails_or_exceeds_a_limit_leaves_the_child_running(process):
    """Each call runs in a fork of the child."""
    children = {process.call(["parent"])}
    for action, why in (
        (["spin"], "it takes more than 0.5 seconds"),
        (["allocate", 300 * MIB], "it needs more than 256 MiB of memory"),
        (["overflow"], "it is nested too deeply"),
    ):
        with pytest.raises(ChildStopped, match=why):
            process.call(action)
        children.add(process.call(["parent"]))
    with pytest.raises(PassError, match=r"^refused$"):
        process.call(["refuse"])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        process.call(["fail"])
    assert children | {process.call(["parent"])} == {process.pid}
    assert process.call(["pid"]) != process.call(["pid"])


def test_close_ends_the_child_its_fork_and_the_call(process):
    child_pid, forks = process.call(["parent"]), []

    def wait() -> Exception:
        with pytest.raises(ChildStopped) as stopped:
            process.call(["sleep", 1000])
        return stopped.value

    with ThreadPoolExecutor(1) as threads:
        error = threads.submit(wait)
        while not forks:
            forks = Path(f"/proc/{child_pid}/task/{child_pid}/children").read_text().split()
        process.close()
        assert error.result()
    while _runs(child_pid) or _runs(int(forks[0])):
        time.sleep(0.01)


def test_a_child_that_was_killed_is_replaced(process):
    first = process.call(["parent"])
    os.kill(first, signal.SIGKILL)
    while process.pid is not None:
        time.sleep(0.01)
    assert process.call(["parent"]) != first


def test_every_call_fails_if_the_setup_fails():
    process = Child("test_child:make", "bad", Limits(1, 256 * MIB))
    for _ in range(2):
        with pytest.raises(PassError, match=r"^bad setup$"):
            process.call(["pid"])


def test_an_interrupt_of_the_caller_ends_the_child(process, monkeypatch):
    first = process.call(["parent"])

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Child, "_read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.call(["echo", 1])
    monkeypatch.undo()
    assert process.call(["parent"]) != first


def test_a_child_ends_with_its_parent():
    code = (
        "import sys, os; sys.path[:] = {path!r}\n"
        "from pass_runtime.text.child import Child, Limits\n"
        "child = Child('test_child:make', None, Limits(1, 1 << 28))\n"
        "print(child.call(['parent']), flush=True); os.kill(os.getpid(), 9)"
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
