"""ORSD's context: the rules of play that set the better games of a group apart.

Three steps, each behind a protocol, so that a language model may take the first two::

    bundles b = 1..B of criteria, from the contrast of best and worst games         (RubricWriter)
    S[b, i] = mean over the criteria of bundle b of v(game i, criterion) in [0, 1]  (Verifier)
    b* = argmax_b corr(S[b], outcome), if that is at least min_correlation          (choose_bundle)

The hint of every game of the group is the text of bundle ``b*``. Without two different outcomes, a
bundle, or a correlation there is no hint. The packaged writer and verifier know criteria that are
predicates on what happened in a game (``rubric_rules``).

Source: ORSD, online rubric self-distillation. Confidence: reconstructed from its abstract, details
ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from delta_belief_rl.algo.base import VIEW, Grain, require_choice, require_range
from delta_belief_rl.algo.scorers.hints import HintScorer, cut_words, outcome_of
from delta_belief_rl.algo.scorers.rubric_rules import Criterion, RuleVerifier, RuleWriter
from delta_belief_rl.types import FloatArray, Group, Task, Trajectory

VIEW_NAME = "rubric"
OPENING = "Rules that helped before:"
CORRELATIONS = ("pearson", "spearman")


@dataclass(frozen=True, slots=True)
class RubricSettings:
    """Knobs; ``num_best`` and ``num_worst`` are the games that a writer is shown."""

    bundles: int = 4
    max_criteria: int = 6
    num_best: int = 2
    num_worst: int = 2
    min_correlation: float = 0.1
    correlation: str = "pearson"

    def __post_init__(self) -> None:
        for name in ("bundles", "max_criteria", "num_best", "num_worst"):
            require_range(f"algorithm.orsd.{name}", getattr(self, name), 1)
        require_range("algorithm.orsd.min_correlation", self.min_correlation, 0.0, 1.0)
        require_choice("algorithm.orsd.correlation", self.correlation, CORRELATIONS)


class RubricWriter(Protocol):
    """Writes rules of play."""

    def bundles(
        self, best: Sequence[Trajectory], worst: Sequence[Trajectory], count: int, size: int
    ) -> Sequence[Sequence[Criterion]]:
        """``count`` bundles of up to ``size`` criteria; none where writing fails."""
        ...


class Verifier(Protocol):
    """Says how far a game kept a rule."""

    def satisfaction(self, game: Trajectory, criterion: Criterion) -> float | None:
        """In [0, 1]; None, like anything outside, counts as 0."""
        ...


@dataclass(frozen=True, slots=True)
class RubricScorer(HintScorer):
    """See the module's head."""

    rubric: RubricSettings = RubricSettings()
    writer: RubricWriter = field(default_factory=RuleWriter)
    verifier: Verifier = field(default_factory=RuleVerifier)
    provides: ClassVar[tuple[str, ...]] = (VIEW + VIEW_NAME,)
    grain: ClassVar[Grain] = Grain.GROUP

    def hints(self, groups: Sequence[Group]) -> list[str | None]:
        """The chosen bundle of each game's group; None for games whose end is unknown."""
        out: list[str | None] = []
        for group in groups:
            ends = [outcome_of(game, self.settings.rule) for game in group.trajectories]
            known = [place for place, end in enumerate(ends) if end is not None]
            games = [group.trajectories[place] for place in known]
            chosen = self._choose(games, np.array([ends[place] for place in known], dtype=float))
            text = None if chosen is None else self._text(chosen)
            out += [text if place in known else None for place in range(len(ends))]
        return out

    def _choose(
        self, games: Sequence[Trajectory], outcome: FloatArray
    ) -> Sequence[Criterion] | None:
        """The bundle that tracks the outcome best; None where there is none."""
        if len(games) < 2 or np.ptp(outcome) == 0:
            return None
        order: list[int] = np.argsort(-outcome, kind="stable").tolist()
        # A game as bad as the worst one teaches nothing good, however few are better.
        better = [place for place in order if outcome[place] > outcome.min()]
        lesser = [place for place in reversed(order) if outcome[place] < outcome.max()]
        best = [games[place] for place in better[: self.rubric.num_best]]
        worst = [games[place] for place in lesser[: self.rubric.num_worst]]
        written = self.writer.bundles(best, worst, self.rubric.bundles, self.rubric.max_criteria)
        bundles = [
            [one for one in bundle if not quotes_answer(one.text, games[0].task)]
            for bundle in written
        ]
        bundles = [bundle[: self.rubric.max_criteria] for bundle in bundles if bundle]
        if not bundles:
            return None
        scores = np.array(
            [[self._satisfaction(game, bundle) for game in games] for bundle in bundles]
        )
        place = choose_bundle(scores, outcome, self.rubric.min_correlation, self.rubric.correlation)
        return None if place is None else bundles[place]

    def _satisfaction(self, game: Trajectory, bundle: Sequence[Criterion]) -> float:
        found = [self.verifier.satisfaction(game, criterion) for criterion in bundle]
        # "not 0 <= x <= 1" also holds of NaN.
        return float(np.mean([0.0 if x is None or not 0 <= x <= 1 else x for x in found]))

    def _text(self, bundle: Sequence[Criterion]) -> str:
        return cut_words(" ".join([OPENING, *(one.text for one in bundle)]), self.settings.words)


def quotes_answer(text: str, task: Task) -> bool:
    """Whether a text holds the secret of a task, or another name of it, as words."""
    names = [name for name in (task.secret, *task.aliases) if name]
    return any(re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE) for name in names)


def choose_bundle(
    satisfaction: FloatArray, outcome: FloatArray, least: float, kind: str = "pearson"
) -> int | None:
    """The row of ``satisfaction`` that correlates most with the outcome.

    Args:
        satisfaction: ``[B, n]``.
        outcome: ``[n]``.
        least: The least correlation that is enough.
        kind: One of ``CORRELATIONS``.

    Returns:
        The first of equally good rows; None where no row has spread and correlation enough.
    """
    if kind == "spearman":
        satisfaction = np.array([_ranks(row) for row in satisfaction])
        outcome = _ranks(outcome)
    best: tuple[float, int] | None = None
    for place, row in enumerate(satisfaction):
        found = correlation(row, outcome)
        if found is not None and found >= least and (best is None or found > best[0] + 1e-12):
            best = (found, place)
    return None if best is None else best[1]


def correlation(one: FloatArray, other: FloatArray) -> float | None:
    """Pearson's; None where one of them has no spread."""
    if len(one) < 2:
        return None
    left, right = one - one.mean(), other - other.mean()
    scale = float(np.sqrt((left**2).sum() * (right**2).sum()))
    # Equal values differ by rounding from their mean; that is no spread.
    if min(np.ptp(one), np.ptp(other)) <= 1e-12 or scale == 0:
        return None
    return float((left * right).sum() / scale)


def _ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1; equal values share the mean of theirs."""
    below = (values[:, None] > values).sum(axis=1)
    equal = (values[:, None] == values).sum(axis=1)
    return below + (equal + 1) / 2
