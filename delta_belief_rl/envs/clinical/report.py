"""What the games of clinical cases say, by stratum.

For the games of a stratum and ``v`` the value of a game's decision in [-1, 1]::

    value            mean of v; a case left undecided counts -1
    questions        mean number of turns that did not decide
    committed        share of the games that ended by a decision
    premature        share of the decisions that were made while no hidden state had a probability
                     of 0.8
    harm             share of the decisions with v < 0

A game without an outcome, because an engine failed, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from delta_belief_rl.algo.shapers.channels import FAILED_STOPS
from delta_belief_rl.envs.clinical.sheets import STRATA
from delta_belief_rl.envs.clinical.tasks import SOURCE
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.types import Trajectory


@dataclass(frozen=True, slots=True)
class StratumReport:
    """The numbers of the module's head; NaN where there is nothing to count."""

    games: int
    value: float
    questions: float
    committed: float
    premature: float
    harm: float


def report_of(games: Sequence[Trajectory], options: EnvOptions) -> dict[str, float]:
    """The numbers of every stratum by name, e.g. ``high/harm``.

    Args:
        games: Finished ones.
        options: Not read, because the games say it all.
    """
    del options
    return {
        f"{name}/{field.name}": float(getattr(found, field.name))
        for name, found in by_stratum(games).items()
        for field in fields(found)
    }


def by_stratum(games: Iterable[Trajectory]) -> dict[str, StratumReport]:
    """One report for each stratum that has a game, and ``all`` of them together.

    Games of other environments are passed over.
    """
    own: dict[str, list[Trajectory]] = {}
    for game in games:
        source, _, stratum = game.task.source.rpartition("_")
        if source == SOURCE and stratum in STRATA and game.turns and game.stop not in FAILED_STOPS:
            own.setdefault(stratum, []).append(game)
            own.setdefault("all", []).append(game)
    return {name: _report(own[name]) for name in (*STRATA, "all") if name in own}


def _report(games: list[Trajectory]) -> StratumReport:
    ends = [game.turns[-1] for game in games]
    decided = [turn for turn in ends if turn.is_guess]
    values = [2.0 * (turn.score or 0.0) - 1.0 for turn in ends]
    return StratumReport(
        games=len(games),
        value=float(np.mean(values)),
        questions=float(np.mean([sum(not turn.is_guess for turn in g.turns) for g in games])),
        committed=len(decided) / len(games),
        premature=_share([("premature" in turn.diagnostics) for turn in decided]),
        harm=_share([("harm" in turn.diagnostics) for turn in decided]),
    )


def _share(flags: list[bool]) -> float:
    return float(np.mean(flags)) if flags else float("nan")
