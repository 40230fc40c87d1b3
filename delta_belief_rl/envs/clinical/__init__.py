"""Clinical cases in text: ask and test under uncertainty, then decide; the belief is exact.

Name this module in ``plugins`` and set ``multi_turn.env=clinical``, as ``env=clinical`` does; see
docs/clinical.md. All cases and numbers are made up: nothing here is medical advice.
"""

from __future__ import annotations

from collections.abc import Mapping

from delta_belief_rl.envs.clinical.game import game_factory, tasks_of
from delta_belief_rl.envs.clinical.report import report_of
from delta_belief_rl.envs.plugin import EnvPlugin

ENVIRONMENTS: Mapping[str, EnvPlugin] = {
    "clinical": EnvPlugin(make=game_factory, tasks=tasks_of, report=report_of)
}
