"""Settings of games that are continued from the middle of others (``algorithm.tree.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt


@dataclass(frozen=True, slots=True)
class ArpoTree:
    """Settings of rule=arpo."""

    initial: int | None = opt(
        None,
        "Games of a secret that begin at the opening; null for half of multi_turn.train.n.",
        new=True,
    )
    beam: int = opt(2, "A game is left by at most beam - 1 others.", new=True)
    base_probability: float = opt(
        0.5, "Probability of leaving a game before a turn as uncertain as its first one.", new=True
    )
    entropy_weight: float = opt(
        0.2, "How much the rise of uncertainty after a reply adds to it.", new=True
    )
    first_tokens: int = opt(
        20, "Sampled tokens at the beginning of a turn by which its uncertainty is told.", new=True
    )


@dataclass(frozen=True, slots=True)
class TreeGrpoTree:
    """Settings of rule=tree_grpo."""

    trees: int = opt(2, "Trees of a secret; a divisor of multi_turn.train.n.", new=True)
    rounds: int = opt(1, "Rounds of growth.", new=True)
    expand: int | None = opt(
        None,
        "Turns of each tree from which it goes on anew in a round; null for as few as make "
        "multi_turn.train.n games.",
        new=True,
    )


@dataclass(frozen=True, slots=True)
class At2poTree:
    """Settings of rule=at2po."""

    rounds: int = opt(2, "Rounds of growth.", new=True)
    beam: int | None = opt(
        None,
        "Turns that get a sibling in a round; the other games begin at the opening. Null for as "
        "many as make 6 of 11 games branches, as published.",
        new=True,
    )
    branch_penalty: float = opt(
        0.05, "Nats that each sibling takes off a turn's uncertainty.", new=True
    )


@dataclass(frozen=True, slots=True)
class Tree:
    """How the games of a secret share their first turns."""

    rule: Literal["none", "arpo", "tree_grpo", "at2po"] = opt(
        "none",
        "Which games are continued from which turn: arpo (where uncertainty rises after a reply), "
        "tree_grpo (turns drawn uniformly) or at2po (the least certain turns); see docs/trees.md.",
        new=True,
    )
    arpo: ArpoTree = field(default_factory=ArpoTree)
    tree_grpo: TreeGrpoTree = field(default_factory=TreeGrpoTree)
    at2po: At2poTree = field(default_factory=At2poTree)


@dataclass(frozen=True, slots=True)
class TreeGrpo:
    """Settings of tree_grpo alone."""

    mode: Literal["both", "tree", "nested"] = opt(
        "both",
        "Compare the games of a secret and those of a tree, those of a tree alone, or what the "
        "first comparison gives inside the trees.",
        new=True,
    )


@dataclass(frozen=True, slots=True)
class At2po:
    """Settings of at2po alone."""

    value: Literal["child_mean", "leaf_mean", "entropy"] = opt(
        "child_mean",
        "Value of a turn: mean of the turns after it, mean of the games through it, or the former "
        "weighted by their uncertainty.",
        new=True,
    )
    advantage: Literal["value", "parent", "root", "both"] = opt(
        "value",
        "A turn is paid its value, or what that exceeds the turn before, the opening, or both.",
        new=True,
    )
