"""``multi_turn.env_kwargs`` of the environment ``agreement``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delta_belief_rl.envs.env_kwargs import WHERE, check_keys, seed_of, tasks_of

DEFAULT_TASKS: Mapping[str, int] = {"train": 256, "val": 64, "test": 64}
SPLITS = tuple(DEFAULT_TASKS)
MOST_TASKS = 2000
"""Of a split: there are not many more problems of one."""

_KEYS = ("seed", "tasks")


@dataclass(frozen=True, slots=True)
class AgreementSettings:
    """Which problems are set.

    Attributes:
        seed: Of the tasks.
        tasks: Number of tasks of each split.
    """

    seed: int = 0
    tasks: tuple[tuple[str, int], ...] = tuple(DEFAULT_TASKS.items())


def read_settings(kwargs: Mapping[str, Any]) -> AgreementSettings:
    """Check and read ``multi_turn.env_kwargs``.

    Raises:
        UserError: A key is unknown, or a value is none that it may have.

    Example:
        >>> read_settings({"seed": 3, "tasks": {"train": 4}}).tasks
        (('train', 4), ('val', 0), ('test', 0))
    """
    check_keys(WHERE, tuple(kwargs), _KEYS)
    return AgreementSettings(
        seed=seed_of(kwargs), tasks=tasks_of(kwargs, DEFAULT_TASKS, MOST_TASKS)
    )
