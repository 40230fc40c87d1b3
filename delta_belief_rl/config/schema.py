"""The whole configuration as frozen dataclasses.

Nesting and names are those of the published implementation, so its launch lines compose
unchanged. What is not here is either unknown (an error) or listed in ``reference_keys``
(accepted, with a warning).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from delta_belief_rl.config.fields import opt
from delta_belief_rl.config.schema_actor import ActorRolloutRef
from delta_belief_rl.config.schema_algo import Algorithm
from delta_belief_rl.config.schema_critic import Critic
from delta_belief_rl.config.schema_data import Data
from delta_belief_rl.config.schema_judge import JudgeRollout
from delta_belief_rl.config.schema_trainer import RayInit, Trainer
from delta_belief_rl.config.schema_turns import MultiTurn


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that defines a run."""

    seed: int = opt(
        42,
        "Seed of every random choice.",
        corrected="also reaches the engines, the judge and the order of tasks",
    )
    plugins: tuple[str, ...] = opt(
        (),
        "Modules with environments of your own, imported once in each process: dotted names, or "
        "paths of .py files.",
        new=True,
    )
    multi_turn: MultiTurn = field(default_factory=MultiTurn)
    data: Data = field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)
    judge_rollout: JudgeRollout = field(default_factory=JudgeRollout)
    algorithm: Algorithm = field(default_factory=Algorithm)
    critic: Critic = field(default_factory=Critic)
    trainer: Trainer = field(default_factory=Trainer)
    ray_init: RayInit = field(default_factory=RayInit)


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], object]]:
    """Every setting as ``(dotted name, field, type)``, in order of declaration."""
    hints = get_type_hints(cls)
    for item in fields(cls):
        name, kind = prefix + item.name, hints[item.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from leaves(kind, name + ".")
        else:
            yield name, item, kind


def lookup(config: RunConfig, name: str) -> object:
    """The value of a setting by its dotted name."""
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
