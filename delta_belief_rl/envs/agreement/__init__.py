"""Sums in words that agree: a toy task of one sentence, made for denoisers of a fixed length.

Name this module in ``plugins`` and set ``multi_turn.env=agreement``, as ``env=agreement`` does; see
docs/agreement.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from delta_belief_rl.envs.agreement.game import game_factory, tasks_of
from delta_belief_rl.envs.plugin import EnvPlugin

ENVIRONMENTS: Mapping[str, EnvPlugin] = {"agreement": EnvPlugin(make=game_factory, tasks=tasks_of)}
