"""A method of credit that a plug-in brings: found by its name, made of its settings.

Nothing here needs torch, so that a plan refuses a method that cannot be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from delta_belief_rl.algo import nearest
from delta_belief_rl.algo.base import Credit, check_group_size
from delta_belief_rl.algo.plugin import CreditPlugin
from delta_belief_rl.config.convert import to_plain
from delta_belief_rl.config.rules import unknown
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_algo import ESTIMATORS
from delta_belief_rl.envs.plugins import MISTAKES, describe, load_methods
from delta_belief_rl.types import UserError

DECLARED = ("requires", "provides", "grain", "needs_group")
CALLED = ("apply", "paid", "state_dict", "load_state_dict")


def find_credit(cfg: RunConfig) -> CreditPlugin | None:
    """What ``algorithm.adv_estimator`` names; None for a method of this package.

    Raises:
        UserError: There is no such method, or a plug-in cannot be loaded.
    """
    if not cfg.plugins:
        return None
    methods, name = load_methods(cfg.plugins), cfg.algorithm.adv_estimator
    for sentence in unknown("algorithm.adv_estimator", [name], (*ESTIMATORS, *methods)):
        raise UserError(sentence)
    return methods.get(name)


def own_credit(cfg: RunConfig) -> Credit | None:
    """The method of a plug-in, made with ``algorithm.kwargs``; None for one of this package.

    Raises:
        UserError: It cannot be made, is no method, or compares games where there is one of each.
    """
    plugin = find_credit(cfg)
    if plugin is None:
        return None
    kwargs: Mapping[str, Any] = to_plain(cfg.algorithm.kwargs)
    credit = make_credit(cfg.algorithm.adv_estimator, plugin, kwargs)
    check_group_size(credit, cfg.multi_turn.train.n)
    return credit


def make_credit(name: str, plugin: CreditPlugin, kwargs: Mapping[str, Any]) -> Credit:
    """Make a method of its settings.

    Raises:
        UserError: A setting that it does not have, a value that it refuses, or something that is
            no method of credit.
    """
    if not is_dataclass(plugin.settings):
        raise UserError(f"The settings of {name} are no dataclass: decorate the class with one.")
    known = [item.name for item in fields(plugin.settings) if item.init]
    for knob in kwargs:
        if knob not in known:
            hint = nearest(knob, known) if known else "; it has none."
            raise UserError(f"algorithm.kwargs has {knob}, which is no setting of {name}{hint}")
    try:
        credit: object = plugin.method(plugin.settings(**kwargs))
    except UserError:
        raise
    except MISTAKES as error:
        raise UserError(
            f"{name} cannot be made with algorithm.kwargs={dict(kwargs)}: {describe(error)}."
        ) from error
    missing = [one for one in DECLARED if not hasattr(credit, one)]
    missing += [one for one in CALLED if not callable(getattr(credit, one, None))]
    if missing or not isinstance(credit, Credit):
        raise UserError(
            f"{name} is no method of credit, because it has no {', '.join(missing)}: inherit from "
            "delta_belief_rl.algo.base.Stateless and see docs/add_a_method.md."
        )
    return credit
