"""A policy engine on vLLM beside plain PyTorch with the same adapter, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import tiny

from delta_belief_rl.engines.base import Completion
from delta_belief_rl.engines.vllm_engine import VllmEngine

BOUND = 1e-3
PATIENCE = 840
"""Seconds, below the limit of a test; an engine takes a minute to start where nothing else runs."""


class Held:
    """One engine on an event loop of its own, for tests that are not asynchronous."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        arguments = {"model": str(folder), **tiny.ARGUMENTS, **more}
        self.engine: VllmEngine = self(VllmEngine.start(arguments, lora=tiny.LORA))
        self.reference = tiny.Reference(folder)

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def load(self, seed: int, version: int) -> dict[str, np.ndarray]:
        state = self.reference.adapter(seed)
        self(self.engine.load_adapter(state, version))
        return state

    def play(self, *requests: Any) -> list[Completion]:
        return self(self.engine.generate_all(requests))

    def close(self) -> None:
        self(self.engine.shutdown())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def gap(
    held: Held, state: Any, ids: tuple[int, ...], answer: Completion, heat: float = 1.0
) -> float:
    """Largest difference of the sampled log-probs to plain PyTorch, in nats."""
    expected = held.reference.logprobs(state, (*ids, *answer.token_ids), heat)[len(ids) - 1 :]
    return float(np.max(np.abs(expected - np.array(answer.logprobs))))
