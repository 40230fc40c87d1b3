"""Environments of a user's own: what a module that ``plugins`` names has to bring.

Such a module has one mapping of names to :class:`EnvPlugin`, called ``ENVIRONMENTS``; a name is
then a value of ``multi_turn.env``. See docs/add_an_environment.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from delta_belief_rl.envs.base import Env, Judge
from delta_belief_rl.types import Task


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
    """

    make: Callable[[EnvOptions], Callable[[Task], Env]]
    tasks: Callable[[str, EnvOptions], Sequence[Task]] | None = None
    judge: Callable[[], Judge] | None = None
