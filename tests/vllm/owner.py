"""A process that owns an engine; it writes the ids of its children, then does as it is told.

``wait`` waits to be killed, ``wait_wide`` too, with an engine over two workers. ``lose`` lets two
games wait, kills the engine's process and writes what the games were told.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import tiny

from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.engines.vllm_engine import VllmEngine


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def engine_pids(pid: int) -> list[int]:
    """All that descends from a process, but Python's own helpers, which end by themselves."""
    names = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children(pid)}
    own = [child for child, name in names.items() if "resource_tracker" not in name]
    return [pid for child in own for pid in (child, *engine_pids(child))]


def all_gone(pids: list[int], seconds: float) -> bool:
    """Whether the processes end within the time; one that waits to be reaped has ended."""

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except FileNotFoundError:
            return False

    until = time.monotonic() + seconds
    while any(lives(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


async def main(folder: str, task: str) -> None:
    wide = {"tensor_parallel_size": 2} if task == "wait_wide" else {}
    engine = await VllmEngine.start({"model": folder, **tiny.ARGUMENTS, **wide})
    pids = engine_pids(os.getpid())
    print(json.dumps({"pids": pids}), flush=True)
    if task != "lose":
        await asyncio.sleep(600)
    asked = [
        tiny.request(name, tiny.prompt(0, 6), max_tokens=110, stop_token_ids=()) for name in "ab"
    ]
    games = [asyncio.ensure_future(engine.generate(request)) for request in asked]
    await asyncio.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)
    done = await asyncio.wait_for(asyncio.gather(*games, return_exceptions=True), 60)
    told = [type(answer).__name__ for answer in done]
    late = await asyncio.gather(engine.generate(asked[0]), return_exceptions=True)
    facts = {
        "told": told,
        "late": isinstance(late[0], EngineFailure),
        "alive": engine.health().alive,
    }
    print(json.dumps(facts), flush=True)
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
