"""ArCHer's critics: two of actions and two of states, on what the frozen base model reads.

The base model, without any adapter, reads each game once in the score pass and once in the update.
A state is its last hidden state before a turn, an action the one at the turn's last token; the
environment's tokens stand between any two turns. On these the heads of ``models.double_critic`` say
``Q`` and ``V``; slow copies of all four, ``Q'`` and ``V'``, give the targets. At the end of a
training step the critics learn ``epochs`` times from ``batch`` transitions at random::

    loss = sum_j mean (Q_j(s, a) - r - gamma * (1 - done) * V'_j(s'))^2     from the replay buffer
         + sum_j mean (V_j(s) - Q'_j(s, a))^2                               from this step alone
    copy <- copy + tau * (critic - copy)

``V`` is that of the policy, so its actions must be fresh. Those of the step are: nothing has been
learnt since they were sampled. Stored actions of earlier steps teach ``Q`` only.

With ``token_baseline`` a baseline of single tokens reads the same hidden states and learns on its
own (``trainer.token_baseline``).

Every rank gets the transitions of all, in the order of games and turns, and draws the same ones, so
all ranks hold the same critics without averaging a gradient, and buffer and critics do not depend
on how many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from delta_belief_rl.algo.base import require_range
from delta_belief_rl.algo.credit.archer import BASELINE, DONE, GAME, REWARD, Q, V
from delta_belief_rl.algo.losses.aggregate import Metrics
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.adapters import adapter_names, use_adapter
from delta_belief_rl.models.double_critic import DoubleCritic, TokenBaseline
from delta_belief_rl.models.logprobs import hidden_states
from delta_belief_rl.models.packed import PackedInput, PackSegment, pack
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.optimizer import OptimizerSettings, build_optimizer, gradient_norm
from delta_belief_rl.trainer.replay import Replay, Transitions, drawn, joined, nothing, of_all_ranks
from delta_belief_rl.trainer.token_baseline import BaselineTeacher
from delta_belief_rl.types import FloatArray, IntArray, TrainBatch, UserError

NAME = "archer"
CRITICS = "critics"
"""Their optimizer's key in checkpoints, where there is one of a baseline beside it."""
NEEDS_LORA = (
    "algorithm.adv_estimator=archer reads the base model beside the policy, which needs LoRA "
    "adapters: set actor_rollout_ref.model.lora_rank."
)


@dataclass(frozen=True, slots=True)
class ArcherCriticSettings:
    """The critics and their training.

    Attributes:
        gamma: Discount of one turn.
        tau: How far the slow copies go towards the critics in one update of these.
        lr: Learning rate of AdamW.
        width: Of the layers of a critic.
        buffer: Transitions that are kept.
        epochs: Updates at the end of a training step.
        batch: Transitions of one update.
        grad_clip: Largest norm of the gradient of all four, and of the baseline's.
        seed: Of the initial weights and of what is drawn.
        policy_waits: Training steps, from the first, in which the critics alone are trained.
        token_baseline: There is a baseline of single tokens as well.
        baseline_lr: Its learning rate.
    """

    gamma: float = 0.95
    tau: float = 0.1
    lr: float = 2e-5
    width: int = 256
    buffer: int = 100_000
    epochs: int = 50
    batch: int = 128
    grad_clip: float = 1.0
    seed: int = 42
    policy_waits: int = 0
    token_baseline: bool = False
    baseline_lr: float = 1e-3

    def __post_init__(self) -> None:
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_range("algorithm.archer.tau", self.tau, 0.0, 1.0, open_low=True)
        require_range("algorithm.archer.lr", self.lr, 0.0, open_low=True)
        require_range("algorithm.archer.width", self.width, 1)
        require_range("algorithm.archer.buffer", self.buffer, 1)
        require_range("algorithm.archer.critic_epochs", self.epochs, 1)
        require_range("algorithm.archer.critic_batch", self.batch, 1)
        require_range("algorithm.archer.grad_clip", self.grad_clip, 0.0, open_low=True)
        require_range("algorithm.archer.warmup_steps", self.policy_waits, 0)
        require_range("algorithm.archer.baseline_lr", self.baseline_lr, 0.0, open_low=True)

    @property
    def name(self) -> str:
        """Its key in checkpoints."""
        return NAME

    @property
    def columns(self) -> tuple[str, ...]:
        """The smaller critic of the action, and of the state; the baseline where there is one."""
        own = (f"tokens:{Q}", f"tokens:{V}")
        return (*own, f"tokens:{BASELINE}") if self.token_baseline else own

    @property
    def adapter(self) -> str | None:
        """None: the base model is read as it is."""
        return None

    def build(self, model: Any, device: torch.device, world_size: int) -> ArcherCritics:
        """The critics of one rank.

        Raises:
            UserError: The policy is the whole model, so there is no base model beside it.
        """
        if not adapter_names(model):
            raise UserError(NEEDS_LORA)
        return ArcherCritics(self, model, device, world_size)


