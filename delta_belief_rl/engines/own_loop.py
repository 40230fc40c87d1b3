"""An event loop with a thread of its own, for callers that ask and wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnLoop:
    """Runs coroutines for any thread.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, or what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def begin(self, work: Coroutine[Any, Any, T]) -> T:
        """As ``wait``, for what the loop is there for: it ends when this fails."""
        done = False
        try:
            result = self.wait(work)
            done = True
        finally:
            if not done:
                self.close()
        return result

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._loop.is_closed()

    def close(self) -> None:
        """End loop and thread; a second call does nothing."""
        if self.closed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
