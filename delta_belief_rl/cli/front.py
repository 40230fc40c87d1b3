"""The shared front of every command that needs a configuration: compose, validate, plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import gather_facts
from delta_belief_rl.config.plan import Plan, make_plan
from delta_belief_rl.config.rules import check
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.worlds.table import WorldError, load_world
from delta_belief_rl.types import UserError


def prepare(
    overrides: Sequence[str], config_name: str = "base"
) -> tuple[RunConfig, Plan, list[str]]:
    """``(configuration, plan, warnings)`` of a command line; imports no torch.

    Raises:
        UserError: The configuration cannot be composed or cannot work.
    """
    config, warnings = load_config(overrides, config_name)
    check(config)
    return config, make_plan(config, gather_facts(config, count_world)), warnings


def count_world(name: str) -> Mapping[str, int]:
    """Secrets per split of a world by name or path.

    Raises:
        UserError: No such world, or a broken file.
    """
    try:
        world = load_world(name)
    except WorldError as error:
        raise UserError(str(error)) from error
    return {split: len(names) for split, names in world.splits.items()}
