"""Teacher games made ahead of the training step by worker processes.

Batch ``k`` is a function of (seed, ``k``, share of training done), never of the number of workers.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from delta_belief_rl.trainer.warmup.games import GameBatch, Language, plan_games, play_games

_language: Language | None = None


def make_batch(
    language: Language, seed: int, step: int, share: float, games: int, max_turns: int
) -> GameBatch:
    """The batch of one step."""
    rng = np.random.default_rng([seed, step])
    return play_games(language, plan_games(share, games, max_turns, rng), rng)


def _start_worker(language: Language) -> None:
    global _language
    _language = language


def _work(seed: int, step: int, share: float, games: int, max_turns: int) -> GameBatch:
    assert _language is not None, "the pool starts every worker with a language"
    return make_batch(_language, seed, step, share, games, max_turns)


@dataclass
class BatchSource:
    """Hands out the batches in order and keeps some in preparation; use as a context manager."""

    language: Language
    seed: int
    games: int
    max_turns: int
    workers: int = 0
    _pool: ProcessPoolExecutor | None = None
    _waiting: deque[Future[GameBatch]] = field(default_factory=deque)
    _next: int = 0

    def __enter__(self) -> BatchSource:
        if self.workers:
            self._pool = ProcessPoolExecutor(
                self.workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self.language,),
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, shares: tuple[float, ...]) -> GameBatch:
        """The next batch.

        Args:
            shares: Share of training done now and expected at the batches to come; with workers, as many
                batches are kept in preparation as there are entries.
        """
        if self._pool is None:
            batch = make_batch(
                self.language, self.seed, self._next, shares[0], self.games, self.max_turns
            )
            self._next += 1
            return batch
        while len(self._waiting) < len(shares):
            share = shares[len(self._waiting)]
            self._waiting.append(
                self._pool.submit(
                    _work, self.seed, self._next, share, self.games, self.max_turns
                )
            )
            self._next += 1
        return self._waiting.popleft().result()
