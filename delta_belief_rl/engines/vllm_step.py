"""A vLLM engine behind the protocol of stepping engines, for callers without an event loop.

The doctor compares engines through one protocol. A step here waits for all of its requests: vLLM
batches them by itself, and nobody else asks meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.engines.base import (
    AdapterState,
    Completion,
    EngineHealth,
    GenRequest,
    TailRequest,
)
from delta_belief_rl.engines.own_loop import OwnLoop

if TYPE_CHECKING:
    from delta_belief_rl.engines.vllm_engine import VllmEngine


class VllmStepEngine:
    """One vLLM engine as a ``BranchStepEngine``; the constructor waits until it is ready.

    Args:
        start: Starts the engine; see ``VllmEngine.start``, whose errors are raised here.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, VllmEngine]]) -> None:
        self._loop = OwnLoop("vllm-step")
        self._engine = self._loop.begin(start())

    def step(self, new: Sequence[GenRequest]) -> list[Completion]:
        """All completions, in the order of the requests; raises as ``VllmEngine.generate``."""
        return self._loop.wait(self._engine.generate_all(new))

    def release(self, sessions: Sequence[str]) -> None:
        """Forget games."""
        for session in sessions:
            self._loop.wait(self._engine.release(session))

    def load_adapter(self, state: AdapterState, version: int) -> None:
        """See ``VllmEngine.load_adapter``."""
        self._loop.wait(self._engine.load_adapter(state, version))

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """See ``VllmEngine.score``."""
        return self._loop.wait(self._engine.score(token_ids))

    def score_tails(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """See ``VllmEngine.score_all``: every text is run as a whole, whatever is cached."""
        return self._loop.wait(self._engine.score_all(requests))

    def health(self) -> EngineHealth:
        """What the engine says of itself."""
        return self._engine.health()

    def close(self) -> None:
        """End the engine and its thread; a second call does nothing."""
        if self._loop.closed:
            return
        self._loop.wait(self._engine.shutdown())
        self._loop.close()
