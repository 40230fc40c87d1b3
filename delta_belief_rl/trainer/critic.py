"""The critic: values of the states in which the policy's tokens are sampled, and their training.

``form="shared"``
    A head (``models.value_head``) on the policy's own hidden states. With ``detach`` the value
    loss moves the head alone; without it the policy's adapter gets its gradient, weighted by
    ``vf_coef``, as well.
``form="own"``
    A LoRA adapter of its own on the same frozen base, and a head on its hidden states. It has
    forward and backward passes of its own and never touches the policy.

The critic has its own optimizer, learning rate, clip and count of steps that were skipped. Its
loss is divided by the number of trained values of the whole optimizer step, over all ranks. The
head is not sharded: every rank holds it whole, and its gradients are averaged like those that
FSDP averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.losses.aggregate import Metrics
from delta_belief_rl.algo.losses.value import value_loss
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.adapters import (
    adapter_parameters,
    adapter_state,
    load_adapter_state,
    switch_adapter,
)
from delta_belief_rl.models.logprobs import hidden_states
from delta_belief_rl.models.packed import PackedInput, PackSegment, pack
from delta_belief_rl.models.value_head import ValueHead
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.optimizer import (
    OptimizerSettings,
    at_hand,
    build_optimizer,
    count_of_all_ranks,
    gradient_norm,
    learning_rate,
    restore_optimizer,
    saved_optimizer,
    set_learning_rate,
    sum_gradients,
)
from delta_belief_rl.types import FloatArray, IntArray, TrainBatch, UserError

CRITIC = "critic"
"""Name of the critic's own adapter."""
FORMS = ("shared", "own")
VALUES, TARGETS = "values", "targets"
"""Columns of ``TrainBatch.views``: values before the update, and what they are trained towards."""


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """A critic and its training.

    Attributes:
        detach: With ``shared``: the value loss does not reach the policy's adapter.
        vf_coef: Weight of the value loss in what it reaches otherwise.
        cliprange_value: How far a value may move before its loss stops to help it.
        warmup_steps: Training steps, from the first, in which the critic alone is trained.
    """

    form: str = "shared"
    detach: bool = True
    vf_coef: float = 0.5
    cliprange_value: float = 0.5
    grad_clip: float = 1.0
    warmup_steps: int = 0
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))

    def __post_init__(self) -> None:
        require_choice("critic.form", self.form, FORMS)
        require_range("critic.vf_coef", self.vf_coef, 0.0, open_low=True)
        require_range("critic.cliprange_value", self.cliprange_value, 0.0, open_low=True)
        require_range("critic.grad_clip", self.grad_clip, 0.0, open_low=True)
        require_range("critic.optim.lr", self.optimizer.lr, 0.0, open_low=True)
        require_range("critic.optim.weight_decay", self.optimizer.weight_decay, 0.0)
        require_range("critic.optim.min_lr_ratio", self.optimizer.min_ratio, 0.0, 1.0)
        require_range("trainer.critic_warmup", self.warmup_steps, 0)
        for beta in self.optimizer.betas:
            if not 0 <= beta < 1:
                raise UserError(f"critic.optim.betas must lie in [0, 1), not {beta}.")

    @property
    def own(self) -> bool:
        """Whether it has an adapter and passes of its own."""
        return self.form == "own"


