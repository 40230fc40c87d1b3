"""A scripted engine for tests: it says what it is told, and fails where it is told to.

``FakeEngine`` is both an asynchronous ``Engine`` (``generate``) and the callable that an
``EnginePump`` wants (``step``), so that the same script and the same faults serve either side.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.engines.base import Completion, FinishReason, GenRequest, TailRequest

Script = Callable[[GenRequest], "str | Sequence[int]"]
"""What to answer: text (encoded, then ended by the stop token) or the very token ids."""
TailScript = Callable[[TailRequest], Sequence[float]]
"""Log-prob in nats of each token of a tail."""


class FaultKind(StrEnum):
    """What goes wrong."""

    ERROR = "error"
    """The completion says that it failed."""
    STALL = "stall"
    """The answer comes ``seconds`` later."""
    VERSION = "version"
    """The completion carries another adapter version."""
    RAISE = "raise"
    """The call raises ``FakeEngineCrash``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, planned for one turn of one session."""

    kind: FaultKind
    seconds: float = 0.0
    version: int = -1
    message: str = "injected fault"


class FakeEngineCrash(RuntimeError):
    """What a ``RAISE`` fault raises."""


class FakeEngine:
    """Answers from a script.

    Args:
        script: Called once per request.
        encode: Turns scripted text into token ids.
        version: Adapter version stamped on completions.
        faults: Keyed by session and turn (0 for the first request of a session).
        logprob: Log-prob in nats reported for every token.
        tails: Called once per text to be scored; ``logprob`` for every token when None.

    Attributes:
        requests: Every request seen, in order.
        scored: Every text that was scored, in order.
        released: Every session released, in order.
    """

    def __init__(
        self,
        script: Script,
        encode: Callable[[str], Sequence[int]],
        *,
        version: int = 0,
        faults: Mapping[tuple[str, int], Fault] | None = None,
        logprob: float = -0.5,
        tails: TailScript | None = None,
    ) -> None:
        self.version = version
        self.requests: list[GenRequest] = []
        self.scored: list[TailRequest] = []
        self.released: list[str] = []
        self._script = script
        self._encode = encode
        self._faults = dict(faults or {})
        self._logprob = logprob
        self._tails = tails or (lambda request: [logprob] * request.length)
        self._turns: Counter[str] = Counter()

    async def generate(self, request: GenRequest) -> Completion:
        """Answer one request, or fail as planned.

        Raises:
            FakeEngineCrash: Where a ``RAISE`` fault is planned.
        """
        turn = self._turns[request.session]
        self._turns[request.session] += 1
        self.requests.append(request)
        fault = self._faults.get((request.session, turn))
        if fault is None:
            return self._answer(request, self.version)
        match fault.kind:
            case FaultKind.RAISE:
                raise FakeEngineCrash(fault.message)
            case FaultKind.ERROR:
                return Completion(
                    request.session, (), (), FinishReason.ERROR, self.version, fault.message
                )
            case FaultKind.STALL:
                await asyncio.sleep(fault.seconds)
                return self._answer(request, self.version)
            case FaultKind.VERSION:
                return self._answer(request, fault.version)

    async def generate_all(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Answer the requests of one game, one after another."""
        return [await self.generate(request) for request in requests]

    async def score_all(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """Score texts as the script says; also what a pump wants for its scores."""
        self.scored.extend(requests)
        return [np.array(self._tails(request), dtype=np.float64) for request in requests]

    async def step(self, new: list[GenRequest]) -> list[Completion]:
        """Answer all of ``new``, one after another."""
        return [await self.generate(request) for request in new]

    async def release(self, session: str) -> None:
        """Note that the game is over."""
        self.released.append(session)

    async def release_all(self, sessions: list[str]) -> None:
        """Note that these games are over."""
        self.released.extend(sessions)

    def _answer(self, request: GenRequest, version: int) -> Completion:
        said = self._script(request)
        sampling = request.sampling
        if isinstance(said, str):
            ids = (*self._encode(said), *sampling.stop_token_ids[:1])
        else:
            ids = tuple(said)
        ids = ids[: sampling.max_tokens]
        stopped = bool(ids) and ids[-1] in sampling.stop_token_ids
        return Completion(
            session=request.session,
            token_ids=ids,
            logprobs=(self._logprob,) * len(ids),
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
            adapter_version=version,
        )
