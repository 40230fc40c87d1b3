"""Models that are trained beside the policy on the games of each step, and read by credit.

A learner fills columns of ``TurnTable.tokens`` in the score pass, before the update, and is trained
in the update on the columns that credit hands over (``Advantage.columns``): score first, then
learn. It has passes and a state of its own, an optimizer where it needs one, and never moves the
policy. Methods ask for one by the name of a column in ``requires``; ``trainer.settings_learners``
knows who makes which. The critic, whose loss may share the policy's forward, is not one of them.

With several ranks every method is called on all of them together, and all make the same
collectives. Games that carry no weight are left out of the update and are not learnt from either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from delta_belief_rl.algo.losses.aggregate import Metrics
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.packed import PackedInput
from delta_belief_rl.types import FloatArray, TrainBatch


class Learner(Protocol):
    """One learner on one training rank."""

    def score(self, games: Sequence[ScoreRequest]) -> list[dict[str, FloatArray]]:
        """Its columns for each game, without the ``tokens:`` in front, ``[sampled tokens]`` each.

        One forward for all games together; without gradient.
        """
        ...

    def begin(self, micro_batches: Sequence[TrainBatch | None]) -> None:
        """Begin an optimizer step; None is a micro-batch that stands in for games."""
        ...

    def backward(self, packed: PackedInput, batch: TrainBatch | None) -> Metrics:
        """Learn from a micro-batch; metrics as (sum, count) over this rank's part.

        Args:
            packed: The games, one after the other in one row.
            batch: The same games; None for a row that stands in for games.
        """
        ...

    def step(self, training_step: int) -> None:
        """End an optimizer step."""
        ...

    def finish(self, training_step: int) -> dict[str, tuple[float, float]]:
        """End a training step; its figures as (sum, count), the same on every rank."""
        ...

    def state(self) -> dict[str, Any]:
        """Arrays and plain values, with those of an optimizer under ``optimizer``.

        A collective when the model is sharded; does not depend on the number of ranks.
        """
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, on any number of ranks.

        Raises:
            UserError: The state is that of another learner or another model.
        """
        ...


class LearnerSettings(Protocol):
    """What a rank needs to know of a learner; a frozen dataclass that can be sent."""

    @property
    def name(self) -> str:
        """Its key in checkpoints, and the first part of its metrics."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it makes, as in ``requires``: ``tokens:<name>``."""
        ...

    @property
    def adapter(self) -> str | None:
        """Name of a trainable LoRA adapter of its own on the policy's base; None for none."""
        ...

    @property
    def policy_waits(self) -> int:
        """Training steps, from the first, in which the learner is trained and the policy is not."""
        ...

    def build(self, model: Any, device: torch.device, world_size: int) -> Learner:
        """The learner; ``model`` has the adapter."""
        ...
