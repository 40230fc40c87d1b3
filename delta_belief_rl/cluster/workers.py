"""The Ray actors of the policy: a training rank, an engine replica.

Each class only translates between Ray and the room that does the work; it has no logic of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.cluster.members import Present, remote_worker
from delta_belief_rl.cluster.ranks import (
    join_ranks,
    meeting_point,
    stack_after,
    write_errors_to,
)
from delta_belief_rl.engines.base import (
    AdapterState,
    Completion,
    EngineHealth,
    GenRequest,
    TailRequest,
)
from delta_belief_rl.models.loading import state_checksum
from delta_belief_rl.trainer.actor import (
    ActorSettings,
    AdapterSnapshot,
    GameScore,
    PolicyActor,
    dump_state,
    parse_state,
)
from delta_belief_rl.trainer.denoiser_actor import DenoiserActor
from delta_belief_rl.trainer.policy_engine import EngineSettings
from delta_belief_rl.trainer.policy_kinds import build_actor, build_engine
from delta_belief_rl.trainer.usage import RankUsage
from delta_belief_rl.types import TrainBatch


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a replica says after it took over an adapter."""

    version: int
    checksum: str
    probe: np.ndarray


def worker_env(num_threads: int | None) -> dict[str, str]:
    """Environment of a worker process.

    The malloc thresholds keep freed memory in the process: on CPU every forward pass allocates and
    frees the same large blocks, and giving them back to the system each time costs page faults.
    """
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        # Ray runs the methods in a thread, whose own arena would hold blocks of 64 MiB at most.
        "MALLOC_ARENA_MAX": "1",
    }
    if num_threads:
        env |= {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    return env


@remote_worker()
class ActorWorker(Present):
    """One training rank."""

    def __init__(self, settings: ActorSettings, rank: int, world_size: int) -> None:
        self._settings, self._rank, self._world_size = settings, rank, world_size
        self._actor: PolicyActor | DenoiserActor | None = None
        self._meeting: TCPStore | None = None
        self._patience = math.inf

    def address(self) -> tuple[str, int]:
        """Host and port where the ranks meet; rank 0 listens there from now on."""
        host = ray.util.get_node_ip_address()
        if self._world_size == 1:
            return host, 0
        self._meeting = meeting_point(host)
        return host, self._meeting.port

    def setup(self, host: str, port: int, timeout: float, log: Path | None = None) -> None:
        """Join the other ranks, then load the model.

        Args:
            host: Of rank 0.
            port: Of rank 0.
            timeout: Seconds that a collective may take.
            log: File for what this process says on stderr.
        """
        if self._world_size > 1:
            if log is not None:
                write_errors_to(log)
            address = (host, port)
            device, store = self._settings.device, self._meeting
            join_ranks(device, self._rank, self._world_size, address, timeout, store)
            self._patience = timeout
        self._actor = build_actor(self._settings, self._rank, self._world_size)

    @property
    def actor(self) -> PolicyActor | DenoiserActor:
        """The rank's policy, there after ``setup``."""
        assert self._actor is not None, "setup() comes first"
        return self._actor

    def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        """Log-probs and beliefs of this rank's games, perhaps of none."""
        with stack_after(self._patience):
            scores = self.actor.score(games)
        self._give_back()
        return scores

    def update(
        self,
        steps: Sequence[tuple[Sequence[TrainBatch | None], Mapping[str, float]]],
        training_step: int,
    ) -> dict[str, tuple[float, float]]:
        """Run this rank's part of an update plan; metrics are (sum, count) pairs."""
        with stack_after(self._patience):
            metrics = self.actor.update(steps, training_step)
        self._give_back()
        return metrics

    def _give_back(self) -> None:
        """Hand what PyTorch keeps for later back to the GPU: a sleeping engine needs it."""
        if self._settings.device != "cpu":
            torch.cuda.empty_cache()

    def usage(self) -> RankUsage:
        """Time, operations and memory since the last call."""
        return self.actor.usage()

    def snapshot(self) -> AdapterSnapshot:
        """The adapter as it stands."""
        return self.actor.snapshot()

    def probe(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probs of a fixed sequence, without its first token."""
        return self.actor.probe(token_ids)

    def dump(self) -> bytes:
        """The state for a checkpoint, of rank 0; the others only help to gather it."""
        state = self.actor.state()
        return dump_state(state) if self._rank == 0 else b""

    def load(self, data: bytes) -> str:
        """Take over a saved state; returns the checksum of the adapter that is now in place."""
        self.actor.load_state(parse_state(data))
        return self.actor.snapshot().checksum


@remote_worker()
class EngineWorker(Present):
    """One replica of the policy engine."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = build_engine(settings)

    def step(self, new: list[GenRequest]) -> list[Completion]:
        """Add requests and run until enough have finished."""
        return self._engine.step(new)

    def score_tails(self, requests: list[TailRequest]) -> list[np.ndarray]:
        """Log-probs of the last tokens of some texts."""
        return self._engine.score_tails(requests)

    def release(self, sessions: list[str]) -> None:
        """Forget games."""
        self._engine.release(sessions)

    def sync(self, state: AdapterState, version: int, probe_ids: Sequence[int]) -> SyncReport:
        """Take over an adapter and say what arrived: version, checksum of the bytes, probe."""
        self._engine.load_adapter(state, version)
        probe = self._engine.score([tuple(probe_ids)])[0]
        held = self._engine.health().adapter_version
        return SyncReport(held, state_checksum(state), np.asarray(probe[1:]))

    def health(self) -> EngineHealth:
        """What the engine says of itself."""
        return self._engine.health()
