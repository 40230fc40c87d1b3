"""A run is played by one process at a time: a second start of it is refused."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from delta_belief_rl.types import UserError

_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""What file systems say that cannot lock a folder, some network ones among them."""


@contextmanager
def sole_start(root: Path) -> Iterator[None]:
    """Hold a run's checkpoints for the length of the block.

    The kernel gives the lock back when its holder dies in whatever way, and no file stands for it,
    so nothing is ever left to clear away. Where the file system has no locks there is none.

    Args:
        root: ``trainer.default_local_dir``; made where it is missing.

    Raises:
        UserError: Another process plays this run.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another process is playing the run in {root}: wait for its end, end it, or set "
                "another trainer.experiment_name."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        # A start that was refused before it began leaves no empty folder.
        with suppress(OSError):
            root.rmdir()
        os.close(folder)
