"""What the environments with made tasks read alike from ``multi_turn.env_kwargs``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import cast

from delta_belief_rl.types import UserError

WHERE = "multi_turn.env_kwargs"
MOST_SEED = 2**31 - 1


def check_keys(name: str, keys: Sequence[object], known: Sequence[str]) -> None:
    """Refuse a key that a setting does not have.

    Args:
        name: Of the setting, for the sentence.

    Raises:
        UserError: One is unknown; the sentence has the nearest name.
    """
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}."
            raise UserError(f"{name} has no key {str(key)!r}: {hint}")


def whole_number(name: str, value: object, most: int) -> int:
    """A number of ``multi_turn.env_kwargs`` from 0 to ``most``.

    Raises:
        UserError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise UserError(f"{WHERE}.{name} is {value!r}: give a whole number from 0 to {most}.")
    return value


def seed_of(kwargs: Mapping[str, object]) -> int:
    """The seed of the tasks, 0 where none is given.

    Raises:
        UserError: It is no whole number from 0.
    """
    return whole_number("seed", kwargs.get("seed", 0), MOST_SEED)


def tasks_of(
    kwargs: Mapping[str, object], default: Mapping[str, int], most: int, noun: str = "tasks"
) -> tuple[tuple[str, int], ...]:
    """How many tasks each split has.

    Args:
        default: Of each split, where nothing is given; a split that is left out has none.
        most: Of one split.
        noun: What the environment calls its tasks.

    Raises:
        UserError: It is no mapping of splits to numbers from 0 to ``most``.

    Example:
        >>> tasks_of({"tasks": {"val": 4}}, {"train": 9, "val": 3}, 10)
        (('train', 0), ('val', 4))
    """
    given = kwargs.get("tasks")
    if given is None:
        return tuple(default.items())
    if not isinstance(given, Mapping):
        shown = ", ".join(f"{split}: {count}" for split, count in default.items())
        raise UserError(
            f"{WHERE}.tasks is {given!r}: give the number of {noun} of each split, "
            f"e.g. {{{shown}}}."
        )
    counts = cast(Mapping[str, object], given)
    check_keys(f"{WHERE}.tasks", tuple(counts), tuple(default))
    return tuple(
        (split, whole_number(f"tasks.{split}", counts.get(split, 0), most)) for split in default
    )
