"""The process model of ``istar``: a LoRA adapter that learns which games are won.

It reads the sampled tokens as the policy does, on the same frozen base, through an adapter of its
own that starts, like the policy's, as no change at all. Its log-probs are taken at the policy's
temperature, so that their difference is a ratio of two ways to sample the same token.

Credit computes the slope of the pairs' loss at every token (``algo.credit.istar``); here the sum of
slope times log-prob is differentiated. That is the gradient of the loss only at the weights that
were scored. So gradients are added up over all optimizer steps of a training step, whose every game
is in one of them, and the adapter takes one step at the end. Further passes over the batch repeat
the same gradient, which is divided by their number.

The loss is normalised on the driver, so micro-batches and ranks only add up. A gradient that is not
finite skips the step; one that is zero, as without any pair, leaves the model as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from delta_belief_rl.algo.base import require_range
from delta_belief_rl.algo.credit.istar import PRM, PRM_COLUMN, SLOPE
from delta_belief_rl.algo.losses.aggregate import Metrics
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.adapters import (
    adapter_parameters,
    adapter_state,
    load_adapter_state,
    switch_adapter,
)
from delta_belief_rl.models.logprobs import token_logprobs
from delta_belief_rl.models.packed import PackedInput, PackSegment, pack
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.optimizer import (
    OptimizerSettings,
    at_hand,
    build_optimizer,
    gradient_norm,
    learning_rate,
    restore_optimizer,
    saved_optimizer,
    set_learning_rate,
)
from delta_belief_rl.types import FloatArray, IntArray, TrainBatch, UserError

ADAPTER = "prm"
"""Name of the process model's adapter, of its state and of its metrics."""


