"""Draws tasks epoch by epoch; the order of an epoch is a function of (seed, epoch) alone.

The cursor is the step: nothing else has to be saved, and a resumed run draws what the straight run
draws.

``drop_last=True``
    An epoch has ``num_tasks // batch`` steps; the last ``num_tasks % batch`` tasks of that epoch's
    order are left out (``dropped_per_epoch`` says how many), another set in each epoch when
    shuffled.
``drop_last=False``
    Nothing is left out: a step may begin in one epoch and end in the next. A batch that crosses the
    border can hold a task twice, as two groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_belief_rl.types import IntArray, UserError


@dataclass(frozen=True, slots=True)
class TaskSampler:
    """A pure function from step to task indices.

    Attributes:
        num_tasks: Tasks in the data set.
        batch_size: Tasks of one step.
        seed: Names the order; unused without ``shuffle``.

    Example:
        >>> TaskSampler(num_tasks=5, batch_size=2, seed=0, shuffle=False).batch(1)[0].tolist()
        [2, 3]
    """

    num_tasks: int
    batch_size: int
    seed: int = 42
    drop_last: bool = True
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_tasks < 1:
            raise UserError("The training data hold no task; check data.train_files.")
        if self.batch_size < 1:
            raise UserError(f"data.train_batch_size is {self.batch_size}; set it to at least 1.")
        if self.drop_last and self.batch_size > self.num_tasks:
            raise UserError(
                f"data.train_batch_size is {self.batch_size} but the training data hold only "
                f"{self.num_tasks} tasks; lower it or keep incomplete batches."
            )

    @property
    def dropped_per_epoch(self) -> int:
        """Tasks that an epoch leaves out."""
        return self.num_tasks % self.batch_size if self.drop_last else 0

    def total_steps(self, epochs: int) -> int:
        """Steps of so many epochs; without ``drop_last`` the last step runs on into one more."""
        if self.drop_last:
            return epochs * (self.num_tasks // self.batch_size)
        return -(-epochs * self.num_tasks // self.batch_size)

    def order(self, epoch: int) -> IntArray:
        """All task indices in the order of an epoch, ``[num_tasks]``."""
        indices = np.arange(self.num_tasks, dtype=np.int64)
        if not self.shuffle:
            return indices
        return np.random.default_rng([self.seed, epoch]).permutation(indices)

    def batch(self, step: int) -> tuple[IntArray, int]:
        """Task indices ``[batch_size]`` of a zero-based step, and the epoch in which it begins."""
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        if self.drop_last:
            epoch, place = divmod(step, self.num_tasks // self.batch_size)
            start = place * self.batch_size
            return self.order(epoch)[start : start + self.batch_size], epoch
        first, start = divmod(step * self.batch_size, self.num_tasks)
        last = (start + self.batch_size - 1) // self.num_tasks
        stream = np.concatenate([self.order(first + ahead) for ahead in range(last + 1)])
        return stream[start : start + self.batch_size], first
