"""The protocols of ``algo/``: what a shaper, a credit method and a sampler are.

A component declares what it needs and what it makes, in names of turn-table columns, reward
channels (``reward:outcome``) and views. The trainer resolves these once at start and never asks
which algorithm is running. Components know nothing of processes, files or configuration trees.

Shapes: ``R`` rows of the turn table; see ``delta_belief_rl.types`` for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from delta_belief_rl.types import FloatArray, Group, IntArray, TurnTable, UserError

HOOK_COLUMNS = ("state_key", "progress", "action_key", "footprint")
"""Columns of the turn table that an environment's optional hook of the same name fills."""
VIEW = "view:"
"""What the name of a view begins with in ``requires``; see ``TurnTable.tokens``."""
LOGP = "tokens:logp"
"""Log-probs of the played tokens before the update, which every run has."""
VALUES = "tokens:values"
"""Values of a critic at every played token; who requires them starts a critic."""


class Grain(StrEnum):
    """The smallest set of rows that a component must see together."""

    GROUP = "group"
    TRAJECTORY = "trajectory"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Advantage:
    """What credit assignment hands to the loss; every array but ``tokens`` has shape ``[R]``.

    Attributes:
        turns: Advantage of each turn, given to each of its sampled tokens.
        weight: Multiplies the loss of the turn; 0 removes it from the loss and from every count.
        stats: Scalars for the log, e.g. ``frac_dead_groups``.
        rewards: The reward of each row as the estimator used it, so that the logged sum is the used
            sum.
        tokens: Where the tokens of a turn differ: the advantage of every sampled token, all rows
            end to end, ``[S]``; ``turns`` then holds their means.
        targets: What a critic's value of each sampled token is trained towards, ``[S]``; NaN where
            it is not trained.
        distil: Weight of each turn in distillation losses, ``[R]``; None weighs all valid ones 1.
        columns: What a learner beside the policy is told of every sampled token, by name, ``[S]``.
    """

    turns: FloatArray
    weight: FloatArray
    stats: Mapping[str, float] = field(default_factory=dict[str, float])
    rewards: FloatArray = field(default_factory=lambda: np.zeros(0))
    tokens: FloatArray | None = None
    targets: FloatArray | None = None
    distil: FloatArray | None = None
    columns: Mapping[str, FloatArray] = field(default_factory=dict[str, FloatArray])


def paid_rewards(table: TurnTable) -> FloatArray:
    """Sum of all channels, ``[R]``; zero on rows that are not valid."""
    total = np.sum(list(table.rewards.values()), axis=0) if table.rewards else np.zeros(0)
    return np.where(table.valid, total, 0.0) if table.rewards else np.zeros(table.num_rows)


class Stateless:
    """Defaults of a component that keeps nothing between steps and pays every reward once."""

    def paid(self, table: TurnTable) -> FloatArray:
        """The reward of each row as ``apply`` uses it, ``[R]``."""
        return paid_rewards(table)

    def state_dict(self) -> dict[str, object]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Accept only what ``state_dict`` gives.

        Raises:
            UserError: The state is not empty, so it belongs to another component.
        """
        if state:
            names = ", ".join(sorted(state))
            raise UserError(
                f"{type(self).__name__} keeps no state but was given {names}; "
                "resume with the algorithm that wrote the checkpoint."
            )


@runtime_checkable
class Component(Protocol):
    """What every component declares.

    Attributes:
        requires: Names of columns, hooks, channels, token columns and views that must exist.
        provides: Names that exist afterwards.
        grain: Which rows must be seen together.
    """

    requires: ClassVar[tuple[str, ...]]
    provides: ClassVar[tuple[str, ...]]
    grain: ClassVar[Grain]

    def state_dict(self) -> dict[str, object]:
        """Everything that must survive a restart."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over a saved state."""
        ...


@runtime_checkable
class Shaper(Component, Protocol):
    """Turns what happened into named reward channels."""

    def shape(
        self, table: TurnTable, groups: Sequence[Group], belief: FloatArray | None = None
    ) -> dict[str, FloatArray]:
        """Channels, ``[R]`` each; ``belief`` holds shaped belief changes in nats, ``[R]``."""
        ...


