"""Settings of methods of credit that read the turn table alone (``algorithm.<method>.*``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.config.fields import opt


@dataclass(frozen=True, slots=True)
class MtGrpo:
    """Settings of mt_grpo alone."""

    turn_advantage_w: float = opt(
        1.0, "Weight of what a turn itself brought, next to the outcome.", new=True
    )
    turn_credit: Literal["each", "boundary"] = opt(
        "each",
        "Compare each turn index on its own, or pay the sum of all turns up to the first that was "
        "answered.",
        new=True,
    )


@dataclass(frozen=True, slots=True)
class GiGpo:
    """Settings of gigpo alone."""

    step_advantage_w: float = opt(
        1.0, "Weight of the comparison of turns from the same state.", new=True
    )
    episode_weighting: Literal["game", "turn"] = opt(
        "game", "What counts once in the statistics of whole games.", new=True
    )


@dataclass(frozen=True, slots=True)
class Hgpo:
    """Settings of hgpo alone."""

    history: int = opt(2, "States before a turn's own that may agree as well.", new=True)
    length_weight_alpha: float = opt(
        1.0, "How much more a longer agreement weighs; 0 weighs all alike.", new=True
    )
    base_group: bool = opt(False, "Average in the comparison of whole games.", new=True)
    skip_zero: bool = opt(True, "Leave comparisons that are zero out of the average.", new=True)


@dataclass(frozen=True, slots=True)
class GraphGpo:
    """Settings of graphgpo alone."""

    graph_advantage_w: float = opt(1.0, "Weight of the comparison along the graph.", new=True)
    episode_advantage_w: float = opt(1.0, "Weight of the comparison of whole games.", new=True)
    omega: float = opt(
        0.1, "What one turn more on the way to a win leaves of a turn's worth.", new=True
    )
    scale: float = opt(10.0, "Worth of a turn that wins.", new=True)
    form: Literal["reference", "paper", "progress"] = opt(
        "reference",
        "What counts as the way: from the state reached, with the turn itself, or less that from "
        "the state left.",
        new=True,
    )


@dataclass(frozen=True, slots=True)
class StateProgress:
    """Settings of state_progress alone."""

    form: Literal["win_loss", "centered", "loo"] = opt(
        "win_loss",
        "How actions are compared: by wins less losses, by their return less the mean, or by wins "
        "less losses without the game's own return.",
        new=True,
    )
    preference_w: float = opt(1.0, "Weight of the preference, next to the whole game.", new=True)
    margin: float = opt(
        0.05, "Lead that counts as one, as a share of the group's largest return.", new=True
    )
    progress_step: float = opt(
        0.25, "Progress within which turns are compared, in the environment's unit.", new=True
    )


@dataclass(frozen=True, slots=True)
class Pearl:
    """Settings of the transform pearl alone."""

    kappa: float = opt(1.0, "How much a bad decision's advantage grows at most.", new=True)
    outcome_margin: float = opt(
        0.0, "By what the returns of two games must differ to teach a decision.", new=True
    )
    min_losses: float = opt(2.0, "Losses from which on a decision counts.", new=True)
    min_rate: float = opt(0.6, "Share of losses from which on it does, smoothed.", new=True)
    loss_cap: float = opt(4.0, "Losses from which on it grows no further.", new=True)
    decay: float = opt(0.9, "What an update leaves of all counts.", new=True)
    capacity: int = opt(10000, "Decisions that are remembered.", new=True)


@dataclass(frozen=True, slots=True)
class Dtca:
    """Settings of the transform dtca alone."""

    tau: float = opt(
        0.2, "Lead in gained confidence that weighs a part of speech e-fold.", new=True
    )
    decay: float = opt(0.9, "What an update leaves of the running means.", new=True)
    weight_low: float = opt(0.25, "Smallest weight of a token, before their mean is 1.", new=True)
    weight_high: float = opt(4.0, "Largest weight of a token, before their mean is 1.", new=True)
    step_share: float = opt(0.5, "Share of an answer's steps that is trained.", new=True)


@dataclass(frozen=True, slots=True)
class GraphOpd:
    """Settings of graph_opd alone."""

    coefficient: float = opt(0.1, "Factor of the distillation loss.", new=True)
    damping: float = opt(0.85, "Chance that the walk over turns goes on.", new=True)
    direction: Literal["to_enablers", "to_effects", "both"] = opt(
        "to_enablers", "Where the walk goes from a turn.", new=True
    )
    fusion: Literal["product", "sum"] = opt(
        "product", "How a turn's place in the walk and its divergence make one number.", new=True
    )
    alpha: float = opt(0.5, "Part of the walk in a sum.", new=True)
    teacher: Literal["policy", "base", "ema"] = opt(
        "base", "Who reads the answer: the policy, the model without adapter, or ema.", new=True
    )
