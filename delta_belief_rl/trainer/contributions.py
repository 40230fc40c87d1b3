"""SPA-RL's head: what each turn of a game contributed to its outcome.

``c_k = w . h_k``, with ``h_k`` the hidden state at the last token of turn ``k``, brought to mean 0
and length 1; ``w`` starts at zero and is all that is trained. Hidden states are read without
gradient:

``source="base"``
    Of the frozen base, without any adapter: what a state looks like never changes, so the head
    solves the same problem all along.
``source="policy"``
    Of the policy as it is.

``score`` gives the head's reading at every sampled token, because a game that is scored does not
know where one turn ends and the next begins; credit takes that at the last token of each turn
(``algo.credit.spa_rl``). The loss sees of a game only ``x = sum_k h_k``, and it is quadratic. So no
optimizer is needed: at the end of a training step the head becomes the best one there is on the
latest ``games`` games, those of the step and earlier ones::

    w = argmin  mean over games of (w . x - R)^2  +  ridge * |w|^2

Every rank gets the sums of all, in the order of games, and solves the same problem, so the head
does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.credit.spa_rl import COLUMN, CONTRIBUTION, GAME, TARGET
from delta_belief_rl.algo.losses.aggregate import Metrics
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.adapters import adapter_names, use_adapter
from delta_belief_rl.models.logprobs import hidden_states
from delta_belief_rl.models.packed import PackedInput, PackSegment, pack
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.learner import Learner
from delta_belief_rl.trainer.replay import gathered
from delta_belief_rl.types import FloatArray, IntArray, TrainBatch, UserError

NAME = "contributions"
SOURCES = ("base", "policy")
WITHOUT_BASE = (
    "algorithm.spa_rl.source=base needs LoRA adapters: set actor_rollout_ref.model.lora_rank."
)


@dataclass(frozen=True, slots=True)
class ContributionSettings:
    """The head and its training.

    Attributes:
        source: Whose hidden states it reads.
        games: How many of the latest games it learns from.
        ridge: Price of the square of its length.
    """

    source: str = "base"
    games: int = 2048
    ridge: float = 1e-4

    def __post_init__(self) -> None:
        require_choice("algorithm.spa_rl.source", self.source, SOURCES)
        require_range("algorithm.spa_rl.games", self.games, 1)
        require_range("algorithm.spa_rl.ridge", self.ridge, 0.0, open_low=True)

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
        self._width = int(model.config.hidden_size)
        self.weight = torch.zeros(self._width, device=device)
        self._kept = self._nothing()
        self._new: list[torch.Tensor] = []
        self._learns, self._begun = False, 0

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
        """Begin an optimizer step: agree on whether any rank has a game to learn from.

        A collective where there are several ranks.
        """
        self._begun += 1
        own = any(batch is not None and len(_ends(batch)[0]) for batch in micro_batches)
        learns = torch.tensor(float(own), device=self.device)
        if self.world_size > 1:
            dist.all_reduce(learns)
        self._learns = bool(learns)

    @torch.no_grad()
    def backward(self, packed: PackedInput, batch: TrainBatch | None) -> Metrics:
        """Read the games and note their sums; nothing where no game is learnt from."""
        # All ranks agree on whether there is a game, so all of them leave the forward out.
        if not self._learns:
            return {}
        hidden = self._hidden(packed)
        if batch is not None:
            index, game = _ends(batch)
            rows = self._sums(hidden, batch, index, game)
            self._new.append(torch.cat([torch.full((len(rows), 1), float(self._begun)), rows], 1))
        return {}

    def step(self, training_step: int) -> None:
        """Nothing: the head learns at the end of the training step."""

    def finish(self, training_step: int) -> dict[str, tuple[float, float]]:
        """Learn from the games of all ranks; further passes over the same ones add nothing.

        A collective where there are several ranks. The figures are the same on every rank.
        """
        own = torch.cat([torch.zeros(0, 3 + self._width), *self._new])
        self._new, self._begun = [], 0
        new = _ordered(self._of_all_ranks(own))
        told: dict[str, tuple[float, float]] = {}
        if len(new):
            fine = new[torch.isfinite(new).all(dim=1)]
            told["skipped_games"] = (float(len(new) - len(fine)), 1.0)
            if len(fine):
                told["loss"] = (float((_gap(self.weight.cpu(), fine) ** 2).sum()), float(len(fine)))
                self._learn(fine)
                told["fit"] = (_explained(self.weight.cpu(), self._kept), 1.0)
        told["games"] = (float(len(self._kept)), 1.0)
        return {f"{NAME}/{name}": value for name, value in told.items()}

    def state(self) -> dict[str, Any]:
        """The head, whose states it reads, and the games; every rank holds the same."""
        return {
            "source": self.settings.source,
            "head": {"weight": self.weight.cpu().numpy().copy()},
            "games": {"rows": self._kept.numpy().copy()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, on any number of ranks; with the latest games that fit.

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
        self.weight.copy_(torch.from_numpy(weight.copy()))
        rows = np.array(state["games"]["rows"], dtype=np.float32)
        self._kept = torch.from_numpy(rows)[-self.settings.games :].clone()

    def _learn(self, new: torch.Tensor) -> None:
        """Keep these games as well, forget the oldest, and take the best head on what is kept."""
        self._kept = torch.cat([self._kept, new])[-self.settings.games :].clone()
        best = solved(self._kept[:, 2:], self._kept[:, 1], self.settings.ridge)
        self.weight.copy_(best)

    def _nothing(self) -> torch.Tensor:
        """No game, ``[0, 2 + hidden]``: number of the game, outcome, sum of its states."""
        return torch.zeros(0, 2 + self._width)

    def _sums(
        self, hidden: torch.Tensor, batch: TrainBatch, index: IntArray, game: IntArray
    ) -> torch.Tensor:
        """A row for each game as in ``_nothing``, in host memory."""
        _, first, number = np.unique(game, return_index=True, return_inverse=True)
        states = _scaled(hidden.index_select(0, self._tensor(index))).cpu().double()
        sums = torch.zeros(len(first), self._width, dtype=torch.float64)
        sums.index_add_(0, torch.from_numpy(number.astype(np.int64)), states)
        told = np.stack([batch.views[name][index[first]] for name in (GAME, TARGET)], axis=1)
        return torch.cat([torch.from_numpy(told).double(), sums], dim=1).float()

    def _of_all_ranks(self, own: torch.Tensor) -> torch.Tensor:
        """The rows of every rank, the same on each of them; collectives."""
        if self.world_size == 1:
            return own
        count = torch.tensor([[len(own)]])
        sizes = [int(size) for size in gathered(count, 1, self.world_size, self.device)]
        if not max(sizes):
            return own
        parts = gathered(own, max(sizes), self.world_size, self.device)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def _hidden(self, packed: PackedInput) -> torch.Tensor:
        """``[T, hidden]`` of the model that is read."""
        with self._reading():
            return hidden_states(self._model, packed)

    def _reading(self) -> AbstractContextManager[None]:
        return use_adapter(self._model, None) if self.settings.source == "base" else nullcontext()

    def _read(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The head at some positions, ``[n]`` float32."""
        return _scaled(hidden.index_select(0, index)) @ self.weight

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)


