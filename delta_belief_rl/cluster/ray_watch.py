"""A look at Ray itself while a run goes on.

A raylet that dies takes the object store of its machine along, and whoever waits for a large answer
waits for ever. So a thread asks the head of Ray for this machine, and tells when it is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

LOOK_SECONDS = 5.0
"""Between two looks. The head itself notices a raylet that was killed within about a second, and
one that does not answer within about 30."""


class RayLost(RuntimeError):
    """Ray does no longer work on this machine."""


@contextmanager
def watched(
    on_lost: Callable[[BaseException], None], seconds: float = LOOK_SECONDS
) -> Iterator[None]:
    """Tell ``on_lost`` once, from another thread, when Ray's process of this machine is gone.

    Args:
        on_lost: Given a ``RayLost``.
        seconds: Between two looks.
    """
    node = ray.get_runtime_context().get_node_id()
    over = threading.Event()

    def look() -> None:
        while not over.wait(seconds):
            if (why := _why_lost(node)) and not over.is_set():
                on_lost(RayLost(f"{why}: the last checkpoint is as it was; start the run again."))
                return

    thread = threading.Thread(target=look, name="ray watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _why_lost(node: str) -> str:
    """Empty while the machine is part of the cluster."""
    try:
        nodes = ray.nodes()
    except (RayError, RuntimeError, OSError) as error:
        return f"The head of Ray does not answer ({' '.join(str(error).split())[:160]})"
    alive = any(found["NodeID"] == node and found["Alive"] for found in nodes)
    return "" if alive else "Ray's own process on this machine (the raylet) is gone"
