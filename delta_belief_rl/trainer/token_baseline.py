"""ArCHer's baseline of single tokens: which lead a turn will have, by what it has said so far.

``b_t`` reads the base model's hidden state in which token ``t`` is sampled, so it knows the state
and the turn's tokens before ``t``, and not ``t`` itself. Subtracting it changes no expectation of
the policy's gradient (``algo.credit.archer``). It moves by the squared error to the turn's lead::

    loss = mean over the trained tokens of (b_t - A_k)^2

with one step of AdamW for each optimizer step of the policy, on the games of that step. Its hidden
states are those that the critics read anyway, so it costs no pass of the model and keeps nothing.

The mean is over the tokens of all ranks and every rank gets the sum of all gradients, so all hold
the same baseline, and it does not depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from delta_belief_rl.algo.credit.archer import LEAD
from delta_belief_rl.algo.losses.aggregate import Metrics, merge_metrics, pair
from delta_belief_rl.models.double_critic import TokenBaseline
from delta_belief_rl.trainer.optimizer import (
    OptimizerSettings,
    build_optimizer,
    count_of_all_ranks,
    gradient_norm,
    sum_gradients,
)
from delta_belief_rl.types import FloatArray, IntArray, TrainBatch

CHUNK = 4096
"""Tokens whose numbers in float32 exist at one time."""


class BaselineTeacher:
    """The baseline of one training rank, and its training.

    Args:
        baseline: Which reads hidden states.
        lr: Learning rate of AdamW.
        grad_clip: Largest norm of its gradient.
        device: Where it goes.
        world_size: How many ranks there are.
    """

    def __init__(
        self,
        baseline: TokenBaseline,
        lr: float,
        grad_clip: float,
        device: torch.device,
        world_size: int = 1,
    ) -> None:
        self.baseline = baseline.to(device)
        self.grad_clip, self.device, self.world_size = grad_clip, device, world_size
        self.optimizer = build_optimizer(
            self.baseline.parameters(), OptimizerSettings(lr=lr, weight_decay=0.0)
        )
        self._count = 0.0
        self._norms: list[float] = []

    @torch.no_grad()
    def values(self, hidden: torch.Tensor, before: IntArray) -> FloatArray:
        """``b`` of some tokens, ``[n]``.

        Args:
            hidden: ``[T, hidden]``, of a packed row.
            before: ``[n]``, the positions before the tokens.
        """
        parts = [self.baseline(rows) for rows in self._rows(hidden, before)]
        return torch.cat([torch.zeros(0, device=self.device), *parts]).double().cpu().numpy()

    def begin(self, micro_batches: Sequence[TrainBatch | None]) -> None:
        """Begin an optimizer step: forget gradients, agree on the number of trained tokens.

        A collective where there are several ranks.
        """
        self.optimizer.zero_grad(set_to_none=True)
        count = float(sum(len(_trained(batch)) for batch in micro_batches if batch is not None))
        self._count = count_of_all_ranks(count, self.device, self.world_size)

    def backward(self, hidden: torch.Tensor, batch: TrainBatch) -> Metrics:
        """Add this micro-batch's share of the gradient.

        Args:
            hidden: ``[T, hidden]``, of the packed row of its games.
            batch: The games.
        """
        index = _trained(batch)
        if not len(index):
            return {}
        leads = torch.as_tensor(batch.views[LEAD][index], dtype=torch.float32, device=self.device)
        parts: list[Metrics] = []
        for rows, wanted in zip(self._rows(hidden, index - 1), leads.split(CHUNK), strict=True):
            errors = (self.baseline(rows) - wanted) ** 2
            (errors.sum() / self._count).backward()
            parts.append({"archer/baseline_loss": pair(errors, torch.ones_like(errors).bool())})
        return merge_metrics(parts)

    def step(self) -> None:
        """End an optimizer step; nothing happens where no token is trained.

        A gradient that is not finite leaves everything as it is.
        """
        if not self._count:
            return
        sum_gradients(self.baseline.parameters(), self.world_size)
        norm = gradient_norm(self.optimizer, self.grad_clip)
        self._norms.append(norm)
        if math.isfinite(norm):
            self.optimizer.step()

    def finish(self) -> dict[str, tuple[float, float]]:
        """End a training step; its figures as (sum, count), the same on every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        norms, self._norms = self._norms, []
        finite = [norm for norm in norms if math.isfinite(norm)]
        return {
            "archer/baseline_grad_norm": (float(sum(finite)), float(len(finite))),
            "archer/baseline_skipped_updates": (
                float(len(norms) - len(finite)),
                float(len(norms)),
            ),
        }

    def _rows(self, hidden: torch.Tensor, index: IntArray) -> list[torch.Tensor]:
        """Hidden states at some positions, some at a time."""
        places = torch.as_tensor(index, device=hidden.device).split(CHUNK)
        return [hidden.index_select(0, part) for part in places if len(part)]

    def load_state(self, weights: Mapping[str, Any], optimizer: dict[str, Any]) -> None:
        """Continue with these weights and with what ``optimizer.state_dict`` gave.

        Raises:
            UserError: They are of another model or of another width.
        """
        self.baseline.load_arrays(weights)
        self.optimizer.load_state_dict(optimizer)


def _trained(batch: TrainBatch) -> IntArray:
    """Positions of the tokens whose turn has a lead, in the batch."""
    leads = batch.views.get(LEAD)
    if leads is None:
        return np.zeros(0, dtype=np.int64)
    kept = (batch.turn_ids >= 0) & (batch.weight != 0) & np.isfinite(leads)
    return np.flatnonzero(kept).astype(np.int64)
