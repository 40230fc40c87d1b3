"""Two real ranks over gloo: spawned, joined, their results fetched; and scenes that they play."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.trainer.actor import PolicyActor, dump_state, parse_state
from tests.unit import training_fakes as fakes

RANKS = 2
DEADLINE = 240.0
Job = dict[str, Any]
Scenes = Callable[[int, Any, Path], Any]
"""What a rank does: its number, the job and the folder to what it found. A function of a module,
because it is sent."""


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(play: Scenes, job: Any, folder: Path) -> list[Any]:
    """What both ranks found; a rank that waits for ever fails the test and is ended."""
    context = mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
        _body, (free_port(), play, job, folder), nprocs=RANKS, join=False, start_method="spawn"
    )
    assert context is not None
    end = time.monotonic() + DEADLINE
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < end, f"the ranks hang: no end within {DEADLINE:g} s"
    finally:
        for process in context.processes:
            if process is not None and process.is_alive():
                process.kill()
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(RANKS)]


def _body(rank: int, port: int, play: Scenes, job: Any, folder: Path) -> None:
    """Body of a spawned rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    out = play(rank, job, folder)
    dist.barrier()
    (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(out))
    dist.destroy_process_group()


def scenes(actor: PolicyActor, job: Mapping[str, Any], games: list[ScoreRequest]) -> Job:
    """Update once for each plan, then score; ``job`` holds what the driver has planned.

    Args:
        games: All games; ``job["deal"]`` says which of them each rank scores.
    """
    out: Job = {"updates": [], "states": []}
    for step, plan in enumerate(job["plans"], start=1):
        out["updates"].append(actor.update(fakes.share(job["batch"], plan, actor.rank), step))
        out["states"].append(dump_state(actor.state()))
    out["scores"] = actor.score([games[i] for i in job["deal"][actor.rank]])
    return out


def resumed(actor: PolicyActor, state: bytes, job: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The state as it was loaded, and after the second update."""
    actor.load_state(parse_state(state))
    held = dump_state(actor.state())
    actor.update(fakes.share(job["batch"], job["plans"][1], actor.rank), 2)
    return held, dump_state(actor.state())


def assert_close(got: Any, want: Any, atol: float = 2e-5, where: str = "") -> None:
    """Equal but for the rounding of float32 sums, all through a state."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key, value in want.items():
            assert_close(got[key], value, atol, f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for index, value in enumerate(want):
            assert_close(got[index], value, atol, f"{where}.{index}")
    elif hasattr(want, "shape"):
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), atol=atol, rtol=1e-3, err_msg=where
        )
    else:
        assert got == want, where
