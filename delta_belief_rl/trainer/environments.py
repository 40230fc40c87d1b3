"""The environment of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from delta_belief_rl.config.game_settings import question_tag
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.base import Env
from delta_belief_rl.envs.customer_service.game import CustomerService, CustomerServiceSettings
from delta_belief_rl.envs.guess_my_city.game import GuessMyCity, GuessMyCitySettings
from delta_belief_rl.envs.murder_mystery.game import MurderMystery, MurderMysterySettings
from delta_belief_rl.envs.plugins import env_options, find_plugin
from delta_belief_rl.envs.twenty_questions import TwentyQuestions
from delta_belief_rl.envs.user_personalization.game import (
    UserPersonalization,
    UserPersonalizationSettings,
)
from delta_belief_rl.envs.worlds.game import WORLD_NOTICES, WorldTwentyQuestions
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.trainer.settings import env_settings
from delta_belief_rl.types import Task

EnvFactory = Callable[[Task], Env]
"""Makes one game of a task."""


def env_factory(cfg: RunConfig, max_turns: int) -> EnvFactory:
    """A function that makes one game of a task.

    Args:
        cfg: The configuration.
        max_turns: Turns after which a game is over.

    Raises:
        UserError: There is no such environment, or one of a plug-in refuses its options.
    """
    plugin = find_plugin(cfg)
    if plugin is not None:
        return plugin.make(env_options(cfg, max_turns))
    return FACTORIES[cfg.multi_turn.env](cfg, max_turns)


def _twenty_questions(cfg: RunConfig, max_turns: int) -> EnvFactory:
    if cfg.data.world is None:
        return partial(TwentyQuestions, settings=env_settings(cfg, max_turns))
    grammar = Grammar(load_world(cfg.data.world))
    settings = env_settings(cfg, max_turns, notices=WORLD_NOTICES)
    return lambda task: WorldTwentyQuestions(task, settings, grammar)


def _guess_my_city(cfg: RunConfig, max_turns: int) -> EnvFactory:
    turns = cfg.multi_turn
    settings = GuessMyCitySettings(
        max_turns=max_turns,
        verify_methods=_verify_methods(cfg),
        win_rule=turns.win_rule,
        candidate_lists=turns.candidate_lists,
        duplicates=turns.duplicates,
        judge_history=cfg.judge_rollout.repeated_prompt,
        question_tag=question_tag(cfg),
    )
    return partial(GuessMyCity, settings=settings)


def _murder_mystery(cfg: RunConfig, max_turns: int) -> EnvFactory:
    settings = MurderMysterySettings(
        max_turns=max_turns,
        verify_methods=_verify_methods(cfg),
        win_rule=cfg.multi_turn.win_rule,
        question_tag=question_tag(cfg),
    )
    return partial(MurderMystery, settings=settings)


def _customer_service(cfg: RunConfig, max_turns: int) -> EnvFactory:
    settings = CustomerServiceSettings(
        max_turns=max_turns,
        verify_methods=_verify_methods(cfg),
        win_rule=cfg.multi_turn.win_rule,
        question_tag=question_tag(cfg),
    )
    return partial(CustomerService, settings=settings)


def _user_personalization(cfg: RunConfig, max_turns: int) -> EnvFactory:
    turns = cfg.multi_turn
    settings = UserPersonalizationSettings(
        max_turns=max_turns,
        threshold=turns.win_rating,
        verify_methods=_verify_methods(cfg),
        duplicates=turns.duplicates,
        question_tag=question_tag(cfg),
    )
    return partial(UserPersonalization, settings=settings)


def _verify_methods(cfg: RunConfig) -> tuple[str, ...]:
    """Rules that correct the judge; none where they are off."""
    verify = cfg.multi_turn.verify_judge
    return verify.methods if verify.enabled else ()


FACTORIES: Mapping[str, Callable[[RunConfig, int], EnvFactory]] = {
    "twenty_questions": _twenty_questions,
    "guess_my_city": _guess_my_city,
    "murder_mystery": _murder_mystery,
    "customer_service": _customer_service,
    "user_personalization": _user_personalization,
}
"""By environment of this package (``multi_turn.env``)."""
