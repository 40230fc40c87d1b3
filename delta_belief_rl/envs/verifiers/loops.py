"""The event loop that the environments of a process run on.

Environments of ``verifiers`` are coroutines that may share locks and clients, so all of a process
run on one loop. It has a thread of its own, because who plays a game may itself be inside a loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long a loop that is late may take to say that it still runs."""


class LoopThread:
    """An event loop in a thread that ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.process = os.getpid()
        self.stuck = False
        Thread(target=self.loop.run_forever, name="verifiers", daemon=True).start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of a coroutine that watches the time itself.

        Raises:
            TimeoutError: It is still not there ``GRACE_SECONDS`` after the time is over: the loop
                is blocked, and is given up.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        done, _ = wait([future], timeout_s + GRACE_SECONDS)
        if not done:
            # Code that does not await holds the thread; nothing can take it away from there.
            self.stuck = True
            future.cancel()
            raise TimeoutError
        return future.result()


_lock = Lock()
_threads: list[LoopThread] = []


def loop_thread() -> LoopThread:
    """The process's loop; another one after it was blocked or in a forked process."""
    with _lock:
        if not _threads or _threads[-1].stuck or _threads[-1].process != os.getpid():
            _threads[:] = [LoopThread()]
        return _threads[-1]


def attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What foreign code returns, or what it raises, whatever that is."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        error = future.exception()
        return (future.result(), None) if error is None else (None, error)
