"""Processes that prepare data beside a training."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext


def data_processes(modules: Sequence[str]) -> BaseContext:
    """How such processes are started: forked from a small server that has done their imports.

    The server has no threads and no GPU, so nothing that a fork would break exists in it. Processes
    that are started anew would each import PyTorch and its company, which takes a minute where the
    disk is cold.

    Args:
        modules: What the processes need; imported once, in the server.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    return context


def end_with_parent() -> None:
    """From now on this process ends when the one that wanted it is gone; call it in the process.

    A pool's process waits for work on a pipe that it holds open itself, so it would wait for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process of multiprocessing has a parent to outlive"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