@dataclass(frozen=True, slots=True)
class ProcessModelSettings:
    """A process model and its training.

    Attributes:
        temperature: Of its log-probs, the policy's.
        passes: How often an update goes over its batch.
    """

    temperature: float = 1.0
    passes: int = 1
    grad_clip: float = 10.0
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)

    def __post_init__(self) -> None:
        require_range("algorithm.istar.lr", self.optimizer.lr, 0.0, open_low=True)
        require_range("algorithm.istar.weight_decay", self.optimizer.weight_decay, 0.0)
        require_range("algorithm.istar.grad_clip", self.grad_clip, 0.0, open_low=True)
        require_range("The temperature of sampling", self.temperature, 0.0, open_low=True)
        require_range("actor_rollout_ref.actor.ppo_epochs", self.passes, 1)

    @property
    def name(self) -> str:
        """Its key in checkpoints, and the first part of its metrics."""
        return ADAPTER

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it makes."""
        return (PRM,)

    @property
    def adapter(self) -> str | None:
        """Name of its adapter."""
        return ADAPTER

    @property
    def policy_waits(self) -> int:
        """The policy learns from the first step on."""
        return 0

    def build(self, model: Any, device: torch.device, world_size: int) -> ProcessModel:
        """The process model; ``model`` has the adapter."""
        return ProcessModel(self, model, device, world_size)


class ProcessModel:
    """The process model of one training rank; see ``trainer.learner.Learner``.

    Args:
        settings: What it needs to know.
        model: The policy's model, with the adapter ``prm``, trainable.
        device: Where the model is.
        world_size: How many ranks there are.
    """

    def __init__(
        self, settings: ProcessModelSettings, model: Any, device: torch.device, world_size: int = 1
    ) -> None:
        self.settings, self.device, self.world_size = settings, device, world_size
        self._model = model
        self.optimizer = build_optimizer(
            adapter_parameters(model, ADAPTER).values(), settings.optimizer
        )

    # --- scoring ---------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, games: Sequence[ScoreRequest]) -> list[dict[str, FloatArray]]:
        """Log-probs of each game's sampled tokens, ``[sampled tokens]`` each; one forward."""
        segments = [PackSegment(game.token_ids) for game in games]
        packed = pack(segments, self.device, runs_ragged(self._model))
        sources = [
            packed.trunk_sources(place, game.action_positions) for place, game in enumerate(games)
        ]
        targets = [
            np.asarray(game.token_ids, dtype=np.int64)[game.action_positions] for game in games
        ]
        with switch_adapter(self._model, ADAPTER):
            found = self._logps(packed, np.concatenate(sources), np.concatenate(targets))
        logp = found.double().cpu().numpy()
        parts = np.split(logp, np.cumsum([len(rows) for rows in sources])[:-1])
        return [{PRM_COLUMN: rows} for rows in parts]

    def _logps(self, packed: PackedInput, sources: IntArray, targets: IntArray) -> torch.Tensor:
        return token_logprobs(
            self._model,
            packed,
            torch.as_tensor(sources, device=self.device),
            torch.as_tensor(targets, device=self.device),
            self.settings.temperature,
        ).logp

    # --- updating --------------------------------------------------------------------------------

    def begin(self, micro_batches: Sequence[TrainBatch | None]) -> None:
        """Nothing: gradients are added up over the optimizer steps of a training step."""

    def backward(self, packed: PackedInput, batch: TrainBatch | None) -> Metrics:
        """Add the gradient of a micro-batch's part of the loss; credit has logged the loss."""
        with switch_adapter(self._model, ADAPTER):
            loss = self._loss(packed, batch)
            # FSDP averages over the ranks, each of which has a part of the sum.
            (loss * (self.world_size / self.settings.passes)).backward()
        return {}

    def _loss(self, packed: PackedInput, batch: TrainBatch | None) -> torch.Tensor:
        index = _taught(batch)
        if batch is None or not len(index):
            # The same collectives as elsewhere.
            first = np.zeros(1, dtype=np.int64)
            return self._logps(packed, first, first).sum() * 0.0
        slopes = torch.as_tensor(batch.views[SLOPE][index], dtype=torch.float32, device=self.device)
        return (self._logps(packed, index - 1, batch.token_ids[index]) * slopes).sum()

    def step(self, training_step: int) -> None:
        """Nothing; see ``begin``."""

    def finish(self, training_step: int) -> dict[str, tuple[float, float]]:
        """Take the training step's one step; its figures as (sum, count), as on every rank."""
        rate = learning_rate(self.settings.optimizer, training_step)
        set_learning_rate(self.optimizer, rate)
        norm = gradient_norm(self.optimizer, self.settings.grad_clip)
        finite = math.isfinite(norm)
        if finite and norm > 0:
            with at_hand(self.optimizer, self.settings.optimizer.offload):
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            f"{ADAPTER}/grad_norm": (norm if finite else 0.0, float(finite)),
            f"{ADAPTER}/lr": (rate, 1.0),
            f"{ADAPTER}/skipped_updates": (float(not finite), 1.0),
        }

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Weights and optimizer; a collective when the model is sharded."""
        offload = self.settings.optimizer.offload
        optimizer = saved_optimizer(self.optimizer, offload, self.world_size)
        return {"adapter": adapter_state(self._model, ADAPTER), "optimizer": optimizer}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, on any number of ranks.

        Raises:
            UserError: The state is that of another learner or another model.
        """
        if set(state) != {"adapter", "optimizer"}:
            raise UserError(
                "The checkpoint's state of prm is not that of a process model: resume with the "
                "algorithm.adv_estimator that it was saved with, or start a new run."
            )
        load_adapter_state(self._model, ADAPTER, state["adapter"])
        offload = self.settings.optimizer.offload
        restore_optimizer(self.optimizer, state["optimizer"], offload, self.world_size)


def _taught(batch: TrainBatch | None) -> IntArray:
    """Positions of the tokens at which the loss has a slope, in the batch.

    The weight of a token in the policy's loss is not asked: a pair is made of whole games.
    """
    if batch is None or SLOPE not in batch.views:
        return np.zeros(0, dtype=np.int64)
    kept = (batch.turn_ids >= 0) & (batch.views[SLOPE] != 0)
    return np.flatnonzero(kept).astype(np.int64)
