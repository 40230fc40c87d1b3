"""Starting and stopping Ray: private by default, with a short scratch path."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.types import UserError

SOCKET_PATH_LIMIT = 107
"""Longest path of a Unix socket on Linux, in bytes."""

_LONGEST_SOCKET = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")


@contextmanager
def ray_session(settings: RayInit, num_cpus: int, num_gpus: int) -> Iterator[None]:
    """A Ray instance for the length of the block.

    Args:
        settings: ``address="local"`` starts a private instance in a private folder, which is
            removed afterwards; any other address joins a running cluster and leaves it running.
        num_cpus: Logical CPUs of a private instance.
        num_gpus: GPUs of a private instance.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray lowers the priority of its workers by default; here they do all of the work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if settings.address != "local":
        ray.init(address=settings.address, log_to_driver=True, logging_level=logging.WARNING)
        try:
            yield
        finally:
            ray.shutdown()
        return
    folder, private = _scratch(settings.temp_dir)
    try:
        ray.init(
            address="local",
            num_cpus=settings.num_cpus or num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
        yield
    finally:
        ray.shutdown()
        if private:
            shutil.rmtree(folder, ignore_errors=True)


def _scratch(wanted: str | None) -> tuple[Path, bool]:
    """The scratch folder, and whether it is ours to remove."""
    if wanted is not None:
        folder = Path(wanted).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        private = False
    else:
        folder, private = Path(tempfile.mkdtemp(prefix="dbrl-")), True
    if len(str(folder)) + _LONGEST_SOCKET > SOCKET_PATH_LIMIT:
        raise UserError(
            f"Ray's scratch folder {str(folder)!r} is too long for a socket path: set "
            "ray_init.temp_dir to a short one such as /tmp/ray-me."
        )
    return folder, private
