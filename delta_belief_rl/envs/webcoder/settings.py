"""``multi_turn.env_kwargs`` of the environment ``webcoder``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from delta_belief_rl.algo.shapers.requirements_met import RequirementsSettings
from delta_belief_rl.envs.single_use import check_choice
from delta_belief_rl.envs.webcoder.requirements import KINDS
from delta_belief_rl.types import UserError

SPLITS = ("train", "val", "test")
DEFAULT_TASKS: Mapping[str, int] = {"train": 256, "val": 64, "test": 64}
MOST_TASKS = 5_000
MOST_TURNS = 16
PROMPTS = ("full", "short")

_KEYS = ("seed", "tasks", "kinds", "turns_per_task", "regression", "gate", "prompt")


@dataclass(frozen=True, slots=True)
class WebCoderSettings:
    """Which projects are written, and how they are paid.

    Attributes:
        seed: Of the projects.
        tasks: Number of projects of each split.
        kinds: The tasks of a game, some of ``KINDS`` in their order, beginning with the first.
        turns_per_task: Messages after which a task is over, finished or not.
        regression: Price of breaking, in ``modify`` and ``repair``, everything that worked.
        gate: Whether a project that is not built earns nothing.
        prompt: ``full``: the opening explains the format. ``short``: it does not, for an agent that
            knows it.
    """

    seed: int = 0
    tasks: tuple[tuple[str, int], ...] = tuple(DEFAULT_TASKS.items())
    kinds: tuple[str, ...] = KINDS
    turns_per_task: int = 2
    regression: float = 0.5
    gate: bool = True
    prompt: str = "full"

    @property
    def reward(self) -> RequirementsSettings:
        """The knobs of the reward."""
        return RequirementsSettings(self.regression, self.gate)


def read_settings(kwargs: Mapping[str, Any]) -> WebCoderSettings:
    """Check and read ``multi_turn.env_kwargs``.

    Raises:
        UserError: A key is unknown, or a value is none that it may have.

    Example:
        >>> read_settings({"kinds": ["reproduce", "generate"]}).kinds
        ('reproduce', 'generate')
    """
    _known("multi_turn.env_kwargs", tuple(kwargs), _KEYS)
    prompt: object = kwargs.get("prompt", "full")
    check_choice("multi_turn.env_kwargs.prompt", str(prompt), PROMPTS)
    gate: object = kwargs.get("gate", True)
    if not isinstance(gate, bool):
        raise UserError(f"multi_turn.env_kwargs.gate is {gate!r}: give true or false.")
    price: object = kwargs.get("regression", 0.5)
    if isinstance(price, bool) or not isinstance(price, int | float):
        raise UserError(f"multi_turn.env_kwargs.regression is {price!r}: give a number.")
    settings = WebCoderSettings(
        seed=_count("seed", kwargs.get("seed", 0), 0, 2**31 - 1),
        tasks=_tasks(kwargs.get("tasks")),
        kinds=_kinds(kwargs.get("kinds")),
        turns_per_task=_count("turns_per_task", kwargs.get("turns_per_task", 2), 1, MOST_TURNS),
        regression=float(price),
        gate=gate,
        prompt=str(prompt),
    )
    RequirementsSettings(settings.regression)
    return settings


def _kinds(given: object) -> tuple[str, ...]:
    if given is None:
        return KINDS
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    names = tuple(str(name) for name in cast(Sequence[object], given)) if listed else ()
    if not names or names != KINDS[: len(names)]:
        raise UserError(
            f"multi_turn.env_kwargs.kinds is {given!r}: give the first few of [{', '.join(KINDS)}]."
        )
    return names


def _tasks(given: object) -> tuple[tuple[str, int], ...]:
    if given is None:
        return tuple(DEFAULT_TASKS.items())
    if not isinstance(given, Mapping):
        raise UserError(
            f"multi_turn.env_kwargs.tasks is {given!r}: give the number of projects of each "
            "split, e.g. {train: 256, val: 64, test: 64}."
        )
    counts = cast(Mapping[str, object], given)
    _known("multi_turn.env_kwargs.tasks", tuple(counts), SPLITS)
    return tuple(
        (split, _count(f"tasks.{split}", counts.get(split, 0), 0, MOST_TASKS)) for split in SPLITS
    )


def _count(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(
            f"multi_turn.env_kwargs.{name} is {value!r}: give a whole number from {least} to "
            f"{most}."
        )
    return value


def _known(name: str, keys: Sequence[object], known: Sequence[str]) -> None:
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}."
            raise UserError(f"{name} has no key {str(key)!r}: {hint}")