class Critic:
    """The critic of one training rank.

    Args:
        settings: What it needs to know.
        model: The policy's model; with ``own`` it has the adapter ``critic``, trainable.
        device: Where the head goes.
        world_size: How many ranks there are.
    """

    def __init__(
        self, settings: CriticSettings, model: Any, device: torch.device, world_size: int = 1
    ) -> None:
        self.settings, self.world_size, self.device = settings, world_size, device
        self._model = model
        self.head = ValueHead(int(model.config.hidden_size)).to(device)
        adapter = adapter_parameters(model, CRITIC).values() if settings.own else ()
        self.optimizer = build_optimizer([*adapter, *self.head.parameters()], settings.optimizer)
        self._count = 0.0
        self._norms: list[float] = []

    # --- scoring ---------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, games: Sequence[ScoreRequest]) -> list[FloatArray]:
        """Values of a game's sampled tokens and of the state after its end, ``[n + 1]`` each.

        One forward for all games together.
        """
        packed = pack(
            [PackSegment(game.token_ids) for game in games], self.device, runs_ragged(self._model)
        )
        with self._reading():
            hidden = hidden_states(self._model, packed)
        sources = [
            np.append(
                packed.trunk_sources(place, game.action_positions),
                packed.segment_starts[place] + len(game.token_ids) - 1,
            )
            for place, game in enumerate(games)
        ]
        index = torch.from_numpy(np.concatenate(sources)).to(self.device)
        values = self.head(hidden.index_select(0, index)).double().cpu().numpy()
        return list(np.split(values, np.cumsum([len(rows) for rows in sources])[:-1]))

    def _reading(self) -> AbstractContextManager[None]:
        return switch_adapter(self._model, CRITIC) if self.settings.own else nullcontext()

    # --- updating --------------------------------------------------------------------------------

    def begin(self, micro_batches: Sequence[TrainBatch | None]) -> None:
        """Begin an optimizer step: forget gradients, agree on the number of trained values.

        A collective where there are several ranks.
        """
        self.optimizer.zero_grad(set_to_none=True)
        count = float(sum(len(_trained(batch)) for batch in micro_batches if batch is not None))
        self._count = count_of_all_ranks(count, self.device, self.world_size)

    def loss(
        self, hidden: torch.Tensor, batch: TrainBatch | None, *, attached: bool = True
    ) -> tuple[torch.Tensor, Metrics]:
        """This micro-batch's share of the value loss, weighted where it reaches the policy.

        Args:
            hidden: ``[T, hidden]``, of the packed row without branches.
            batch: The games; None for a row that stands in for games.
            attached: Whether the gradient may reach what made ``hidden``.
        """
        free = self.settings.own or (attached and not self.settings.detach)
        states = hidden if free else hidden.detach()
        if batch is None or TARGETS not in batch.views:
            return self.head(states[:1]).sum() * 0.0, {}
        index = _trained(batch)
        values = self.head(states.index_select(0, self._tensor(index - 1)))
        loss, metrics = value_loss(
            values,
            self._tensor(batch.views[VALUES][index], torch.float32),
            self._tensor(batch.views[TARGETS][index], torch.float32),
            torch.ones_like(values),
            self.settings.cliprange_value,
            self._count,
        )
        weight = self.settings.vf_coef if free and not self.settings.own else 1.0
        return loss * weight, metrics

    def backward(self, packed: PackedInput, batch: TrainBatch | None) -> Metrics:
        """Forward and backward of a critic with an adapter of its own."""
        with self._reading():
            loss, metrics = self.loss(hidden_states(self._model, packed), batch)
            (loss * self.world_size).backward()
        return metrics

    def step(self, training_step: int) -> None:
        """End an optimizer step; nothing happens where no value is trained."""
        if not self._count:
            return
        set_learning_rate(self.optimizer, learning_rate(self.settings.optimizer, training_step))
        self._average_head()
        norm = gradient_norm(self.optimizer, self.settings.grad_clip)
        self._norms.append(norm)
        if math.isfinite(norm):
            with at_hand(self.optimizer, self.settings.optimizer.offload):
                self.optimizer.step()

    def finish(self, training_step: int) -> dict[str, tuple[float, float]]:
        """End a training step; its figures as (sum, count), the same on every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        norms, self._norms = self._norms, []
        finite = [norm for norm in norms if math.isfinite(norm)]
        return {
            "critic/grad_norm": (float(np.sum(finite)), float(len(finite))),
            "critic/lr": (learning_rate(self.settings.optimizer, training_step), 1.0),
            "critic/skipped_updates": (float(len(norms) - len(finite)), 1.0),
        }

    def _average_head(self) -> None:
        """Every rank gets the mean of all ranks' gradients; those without one have zeros."""
        sum_gradients(self.head.parameters(), self.world_size)
        for parameter in self.head.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.world_size

    def _tensor(self, array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.as_tensor(array, dtype=dtype, device=self.device)

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Weights and optimizer; a collective when the model is sharded."""
        offload = self.settings.optimizer.offload
        optimizer = saved_optimizer(self.optimizer, offload, self.world_size)
        state: dict[str, Any] = {"head": self.head.arrays(), "optimizer": optimizer}
        if self.settings.own:
            state["adapter"] = adapter_state(self._model, CRITIC)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, on any number of ranks.

        Raises:
            UserError: The state is that of a critic of the other form, or of another model.
        """
        if ("adapter" in state) != self.settings.own:
            raise UserError(
                f"The checkpoint's critic is not of critic.form={self.settings.form}: resume with "
                "the form that it was saved with, or start a new run."
            )
        self.head.load_arrays(state["head"])
        if self.settings.own:
            load_adapter_state(self._model, CRITIC, state["adapter"])
        offload = self.settings.optimizer.offload
        restore_optimizer(self.optimizer, state["optimizer"], offload, self.world_size)


def _trained(batch: TrainBatch) -> IntArray:
    """Positions of the tokens whose value has a target, in the batch."""
    targets = batch.views.get(TARGETS)
    if targets is None:
        return np.zeros(0, dtype=np.int64)
    kept = (batch.turn_ids >= 0) & (batch.weight != 0) & np.isfinite(targets)
    return np.flatnonzero(kept).astype(np.int64)
