"""ORSD: another method's advantages, corrected by what the group's own rules of play would say.

The rules come from the contrast inside the group (``scorers.rubric``), found by code or written and
checked by language models. With ``d_t`` the log-prob of
a played token behind the ``rubric`` view less that without it::

    mode="additive"       A_t <- A_t + correction_w * clip(d_t, -clip, clip)
    mode="sign_weight"    A_t <- A_t * ((1 - sign_mix) + sign_mix * f_t)
                          f_t = clip(exp(sign(A_t) * d_t), 1 - sign_clip, 1 + sign_clip)

``center=True`` subtracts from an additive correction its mean over the trained tokens of the game.
A group whose games ended alike, or for which no bundle of rules tracks the outcome, has no rubric
and keeps its advantages; ``view_share`` counts the games that have one.

Log-prob gaps that are not centred can reward length: watch ``response_length/mean``.

Source: ORSD. Confidence: reconstructed from its abstract, details ours: how games are contrasted,
the mean over criteria, Pearson's correlation, the additive form with its weight and clip, no
centring, no correction without a rubric. The form follows OPID and RLSD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    Advantage,
    Grain,
    Scorer,
    Stateless,
    require_choice,
    require_range,
)
from delta_belief_rl.algo.credit.reading import gap_behind, gap_requires, require_teacher
from delta_belief_rl.algo.credit.rlsd import sign_weight
from delta_belief_rl.algo.credit.views import with_tokens
from delta_belief_rl.algo.scorers.hints import HintSettings
from delta_belief_rl.algo.scorers.rubric import VIEW_NAME, RubricScorer, RubricSettings
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable

MODES = ("additive", "sign_weight")


@dataclass(frozen=True, slots=True)
class OrsdSettings:
    """Knobs of ``Orsd``; ``clip`` in nats. The middle ones are those of ``RubricSettings``."""

    mode: str = "additive"
    correction_w: float = 0.1
    clip: float = 1.0
    center: bool = False
    sign_mix: float = 0.5
    sign_clip: float = 0.2
    bundles: int = 4
    max_criteria: int = 6
    num_best: int = 2
    num_worst: int = 2
    min_correlation: float = 0.1
    correlation: str = "pearson"
    writer: str = "rules"
    verifier: str = "rules"
    teacher: str = "policy"
    hint_words: int = 80

    def __post_init__(self) -> None:
        require_choice("algorithm.orsd.mode", self.mode, MODES)
        require_range("algorithm.orsd.correction_w", self.correction_w, 0.0)
        require_range("algorithm.orsd.clip", self.clip, 0.0, open_low=True)
        require_range("algorithm.orsd.sign_mix", self.sign_mix, 0.0, 1.0)
        require_range("algorithm.orsd.sign_clip", self.sign_clip, 0.0, 1.0)
        require_teacher("orsd", self.teacher)
        require_range("algorithm.orsd.hint_words", self.hint_words, 1)
        self.rubric()

    def rubric(self) -> RubricSettings:
        """The part that the scorer reads.

        Raises:
            UserError: One of its knobs is out of range.
        """
        return RubricSettings(
            self.bundles,
            self.max_criteria,
            self.num_best,
            self.num_worst,
            self.min_correlation,
            self.correlation,
            self.writer,
            self.verifier,
        )


@dataclass(frozen=True, slots=True)
class Orsd(Stateless):
    """See the module's head."""

    settings: OrsdSettings = OrsdSettings()
    requires: ClassVar[tuple[str, ...]] = gap_requires(VIEW_NAME)
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Rules come from the contrast of a group."""
        return True

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What finds the rules."""
        knobs = self.settings
        hints = HintSettings(rule, knobs.teacher, knobs.hint_words)
        return (RubricScorer(hints, knobs.rubric()),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages with one for each token.

        Raises:
            UserError: It is the first of its chain.
            ValueError: The table has no such view.
        """
        knobs = self.settings
        read = gap_behind(table, previous, "orsd", VIEW_NAME)
        if knobs.mode == "sign_weight":
            new = sign_weight(read.tokens, read.gap, knobs.sign_mix, knobs.sign_clip)
        else:
            new = read.tokens + self._correction(table, read.gap, read.seen)
        used = np.repeat(table.valid & read.seen[table.traj], table.n_tokens)
        change, size = np.abs(new - read.tokens)[used], np.abs(read.gap)[used]
        stats = {
            "view_share": read.share,
            "correction_size": float(change.mean()) if used.any() else 0.0,
            "correction_clipped": float((size > knobs.clip).mean()) if used.any() else 0.0,
        }
        return with_tokens(table, read.before, new, stats)

    def _correction(self, table: TurnTable, gap: FloatArray, seen: BoolArray) -> FloatArray:
        """What is added to the tokens, ``[S]``."""
        knobs = self.settings
        correction = knobs.correction_w * np.clip(gap, -knobs.clip, knobs.clip)
        if not knobs.center:
            return correction
        game = np.repeat(table.traj, table.n_tokens)
        used = np.repeat(table.valid & seen[table.traj], table.n_tokens)
        count = np.bincount(game, weights=used, minlength=table.num_games)
        total = np.bincount(game, weights=correction, minlength=table.num_games)
        return np.where(used, correction - (total / np.maximum(count, 1))[game], 0.0)
