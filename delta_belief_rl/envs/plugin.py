"""Environments of a user's own: what a module that ``plugins`` names has to bring.

Such a module has one mapping of names to :class:`EnvPlugin`, called ``ENVIRONMENTS``; a name is
then a value of ``multi_turn.env``. See docs/add_an_environment.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from delta_belief_rl.envs.base import Env, Judge
from delta_belief_rl.types import FloatArray, Task, Trajectory


@dataclass(frozen=True, slots=True)
class EnvOptions:
    """What a configuration says about the games of an environment.

    Attributes:
        max_turns: Turns after which a game is over.
        question_tag: Whether the agent's question stands in ``<question>`` tags; else its whole
            text is the question.
        kwargs: ``multi_turn.env_kwargs``, for the environment to check and to read.
    """

    max_turns: int
    question_tag: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class EnvPlugin:
    """One environment.

    Attributes:
        make: From the options to a function that makes one game of a task. Raises ``UserError``
            where the options do not fit.
        tasks: From a split (``train``, ``val``, ``test``) and the options to its tasks, where they
            are made rather than read; None where ``data.*_files`` name them.
        judge: Makes the judge of ``judge=rules``; None where no action needs one, or where a
            language model judges.
        report: From the finished games of an evaluation and the options to numbers by name, e.g.
            ``{"easy/harm": 0.1}``; a validation has them as ``val-aux/<environment>/<name>``, those
            that are finite.
        task_rewards: From a finished game and the options to what its turns are paid for tasks that
            they end, ``[K]``, NaN where a turn ends none; ``multi_turn.reward.weight_tasks`` is its
            weight.
    """

    make: Callable[[EnvOptions], Callable[[Task], Env]]
    tasks: Callable[[str, EnvOptions], Sequence[Task]] | None = None
    judge: Callable[[], Judge] | None = None
    report: Callable[[Sequence[Trajectory], EnvOptions], Mapping[str, float]] | None = None
    task_rewards: Callable[[Trajectory, EnvOptions], FloatArray] | None = None
