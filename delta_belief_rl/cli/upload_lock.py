"""At most one upload of a run at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from delta_belief_rl.trainer.checkpoint import STEP_FOLDER
from delta_belief_rl.types import UserError

LOCK_FILE = ".upload.lock"


@contextmanager
def upload_lock(run_dir: Path, root: Path) -> Iterator[None]:
    """Hold the run's lock in the block; clear the leases of an upload that was killed.

    The kernel gives the lock back when its holder dies, whatever is left in the file, so a stale
    file never stops anybody. The file holds the holder's process id and machine.

    Args:
        run_dir: Where the lock file lies.
        root: The run's checkpoints.

    Raises:
        UserError: Another upload of this run is going on.
    """
    path = run_dir / LOCK_FILE
    with _open_locked(path) as file:
        _clear_leases(root, file.read().decode(errors="replace").split())
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
        file.flush()
        try:
            yield
        finally:
            # While it is still held: nobody can have locked this file, and a new one is as good.
            path.unlink(missing_ok=True)


def _open_locked(path: Path) -> BinaryIO:
    while True:
        file = path.open("a+b")
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = file.read().decode(errors="replace").split()
            file.close()
            who = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another process"
            raise UserError(
                f"An upload of {path.parent} is going on ({who}): wait for it, or end it."
            ) from error
        # The holder before may have removed the file between our opening and our locking it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _clear_leases(root: Path, holder: list[str]) -> None:
    """Remove the leases of a dead holder, which would keep its checkpoints for hours."""
    if len(holder) != 2 or not root.is_dir():
        return
    for folder in root.iterdir():
        if STEP_FOLDER.match(folder.name):
            (folder / f".lease-{holder[0]}").unlink(missing_ok=True)
