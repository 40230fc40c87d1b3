"""ORSD's context: the rules of play that set the better games of a group apart.

Three steps, the first two by code or by a language model::

    bundles b = 1..B of criteria, from the contrast of best and worst games         (writer)
    S[b, i] = mean over the criteria of bundle b of v(game i, criterion) in [0, 1]  (verifier)
    b* = argmax_b corr(S[b], outcome), if that is at least min_correlation          (choose_bundle)

The hint of every game of the group is the text of bundle ``b*``. Without two different outcomes, a
bundle, or a correlation there is no hint, and where all games ended alike nobody is asked.

``writer="rules"`` and ``verifier="rules"`` know criteria that are predicates on what happened in a
game (``rubric_rules``). With ``"model"`` the part is taken by a role of the run (``roles``), which
``prepare`` asks before the scores (``rubric_model``). What a model wrote, a model has to check.

Source: ORSD, online rubric self-distillation. Confidence: reconstructed from its abstract, details
ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from delta_belief_rl.algo.base import VIEW, Grain, Scorer, require_choice, require_range
from delta_belief_rl.algo.scorers.hints import HintScorer, cut_words, outcome_of
from delta_belief_rl.algo.scorers.roles import Ask, Failure, Roles
from delta_belief_rl.algo.scorers.rubric_contrast import Contrast, quotes_answer
from delta_belief_rl.algo.scorers.rubric_model import (
    check_asks,
    read_bundles,
    satisfactions,
    write_ask,
)
from delta_belief_rl.algo.scorers.rubric_rules import Criterion, RuleVerifier, RuleWriter
from delta_belief_rl.types import FloatArray, Group, Trajectory, UserError

VIEW_NAME = "rubric"
OPENING = "Rules that helped before:"
CORRELATIONS = ("pearson", "spearman")
BY_RULES, BY_MODEL = "rules", "model"
"""Who writes or checks."""

Bundle = Sequence[Criterion]


@dataclass(frozen=True, slots=True)
class RubricSettings:
    """Knobs; ``num_best`` and ``num_worst`` are the games that a writer is shown."""

    bundles: int = 4
    max_criteria: int = 6
    num_best: int = 2
    num_worst: int = 2
    min_correlation: float = 0.1
    correlation: str = "pearson"
    writer: str = BY_RULES
    verifier: str = BY_RULES

    def __post_init__(self) -> None:
        for name in ("bundles", "max_criteria", "num_best", "num_worst"):
            require_range(f"algorithm.orsd.{name}", getattr(self, name), 1)
        require_range("algorithm.orsd.min_correlation", self.min_correlation, 0.0, 1.0)
        require_choice("algorithm.orsd.correlation", self.correlation, CORRELATIONS)
        for name in ("writer", "verifier"):
            require_choice(f"algorithm.orsd.{name}", getattr(self, name), (BY_RULES, BY_MODEL))
        if self.writer == BY_MODEL and self.verifier != BY_MODEL:
            raise UserError(
                "algorithm.orsd.verifier=rules cannot check what a model writes: set "
                "algorithm.orsd.verifier=model, or algorithm.orsd.writer=rules."
            )

    @property
    def asks_models(self) -> bool:
        """Whether a model takes a part."""
        return BY_MODEL in (self.writer, self.verifier)


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
        """The chosen bundle of each game's group; None for games whose end is unknown.

        Raises:
            ValueError: A model takes a part, and ``prepare`` was not called.
        """
        if self.rubric.asks_models:
            raise ValueError(
                "prepare() comes before the hints of a rubric that models are asked for"
            )
        chosen: list[Bundle | None] = []
        for contrast in map(self._contrast, groups):
            bundles = [] if contrast is None else self._by_rules(contrast)
            chosen.append(None if contrast is None else self._best(contrast, bundles))
        return self._told(groups, chosen)

    async def prepare(
        self, groups: Sequence[Group], roles: Roles, step: int
    ) -> tuple[Scorer, Mapping[str, float]]:
        """Ask the models; see ``roles.Prepares``."""
        if not self.rubric.asks_models:
            return self, {}
        found = [self._contrast(group) for group in groups]
        asked = [contrast for contrast in found if contrast is not None]
        counts: Counter[str] = Counter(
            {f"orsd/{name}": 0 for name in COUNTED} | {"orsd/groups_asked": len(asked)}
        )
        written = await self._written(asked, roles, step, counts)
        chosen = iter(await self._checked(asked, written, roles, step, counts))
        bundles = [None if contrast is None else next(chosen) for contrast in found]
        counts["orsd/groups_written"] = sum(bool(own) for own in written)
        counts["orsd/groups_chosen"] = sum(bundle is not None for bundle in bundles)
        told = tuple(self._told(groups, bundles))
        ready = ToldRubric(self.settings, self.rubric, self.writer, self.verifier, told)
        return ready, {name: float(count) for name, count in counts.items()}

    async def _written(
        self, asked: Sequence[Contrast], roles: Roles, step: int, counts: Counter[str]
    ) -> list[Sequence[Bundle]]:
        """The bundles of each group."""
        if self.rubric.writer == BY_RULES:
            return [self._by_rules(contrast) for contrast in asked]
        count, size = self.rubric.bundles, self.rubric.max_criteria
        assert roles.writer is not None, "the run lends no writer"
        asks = [write_ask(contrast, count, size, step) for contrast in asked]
        texts = await roles.writer.write(asks) if asks else []
        out: list[Sequence[Bundle]] = []
        for contrast, text in zip(asked, texts, strict=True):
            if isinstance(text, Failure):
                _count_failure(counts, "writer", text)
                out.append([])
                continue
            bundles, refused = read_bundles(text, contrast, count, size)
            counts.update({f"orsd/{name}": number for name, number in refused.items()})
            out.append(bundles)
        return out

    async def _checked(
        self,
        asked: Sequence[Contrast],
        written: Sequence[Sequence[Bundle]],
        roles: Roles,
        step: int,
        counts: Counter[str],
    ) -> list[Bundle | None]:
        """The bundle that is chosen for each group."""
        if self.rubric.verifier == BY_RULES:
            pairs = zip(asked, written, strict=True)
            return [self._best(contrast, bundles) for contrast, bundles in pairs]
        assert roles.checker is not None, "the run lends no checker"
        asks: list[list[Ask]] = [
            check_asks(contrast, bundles, step)
            for contrast, bundles in zip(asked, written, strict=True)
        ]
        every = [ask for own in asks for ask in own]
        replies = iter(await roles.checker.check(every) if every else [])
        out: list[Bundle | None] = []
        for contrast, bundles, own in zip(asked, written, asks, strict=True):
            found = [next(replies) for _ in own]
            for reply in found:
                if isinstance(reply, Failure):
                    _count_failure(counts, "verifier", reply)
            sizes = [len(bundle) for bundle in bundles]
            scores, unread = satisfactions(found, sizes, len(contrast.games))
            counts["orsd/unread"] += unread["unread"]
            out.append(self._choice(contrast, bundles, scores))
        return out

    def _contrast(self, group: Group) -> Contrast | None:
        """The games of a group whose end is known, where they ended differently."""
        ends = [(game, outcome_of(game, self.settings.rule)) for game in group.trajectories]
        known = [(game, end) for game, end in ends if end is not None]
        outcome = np.array([end for _, end in known], dtype=np.float64)
        shown = self.rubric.num_best, self.rubric.num_worst
        return Contrast.of([game for game, _ in known], outcome, *shown)

    def _by_rules(self, contrast: Contrast) -> list[Bundle]:
        """What code writes, without rules that name the answer."""
        size = self.rubric.max_criteria
        best, worst = [*contrast.best], [*contrast.worst]
        written = self.writer.bundles(best, worst, self.rubric.bundles, size)
        bundles = [
            [one for one in bundle if not quotes_answer(one.text, contrast.task)]
            for bundle in written
        ]
        return [bundle[:size] for bundle in bundles if bundle]

    def _best(self, contrast: Contrast, bundles: Sequence[Bundle]) -> Bundle | None:
        """The bundle that tracks the outcome best, as code checks it."""
        scores = [
            np.array([self._satisfaction(game, bundle) for game in contrast.games])
            for bundle in bundles
        ]
        return self._choice(contrast, bundles, scores)

    def _choice(
        self, contrast: Contrast, bundles: Sequence[Bundle], scores: Sequence[FloatArray | None]
    ) -> Bundle | None:
        """The bundle that tracks the outcome best, of those with scores; None without one."""
        known = [
            (bundle, row) for bundle, row in zip(bundles, scores, strict=True) if row is not None
        ]
        if not known:
            return None
        rows = np.array([row for _, row in known])
        knobs = self.rubric
        place = choose_bundle(rows, contrast.outcome, knobs.min_correlation, knobs.correlation)
        return None if place is None else known[place][0]

    def _told(self, groups: Sequence[Group], chosen: Sequence[Bundle | None]) -> list[str | None]:
        """The hint of each game, of groups for which a bundle was chosen or not."""
        out: list[str | None] = []
        for group, bundle in zip(groups, chosen, strict=True):
            text = None if bundle is None else self._text(bundle)
            ends = [outcome_of(game, self.settings.rule) for game in group.trajectories]
            out += [None if end is None else text for end in ends]
        return out

    def _satisfaction(self, game: Trajectory, bundle: Bundle) -> float:
        found = [self.verifier.satisfaction(game, criterion) for criterion in bundle]
        # "not 0 <= x <= 1" also holds of NaN.
        return float(np.mean([0.0 if x is None or not 0 <= x <= 1 else x for x in found]))

    def _text(self, bundle: Bundle) -> str:
        return cut_words(" ".join([OPENING, *(one.text for one in bundle)]), self.settings.words)


@dataclass(frozen=True, slots=True)
class ToldRubric(RubricScorer):
    """A rubric whose models have been asked, for the games of one update."""

    told: tuple[str | None, ...] = ()

    def hints(self, groups: Sequence[Group]) -> list[str | None]:
        """What ``prepare`` found.

        Raises:
            ValueError: These are other games.
        """
        if sum(len(group.trajectories) for group in groups) != len(self.told):
            raise ValueError(
                "the hints of a rubric are those of the games that it was prepared for"
            )
        return list(self.told)


COUNTED = (
    *("groups_asked", "groups_written", "groups_chosen"),
    *("writer_failures", "bundles_malformed", "bundles_quoting"),
    *("verifier_failures", "unread"),
)
"""Metrics below ``orsd/`` that are there whenever models are asked."""


def _count_failure(counts: Counter[str], role: str, failure: Failure) -> None:
    counts[f"orsd/{role}_failures"] += 1
    counts[f"orsd/{role}_failures/{failure.kind}"] += 1


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
