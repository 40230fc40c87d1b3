"""What a policy engine is: tokens in, sampled tokens and their log-probs out.

Two shapes of engine exist. A *stepping* engine (``StepEngine``) is passive: the caller hands over
new requests and the engine advances until at least one has finished. That makes its schedule a
function of the requests alone, so a run on CPU can be replayed bit for bit. An *asynchronous*
engine (``Engine``) answers each request when it is done, in its own time. ``engines.pump`` turns a
stepping engine into the other kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

AdapterState = Mapping[str, NDArray[np.float32]]
"""Adapter tensors by PEFT's own state-dict names; owned memory, never a view."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Reported log-probs are those of ``softmax(logits / temperature)`` before top-k and top-p cut it;
    with ``temperature == 0`` decoding is greedy and log-probs are those of ``softmax(logits)``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 50
    stop_token_ids: tuple[int, ...] = ()


def check_sampling(sampling: SamplingParams) -> str:
    """The reason why these settings cannot be served, or an empty string."""
    if sampling.max_tokens <= 0:
        return f"max_tokens is {sampling.max_tokens}; at least one token must be asked for"
    if sampling.temperature < 0:
        return f"temperature is {sampling.temperature}; it must not be negative"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p is {sampling.top_p}; it must be in (0, 1]"
    return ""


@dataclass(frozen=True, slots=True)
class GenRequest:
    """One turn of one game.

    Attributes:
        session: Name of the game. Later requests of a session extend the earlier token stream, so
            the engine may keep its key-value cache; ``prompt_ids`` is nevertheless the whole
            stream.
        prompt_ids: Every token before the first one to be sampled.
        seed: Names the random stream of this turn; a function of (run seed, task, game, turn).
    """

    session: str
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TailRequest:
    """Asks how likely the last tokens of a text are, at temperature 1; nothing is sampled.

    Attributes:
        session: The game, or a branch of it, whose key-value cache may hold a beginning of the
            text. What the cache holds beyond the tail's first token is forgotten.
        token_ids: The whole text.
        start: Position of the tail's first token, at least 1.
    """

    session: str
    token_ids: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.token_ids):
            raise ValueError(
                f"a tail starts at 1 .. {len(self.token_ids) - 1}, not at {self.start}"
            )

    @property
    def length(self) -> int:
        """Tokens of the tail."""
        return len(self.token_ids) - self.start


class FinishReason(StrEnum):
    """Why sampling ended: a stop token, the token cap, or a request that cannot be served."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request. ``token_ids`` includes the stop token when it was sampled.

    ``order`` is the step at which each token was said, where that is not one after the other.
    """

    session: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    adapter_version: int
    error: str = ""
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What a replica says of itself."""

    alive: bool
    adapter_version: int
    state: str
    outstanding: int
    generated_tokens: int
    prefilled_tokens: int


class EngineState(StrEnum):
    """Where an engine stands."""

    READY = "ready"
    ASLEEP = "asleep"


class EngineStateError(RuntimeError):
    """The call is not allowed in the engine's present state."""


@runtime_checkable
class StepEngine(Protocol):
    """A passive engine; see the module's head."""

    def step(self, new: Sequence[GenRequest]) -> list[Completion]:
        """Add ``new`` requests and run until one or more have finished; returns all that have."""
        ...

    def release(self, sessions: Sequence[str]) -> None:
        """Forget the caches of these games."""
        ...

    def load_adapter(self, state: AdapterState, version: int) -> None:
        """Take over adapter weights and drop every cache.

        A state that matches no module is an error.
        """
        ...

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Log-probs at temperature 1 of each token given those before it; ``0.0`` at position 0."""
        ...

    def health(self) -> EngineHealth:
        """What the engine says of itself; cheap, and allowed at any time."""
        ...


@runtime_checkable
class BranchStepEngine(StepEngine, Protocol):
    """A passive engine that can also say how likely given texts are, out of its caches."""

    def score_tails(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """Log-probs in nats of each tail, ``[request.length]``, in the order of the requests."""
        ...


@runtime_checkable
class Engine(Protocol):
    """An asynchronous engine, as the rollout sees it."""

    async def generate(self, request: GenRequest) -> Completion:
        """Wait for the completion of one request."""
        ...

    async def release(self, session: str) -> None:
        """Forget the cache of this game."""
        ...


@runtime_checkable
class BranchEngine(Engine, Protocol):
    """An asynchronous engine on which one game can try several actions.

    The calls of one game follow each other, so a game waits for one call at a time whatever the
    number of its requests.
    """

    async def generate_all(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Wait for all completions, in the order of the requests; each has its own session.

        The sessions of one call are branches of one game and live on one replica.
        """
        ...

    async def score_all(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """Log-probs in nats of each tail, ``[request.length]``, in the order of the requests."""
        ...
