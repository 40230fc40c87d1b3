"""Environments: one game each, single-use. ``ENVIRONMENTS`` names those of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from delta_belief_rl.envs.base import Env
from delta_belief_rl.envs.twenty_questions import TwentyQuestions, TwentyQuestionsSettings
from delta_belief_rl.envs.worlds.game import WorldTwentyQuestions
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.types import Task


def make_twenty_questions(
    task: Task,
    settings: TwentyQuestionsSettings,
    grammar: Grammar | None = None,
    candidates: Iterable[str] | None = None,
) -> TwentyQuestions:
    """One game of 20 Questions.

    Args:
        task: The secret and how the game opens.
        settings: The rules.
        grammar: The embedded world's parser, built once and shared by all games. With it the game
            has every optional hook; without it, those that need no table.
        candidates: Names that the prior over things covers; all things of the world when None.
    """
    if grammar is None:
        return TwentyQuestions(task, settings)
    return WorldTwentyQuestions(task, settings, grammar, candidates)


ENVIRONMENTS: Mapping[str, Callable[..., Env]] = {
    "twenty_questions": make_twenty_questions,
}