@runtime_checkable
class Credit(Component, Protocol):
    """Turns reward channels into advantages. The first of a chain gets ``previous=None``."""

    @property
    def needs_group(self) -> bool:
        """True when games are compared with siblings, so that a group of one teaches nothing."""
        ...

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages of all rows; ``previous`` is the output of the element before."""
        ...

    def paid(self, table: TurnTable) -> FloatArray:
        """The reward of each row as ``apply`` uses it, ``[R]``; for the logs of evaluations, whose
        games teach nothing and leave no trace in a method's state."""
        ...


@runtime_checkable
class Scorer(Component, Protocol):
    """Asks how likely the played tokens are behind another context.

    It provides ``view:<view>``: the context is the game's own with a hint at the end of its opening
    message, so that every turn of the game is played in its light.
    """

    @property
    def view(self) -> str:
        """Name of the view."""
        ...

    @property
    def model(self) -> str:
        """Who reads it: ``policy``, ``base`` (without adapter) or ``ema``."""
        ...

    def hints(self, groups: Sequence[Group]) -> list[str | None]:
        """The hint of each game, in the order of the games; None where there is nothing to tell."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Chooses the tasks of a step as a pure function of its own settings and the step."""

    def batch(self, step: int) -> tuple[IntArray, int]:
        """Task indices of a zero-based step, and the epoch in which the step begins."""
        ...


def check_group_size(credit: Credit, group_size: int) -> None:
    """Refuse a group baseline over groups of one.

    Raises:
        UserError: ``group_size`` is below 1, or below 2 while ``credit`` compares siblings.
    """
    if group_size < 1:
        raise UserError(f"The group size is {group_size}; set multi_turn.train.n to at least 1.")
    if credit.needs_group and group_size < 2:
        raise UserError(
            f"{type(credit).__name__} compares the games of one secret, but the group size is "
            f"{group_size}, so every advantage would be zero; set multi_turn.train.n to at least 2."
        )


def check_requires(
    component: Component,
    hooks: Collection[str],
    channels: Collection[str],
    env: str,
    tokens: Collection[str] = (),
) -> None:
    """Refuse a component that needs what nothing in the run makes.

    Args:
        component: Its ``requires`` are looked up.
        hooks: Optional hooks that the environment has.
        channels: Reward channels, e.g. ``reward:outcome``.
        env: The environment's name.
        tokens: Token columns and views that the run makes, e.g. ``tokens:values``.

    Raises:
        UserError: A hook, a channel or a column is missing; it is named.
    """
    name = type(component).__name__
    columns = {item.name for item in fields(TurnTable)} - set(HOOK_COLUMNS)
    for needed in component.requires:
        if needed in HOOK_COLUMNS and needed not in hooks:
            raise UserError(
                f"{name} needs the hook {needed}, which the environment {env} does not have: add "
                f"{needed}() to it, or choose another algorithm.adv_estimator."
            )
        if needed not in {*columns, *channels, *HOOK_COLUMNS, *tokens}:
            raise UserError(
                f"{name} needs {needed}, which nothing in this run makes: choose another "
                "algorithm.adv_estimator."
            )


def require_first(previous: Advantage | None, name: str) -> None:
    """Refuse an estimator that would throw away the advantages of an earlier element.

    Raises:
        UserError: ``previous`` is not None.
    """
    if previous is not None:
        raise UserError(f"{name} makes advantages itself; put it first in the credit chain.")


def require_previous(previous: Advantage | None, name: str) -> Advantage:
    """The advantages that a transform changes.

    Raises:
        UserError: There are none, because it is the first of its chain.
    """
    if previous is None:
        raise UserError(
            f"{name} changes the advantages of another method; name that in "
            f"algorithm.adv_estimator and {name} in algorithm.transforms."
        )
    return previous


def require_range(
    name: str,
    value: float,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
) -> None:
    """Check ``low <= value <= high`` (``low < value`` with ``open_low``) and that it is finite.

    Raises:
        UserError: It is not.
    """
    too_low = value <= low if open_low else value < low
    if not math.isfinite(value) or too_low or value > high:
        bracket = "(" if open_low else "["
        raise UserError(
            f"{name} is {value}; it must be a finite number in {bracket}{low}, {high}]."
        )


def require_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Check that ``value`` is one of the allowed words.

    Raises:
        UserError: It is not.
    """
    if value not in allowed:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.")