class Teacher:
    """The critics, their slow copies and the buffer; knows nothing of language models.

    Args:
        settings: What it needs to know.
        hidden: Numbers of a state.
        device: Where the critics are.
    """

    def __init__(self, settings: ArcherCriticSettings, hidden: int, device: torch.device) -> None:
        self.settings, self.device = settings, device
        made = [DoubleCritic(hidden, settings.width, settings.seed).to(device) for _ in range(2)]
        self.critic, self.slow = made
        self.slow.requires_grad_(False)
        self.optimizer = build_optimizer(
            self.critic.parameters(), OptimizerSettings(lr=settings.lr, weight_decay=0.0)
        )
        self.replay = Replay(settings.buffer, hidden)

    def targets(self, seen: Transitions, fresh: Transitions) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``Q_j`` of ``seen`` and ``V_j`` of ``fresh`` move towards, ``[2, n]`` each."""
        with torch.no_grad():
            after = self.slow.states(self._features(seen, 2))
            rewards, going_on = self._numbers(seen.rewards), self._numbers(1.0 - seen.done)
            q = rewards + self.settings.gamma * torch.where(going_on > 0, after, 0.0)
            return q, self.slow.actions(self._features(fresh, 0), self._features(fresh, 1))

    def learn(self, new: Transitions, training_step: int) -> dict[str, tuple[float, float]]:
        """Keep the transitions of a step and train on them and on earlier ones.

        Returns:
            Figures as (sum, count).
        """
        figures = {"transitions": [float(len(new))]}
        if len(new):
            self.replay.add(new)
            rng = np.random.default_rng([self.settings.seed, training_step])
            count = self.settings.batch
            for _ in range(self.settings.epochs):
                told = self._improve(self.replay.draw(count, rng), drawn(new, count, rng))
                for name, value in told.items():
                    figures.setdefault(name, []).append(value)
            figures["lr"] = [self.settings.lr]
        figures["buffer_size"] = [float(len(self.replay))]
        return {f"{NAME}/{name}": (sum(many), float(len(many))) for name, many in figures.items()}

    def _improve(self, seen: Transitions, fresh: Transitions) -> dict[str, float]:
        """One update; a gradient that is not finite leaves everything as it is."""
        q_target, v_target = self.targets(seen, fresh)
        q = self.critic.actions(self._features(seen, 0), self._features(seen, 1))
        v = self.critic.states(self._features(fresh, 0))
        losses = [((q - q_target) ** 2).mean(dim=1).sum(), ((v - v_target) ** 2).mean(dim=1).sum()]
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        norm = gradient_norm(self.optimizer, self.settings.grad_clip)
        if not math.isfinite(norm):
            return {"skipped_updates": 1.0}
        self.optimizer.step()
        self.slow.follow(self.critic, self.settings.tau)
        names = ("q_loss", "v_loss")
        told = {name: float(loss.detach()) for name, loss in zip(names, losses, strict=True)}
        return {**told, "grad_norm": norm, "skipped_updates": 0.0}

    def _features(self, rows: Transitions, place: int) -> torch.Tensor:
        return rows.features[:, place].to(self.device)

    def _numbers(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, torch.float32)

    def state(self) -> dict[str, Any]:
        """Weights, buffer and optimizer."""
        return {
            "critic": self.critic.arrays(),
            "slow": self.slow.arrays(),
            "replay": self.replay.state(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` gave.

        Raises:
            UserError: It is of another model or of other sizes.
        """
        self.critic.load_arrays(state["critic"])
        self.slow.load_arrays(state["slow"])
        self.replay.load_state(state["replay"])
        self.optimizer.load_state_dict(state["optimizer"])


