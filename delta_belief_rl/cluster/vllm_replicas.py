"""The policy engine on vLLM as a Ray actor; ``remote_engine`` is how the rollout reaches it.

A replica is asynchronous all the way: every game waits for its own request, and vLLM batches what
is there. vLLM itself is imported in the actor's process only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from delta_belief_rl.cluster.members import Present, remote_worker
from delta_belief_rl.cluster.remote_engine import Outbox
from delta_belief_rl.cluster.workers import SyncReport
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import (
    AdapterState,
    Completion,
    EngineHealth,
    GenRequest,
    TailRequest,
)
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.models.adapters import state_checksum
from delta_belief_rl.trainer.vllm_policy import start_vllm

MOST_CALLS = 8192
"""Calls that one replica holds at a time; a game has one, and its release another."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What a replica needs to know.

    Attributes:
        cfg: The configuration, with whole paths.
        device: Where it runs, ``cpu`` or ``cuda``.
    """

    cfg: RunConfig
    device: str


@remote_worker(max_concurrency=MOST_CALLS)
class VllmEngineWorker(Present):
    """One replica; the first call that needs the engine starts it."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._starting = asyncio.Lock()
        self._started: Any = None
        self._outbox: Outbox[Completion] = Outbox()

    async def _engine(self) -> Any:
        async with self._starting:
            if self._started is None:
                self._started = await start_vllm(self._settings.cfg, self._settings.device)
        return self._started

    async def submit(self, numbered: list[tuple[int, GenRequest]]) -> None:
        """Take requests over; ``collect`` hands their completions out by the same numbers."""
        engine = await self._engine()
        for number, request in numbered:
            self._outbox.add(number, engine.generate(request))

    async def collect(self) -> list[tuple[int, Completion | EngineFailure]]:
        """What has finished since the last call, at least one request's end."""
        return await self._outbox.collect()

    async def generate_all(self, requests: list[GenRequest]) -> list[Completion]:
        """The completions of one game's requests, in their order."""
        return await (await self._engine()).generate_all(requests)

    async def score_all(self, requests: list[TailRequest]) -> list[np.ndarray]:
        """Log-probs of the last tokens of some texts."""
        return await (await self._engine()).score_all(requests)

    async def release(self, session: str) -> None:
        """Forget a game."""
        await (await self._engine()).release(session)

    async def sync(self, state: AdapterState, version: int, probe_ids: Sequence[int]) -> SyncReport:
        """Take over an adapter and say what arrived: version, checksum of the bytes, probe."""
        engine = await self._engine()
        await engine.load_adapter(state, version)
        (probe,) = await engine.score([tuple(probe_ids)])
        held = engine.health().adapter_version
        return SyncReport(held, state_checksum(state), np.asarray(probe[1:]))

    async def sleep(self) -> str:
        """Give the GPU's memory back; returns the state that the engine is in."""
        engine = await self._engine()
        await engine.sleep()
        return engine.health().state

    async def wake(self) -> None:
        """Take the GPU's memory again."""
        await (await self._engine()).wake()

    async def health(self) -> EngineHealth:
        """What the engine says of itself."""
        return (await self._engine()).health()

    async def memory(self) -> list[dict[str, int]]:
        """Bytes that each worker of the engine holds."""
        return await (await self._engine()).memory()
