"""Weights that ONNX Runtime packed once are mapped by later sessions, which compute the equal bits.
An entry of the cache that is damaged, or was packed from other weights, is never used."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from manifests import linked, named_bundle

from pass_runtime.backends.ort import packed_weights, packing
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.kernels import EXACT
from pass_runtime.backends.ort.packed_weights import NOTE_FILE, WeightCache
from pass_runtime.backends.ort.packing import GRAPH_FILE, WEIGHTS_FILE, sample_logits
from pass_runtime.bundle import integrity
from pass_runtime.bundle.integrity import HashCache, file_info, verify_files
from pass_runtime.bundle.read import read_manifest
from pass_runtime.cli.main import main
from pass_runtime.session import load
from pass_server.triton.config import read_settings

ANY_SIZE = WeightCache(min_bytes=0)


@pytest.fixture(autouse=True)
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """Return the directory of the cache's entries; every test has its own."""
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(integrity, "MIN_AGE_NS", 0)  # the files of tests are young
    caplog.set_level(logging.INFO, "pass_runtime.weights")
    return tmp_path / "cache" / "packed"


@pytest.fixture(scope="module", params=["tiny_bundle", "adapter_bundle", "int4", "w8a8"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return named_bundle(request)


def verified(bundle: Path) -> Path:
    """Return the bundle after storing the hashes of its files, without which nothing is packed."""
    hashes = HashCache()
    verify_files(bundle, read_manifest(bundle), hash_cache=hashes)
    hashes.save()
    return bundle


def open_backend(
    bundle: Path, cache: WeightCache | None, slots: int = 1, threads: int = 1
) -> OrtBackend:
    options = {"threads": threads, "max_batch_size": slots, "weight_cache": cache}
    return OrtBackend(bundle, read_manifest(bundle), "cpu", **options)


def logits(
    bundle: Path, cache: WeightCache | None = ANY_SIZE, slots: int = 1, threads: int = 1
) -> list[np.ndarray]:
    with closing(open_backend(bundle, cache, slots, threads)) as backend:
        return sample_logits(backend)


def equal(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log since the last call: "packed", "mapped", or lines that say why neither."""
    words = {"were packed in": "packed", "are mapped from": "mapped"}
    lines = [line for line in caplog.messages if "packing weights" not in line]
    caplog.clear()
    return [next((word for text, word in words.items() if text in line), line) for line in lines]


@pytest.mark.parametrize("slots", [1, 4])
def test_mapped_weights_compute_the_same_bits(bundle: Path, cache: Path, caplog, slots: int):
    # With an adapter, a second graph reads the same weights.
    graph_count = 1 + bool(read_manifest(verified(bundle)).lookahead.adapter_rank)
    expected = logits(bundle, None, slots)
    for expected_log in (["packed", "mapped"], ["mapped"]):
        assert equal(expected, logits(bundle, slots=slots))
        assert logged(caplog) == expected_log * graph_count
    assert len(entries(cache)) == graph_count
    for entry in cache.iterdir():
        assert entries(entry) == sorted([NOTE_FILE, GRAPH_FILE, WEIGHTS_FILE])
        assert str(bundle) in (entry / NOTE_FILE).read_text()
    assert len({(entry / WEIGHTS_FILE).stat().st_ino for entry in cache.iterdir()}) == 1


def test_the_graph_with_lookahead_rows_is_opened_at_its_first_use(
    adapter_bundle: Path, cache: Path, caplog
):
    """If its entry is gone by then, it comes from the bundle, with the equal bits."""
    expected = logits(verified(adapter_bundle))
    for entry_is_gone in (False, True):
        caplog.clear()
        with closing(open_backend(adapter_bundle, ANY_SIZE)) as backend:
            plain = sample_logits(backend, lookahead_rows=False)
            assert logged(caplog) == ["mapped"]
            if entry_is_gone:
                shutil.rmtree(cache)
                cache.write_text("a file, so that no entry can be written")
            assert equal(expected, sample_logits(backend))
            assert logged(caplog) != [] and len(plain) < len(expected)


def test_two_graphs_are_open_only_where_they_share_weights(adapter_bundle: Path):
    verified(adapter_bundle)
    # Weights as small as these are packed by ANY_SIZE alone.
    for cache, shared in ((None, False), (WeightCache(), False), (ANY_SIZE, True)):
        with closing(open_backend(adapter_bundle, cache)) as backend:
            trunks = backend._trunks
            assert (trunks.lookahead is not trunks.plain) == shared
            # The threads of one session must not spin while the other session runs.
            for session in (trunks.lookahead, trunks.plain) if shared else ():
                options = session.get_session_options()
                assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_an_entry_belongs_to_a_graph_whatever_the_number_of_threads(tiny_bundle: Path, cache: Path):
    """One slot and several slots run different graphs."""
    verified(tiny_bundle)
    for threads, slots, entry_count in ((1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 3, 2)):
        logits(tiny_bundle, slots=slots, threads=threads)
        assert len(entries(cache)) == entry_count


@pytest.mark.parametrize("changed", ["version", "build", "cpu", "trunk", "weights"])
def test_another_library_cpu_or_bundle_makes_another_entry(
    tiny_bundle: Path, cache: Path, monkeypatch, tmp_path: Path, changed: str
):
    logits(verified(tiny_bundle))
    [before], bundle = entries(cache), tiny_bundle
    if changed == "version":
        monkeypatch.setattr(packing.ort, "__version__", "9.9.9")
    elif changed == "build":
        monkeypatch.setattr(packing.ort, "get_build_info", lambda: "another build")
    elif changed == "cpu":
        (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu\n")
        monkeypatch.setattr(packing, "CPU_INFO", tmp_path / "cpuinfo")
    else:
        bundle = tmp_path / "bundle"
        shutil.copytree(tiny_bundle, bundle)
        manifest = read_manifest(bundle)
        file = manifest.trunk_file("cpu") if changed == "trunk" else f"{manifest.trunk.file}.data"
        with (bundle / file).open("ab") as opened:  # to the graph's metadata, or after the weights
            opened.write(b"\x20\x01" if changed == "trunk" else b"\0")
        document = json.loads((bundle / "pass_config.json").read_text())
        document["files"][file] = file_info(bundle / file).model_dump()
        (bundle / "pass_config.json").write_text(json.dumps(document))
        verified(bundle)
    logits(bundle)
    assert before in entries(cache) and len(entries(cache)) == 2


def test_a_cpu_is_described_by_each_kind_of_its_cores_once(tmp_path: Path, monkeypatch):
    """Nothing is packed for a CPU whose description is missing or lacks its features."""
    monkeypatch.setattr(packing, "CPU_INFO", tmp_path / "cpuinfo")
    assert packing.describe_cpu() is None and packing.weight_key("0", "1", EXACT) is None
    big, little = (f"CPU part\t: {part}\nFeatures\t: fp asimd\n\n" for part in ("0xd0b", "0xd05"))
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 50.00\n" + little + big + little)
    assert packing.describe_cpu() == "CPU part: 0xd05\nFeatures: fp asimd\nCPU part: 0xd0b\n"
    (tmp_path / "cpuinfo").write_text("CPU part\t: 0xd0b\n")
    assert packing.describe_cpu() is None


def damage(path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["removed", "truncated", "changed"])
@pytest.mark.parametrize("name", [NOTE_FILE, GRAPH_FILE, WEIGHTS_FILE])
def test_a_damaged_entry_is_made_again(tiny_bundle: Path, cache: Path, caplog, name: str, how: str):
    expected = logits(verified(tiny_bundle))
    logits(tiny_bundle)  # stores the hashes of the entry's files
    [entry] = cache.iterdir()
    damage(entry / name, how)
    caplog.clear()
    assert equal(expected, logits(tiny_bundle))
    assert logged(caplog)[-2:] == ["packed", "mapped"]
    assert equal(expected, logits(tiny_bundle)) and logged(caplog) == ["mapped"]


def test_wrong_weights_are_never_used_nor_packed_again(
    tiny_bundle: Path, cache: Path, caplog, monkeypatch
):
    """As if ONNX Runtime wrote other packed weights than those it computes with."""
    expected = logits(verified(tiny_bundle), None)
    align = packing.align

    def align_and_double(model, data, graph_file, *rest):
        files = align(model, data, graph_file, *rest)
        weights = graph_file.parent / WEIGHTS_FILE
        (np.fromfile(weights, np.float32) * 2).tofile(weights)
        return files

    monkeypatch.setattr(packing, "align", align_and_double)
    assert equal(expected, logits(tiny_bundle))
    assert "computes other logits" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    [entry] = cache.iterdir()
    assert entries(entry) == [NOTE_FILE]
    monkeypatch.setattr(packing, "align", align)
    caplog.clear()
    assert equal(expected, logits(tiny_bundle))
    assert logged(caplog) == [
        "trunk.cpu.one.onnx: weights are not packed: the packed trunk computes other logits"
    ]


OPEN_BUNDLE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import logging
from test_packed_weights import logits
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
print("ready", flush=True)
sys.stdin.readline()
logits(Path(sys.argv[1]))
"""
KILL_ITSELF = """
import os, signal
from pass_runtime.backends.ort import packing
def stop(_path): os.kill(os.getpid(), signal.SIGKILL)
packing._sync = stop
"""


"""Put before OPEN_BUNDLE, this kills the process before an entry is complete."""


def start_process(bundle: Path, before: str = "") -> subprocess.Popen[str]:
    """Start a process that runs the code `before`, and opens the bundle once it reads a line."""
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    command = [sys.executable, "-c", before + OPEN_BUNDLE, str(bundle), *paths]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_of_several_processes_at_once_one_packs(tiny_bundle: Path, cache: Path):
    verified(tiny_bundle)
    processes = [start_process(tiny_bundle) for _ in range(3)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    output = "".join(process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert (output.count("were packed"), output.count("are mapped from")) == (1, 3), output
    assert len(entries(cache)) == 1


def test_what_a_killed_process_left_is_not_used(tiny_bundle: Path, cache: Path, caplog):
    process = start_process(verified(tiny_bundle), KILL_ITSELF)
    process.communicate("\n", timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert [name.rpartition(".")[2] for name in entries(cache)] == ["lock", "part"]
    assert equal(logits(tiny_bundle, None), logits(tiny_bundle))
    assert logged(caplog) == ["packed", "mapped"] and len(entries(cache)) == 1


def test_remains_of_killed_processes_are_removed(tiny_bundle: Path, cache: Path):
    remains = cache / f"{'0' * 32}.part"
    remains.mkdir(parents=True)
    (remains / WEIGHTS_FILE).write_bytes(b"1")
    with packed_weights._lock(remains.with_suffix(""), 0):  # as if a process were writing it
        logits(verified(tiny_bundle))
    assert remains.exists() and len(entries(cache)) == 2
    logits(tiny_bundle, slots=2)
    assert not remains.exists() and len(entries(cache)) == 2


def test_a_process_that_waited_too_long_uses_unpacked_weights(
    tiny_bundle: Path, cache: Path, caplog, monkeypatch
):
    logits(verified(tiny_bundle))
    [entry] = cache.iterdir()
    shutil.rmtree(entry)
    caplog.clear()
    monkeypatch.setattr(packed_weights, "LOCK_SECONDS", 0.1)
    with packed_weights._lock(entry, 0):
        assert equal(logits(tiny_bundle, None), logits(tiny_bundle))
    assert logged(caplog) == [
        "trunk.cpu.one.onnx: weights are not packed: another process is packing them"
    ]


def test_a_full_cache_loses_the_entry_that_was_unused_for_longest(tiny_bundle: Path, cache: Path):
    size = read_manifest(verified(tiny_bundle)).files["trunk.onnx.data"].bytes
    bounded = WeightCache(min_bytes=0, max_bytes=5 * size)  # for the new entry and two old ones
    for number in range(3):
        old = cache / f"old{number}"
        old.mkdir(parents=True)
        (old / NOTE_FILE).write_bytes(bytes(size))
        os.utime(old, (1e9 - number, 1e9 - number))
    logits(tiny_bundle, bounded)
    assert [name for name in entries(cache) if name.startswith("old")] == ["old0", "old1"]
    [entry] = set(entries(cache)) - {"old0", "old1"}
    os.utime(cache / entry, (1, 1))
    logits(tiny_bundle, bounded)  # uses the entry, which renews its time
    assert (cache / entry).stat().st_mtime > 1e9


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "they are only 0 MiB"),
        ({"min_bytes": 0, "max_bytes": 1000}, "more than the 0 MiB of the cache"),
    ],
    ids=["small", "too large"],
)
def test_weights_that_are_too_small_or_too_large_are_not_packed(
    tiny_bundle: Path, cache: Path, caplog, settings: dict, reason: str
):
    logits(verified(tiny_bundle), WeightCache(**settings))
    assert reason in caplog.text and not cache.exists()


def test_a_full_disk_leaves_no_entry(tiny_bundle: Path, cache: Path, caplog, monkeypatch):
    monkeypatch.setattr(packed_weights, "RESERVED_BYTES", 1 << 62)
    logits(verified(tiny_bundle))
    assert "too little room" in caplog.text and entries(cache) == []


@pytest.mark.parametrize("where", ["not a directory", "no home"])
def test_a_cache_that_cannot_be_written_is_no_error(
    tiny_bundle: Path, tmp_path: Path, caplog, monkeypatch, where: str
):
    verified(tiny_bundle)
    if where == "no home":

        def fail() -> Path:
            raise RuntimeError("no home")

        monkeypatch.setattr(packed_weights, "cache_directory", fail)
        logits(tiny_bundle)
    else:
        (tmp_path / "file").write_text("")
        logits(tiny_bundle, WeightCache(tmp_path / "file" / "packed", min_bytes=0))
    assert "are not packed" in caplog.text and len(caplog.records) == 1


def test_only_verified_files_are_packed(tiny_bundle: Path, tmp_path: Path, cache: Path, caplog):
    """Otherwise an entry could be used for a bundle with other weights."""
    bundle = linked(tiny_bundle, tmp_path)
    logits(bundle)
    assert "is not known yet" in caplog.text and not cache.exists()
    logits(verified(bundle))
    weights = bundle / "trunk.onnx.data"
    content = np.fromfile(weights, np.float32) * 2
    weights.unlink()
    content.tofile(weights)
    caplog.clear()
    assert equal(logits(bundle, None), logits(bundle))
    assert "the hash of trunk.onnx.data is not known yet" in caplog.text


@pytest.mark.parametrize("flags", [[], ["--no-weight-cache"]])
def test_a_flag_of_commands_turns_the_cache_off(tiny_bundle: Path, caplog, flags: list[str]):
    command = ["generate", str(tiny_bundle), "-p", "a", "--device", "cpu", *flags]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    # With the cache, one line says that these weights are too small to be packed.
    assert len(caplog.records) == (0 if flags else 1)


def test_a_parameter_of_triton_turns_the_cache_off():
    assert read_settings({"bundle": "b"}).load.weight_cache
    assert not read_settings({"bundle": "b", "weight_cache": "false"}).load.weight_cache


@pytest.mark.parametrize("weight_cache", [True, False])
def test_an_option_of_load_turns_the_cache_off(
    tiny_bundle: Path, cache: Path, monkeypatch, weight_cache: bool
):
    # By default, weights as small as these are not packed; here those of any size are.
    monkeypatch.setattr(WeightCache.__init__, "__defaults__", (None, 0, 16 << 30))
    verified(tiny_bundle)
    with load(tiny_bundle, "cpu", weight_cache=weight_cache) as session:
        assert session.generate("a").result().token_ids
    assert cache.exists() == weight_cache


PACK_ON_A_TERMINAL = """
import io, sys
class Terminal(io.StringIO):
    def isatty(self):
        return True
sys.stderr = Terminal()
from pass_runtime.backends.ort.packed_weights import PACKING, log
from pass_runtime.cli.flags import announce_packing
announce_packing()
announce_packing()
log.info("weights are mapped")
log.info(PACKING, "trunk.onnx")
print(sys.stderr.getvalue(), end="")
"""


def test_a_terminal_shows_once_why_the_first_opening_takes_longer():
    command = [sys.executable, "-c", PACK_ON_A_TERMINAL]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == packed_weights.PACKING % "trunk.onnx" + "\n"
