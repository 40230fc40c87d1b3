"""``multi_turn.env_kwargs`` of the environment ``agreement``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from delta_belief_rl.types import UserError

SPLITS = ("train", "val", "test")
DEFAULT_TASKS: Mapping[str, int] = {"train": 256, "val": 64, "test": 64}
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
    _known("multi_turn.env_kwargs", tuple(kwargs), _KEYS)
    return AgreementSettings(
        seed=_count("seed", kwargs.get("seed", 0), 2**31 - 1), tasks=_tasks(kwargs.get("tasks"))
    )


def _tasks(given: object) -> tuple[tuple[str, int], ...]:
    if given is None:
        return tuple(DEFAULT_TASKS.items())
    if not isinstance(given, Mapping):
        raise UserError(
            f"multi_turn.env_kwargs.tasks is {given!r}: give the number of tasks of each split, "
            "e.g. {train: 256, val: 64, test: 64}."
        )
    counts = cast(Mapping[str, object], given)
    _known("multi_turn.env_kwargs.tasks", tuple(counts), SPLITS)
    return tuple(
        (split, _count(f"tasks.{split}", counts.get(split, 0), MOST_TASKS)) for split in SPLITS
    )


def _count(name: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise UserError(
            f"multi_turn.env_kwargs.{name} is {value!r}: give a whole number from 0 to {most}."
        )
    return value


def _known(name: str, keys: Sequence[object], known: Sequence[str]) -> None:
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}."
            raise UserError(f"{name} has no key {str(key)!r}: {hint}")