def solved(sums: torch.Tensor, outcomes: torch.Tensor, ridge: float) -> torch.Tensor:
    """The head with the least loss, ``[hidden]`` float64.

    Args:
        sums: ``[n, hidden]``, of the states of each game.
        outcomes: ``[n]``.
        ridge: Price of the square of the head's length.

    Example:
        >>> solved(torch.tensor([[2.0], [2.0]]), torch.tensor([1.0, 3.0]), ridge=4.0)
        tensor([0.5000], dtype=torch.float64)
    """
    rows, wanted = sums.double(), outcomes.double()
    price = ridge * len(rows)
    if len(rows) >= rows.shape[1]:
        square = rows.T @ rows
        square.diagonal().add_(price)
        return torch.linalg.solve(square, rows.T @ wanted)
    # With fewer games than numbers the same head comes from the smaller system.
    square = rows @ rows.T
    square.diagonal().add_(price)
    return rows.T @ torch.linalg.solve(square, wanted)


def _gap(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """By how much the head's sum misses the outcome of each game, ``[n]`` float64."""
    return rows[:, 2:].double() @ weight.double() - rows[:, 1].double()


def _explained(weight: torch.Tensor, rows: torch.Tensor) -> float:
    """Share of the outcomes' variance that the head explains; 0 where they do not differ."""
    spread = float(rows[:, 1].double().var(correction=0))
    return 1.0 - float(_gap(weight, rows).var(correction=0)) / spread if spread > 1e-12 else 0.0


def _ordered(read: torch.Tensor) -> torch.Tensor:
    """Each game once, as it was first read, in the order of games, ``[n, 2 + hidden]``.

    Args:
        read: The same behind the number of the optimizer step in which the game was read, which a
            policy that moves in between makes a difference to.
    """
    early = read[torch.argsort(read[:, 0], stable=True), 1:]
    _, first = np.unique(early[:, 0].numpy(), return_index=True)
    return early[torch.from_numpy(first)]


def _scaled(states: torch.Tensor) -> torch.Tensor:
    """Each state with mean 0 and length 1, float32."""
    width = states.shape[-1]
    return torch.nn.functional.layer_norm(states.float(), (width,)) / width**0.5


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
