"""What each method of credit is in a line, where it comes from, and how sure its formula is.

The names are those of ``CREDITS`` and ``TRANSFORMS``, and in ``GROUPS`` those of the groups of
settings that make a method of their own out of them. What a method needs is read off the method
itself, so that it cannot be written down wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from delta_belief_rl.algo import CREDITS, TRANSFORMS
from delta_belief_rl.algo.base import HOOK_COLUMNS, LOGP, VALUES, VIEW, Credit


class Label(StrEnum):
    """How sure it is that a formula is that of the source."""

    CODE = "CODE"
    """Read in the authors' code or in a faithful public port."""
    TEXT = "TEXT"
    """From the paper's equations."""
    ABSTRACT = "ABSTRACT"
    """The mechanism is that of an abstract; the details are ours."""
    DIGEST = "DIGEST"
    """A few sentences of a digest; the details are ours."""
    OWN = "OWN"
    """A method of this package, or of a plug-in."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One method.

    Attributes:
        summary: What its advantage is, in a line.
        arxiv: Number of its paper; empty where there is none.
    """

    summary: str
    label: Label
    arxiv: str = ""


TOKENS = "tokens:"
"""What the name of a token column begins with in ``requires``."""

CATALOGUE: dict[str, Entry] = {
    "grpo": Entry("return of the game, standardised in its group", Label.CODE, "2402.03300"),
    "grpo_turn": Entry(
        "reward of the turn and outcome, standardised for each turn index", Label.CODE, "2602.12342"
    ),
    "grpo_turn_rtg": Entry(
        "return-to-go of the turn less the mean of its siblings at that index", Label.OWN
    ),
    "grpo_passk": Entry("lead of the group's best game over the second", Label.CODE, "2503.19595"),
    "rloo": Entry("return less the mean of the other games", Label.CODE, "2402.14740"),
    "opo": Entry("return less the group's mean weighted by length", Label.CODE, "2505.23585"),
    "mt_grpo": Entry(
        "outcome and reward of the turn, each standardised apart", Label.CODE, "2505.11821"
    ),
    "gigpo": Entry("whole games, and turns that began in the same state", Label.CODE, "2505.10978"),
    "hgpo": Entry(
        "turns from the same state, weighted by how far their histories agree",
        Label.CODE,
        "2602.22817",
    ),
    "reinforce": Entry("return-to-go less the mean of the batch", Label.CODE),
    "reinforce_plus_plus": Entry(
        "discounted return of each token, whitened over the batch", Label.CODE, "2501.03262"
    ),
    "reinforce_plus_plus_baseline": Entry(
        "return less the group's mean, whitened over the batch", Label.CODE, "2501.03262"
    ),
    "multi_turn_reinforce": Entry(
        "reward of the turn and the discounted end of the game", Label.CODE, "2602.12342"
    ),
    "igpo": Entry(
        "what each turn gained in knowledge of the answer, the last one the outcome",
        Label.CODE,
        "2510.14967",
    ),
    "hcapo": Entry(
        "return, more of it for turns that look likely once the end is known",
        Label.TEXT,
        "2603.08754",
    ),
    "relace": Entry(
        "return, more of it for turns that look likelier once the outcome is told",
        Label.ABSTRACT,
        "2610.07349",
    ),
    "opsd": Entry("none: the policy learns from itself with the answer", Label.CODE, "2601.18734"),
    "sdpo": Entry(
        "none: the policy learns from itself with a sibling's win", Label.CODE, "2601.20802"
    ),
    "rlsd": Entry("tokens weighed by a teacher who knows the answer", Label.CODE),
    "sdar": Entry("tokens pulled towards a teacher who knows the answer", Label.CODE, "2605.15155"),
    "opid": Entry("what a skill would have said is added, by token", Label.CODE, "2606.26790"),
    "orsd": Entry("corrected by what the group's own rules of play would say", Label.DIGEST),
    "graphgpo": Entry("how near to a win a turn leads, over all games", Label.CODE, "2605.26684"),
    "state_progress": Entry("actions compared where state and progress are the same", Label.DIGEST),
    "tree_grpo": Entry(
        "games compared inside their tree and across the trees", Label.CODE, "2509.21240"
    ),
    "at2po": Entry("value of each turn in the tree of its games", Label.CODE, "2601.04767"),
    "dtca": Entry(
        "tokens of a denoiser weighed by what their part of speech does for the rest", Label.DIGEST
    ),
    "pearl": Entry("bad decisions that keep coming back are punished harder", Label.DIGEST),
    "shared_once": Entry("turns that games of a tree share are trained on once", Label.OWN),
    "graph_opd": Entry(
        "none: distilled on turns that others build on", Label.ABSTRACT, "2610.08959"
    ),
    "gae": Entry("PPO: a critic's error at each token and what follows", Label.CODE, "1506.02438"),
    "turn_ppo": Entry(
        "a critic's error at each turn and what follows, standardised over turns",
        Label.CODE,
        "2604.18401",
    ),
    "bilevel_gae": Entry(
        "a critic's errors of turns, shared out among their tokens by a second recursion",
        Label.CODE,
    ),
    "istar": Entry(
        "whole games, and turns by a model that learns which games are won",
        Label.CODE,
        "2509.19199",
    ),
    "spa_rl": Entry(
        "gae on the outcome as a learnt head shares it out, and a bonus for valid acts",
        Label.CODE,
        "2505.20732",
    ),
    "archer": Entry(
        "what two critics expect of the action, less what they expect of its state",
        Label.CODE,
        "2402.19446",
    ),
    "mpo": Entry(
        "a critic's errors of turns, told apart inside a turn with their mean kept", Label.DIGEST
    ),
}


