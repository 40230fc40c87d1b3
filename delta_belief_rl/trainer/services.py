"""What the training loop works with: pools behind protocols, and all that is fixed for a run.

The loop and the steps see these types only. The cluster room builds them on Ray; tests build them
in one process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from delta_belief_rl.algo.base import Credit, Sampler, Scorer, Shaper
from delta_belief_rl.algo.scorers.roles import Roles
from delta_belief_rl.algo.shapers.kl_reward import KlReward
from delta_belief_rl.algo.shapers.prices import Prices
from delta_belief_rl.belief.branched import ScoreRequest, View
from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import BranchEngine
from delta_belief_rl.judge.pool import JudgePool
from delta_belief_rl.obs.jsonl import MetricsLog
from delta_belief_rl.obs.metrics import StepTimers
from delta_belief_rl.obs.progress import ProgressView
from delta_belief_rl.obs.wandb_mirror import WandbMirror
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.trainer.actor import AdapterSnapshot, GameScore
from delta_belief_rl.trainer.background import Background
from delta_belief_rl.trainer.packing import UpdatePlan
from delta_belief_rl.types import FloatArray, Task, TrainBatch, Trajectory


class PolicyGroup(Protocol):
    """All training ranks as one."""

    num_ranks: int

    async def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        """Scores in the order of ``games``."""
        ...

    async def update(
        self, batch: TrainBatch, plan: UpdatePlan, training_step: int
    ) -> dict[str, float]:
        """Run the plan; metrics are means over all ranks."""
        ...

    async def usage(self) -> dict[str, float]:
        """Time of the parts of the work, operations and memory since the last call, as metrics."""
        ...

    async def snapshot(self) -> AdapterSnapshot:
        """The adapter as it stands."""
        ...

    async def probe(self, token_ids: Sequence[int]) -> FloatArray:
        """Log-probs of a fixed sequence under the adapter as it stands."""
        ...

    async def dump(self) -> bytes:
        """The state for a checkpoint."""
        ...

    async def load(self, data: bytes) -> str:
        """Take over a saved state; returns the adapter's checksum."""
        ...


async def no_check() -> None:
    """Workers that are in this process need no sign of life."""


class EngineGroup(Protocol):
    """All replicas of the policy engine as one."""

    async def sync(self, policy: PolicyGroup) -> Mapping[str, float]:
        """Bring every replica to the policy's adapter and prove it; raises when one differs."""
        ...

    @property
    def adapter(self) -> str:
        """Checksum of the adapter that all replicas hold; empty before the first ``sync``."""
        ...


class Player(Protocol):
    """A policy that is asked over a network."""

    def metrics(self) -> dict[str, float]:
        """What its calls came to since the last call of this."""
        ...

    async def close(self) -> None:
        """Nothing more is asked."""
        ...


@dataclass(frozen=True, slots=True)
class TaskSets:
    """The tasks of a run; ``test`` is empty where none is given."""

    train: tuple[Task, ...]
    val: tuple[Task, ...]
    test: tuple[Task, ...] = ()

    def train_secrets(self) -> frozenset[str]:
        """Secrets of the training tasks, for the overlap report."""
        return frozenset(task.secret for task in self.train if task.secret)


@dataclass(slots=True)
class RunState:
    """What changes during a run beside the policy, and is saved with it.

    Attributes:
        step: Training steps finished.
        validated: Step of the newest validation on record; -1 before the first.
        best: Best validation success rate so far.
        best_step: Step of that validation, the earliest of equal ones; -1 before the first.
        batches: Batches of secrets drawn so far, the cursor of the task order; as many as steps
            unless groups are filtered.
        broken: Steps in a row in which a rule of ``trainer.abort`` was broken, by rule.
    """

    step: int = 0
    validated: int = -1
    best: float = -1.0
    best_step: int = -1
    batches: int = 0
    broken: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class Services:
    """One run, ready to go."""

    cfg: RunConfig
    run_dir: Path
    run_id: str
    total_steps: int
    tasks: TaskSets
    sampler: Sampler
    rollouts: RolloutDriver
    val_rollouts: RolloutDriver
    policy: PolicyGroup
    engines: EngineGroup
    judge: JudgePool
    shaper: Shaper
    credit: Credit
    elicit: Callable[[str], Elicitation]
    log: MetricsLog
    wandb: WandbMirror
    progress: ProgressView
    resolved: str
    scorers: tuple[Scorer, ...] = ()
    """What the credit method asks of the played tokens behind other contexts."""
    hinted: Callable[[Trajectory, str], View] | None = None
    """A game with a hint in its opening; there where there are scorers."""
    roles: Roles = field(default_factory=Roles)
    """Models that scorers may ask before the score pass."""
    prices: Prices = field(default_factory=Prices)
    kl_reward: KlReward | None = None
    engine: BranchEngine | None = None
    """Scores texts for cross-checks; None where the engine cannot."""
    device: str = "cpu"
    """Where the policy is trained."""
    state: RunState = field(default_factory=RunState)
    timers: StepTimers = field(default_factory=StepTimers)
    saver: Background = field(default_factory=Background)
    """Writes checkpoints."""
    border: RunState | None = None
    """The state after the last finished step, as long as the policy is that step's."""
    player: Player | None = None
    """A policy that is no model of this run."""
    check_workers: Callable[[], Awaitable[None]] = no_check
    """Asks every worker for a sign of life before a step; raises for a lost training rank."""

    def settle(self) -> None:
        """Note that a step is finished and recorded: its state is what a checkpoint would hold."""
        self.border = replace(self.state, broken=dict(self.state.broken))
