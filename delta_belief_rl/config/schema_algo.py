"""Settings of credit assignment (``algorithm.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt
from delta_belief_rl.config.schema_credit import (
    Dtca,
    GiGpo,
    GraphGpo,
    GraphOpd,
    Hgpo,
    MtGrpo,
    Pearl,
    StateProgress,
)
from delta_belief_rl.config.schema_critic import BilevelGae, Gae, Mpo, TurnPpo
from delta_belief_rl.config.schema_learners import Archer, Istar, SpaRl
from delta_belief_rl.config.schema_rewards import (
    Clinical,
    FilterGroups,
    Overlong,
    ProcessReward,
    RewardNormalisation,
)
from delta_belief_rl.config.schema_trees import At2po, Tree, TreeGrpo
from delta_belief_rl.config.schema_views import (
    Hcapo,
    Igpo,
    Opid,
    Opsd,
    Orsd,
    Relace,
    Rlsd,
    Sdar,
    Sdpo,
)

GROUP_ESTIMATORS = (
    *("grpo", "grpo_turn", "grpo_turn_rtg", "grpo_passk", "rloo", "opo"),
    *("mt_grpo", "gigpo", "hgpo", "reinforce_plus_plus_baseline"),
    *("igpo", "hcapo", "relace", "graphgpo", "state_progress", "tree_grpo", "at2po"),
    "istar",
)
"""These compare the games of one secret."""
CRITIC_ESTIMATORS = ("gae", "turn_ppo", "bilevel_gae", "mpo", "spa_rl")
"""These train a critic."""
ESTIMATORS = (
    *CRITIC_ESTIMATORS,
    *(*GROUP_ESTIMATORS, "reinforce", "reinforce_plus_plus", "multi_turn_reinforce"),
    *("opsd", "sdpo", "graph_opd", "archer"),
)
CREDIT_TRANSFORMS: tuple[str, ...] = (
    "mpo",
    "rlsd",
    "sdar",
    "opid",
    "orsd",
    "pearl",
    "dtca",
    "shared_once",
    "graph_opd",
)


@dataclass(frozen=True, slots=True)
class KlControl:
    """The coefficient of the KL reward."""

    type: Literal["fixed", "adaptive"] = opt(
        "fixed", "Keep the coefficient, or move it towards target_kl after each step."
    )
    kl_coef: float = opt(0.001, "Coefficient; where an adaptive one begins.")
    horizon: int = opt(10000, "Games over which an adaptive coefficient may double, roughly.")
    target_kl: float = opt(
        0.1, "Divergence per token, in nats, that an adaptive coefficient seeks."
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How rewards become advantages."""

    adv_estimator: str = opt(
        "grpo",
        "Advantage: grpo (whole games), grpo_turn (each turn index on its own), grpo_turn_rtg "
        "(return-to-go against the siblings), grpo_passk (the best game's lead), rloo, opo "
        "(baseline weighted by length), mt_grpo (outcome and turn apart), gigpo and hgpo (turns "
        "from the same state), reinforce (no group), reinforce_plus_plus, "
        "reinforce_plus_plus_baseline or multi_turn_reinforce; see docs/algorithms.md.",
        corrected="the last three run",
    )
    kwargs: Mapping[str, object] = field(
        default_factory=dict[str, object],
        metadata={
            "help": "Settings of a method that a plug-in brings, for it to check and to read.",
            "new": True,
        },
    )
    transforms: tuple[str, ...] = opt(
        (), "Methods that change these advantages, one after the other.", new=True
    )
    parity: Literal["reference", "masked"] = opt(
        "reference",
        "Turns after a game's end in group statistics: reference counts them as zeros and gives a "
        "lone game its raw score; masked leaves them out and gives it zero. With "
        "reinforce_plus_plus, reference starts the return anew at each reply and masked lets it "
        "run through the game.",
        new=True,
    )
    std_floor: float = opt(
        0.01, "Smallest standard deviation of a group, in reward; with parity=masked.", new=True
    )
    norm_adv_by_std_in_grpo: bool = opt(
        True, "Divide by the group's standard deviation, where the method leaves the choice."
    )
    gamma: float = opt(
        1.0,
        "Discount per turn of all methods with a return-to-go, per token of reinforce_plus_plus, "
        "gae and bilevel_gae, and of the potential in logprob_reward.methods.",
    )
    lam: float = opt(
        1.0,
        "How far the critic's errors reach back in gae and bilevel_gae (per token), turn_ppo and "
        "mpo (per turn): 1 is the whole return, 0 the next value.",
    )
    norm_adv_in_mtr: bool = opt(False, "Whiten the advantages of multi_turn_reinforce.")
    clip_adv_in_mtr: bool = opt(False, "Clip the advantages of multi_turn_reinforce.")
    clip_adv_min: float = opt(-3.0, "Lower bound of that clip.")
    clip_adv_max: float = opt(3.0, "Upper bound of that clip.")
    only_propagate_eog_in_mtr: bool = opt(
        True, "Carry only the end-of-game reward back to earlier turns in multi_turn_reinforce."
    )
    mt_grpo: MtGrpo = field(default_factory=MtGrpo)
    gigpo: GiGpo = field(default_factory=GiGpo)
    hgpo: Hgpo = field(default_factory=Hgpo)
    graphgpo: GraphGpo = field(default_factory=GraphGpo)
    state_progress: StateProgress = field(default_factory=StateProgress)
    pearl: Pearl = field(default_factory=Pearl)
    dtca: Dtca = field(default_factory=Dtca)
    graph_opd: GraphOpd = field(default_factory=GraphOpd)
    tree: Tree = field(default_factory=Tree)
    tree_grpo: TreeGrpo = field(default_factory=TreeGrpo)
    at2po: At2po = field(default_factory=At2po)
    gae: Gae = field(default_factory=Gae)
    turn_ppo: TurnPpo = field(default_factory=TurnPpo)
    bilevel_gae: BilevelGae = field(default_factory=BilevelGae)
    mpo: Mpo = field(default_factory=Mpo)
    spa_rl: SpaRl = field(default_factory=SpaRl)
    istar: Istar = field(default_factory=Istar)
    archer: Archer = field(default_factory=Archer)
    igpo: Igpo = field(default_factory=Igpo)
    hcapo: Hcapo = field(default_factory=Hcapo)
    relace: Relace = field(default_factory=Relace)
    rlsd: Rlsd = field(default_factory=Rlsd)
    sdar: Sdar = field(default_factory=Sdar)
    opid: Opid = field(default_factory=Opid)
    orsd: Orsd = field(default_factory=Orsd)
    opsd: Opsd = field(default_factory=Opsd)
    sdpo: Sdpo = field(default_factory=Sdpo)
    use_kl_in_reward: bool = opt(
        False,
        "Pay each turn for its divergence from the policy without adapter.",
        corrected="is paid",
    )
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = opt(
        "kl", "Estimator of that divergence."
    )
    kl_ctrl: KlControl = field(default_factory=KlControl)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    overlong: Overlong = field(default_factory=Overlong)
    process_reward: ProcessReward = field(default_factory=ProcessReward)
    clinical: Clinical = field(default_factory=Clinical)
    reward_normalisation: RewardNormalisation = field(default_factory=RewardNormalisation)
