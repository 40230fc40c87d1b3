"""Teacher games made ahead of the training step by worker processes.

Batch ``k`` is a function of (seed, ``k``, share of training done), never of the number of workers.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from delta_belief_rl.trainer.processes import data_processes, end_with_parent
from delta_belief_rl.trainer.warmup.games import (
    GameBatch,
    Language,
    Teacher,
    plan_games,
    play_games,
)


@dataclass(frozen=True, slots=True)
class BatchRecipe:
    """What a batch is a function of, besides its number and the share of training done."""

    language: Language
    seed: int
    games: int
    max_turns: int
    teacher: Teacher = field(default_factory=Teacher)

    def make(self, step: int, share: float) -> GameBatch:
        """The batch of one step."""
        rng = np.random.default_rng([self.seed, step])
        plan = plan_games(share, self.games, self.max_turns, rng)
        return play_games(self.language, plan, rng, self.teacher)


_recipe: list[BatchRecipe] = []
"""In a worker: the one recipe that its pool works on."""


def _start_worker(recipe: BatchRecipe) -> None:
    end_with_parent()
    _recipe[:] = [recipe]


def _work(step: int, share: float) -> GameBatch:
    return _recipe[0].make(step, share)


@dataclass
class BatchSource:
    """Hands out the batches in order and keeps some in preparation; use as a context manager."""

    recipe: BatchRecipe
    workers: int = 0
    _pool: ProcessPoolExecutor | None = None
    _waiting: deque[Future[GameBatch]] = field(default_factory=deque)
    _next: int = 0

    def __enter__(self) -> BatchSource:
        if self.workers:
            self._pool = ProcessPoolExecutor(
                self.workers,
                mp_context=data_processes([__name__]),
                initializer=_start_worker,
                initargs=(self.recipe,),
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, shares: tuple[float, ...]) -> GameBatch:
        """The next batch.

        Args:
            shares: Share of training done now and expected at the batches to come; with workers, as
                many batches are kept in preparation as there are entries.
        """
        if self._pool is None:
            batch = self.recipe.make(self._next, shares[0])
            self._next += 1
            return batch
        while len(self._waiting) < len(shares):
            share = shares[len(self._waiting)]
            self._waiting.append(self._pool.submit(_work, self._next, share))
            self._next += 1
        return self._waiting.popleft().result()
