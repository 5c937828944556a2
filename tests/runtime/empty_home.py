from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTING = "ORT_DISABLE_TELEMETRY"
"""What turns ONNX Runtime's telemetry off if it is 1."""


class Home:
    """Nothing in its environment turns telemetry off, as CI does. lookups: a file of the names
    that processes look up (no_network.c), if `library`."""

    def __init__(self, directory: Path, library: Path | None = None) -> None:
        self.path, self.lookups = directory / "home", directory / "lookups"
        self.path.mkdir(parents=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.path),
            "PASS_CACHE": str(directory / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **({"LD_PRELOAD": str(library), "LOOKUPS": str(self.lookups)} if library else {}),
        }

    @property
    def content(self) -> list[Path]:
        return [*self.path.rglob("*")]

    def start(self, command: Sequence[object], **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*map(str, command)],
            env=self.environment | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stderr_of(self, command: Sequence[object], **environment: str) -> str:
        process = self.start(command, **environment)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        return errors
