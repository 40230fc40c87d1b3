"""``multi_turn.env_kwargs`` of the environment ``textarena``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from delta_belief_rl.types import UserError

SPLITS = ("train", "val", "test")
SEEDS_OF_A_SPLIT = 1_000_000
"""Seeds of ``train`` begin at 0, of ``val`` at this number, of ``test`` at twice this number."""
DEFAULT_TASKS: Mapping[str, int] = {"train": 64, "val": 32, "test": 32}

_KEYS = ("game", "tasks", "words", "error_allowance", "game_kwargs")


@dataclass(frozen=True, slots=True)
class TextArenaSettings:
    """Which game is played, and how.

    Attributes:
        game: Name of a registered game, e.g. ``Wordle-v0``.
        tasks: Number of tasks of each split.
        words: A file with one word per line, for the games that draw words; None for the list of
            this package.
        error_allowance: Invalid moves in a row that do not end the game; None for the game's own
            number, as a rule 1.
        game_kwargs: JSON object of further arguments of the game.
    """

    game: str
    tasks: tuple[tuple[str, int], ...] = tuple(DEFAULT_TASKS.items())
    words: str | None = None
    error_allowance: int | None = None
    game_kwargs: str = "{}"

    def seeds(self, split: str) -> range:
        """Seeds of a split; no two splits share one."""
        first = SPLITS.index(split) * SEEDS_OF_A_SPLIT
        return range(first, first + dict(self.tasks).get(split, 0))

    def arguments(self) -> dict[str, Any]:
        """``game_kwargs`` as the game takes them."""
        return cast(dict[str, Any], json.loads(self.game_kwargs))


def read_settings(kwargs: Mapping[str, Any]) -> TextArenaSettings:
    """Check and read ``multi_turn.env_kwargs``.

    Raises:
        UserError: A key is unknown, or a value is none that it may have.

    Example:
        >>> read_settings({"game": "Wordle-v0", "tasks": {"train": 4}}).seeds("train")
        range(0, 4)
    """
    _known("multi_turn.env_kwargs", tuple(kwargs), _KEYS)
    game, words = kwargs.get("game"), kwargs.get("words")
    if not isinstance(game, str) or not game:
        raise UserError(
            "multi_turn.env_kwargs.game must name a game of TextArena, e.g. {game: Wordle-v0}."
        )
    if words is not None and not (isinstance(words, str) and words):
        raise UserError(f"multi_turn.env_kwargs.words is {words!r}: give the path of a text file.")
    allowance = kwargs.get("error_allowance")
    return TextArenaSettings(
        game=game,
        tasks=_tasks(kwargs.get("tasks")),
        words=words,
        error_allowance=None if allowance is None else _count("error_allowance", allowance),
        game_kwargs=_arguments(kwargs.get("game_kwargs")),
    )


def _tasks(given: object) -> tuple[tuple[str, int], ...]:
    if given is None:
        return tuple(DEFAULT_TASKS.items())
    if not isinstance(given, Mapping):
        raise UserError(
            f"multi_turn.env_kwargs.tasks is {given!r}: give the number of tasks of each split, "
            "e.g. {train: 64, val: 32, test: 32}."
        )
    counts = cast(Mapping[str, object], given)
    _known("multi_turn.env_kwargs.tasks", tuple(counts), SPLITS)
    return tuple((split, _count(f"tasks.{split}", counts.get(split, 0))) for split in SPLITS)


def _arguments(given: object) -> str:
    if given is None:
        return "{}"
    if not isinstance(given, Mapping):
        raise UserError(
            f"multi_turn.env_kwargs.game_kwargs is {given!r}: give arguments of the game by name, "
            "e.g. {num_guesses: 8}."
        )
    try:
        return json.dumps(dict(cast(Mapping[str, object], given)), sort_keys=True)
    except TypeError as error:
        raise UserError(
            f"multi_turn.env_kwargs.game_kwargs holds a value that is no plain number, text or "
            f"list: {error}."
        ) from error


def _count(name: str, given: object) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= SEEDS_OF_A_SPLIT:
        return given
    raise UserError(
        f"multi_turn.env_kwargs.{name} is {given!r}: give a whole number from 0 to "
        f"{SEEDS_OF_A_SPLIT}."
    )


def _known(where: str, given: Sequence[object], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise UserError(f"{where} does not know {key}: choose from {', '.join(known)}{hint}")
