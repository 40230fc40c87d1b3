"""SPA-RL's head: what each turn of a game contributed to its outcome.

``c_k = w . h``, with ``h`` the hidden state at the last token of turn ``k``; ``w`` is float32,
starts at zero and is all that is trained. Hidden states are read without gradient:

``source="base"``
    Of the frozen base, without any adapter: what a state looks like never changes, so the head
    solves the same problem all along.
``source="policy"``
    Of the policy as it is.

``score`` gives the head's reading at every sampled token, because a game that is scored does not
know where one turn ends and the next begins; credit takes that at the last token of each turn
(``algo.credit.spa_rl``). The loss is ``(sum_k c_k - R)^2``, a mean over the games of the whole
optimizer step, over all ranks. The head is not sharded: every rank holds it whole, and its
gradients are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.credit.spa_rl import COLUMN, CONTRIBUTION, TARGET
from delta_belief_rl.algo.losses.aggregate import Metrics
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.adapters import adapter_names, use_adapter
from delta_belief_rl.models.logprobs import hidden_states
from delta_belief_rl.models.packed import PackedInput, PackSegment, pack
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.learner import Learner
from delta_belief_rl.trainer.optimizer import (
    OptimizerSettings,
    build_optimizer,
    gradient_norm,
    learning_rate,
    set_learning_rate,
)
from delta_belief_rl.types import FloatArray, IntArray, TrainBatch, UserError

NAME = "contributions"
SOURCES = ("base", "policy")
WITHOUT_BASE = (
    "algorithm.spa_rl.source=base needs LoRA adapters: set actor_rollout_ref.model.lora_rank, or "
    "algorithm.spa_rl.source=policy."
)


@dataclass(frozen=True, slots=True)
class ContributionSettings:
    """The head and its training.

    Attributes:
        source: Whose hidden states it reads.
        grad_clip: Largest norm of its gradient.
    """

    source: str = "base"
    grad_clip: float = 1.0
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(lr=1e-5, weight_decay=0.0)
    )

    def __post_init__(self) -> None:
        require_choice("algorithm.spa_rl.source", self.source, SOURCES)
        require_range("algorithm.spa_rl.grad_clip", self.grad_clip, 0.0, open_low=True)
        require_range("algorithm.spa_rl.lr", self.optimizer.lr, 0.0, open_low=True)

    @property
    def name(self) -> str:
        """Its key in checkpoints, and the first part of its metrics."""
        return NAME

    @property
    def columns(self) -> tuple[str, ...]:
        """The column that it makes."""
        return (CONTRIBUTION,)

    @property
    def adapter(self) -> str | None:
        """It has none of its own."""
        return None

    @property
    def policy_waits(self) -> int:
        """The policy learns from the first step on."""
        return 0

    def build(self, model: Any, device: torch.device, world_size: int) -> Learner:
        """The head of one rank.

        Raises:
            UserError: The base shall be read, but the model has no adapters to leave out.
        """
        if self.source == "base" and not adapter_names(model):
            raise UserError(WITHOUT_BASE)
        return Contributions(self, model, device, world_size)


class Contributions:
    """The head on one training rank.

    Args:
        settings: What it needs to know.
        model: The policy's model.
        device: Where the head goes.
        world_size: How many ranks there are.
    """

    def __init__(
        self, settings: ContributionSettings, model: Any, device: torch.device, world_size: int = 1
    ) -> None:
        self.settings, self.world_size, self.device = settings, world_size, device
        self._model = model
        width = int(model.config.hidden_size)
        self.weight = torch.nn.Parameter(torch.zeros(width, device=device))
        self.optimizer = build_optimizer([self.weight], settings.optimizer)
        self._games = 0.0
        self._norms: list[float] = []

    @torch.no_grad()
    def score(self, games: Sequence[ScoreRequest]) -> list[dict[str, FloatArray]]:
        """The head's reading at each sampled token, ``[sampled tokens]``; one forward for all."""
        packed = pack(
            [PackSegment(game.token_ids) for game in games], self.device, runs_ragged(self._model)
        )
        hidden = self._hidden(packed)
        places = [
            packed.segment_starts[number] + np.asarray(game.action_positions, dtype=np.int64)
            for number, game in enumerate(games)
        ]
        index = self._tensor(np.concatenate([np.zeros(0, dtype=np.int64), *places]))
        read = self._read(hidden, index).double().cpu().numpy()
        rows = np.split(read, np.cumsum([len(each) for each in places])[:-1])
        return [{COLUMN: row} for row in rows]

    def begin(self, micro_batches: Sequence[TrainBatch | None]) -> None:
        """Begin an optimizer step: forget gradients, agree on the number of games.

        A collective where there are several ranks.
        """
        self.optimizer.zero_grad(set_to_none=True)
        own = [len(np.unique(_ends(batch)[1])) for batch in micro_batches if batch is not None]
        games = float(sum(own))
        if self.world_size > 1:
            total = torch.tensor(games, dtype=torch.float64, device=self.device)
            dist.all_reduce(total)
            games = float(total)
        self._games = games

    def backward(self, packed: PackedInput, batch: TrainBatch | None) -> Metrics:
        """Forward of the model and backward of the head; nothing where no game is learnt from."""
        # All ranks agree on the number of games, so all of them leave the forward out.
        if not self._games:
            return {}
        with torch.no_grad():
            hidden = self._hidden(packed)
        if batch is None:
            return {}
        index, game = _ends(batch)
        if not len(index):
            return {}
        _, first, number = np.unique(game, return_index=True, return_inverse=True)
        read = self._read(hidden, self._tensor(index))
        total = torch.zeros(len(first), device=self.device)
        total = total.index_add(0, self._tensor(number), read)
        outcome = self._tensor(batch.views[TARGET][index[first]].astype(np.float32))
        error = ((total - outcome) ** 2).sum()
        # Gradients are averaged over ranks; the loss is already divided by a global count.
        (error / self._games * self.world_size).backward()
        return {f"{NAME}/loss": (error.detach(), torch.tensor(float(len(first))))}

    def step(self, training_step: int) -> None:
        """End an optimizer step; nothing happens where no game is learnt from."""
        if not self._games:
            return
        set_learning_rate(self.optimizer, learning_rate(self.settings.optimizer, training_step))
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        if self.world_size > 1:
            dist.all_reduce(self.weight.grad)
            self.weight.grad /= self.world_size
        norm = gradient_norm(self.optimizer, self.settings.grad_clip)
        self._norms.append(norm)
        if math.isfinite(norm):
            self.optimizer.step()

    def finish(self, training_step: int) -> dict[str, tuple[float, float]]:
        """End a training step; its figures as (sum, count), the same on every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        norms, self._norms = self._norms, []
        finite = [norm for norm in norms if math.isfinite(norm)]
        return {
            f"{NAME}/grad_norm": (float(np.sum(finite)), float(len(finite))),
            f"{NAME}/lr": (learning_rate(self.settings.optimizer, training_step), 1.0),
            f"{NAME}/skipped_updates": (float(len(norms) - len(finite)), 1.0),
        }

    def state(self) -> dict[str, Any]:
        """The head, whose states it reads, and the optimizer; every rank holds the same."""
        weight = self.weight.detach().to("cpu", torch.float32).numpy().copy()
        return {
            "source": self.settings.source,
            "head": {"weight": weight},
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, on any number of ranks.

        Raises:
            UserError: It is that of a head on other hidden states, or of another model.
        """
        if state["source"] != self.settings.source:
            raise UserError(
                f"The checkpoint's head reads hidden states of algorithm.spa_rl.source="
                f"{state['source']}: resume with it, or start a new run."
            )
        weight = np.asarray(state["head"]["weight"], dtype=np.float32)
        if weight.shape != tuple(self.weight.shape):
            raise UserError(
                "The checkpoint's head of contributions belongs to another model: resume with the "
                "actor_rollout_ref.model.path that it was saved with, or start a new run."
            )
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(weight.copy()))
        self.optimizer.load_state_dict(state["optimizer"])

    def _hidden(self, packed: PackedInput) -> torch.Tensor:
        """``[T, hidden]`` of the model that is read."""
        with self._reading():
            return hidden_states(self._model, packed)

    def _reading(self) -> AbstractContextManager[None]:
        return use_adapter(self._model, None) if self.settings.source == "base" else nullcontext()

    def _read(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The head at some positions, ``[n]`` float32."""
        return hidden.index_select(0, index).float() @ self.weight

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)


def _ends(batch: TrainBatch) -> tuple[IntArray, IntArray]:
    """Positions of the last tokens of turns in a sum, and the number of each one's game.

    A game without any weight is left out, because an update may leave it out. The weight of single
    turns says nothing here: a turn that is trained with another game has its part in the sum.
    """
    target = batch.views.get(TARGET)
    if target is None:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty
    game = np.repeat(np.arange(batch.num_games), batch.lengths())
    trained = np.zeros(batch.num_games, dtype=np.bool_)
    trained[game[batch.weight != 0]] = True
    index = np.flatnonzero((batch.turn_ids >= 0) & np.isfinite(target) & trained[game])
    return index.astype(np.int64), game[index].astype(np.int64)
