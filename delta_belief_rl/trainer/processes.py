"""Processes that prepare data beside a training."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
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
