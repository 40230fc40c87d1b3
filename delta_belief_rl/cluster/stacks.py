"""Stacks of a run's processes on SIGUSR1 to its driver; the run goes on.

Each worker of the driver's machine leaves a file in a folder of the run, from the moment at which
it can answer the signal, and writes its stacks into it. The driver's handler asks all of them and
puts what they wrote into one file beside the run's other logs. Workers of other machines or of a
Ray that somebody else has started, and processes that a worker itself has started, cannot be asked.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from delta_belief_rl.cluster.reaper import look_up
from delta_belief_rl.obs.exits import on_sigusr1

FOLDER = "DELTA_BELIEF_STACKS"
"""Environment variable with the folder that workers write into."""

WAIT = 2.0
"""Seconds that workers have to write; they need no Python for it."""

_open: list[Any] = []
"""The file that this process writes into; it must stay open."""


def answer_as_worker(kind: str) -> None:
    """From now on SIGUSR1 makes this process write its stacks; outside of a run nothing happens.

    Args:
        kind: What the process is, for the reader.
    """
    folder, process = os.environ.get(FOLDER), look_up(os.getpid())
    if folder is None or process is None or _open or not Path(folder).is_dir():
        return
    path = Path(folder) / f"{kind}-{os.getpid()}-{process.born}"
    hidden = path.with_name(f".{path.name}")
    _open.append(hidden.open("ab", buffering=0))
    faulthandler.register(signal.SIGUSR1, file=_open[0], all_threads=True)
    # Who finds the file sends the signal, which would end a process that does not know it.
    hidden.rename(path)


def dump_on_signal(logs: Path) -> None:
    """From now on SIGUSR1 writes ``stacks-<time>.txt`` into a folder; call it in the main thread.

    Args:
        logs: Made when it is needed.
    """

    def dump() -> None:
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"== driver, process {os.getpid()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        # Waiting in the handler would stop the run meanwhile.
        threading.Thread(target=collect, args=(path,), daemon=True).start()

    on_sigusr1(dump)


def collect(path: Path) -> int:
    """Ask the workers for their stacks and append them to a file; returns how many answered."""
    folder = os.environ.get(FOLDER)
    files = sorted(Path(folder).glob("[!.]*")) if folder else []
    before = {file: file.stat().st_size for file in files}
    for file in files:
        _, pid, born = file.name.rsplit("-", 2)
        process = look_up(int(pid))
        if process is not None and process.born == int(born):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGUSR1)
    if files:
        time.sleep(WAIT)
    answers = 0
    with path.open("a", encoding="utf-8") as out:
        for file, size in before.items():
            kind, pid, _ = file.name.rsplit("-", 2)
            text = file.read_bytes()[size:].decode(errors="replace")
            answers += bool(text)
            out.write(f"\n== {kind}, process {pid}\n{text or 'no answer'}\n")
    print(f"stacks of the driver and of {answers} workers: {path}", file=sys.stderr)
    return answers