GROUPS: dict[str, Entry] = {
    "arpo": Entry("grpo over games that branch where uncertainty rises", Label.CODE, "2507.19849"),
    "cispo": Entry(
        "grpo with clipped weights in place of clipped ratios", Label.CODE, "2506.13585"
    ),
    "clinical": Entry("grpo paid for the uncertainty that questions remove", Label.DIGEST),
    "dapo": Entry(
        "grpo on groups that differ, a wider upper clip, a price on length",
        Label.CODE,
        "2503.14476",
    ),
    "decay": Entry("grpo with a belief reward that fades", Label.DIGEST),
    "delta_belief": Entry(
        "grpo_turn on the outcome and the rise of the own belief", Label.CODE, "2602.12342"
    ),
    "delta_belief_guarded": Entry("delta_belief behind guards against gaming it", Label.OWN),
    "dr_grpo": Entry("grpo without division by deviation and length", Label.CODE, "2503.20783"),
    "gspo": Entry("grpo with one importance ratio for a game", Label.CODE, "2507.18071"),
    "ppo": Entry("gae with the clipped ratios of tokens", Label.CODE, "1707.06347"),
    "starpo_s": Entry("grpo on the groups whose returns vary most", Label.CODE, "2504.20073"),
    "turn_ratio": Entry("grpo with one importance ratio for a turn", Label.CODE, "2601.04767"),
}
"""Groups of settings that are no method of credit by name."""


def needs_of(credit: Credit) -> tuple[str, ...]:
    """What a run must have for a method: ``group``, ``critic``, learners, hooks, views by name.

    Example:
        >>> from delta_belief_rl.algo import build_credit
        >>> needs_of(build_credit("gigpo"))
        ('group', 'hook state_key')
    """
    requires: Sequence[str] = credit.requires
    needs = ["group"] if credit.needs_group else []
    needs += ["critic"] if VALUES in requires else []
    learnt = [name for name in requires if name.startswith(TOKENS) and name not in (LOGP, VALUES)]
    needs += [f"learner {name.removeprefix(TOKENS)}" for name in learnt]
    needs += [f"hook {name}" for name in requires if name in HOOK_COLUMNS]
    needs += [f"view {name.removeprefix(VIEW)}" for name in requires if name.startswith(VIEW)]
    return tuple(needs)


def listed(*, transforms: bool = False) -> dict[str, tuple[Entry, tuple[str, ...]]]:
    """Every estimator, or every transform, with its entry and its needs."""
    known = TRANSFORMS if transforms else CREDITS
    return {
        name: (CATALOGUE[name], needs_of(method(settings())))
        for name, (method, settings) in known.items()
    }
