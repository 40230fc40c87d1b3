"""``multi_turn.env_kwargs`` of the environment ``clinical``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from delta_belief_rl.envs.clinical.sheets import SIMULATORS
from delta_belief_rl.envs.env_kwargs import WHERE, check_keys, seed_of, tasks_of
from delta_belief_rl.envs.single_use import check_choice
from delta_belief_rl.types import UserError

DEFAULT_TASKS: Mapping[str, int] = {"train": 288, "val": 72, "test": 72}
MOST_TASKS = 20_000
PROMPTS = ("full", "short")

_KEYS = ("seed", "tasks", "simulators", "prompt")


@dataclass(frozen=True, slots=True)
class ClinicalSettings:
    """Which cases are played.

    Attributes:
        seed: Of the cases.
        tasks: Number of cases of each split.
        simulators: Those of ``SIMULATORS`` that cases are drawn from.
        prompt: ``full``: the opening lists what can be asked, ordered and decided. ``short``: it
            lists the decisions alone.
    """

    seed: int = 0
    tasks: tuple[tuple[str, int], ...] = tuple(DEFAULT_TASKS.items())
    simulators: tuple[str, ...] = SIMULATORS
    prompt: str = "full"


def read_settings(kwargs: Mapping[str, Any]) -> ClinicalSettings:
    """Check and read ``multi_turn.env_kwargs``.

    Raises:
        UserError: A key is unknown, or a value is none that it may have.

    Example:
        >>> read_settings({"seed": 3, "simulators": ["refill"]}).simulators
        ('refill',)
    """
    check_keys(WHERE, tuple(kwargs), _KEYS)
    prompt: object = kwargs.get("prompt", "full")
    check_choice("multi_turn.env_kwargs.prompt", str(prompt), PROMPTS)
    return ClinicalSettings(
        seed=seed_of(kwargs),
        tasks=tasks_of(kwargs, DEFAULT_TASKS, MOST_TASKS, "cases"),
        simulators=_simulators(kwargs.get("simulators")),
        prompt=str(prompt),
    )


def _simulators(given: object) -> tuple[str, ...]:
    if given is None:
        return SIMULATORS
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise UserError(
            f"multi_turn.env_kwargs.simulators is {given!r}: give a list of some of "
            f"{', '.join(SIMULATORS)}."
        )
    names = [str(name) for name in cast(Sequence[object], given)]
    for name in names:
        check_choice("multi_turn.env_kwargs.simulators", name, SIMULATORS)
    return tuple(name for name in SIMULATORS if name in names)
