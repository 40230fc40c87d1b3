"""Small web applications in text: one project, several tasks, paid by what the application does.

Name this module in ``plugins`` and set ``multi_turn.env=webcoder``, as ``env=webcoder`` does; see
docs/webcoder.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from delta_belief_rl.envs.plugin import EnvPlugin
from delta_belief_rl.envs.webcoder.game import game_factory, tasks_of
from delta_belief_rl.envs.webcoder.report import report_of, rewards_of

ENVIRONMENTS: Mapping[str, EnvPlugin] = {
    "webcoder": EnvPlugin(
        make=game_factory, tasks=tasks_of, report=report_of, task_rewards=rewards_of
    )
}
