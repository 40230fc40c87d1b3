"""One write to the disk at a time, beside the training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Background:
    """Does one thing in a thread while the run goes on.

    A failure is raised at the next call of ``check``, ``finish`` or ``start``. The event loop does
    not close before the thread has ended, so no exit of a run leaves a write behind.
    """

    def __init__(self) -> None:
        self._work: asyncio.Future[None] | None = None

    async def start(self, work: Callable[[], None]) -> None:
        """Begin something, once what was begun before has ended."""
        await self.finish()
        self._work = asyncio.get_running_loop().run_in_executor(None, work)
        # A run that ends for another reason does not ask what came of it.
        self._work.add_done_callback(_look)

    def check(self) -> None:
        """Raise what went wrong, as far as it has ended."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.result()

    async def finish(self) -> None:
        """Wait for what was begun, and raise what went wrong."""
        if self._work is not None:
            # Who waits may be cancelled; what is waited for goes on, and is waited for again.
            await asyncio.wait([self._work])
        self.check()


def _look(work: asyncio.Future[None]) -> None:
    if not work.cancelled():
        work.exception()
