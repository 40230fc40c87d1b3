"""``multi_turn.env_kwargs`` of the environment ``errands``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delta_belief_rl.envs.env_kwargs import WHERE, check_keys, seed_of, tasks_of
from delta_belief_rl.envs.single_use import check_choice

DEFAULT_TASKS: Mapping[str, int] = {"train": 256, "val": 64, "test": 64}
MOST_TASKS = 100_000
PROMPTS = ("full", "short")

_KEYS = ("seed", "tasks", "prompt")


@dataclass(frozen=True, slots=True)
class ErrandsSettings:
    """Which errands are run.

    Attributes:
        seed: Of the tasks.
        tasks: Number of tasks of each split.
        prompt: ``full``: the opening says what commands there are. ``short``: it does not, for an
            agent that knows them.
    """

    seed: int = 0
    tasks: tuple[tuple[str, int], ...] = tuple(DEFAULT_TASKS.items())
    prompt: str = "full"


def read_settings(kwargs: Mapping[str, Any]) -> ErrandsSettings:
    """Check and read ``multi_turn.env_kwargs``.

    Raises:
        UserError: A key is unknown, or a value is none that it may have.

    Example:
        >>> read_settings({"seed": 3, "tasks": {"train": 4}}).tasks
        (('train', 4), ('val', 0), ('test', 0))
    """
    check_keys(WHERE, tuple(kwargs), _KEYS)
    prompt: object = kwargs.get("prompt", "full")
    check_choice("multi_turn.env_kwargs.prompt", str(prompt), PROMPTS)
    return ErrandsSettings(
        seed=seed_of(kwargs),
        tasks=tasks_of(kwargs, DEFAULT_TASKS, MOST_TASKS),
        prompt=str(prompt),
    )