class ArcherCritics:
    """The learner of one training rank; see the module's head.

    Args:
        settings: What it needs to know.
        model: The policy's model, with LoRA adapters.
        device: Where the critics are.
        world_size: How many ranks there are.
    """

    def __init__(
        self,
        settings: ArcherCriticSettings,
        model: Any,
        device: torch.device,
        world_size: int = 1,
    ) -> None:
        self.settings, self.world_size, self.device = settings, world_size, device
        self._model = model
        self._hidden = int(model.config.hidden_size)
        self.teacher = Teacher(settings, self._hidden, device)
        self.baseline: BaselineTeacher | None = None
        if settings.token_baseline:
            self.baseline = BaselineTeacher(
                TokenBaseline(self._hidden, settings.width, settings.seed),
                settings.baseline_lr,
                settings.grad_clip,
                device,
                world_size,
            )
        self._new: list[Transitions] = []

    @torch.no_grad()
    def _read(self, packed: PackedInput) -> torch.Tensor:
        """Hidden states of the base model, ``[T, hidden]``."""
        with use_adapter(self._model, None):
            return hidden_states(self._model, packed)

    @torch.no_grad()
    def score(self, games: Sequence[ScoreRequest]) -> list[dict[str, FloatArray]]:
        """``Q`` and ``V`` of each turn, at each of its tokens, and the baseline of the token."""
        packed = pack(
            [PackSegment(game.token_ids) for game in games], self.device, runs_ragged(self._model)
        )
        hidden = self._read(packed)
        cuts = [_runs(game.action_positions) for game in games]
        first = [packed.segment_starts[i] + start - 1 for i, (start, _) in enumerate(cuts)]
        last = [packed.segment_starts[i] + end for i, (_, end) in enumerate(cuts)]
        states = self._rows(hidden, np.concatenate(first))
        critic = self.teacher.critic
        q = critic.actions(states, self._rows(hidden, np.concatenate(last))).amin(dim=0)
        values = torch.stack([q, critic.states(states).amin(dim=0)]).double().cpu().numpy()
        ends = np.cumsum([len(start) for start, _ in cuts])[:-1]
        found = [
            {name: np.repeat(row, end + 1 - start) for name, row in zip((Q, V), part, strict=True)}
            for part, (start, end) in zip(np.split(values, ends, axis=1), cuts, strict=True)
        ]
        if self.baseline is not None:
            before = [packed.trunk_sources(i, g.action_positions) for i, g in enumerate(games)]
            rows = self.baseline.values(hidden, np.concatenate(before))
            parts = np.split(rows, np.cumsum([len(each) for each in before])[:-1])
            for columns, part in zip(found, parts, strict=True):
                columns[BASELINE] = part
        return found

    def begin(self, micro_batches: Sequence[TrainBatch | None]) -> None:
        """Begin a step of the baseline; the critics learn at the end of the training step.

        A collective where there are several ranks and a baseline.
        """
        if self.baseline is not None:
            self.baseline.begin(micro_batches)

    def backward(self, packed: PackedInput, batch: TrainBatch | None) -> Metrics:
        """Read the games and note their transitions; the baseline learns from them."""
        hidden = self._read(packed)
        # Ranks exchange rows as bytes, so one without any has to know their number format, too.
        self._new.append(nothing(self._hidden, hidden.dtype))
        if batch is not None:
            index, numbers = transitions_of(batch)
            rows = self._rows(hidden, index.ravel()).reshape(len(index), 3, self._hidden).cpu()
            keys, rewards, done = (torch.from_numpy(part) for part in np.split(numbers, [2, 3], 1))
            self._new.append(Transitions(rows, rewards[:, 0], done[:, 0], keys))
        if batch is None or self.baseline is None:
            return {}
        return self.baseline.backward(hidden, batch)

    def step(self, training_step: int) -> None:
        """End a step of the baseline; a collective as in ``begin``."""
        if self.baseline is not None:
            self.baseline.step()

    def finish(self, training_step: int) -> dict[str, tuple[float, float]]:
        """Learn from the transitions of all ranks; those of further passes are the same ones."""
        own = joined(self._new or [nothing(self._hidden)]).ordered()
        self._new = []
        new = of_all_ranks(own, self.device, self.world_size).ordered()
        told = self.teacher.learn(new, training_step)
        return told if self.baseline is None else told | self.baseline.finish()

    def _rows(self, hidden: torch.Tensor, index: IntArray) -> torch.Tensor:
        return hidden.index_select(0, torch.as_tensor(index, device=hidden.device))

    def state(self) -> dict[str, Any]:
        """Weights, buffer and optimizer, the same on every rank."""
        state = self.teacher.state()
        if self.baseline is None:
            return state
        own = {CRITICS: state["optimizer"], BASELINE: self.baseline.optimizer.state_dict()}
        return {**state, BASELINE: self.baseline.baseline.arrays(), "optimizer": own}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, on any number of ranks.

        Raises:
            UserError: It is of another model or of other sizes, or of a run with a baseline where
                this one has none, or the other way round.
        """
        known = BASELINE in state
        if known != self.settings.token_baseline:
            raise UserError(
                f"The checkpoint's critics were trained with algorithm.archer.token_baseline="
                f"{str(known).lower()}: resume with it, or start a new run."
            )
        if self.baseline is None:
            self.teacher.load_state(state)
            return
        optimizers = state["optimizer"]
        self.teacher.load_state({**state, "optimizer": optimizers[CRITICS]})
        self.baseline.load_state(state[BASELINE], optimizers[BASELINE])


def _runs(positions: IntArray) -> tuple[IntArray, IntArray]:
    """First and last position of every turn, from the positions of all sampled tokens."""
    if not len(positions):
        return positions, positions
    breaks = np.flatnonzero(np.diff(positions) != 1)
    return positions[np.append(0, breaks + 1)], positions[np.append(breaks, len(positions) - 1)]


def transitions_of(batch: TrainBatch) -> tuple[IntArray, FloatArray]:
    """The transitions of a packed row of games.

    Returns:
        ``[n, 3]`` positions of the hidden states of ``Transitions.features``, and ``[n, 4]``: game,
        turn, reward and ``done``.
    """
    rewards = batch.views.get(REWARD, np.full(len(batch.turn_ids), np.nan))
    tokens = np.flatnonzero((batch.turn_ids >= 0) & np.isfinite(rewards)).astype(np.int64)
    if not len(tokens):
        return np.zeros((0, 3), dtype=np.int64), np.zeros((0, 4))
    game_of = np.repeat(np.arange(batch.num_games), batch.lengths())
    border = np.flatnonzero(
        (np.diff(game_of[tokens]) != 0) | (np.diff(batch.turn_ids[tokens]) != 0)
    )
    first, last = tokens[np.append(0, border + 1)], tokens[np.append(border, len(tokens) - 1)]
    game = game_of[first]
    # The stream ends where the agent would speak next, so its last position is a state as well.
    after = batch.offsets[1:][game] - 1
    follows = np.flatnonzero(np.diff(game) == 0)
    after[follows] = first[follows + 1] - 1
    views = batch.views
    columns = [views[GAME][first], batch.turn_ids[first], rewards[first], views[DONE][first]]
    return np.stack([first - 1, last, after], axis=1), np.stack(columns, axis=1).astype(np.float64)
