"""The score of a game, by the environment's own rubric.

The library logs an exception of a reward function and pays 0 for it. Here the functions that a
score depends on are watched, so that such a game has no score instead of a bad one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from delta_belief_rl.envs.plugins import describe
from delta_belief_rl.envs.verifiers.settings import VerifiersSettings
from delta_belief_rl.types import UserError

TOLERANCE = 1e-9
"""Rewards are sums of floats: 0.7 + 0.2 + 0.1 is a win, too."""

FAULTS: ContextVar[list[str]] = ContextVar("faults")
"""What reward functions raised in the game that is being played."""


class ScoreError(ValueError):
    """A reward that is no score; the message says why."""


def leaves(rubric: Any) -> list[Any]:
    """The rubrics of a rubric, groups resolved."""
    inner: list[Any] | None = getattr(rubric, "rubrics", None)
    return [rubric] if inner is None else [leaf for one in inner for leaf in leaves(one)]


class Scoring:
    """How the rewards of an environment are read."""

    def __init__(self, name: str, rubrics: list[Any], settings: VerifiersSettings) -> None:
        """Take the weights of the rubrics as they are now.

        Raises:
            UserError: The range of the rewards is not known, or there is no function that is called
                ``win_metric``.
        """
        weights = [
            (_name(func), float(weight))
            for rubric in rubrics
            for func, weight in zip(rubric.funcs, rubric.weights, strict=True)
        ]
        paid = [weight for _, weight in weights if weight]
        if not paid and settings.score_range is None:
            raise UserError(
                f"The rubric of {name} has no function with a weight: give "
                "multi_turn.env_kwargs.score_range if it scores in another way."
            )
        low, high = settings.score_range or (
            math.fsum(weight for weight in paid if weight < 0.0),
            math.fsum(weight for weight in paid if weight > 0.0),
        )
        self.low, self.high = low, high
        self.win_at, self.win_metric = settings.win_at, settings.win_metric
        known = sorted(dict.fromkeys(called for called, _ in weights))
        if self.win_metric and self.win_metric not in known:
            raise UserError(
                f"multi_turn.env_kwargs.win_metric is {self.win_metric!r}; the reward functions of "
                f"{name} are {', '.join(known)}."
            )

    def read(self, output: Mapping[str, Any]) -> tuple[float, bool]:
        """Score in [0, 1] and whether the game is won.

        Raises:
            ScoreError: The reward lies outside of the range, or there is none.
        """
        reward = _number("reward", output.get("reward"))
        if not self.low - TOLERANCE <= reward <= self.high + TOLERANCE:
            raise ScoreError(
                f"the reward {reward:.6g} lies outside of score_range [{self.low:g}, {self.high:g}]"
            )
        score = min(max((reward - self.low) / (self.high - self.low), 0.0), 1.0)
        if not self.win_metric:
            return score, score >= self.win_at - TOLERANCE
        metrics: Mapping[str, Any] = output.get("metrics") or {}
        value = _number(self.win_metric, metrics.get(self.win_metric))
        return score, value >= self.win_at - TOLERANCE


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float):
        raise ScoreError(f"the value of {name} is {value!r}, which is no number")
    return float(value)


def watch(rubrics: list[Any], win_metric: str) -> None:
    """Have the functions that a score depends on note what they raise in ``FAULTS``."""
    for rubric in rubrics:
        # A new list, because the old one may belong to the environment's module.
        rubric.funcs = [
            _watched(func) if weight or _name(func) == win_metric else func
            for func, weight in zip(rubric.funcs, rubric.weights, strict=True)
        ]


def _watched(func: Callable[..., Any]) -> Callable[..., Any]:
    name = _name(func)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Noted(name):
            result = func(*args, **kwargs)
            return _later(name, result) if inspect.isawaitable(result) else float(result)

    call.__name__ = name
    return call


async def _later(name: str, result: Awaitable[Any]) -> float:
    with _Noted(name):
        return float(await result)


class _Noted:
    """Notes an exception on its way out."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            FAULTS.get([]).append(f"{self.name}: {describe(error)}")


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", type(func).__name__))
