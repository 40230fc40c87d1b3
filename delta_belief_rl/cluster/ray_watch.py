"""A look at Ray itself while a run goes on.

A raylet that dies takes the object store of its machine along, and whoever waits for a large answer
waits for ever. So a thread asks the head of Ray for the machines of the run, and tells when one is
gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from delta_belief_rl.cluster.machines import Machine

LOOK_SECONDS = 5.0
"""Between two looks. The head itself notices a raylet that was killed within about a second, and
one that does not answer within about 30."""


class RayLost(RuntimeError):
    """Ray does no longer work on a machine of the run."""


@contextmanager
def watched(
    on_lost: Callable[[BaseException], None],
    machines: Sequence[Machine] = (),
    seconds: float = LOOK_SECONDS,
) -> Iterator[None]:
    """Tell ``on_lost`` once, from another thread, when Ray's process of a machine is gone.

    Args:
        on_lost: Given a ``RayLost``.
        machines: Of the run, beside this one.
        seconds: Between two looks.
    """
    held = {machine.node: f"{machine} is gone" for machine in machines}
    own = ray.get_runtime_context().get_node_id()
    held[own] = "Ray's own process on this machine (the raylet) is gone"
    over = threading.Event()

    def look() -> None:
        while not over.wait(seconds):
            if (why := _why_lost(held)) and not over.is_set():
                on_lost(RayLost(f"{why}: the last checkpoint is as it was; start the run again."))
                return

    thread = threading.Thread(target=look, name="ray watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _why_lost(held: Mapping[str, str]) -> str:
    """Empty while all machines, by the ids of their nodes, are part of the cluster."""
    try:
        nodes = ray.nodes()
    except (RayError, RuntimeError, OSError) as error:
        return f"The head of Ray does not answer ({' '.join(str(error).split())[:160]})"
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    return next((words for node, words in held.items() if node not in alive), "")
