"""Pure learning algorithms, one method a module, and the closed lists of their names.

Only NumPy is imported here. ``LOSSES``, ``AGGREGATIONS`` and ``KL`` need torch and are loaded when
asked for, so that a plan can read ``CREDITS`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from delta_belief_rl.algo.base import Credit, Scorer
from delta_belief_rl.algo.credit.archer import Archer, ArcherSettings
from delta_belief_rl.algo.credit.at2po import At2poSettings
from delta_belief_rl.algo.credit.bilevel_gae import BilevelGae, BilevelGaeSettings
from delta_belief_rl.algo.credit.dtca import Dtca, DtcaSettings
from delta_belief_rl.algo.credit.gae import Gae, GaeSettings
from delta_belief_rl.algo.credit.gigpo import GiGpo, GiGpoSettings
from delta_belief_rl.algo.credit.graph_opd import GraphOpd, GraphOpdSettings
from delta_belief_rl.algo.credit.graphgpo import GraphGpo, GraphGpoSettings
from delta_belief_rl.algo.credit.grpo import Grpo, GrpoSettings
from delta_belief_rl.algo.credit.grpo_passk import GrpoPassk, GrpoPasskSettings
from delta_belief_rl.algo.credit.grpo_turn import GrpoTurn, GrpoTurnSettings
from delta_belief_rl.algo.credit.grpo_turn_rtg import GrpoTurnRtg, GrpoTurnRtgSettings
from delta_belief_rl.algo.credit.hcapo import Hcapo, HcapoSettings
from delta_belief_rl.algo.credit.hgpo import Hgpo, HgpoSettings
from delta_belief_rl.algo.credit.igpo import Igpo, IgpoSettings
from delta_belief_rl.algo.credit.istar import Istar, IstarSettings
from delta_belief_rl.algo.credit.mpo import Mpo, MpoSettings
from delta_belief_rl.algo.credit.mt_grpo import MtGrpo, MtGrpoSettings
from delta_belief_rl.algo.credit.multi_turn_reinforce import (
    MultiTurnReinforce,
    MultiTurnReinforceSettings,
)
from delta_belief_rl.algo.credit.opid import Opid, OpidSettings
from delta_belief_rl.algo.credit.opo import Opo, OpoSettings
from delta_belief_rl.algo.credit.opsd import Opsd, OpsdSettings, Sdpo, SdpoSettings
from delta_belief_rl.algo.credit.orsd import Orsd, OrsdSettings
from delta_belief_rl.algo.credit.pearl import Pearl, PearlSettings
from delta_belief_rl.algo.credit.reinforce import Reinforce, ReinforceSettings, Rloo, RlooSettings
from delta_belief_rl.algo.credit.reinforce_plus_plus import (
    ReinforcePlusPlus,
    ReinforcePlusPlusSettings,
)
from delta_belief_rl.algo.credit.reinforce_plus_plus_baseline import (
    ReinforcePlusPlusBaseline,
    ReinforcePlusPlusBaselineSettings,
)
from delta_belief_rl.algo.credit.relace import Relace, RelaceSettings
from delta_belief_rl.algo.credit.rlsd import Rlsd, RlsdSettings, Sdar, SdarSettings
from delta_belief_rl.algo.credit.spa_rl import SpaRl, SpaRlSettings
from delta_belief_rl.algo.credit.state_progress import StateProgress, StateProgressSettings
from delta_belief_rl.algo.credit.tree import TreeGrpoSettings
from delta_belief_rl.algo.credit.turn_ppo import TurnPpo, TurnPpoSettings
from delta_belief_rl.algo.credit.turn_trees import (
    At2po,
    SharedOnce,
    SharedOnceSettings,
    TreeGrpo,
)
from delta_belief_rl.algo.scorers.hindsight import HindsightScorer
from delta_belief_rl.algo.scorers.outcome import OutcomeScorer
from delta_belief_rl.algo.scorers.reference import ReferenceScorer
from delta_belief_rl.algo.scorers.retry import RetryScorer
from delta_belief_rl.algo.scorers.rubric import RubricScorer
from delta_belief_rl.types import UserError

if TYPE_CHECKING:
    from delta_belief_rl.algo.losses.kl import KL as KL
    from delta_belief_rl.algo.losses.registry import AGGREGATIONS as AGGREGATIONS
    from delta_belief_rl.algo.losses.registry import LOSSES as LOSSES
else:
    _LAZY = {
        "LOSSES": "delta_belief_rl.algo.losses.registry",
        "AGGREGATIONS": "delta_belief_rl.algo.losses.registry",
        "KL": "delta_belief_rl.algo.losses.kl",
    }

    def __getattr__(name: str) -> object:
        """Load a registry that needs torch."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)


