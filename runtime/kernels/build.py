"""Builds libpass_kernels.so, the operators of the CPU's trunk, unless it is up to date. hatchling
runs this file, too, so that a wheel has the library (pyproject.toml). CXX names a compiler, and
CXXFLAGS adds flags; with PASS_KERNELS=off a package is made without the library.

    python runtime/kernels/build.py [--output FILE] [--sanitize address,undefined]

Exit status: 1 if the sources do not compile, 2 if there is no compiler."""

from __future__ import annotations

import argparse
import hashlib
import operator
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # it runs as a program
    BuildHookInterface = object

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER.parent / "pass_runtime/libpass_kernels.so"
COMPILERS = "g++", "c++", "clang++"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno"]
# The code says where products and sums are fused: else bits would depend on the variant.
FLAGS += ["-ffp-contract=off"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
X86 = {"avx2": AVX2, "avxvnni": ["-mavxvnni", *AVX2], "avx512": AVX512 + AVX2}
"""Files for sets of instructions, and their flags."""
BUILD = """extern "C" {
__attribute__((visibility("default"), used)) extern const char pass_kernels_build[];
const char pass_kernels_build[] = "%s";
}
"""


class BuildError(Exception):
    """status: the program's exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def build(output: Path = LIBRARY, sanitize: str = "") -> None:
    """Build unless the library is from these sources, compiler and flags. Raises BuildError and
    OSError; a library that is there stays."""
    compiler = find_compiler()
    is_x86 = run([*compiler, "-dumpmachine"]).startswith("x86_64")
    flags = [*FLAGS, *(["-DPASS_X86"] if is_x86 else [])]
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1"]
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    sources = [path for path in sorted(FOLDER.glob("*.cpp")) if is_x86 or path.stem not in X86]
    commands = [
        [*compiler, *flags, *X86.get(path.stem, []), *extra, "-c", path.name] for path in sources
    ]
    digest = hashlib.sha256(repr(commands).encode())
    for path in [*sources, *sorted(FOLDER.glob("*.h")), Path(__file__)]:
        digest.update(path.read_bytes())
    made_of = digest.hexdigest()
    if output.is_file() and made_of.encode() in output.read_bytes():
        return
    print(f"building {output.name} with {compiler[0]}", file=sys.stderr)
    beside = output.absolute().with_name(f"{output.name}.{os.getpid()}")
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [f"{directory}/{path.stem}.o" for path in sources]
        outputs = [["-o", path] for path in objects]
        list(pool.map(run, map(operator.add, commands, outputs)))
        link = [*compiler, *flags, *extra, "-shared", "-o", str(beside), *objects, "-x", "c++", "-"]
        try:
            run(link, BUILD % made_of)
            beside.replace(output)
        finally:
            beside.unlink(missing_ok=True)


def find_compiler() -> list[str]:
    """$CXX, or the first compiler that there is."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    missing = named[0] if named else "C++ compiler"
    raise BuildError(f"there is no {missing}; install g++, or name a compiler: CXX=...", 2)


def run(command: list[str], text: str = "") -> str:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, cwd=FOLDER
    )
    if done.returncode:
        raise BuildError(f"this failed: {shlex.join(command)}\n{done.stderr.rstrip()}")
    return done.stdout


def platform_tag(library: Path) -> str:
    """Return a wheel's platform: manylinux_2_28 as ONNX Runtime's, or what newer glibc symbols
    need; linux where manylinux allows no such library."""
    from packaging.tags import platform_tags

    platform = next(tag for tag in platform_tags() if "manylinux" not in tag and "musl" not in tag)
    content = library.read_bytes()
    glibc, libstdcxx, abi = (
        max(map(int, re.findall(name + rb"\.(\d+)", content)), default=0)
        for name in (rb"GLIBC_2", rb"GLIBCXX_3\.4", rb"CXXABI_1\.3")
    )
    if not glibc or libstdcxx > 24 or abi > 11 or b"libc++.so" in content:
        return platform
    return platform.replace("linux", f"manylinux_2_{max(28, glibc)}")


class KernelsHook(BuildHookInterface):
    """Without a compiler the wheel is pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("PASS_KERNELS") == "off":
            return
        try:
            build()
        except (BuildError, OSError) as error:
            self.app.display_warning(f"{error}\nwarning: the package is made without CPU kernels")
            return
        if version == "standard":  # an editable installation uses the library where it is
            build_data["force_include"][str(LIBRARY)] = f"pass_runtime/{LIBRARY.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(LIBRARY)}"


def main() -> int:
    usage = argparse.ArgumentParser(description="Builds the CPU kernels, unless up to date.")
    usage.add_argument("--output", type=Path, default=LIBRARY, metavar="FILE")
    usage.add_argument("--sanitize", default="", metavar="LIST", help="such as address,undefined")
    arguments = usage.parse_args()
    try:
        build(arguments.output, arguments.sanitize)
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "status", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
