"""Single-player games of TextArena, the package ``textarena``, as environments.

Name this module in ``plugins`` and set ``multi_turn.env=textarena``; see docs/textarena.md.
``textarena`` is imported when a game is made and not before.
"""

from __future__ import annotations

from collections.abc import Mapping

from delta_belief_rl.envs.plugin import EnvPlugin
from delta_belief_rl.envs.textarena.game import game_factory
from delta_belief_rl.envs.textarena.tasks import tasks_of

ENVIRONMENTS: Mapping[str, EnvPlugin] = {"textarena": EnvPlugin(make=game_factory, tasks=tasks_of)}
