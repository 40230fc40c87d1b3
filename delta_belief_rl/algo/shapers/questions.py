"""Reward channel ``question``: what the answer to a turn's question told, by an exact posterior.

The environment's posterior before and after each turn (``Turn.uncertainty``, ``Turn.truth_logp``)
is the measure of ``shapers.clinical``; its form says which of the two. A turn asks unless it was
invalid, failed, or named an answer: a decision or a guess is paid by its outcome alone. A question
that was asked before costs what others cost and gains nothing.

Shapes: ``R`` rows of the turn table, ``N`` games, ``K`` turns of the longest game.

Source and confidence: as in ``shapers.clinical``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from delta_belief_rl.algo.shapers.clinical import ClinicalSettings, question_credit
from delta_belief_rl.types import FloatArray, Turn, TurnTable, Verdict

CHANNEL = "question"
NO_QUESTION = frozenset({Verdict.INVALID, Verdict.ERROR})


def question_rewards(
    table: TurnTable, turns: Sequence[Turn], settings: ClinicalSettings
) -> FloatArray:
    """The channel, ``[R]``; zero on rows that are not valid, or whose posterior is unknown.

    Args:
        table: Its columns ``traj``, ``turn`` and ``valid`` are read.
        turns: The table's turns, in the order of its rows.
        settings: The knobs.
    """
    if not table.num_rows:
        return np.zeros(0)
    pairs = [turn.truth_logp if settings.form == "logp" else turn.uncertainty for turn in turns]
    around = np.array([(np.nan, np.nan) if pair is None else pair for pair in pairs])
    asks = np.array([not turn.is_guess and turn.verdict not in NO_QUESTION for turn in turns])
    # Each turn by its own pair, so that a failed turn next to it changes nothing.
    return question_credit(around, (asks & table.valid)[:, None], settings)[:, 0]
