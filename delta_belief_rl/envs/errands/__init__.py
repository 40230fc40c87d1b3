"""Household errands in text: an embedded world with states that recur and goals in parts.

Name this module in ``plugins`` and set ``multi_turn.env=errands``, as ``env=errands`` does; see
docs/errands.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from delta_belief_rl.envs.errands.game import game_factory, tasks_of
from delta_belief_rl.envs.plugin import EnvPlugin

ENVIRONMENTS: Mapping[str, EnvPlugin] = {"errands": EnvPlugin(make=game_factory, tasks=tasks_of)}
