"""Several machines of one start, all of them this one, each with a Ray and a scratch folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.processes import mentioning
from tests.runs import ROOT

NODE = (sys.executable, "-m", "delta_belief_rl.cli.main", "node")
SECONDS = 600.0
"""Longest that anything may take on a busy machine."""


def until(happened: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@dataclass
class Machine:
    """One rank.

    Attributes:
        scratch: Folder of everything temporary; its path is in the environment of all that it has.
        output: What it printed, once it is over.
    """

    process: subprocess.Popen[str]
    scratch: Path
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def end(self) -> int:
        """Wait for its end; its status."""
        return self.process.wait(SECONDS)

    def holds(self, pid: int) -> bool:
        """Whether a process belongs to this machine."""
        return pid in mentioning(str(self.scratch))

    def is_clear(self) -> bool:
        """Whether no process and no file is left."""
        return mentioning(str(self.scratch)) == [] and list(self.scratch.iterdir()) == []


@contextmanager
def machines(folder: Path) -> Iterator[Callable[..., Machine]]:
    """Starts ranks: ``start(rank, nodes, command, *options)``; ends those that are left."""
    started: list[Machine] = []

    def start(rank: int, nodes: int, command: Sequence[str], *options: str) -> Machine:
        # Short, because Ray's sockets lie below it.
        scratch = Path(tempfile.mkdtemp(prefix="dm", dir="/tmp"))
        apart = ("SLURM", "RAY_", "CUDA_VISIBLE_DEVICES")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(apart)}
        log = folder / f"machine{len(started)}.log"
        words = ["--rank", str(rank), "--nodes", str(nodes), "--meet", str(folder / "meet")]
        with log.open("w") as file:
            process = subprocess.Popen(
                [*NODE, *words, *options, "--", *command],
                cwd=ROOT,
                env=kept | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        started.append(Machine(process, scratch, log))
        return started[-1]

    try:
        yield start
    finally:
        for machine in started:
            if machine.process.poll() is None:
                os.killpg(machine.process.pid, signal.SIGKILL)
                machine.process.wait()
        for machine in started:
            until(lambda machine=machine: mentioning(str(machine.scratch)) == [], 60)
            shutil.rmtree(machine.scratch, ignore_errors=True)
