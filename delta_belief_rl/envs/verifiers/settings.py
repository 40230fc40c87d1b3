"""What ``multi_turn.env_kwargs`` may say about an environment of ``verifiers``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from delta_belief_rl.config.convert import nearest
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.types import UserError

SPLITS = ("train", "val", "test")
_OPTIONS = ("max_turns", "question_tag")


@dataclass(frozen=True, slots=True)
class VerifiersSettings:
    """Which environment is played, and what its games are worth.

    Attributes:
        max_turns: A game is over after so many actions, or earlier by the environment's own limit.
        question_tag: Only the text in ``<question>`` tags reaches the environment.
        environment: What ``verifiers.load_environment`` takes, or ``module:function``.
        args: Its keyword arguments.
        secret: The dataset's column that has the secret, or ``info.NAME``; empty for none.
        tasks: Rows of each split, by its name; see ``rows.split_rows`` for those left out.
        timeout_s: Seconds that the environment has for a reply, or to start or score a game.
        score_range: Rewards that become the scores 0 and 1; None where the weights of the rubric
            say it, with each of its functions between 0 and 1.
        win_metric: The reward function that decides about a win; empty for the score.
        win_at: The value from which a game is won.
    """

    max_turns: int
    question_tag: bool
    environment: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    secret: str = "answer"
    tasks: Mapping[str, int] = field(default_factory=dict[str, int])
    timeout_s: float = 60.0
    score_range: tuple[float, float] | None = None
    win_metric: str = ""
    win_at: float = 1.0


def read_settings(options: EnvOptions) -> VerifiersSettings:
    """Check the options.

    Raises:
        UserError: A key is unknown, or a value is none that its key may have.
    """
    known = [item.name for item in fields(VerifiersSettings) if item.name not in _OPTIONS]
    given = options.kwargs
    for key in given:
        if key not in known:
            close = nearest(key, known)
            hint = f"did you mean {close}?" if close else f"the known keys are {', '.join(known)}."
            raise UserError(f"multi_turn.env_kwargs.{key} is unknown to verifiers: {hint}")
    if options.max_turns < 1:
        raise UserError(f"max_turns is {options.max_turns}: a game needs at least one turn.")
    if not given.get("environment"):
        raise UserError(
            "multi_turn.env_kwargs.environment is missing: name an environment of verifiers, or "
            "module:function of a loader of your own."
        )
    return VerifiersSettings(
        max_turns=options.max_turns,
        question_tag=options.question_tag,
        environment=_text(given, "environment"),
        args=_mapping(given, "args"),
        secret=_text(given, "secret", "answer"),
        tasks=_counts(_mapping(given, "tasks")),
        timeout_s=_positive(given, "timeout_s", 60.0),
        score_range=_range(given.get("score_range")),
        win_metric=_text(given, "win_metric"),
        win_at=_number("win_at", given.get("win_at", 1.0)),
    )


def _refuse(key: str, value: object, must: str) -> UserError:
    return UserError(f"multi_turn.env_kwargs.{key} is {value!r}: it must be {must}.")


def _text(given: Mapping[str, Any], key: str, default: str = "") -> str:
    value = given.get(key, default)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _refuse(key, value, "text")
    return value


def _mapping(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    value: object = given.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse(key, value, "a mapping")
    return {str(name): item for name, item in cast("Mapping[object, Any]", value).items()}


def _counts(tasks: Mapping[str, object]) -> dict[str, int]:
    for split, count in tasks.items():
        if split not in SPLITS:
            raise _refuse("tasks", dict(tasks), f"numbers of rows by split: {', '.join(SPLITS)}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise _refuse(f"tasks.{split}", count, "a whole number that is not negative")
    return cast("dict[str, int]", dict(tasks))


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refuse(key, value, "a finite number")
    return float(value)


def _positive(given: Mapping[str, Any], key: str, default: float) -> float:
    value = _number(key, given.get(key, default))
    if value <= 0.0:
        raise _refuse(key, value, "above 0")
    return value


def _range(value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    must = "two numbers, the lowest and the highest reward"
    if not isinstance(value, list | tuple):
        raise _refuse("score_range", value, must)
    pair = cast("list[object]", value)
    if len(pair) != 2:
        raise _refuse("score_range", pair, must)
    low, high = (_number("score_range", number) for number in pair)
    if low >= high:
        raise _refuse("score_range", pair, "two numbers, the lower one first")
    return low, high