CREDITS: dict[str, tuple[Callable[..., Credit], type[Any]]] = {
    "grpo": (Grpo, GrpoSettings),
    "grpo_turn": (GrpoTurn, GrpoTurnSettings),
    "grpo_turn_rtg": (GrpoTurnRtg, GrpoTurnRtgSettings),
    "grpo_passk": (GrpoPassk, GrpoPasskSettings),
    "rloo": (Rloo, RlooSettings),
    "opo": (Opo, OpoSettings),
    "mt_grpo": (MtGrpo, MtGrpoSettings),
    "gigpo": (GiGpo, GiGpoSettings),
    "hgpo": (Hgpo, HgpoSettings),
    "graphgpo": (GraphGpo, GraphGpoSettings),
    "state_progress": (StateProgress, StateProgressSettings),
    "tree_grpo": (TreeGrpo, TreeGrpoSettings),
    "at2po": (At2po, At2poSettings),
    "graph_opd": (GraphOpd, GraphOpdSettings),
    "igpo": (Igpo, IgpoSettings),
    "hcapo": (Hcapo, HcapoSettings),
    "relace": (Relace, RelaceSettings),
    "opsd": (Opsd, OpsdSettings),
    "sdpo": (Sdpo, SdpoSettings),
    "reinforce": (Reinforce, ReinforceSettings),
    "reinforce_plus_plus": (ReinforcePlusPlus, ReinforcePlusPlusSettings),
    "reinforce_plus_plus_baseline": (ReinforcePlusPlusBaseline, ReinforcePlusPlusBaselineSettings),
    "multi_turn_reinforce": (MultiTurnReinforce, MultiTurnReinforceSettings),
    "gae": (Gae, GaeSettings),
    "turn_ppo": (TurnPpo, TurnPpoSettings),
    "bilevel_gae": (BilevelGae, BilevelGaeSettings),
    "spa_rl": (SpaRl, SpaRlSettings),
    "archer": (Archer, ArcherSettings),
    "mpo": (Mpo, MpoSettings),
    "istar": (Istar, IstarSettings),
}
"""Name of a method to its class and the class of its settings."""


TRANSFORMS: dict[str, tuple[Callable[..., Credit], type[Any]]] = {
    "mpo": (Mpo, MpoSettings),
    "rlsd": (Rlsd, RlsdSettings),
    "sdar": (Sdar, SdarSettings),
    "opid": (Opid, OpidSettings),
    "orsd": (Orsd, OrsdSettings),
    "pearl": (Pearl, PearlSettings),
    "dtca": (Dtca, DtcaSettings),
    "graph_opd": (GraphOpd, GraphOpdSettings),
    "shared_once": (SharedOnce, SharedOnceSettings),
}
"""The same of methods that change the advantages of another one."""

SCORERS: dict[str, Callable[..., Scorer]] = {
    "hindsight": HindsightScorer,
    "outcome": OutcomeScorer,
    "reference": ReferenceScorer,
    "retry": RetryScorer,
    "rubric": RubricScorer,
}
"""Name of a view to what tells its hints, made of ``HintSettings``."""


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """A hint at the known name that looks most like ``name``."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}."


def find_method(name: str, *, transform: bool = False) -> tuple[Callable[..., Credit], type[Any]]:
    """The class of a method and that of its settings.

    Args:
        name: As ``algorithm.adv_estimator`` has it, or ``algorithm.transforms``.
        transform: Which of the two.

    Raises:
        UserError: There is no such method.
    """
    known = TRANSFORMS if transform else CREDITS
    if name not in known:
        setting = "algorithm.transforms" if transform else "algorithm.adv_estimator"
        raise UserError(f"{setting} is {name!r}{nearest(name, known)}")
    return known[name]


def build_credit(
    name: str, knobs: Mapping[str, Any] | None = None, *, transform: bool = False
) -> Credit:
    """A credit method by name, with some of its settings changed.

    Raises:
        UserError: Unknown name, a knob that the method does not have, or a value out of range.

    Example:
        >>> build_credit("grpo", {"norm_adv_by_std_in_grpo": False}).needs_group
        True
    """
    method, settings = find_method(name, transform=transform)
    known = [item.name for item in fields(settings)]
    for knob in knobs or {}:
        if knob not in known:
            raise UserError(f"{name} has no setting {knob!r}{nearest(knob, known)}")
    return method(settings(**(knobs or {})))
