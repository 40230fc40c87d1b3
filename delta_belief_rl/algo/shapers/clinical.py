"""Credit for questions by what their answers tell about a hidden state, as in a diagnosis.

With ``b_k`` the belief over ``H`` hidden states before turn ``k`` and ``E(b) = -sum b log b / log
H`` in [0, 1], a turn that asks is paid::

    q_k = beta * (E(b_k) - E(b_{k+1})) - cost               form="entropy"
    q_k = beta * (log b_{k+1}(h) - log b_k(h)) - cost       form="logp", h the true state
    q_k = beta * max(0, E(b_k) - E(b_{k+1})) - cost         form="positive"

and any other turn 0. Without cost, the first two telescope: where every turn asks, a game is paid
``beta * (E(b_0) - E(b_K))`` in all, at most ``beta``, so that a question asked twice, or one that
tells nothing, earns nothing. ``positive`` does not, and pays a belief that goes up and down.

Use the belief of a simulator where there is one: one read out of the policy can be raised by
over-confidence. A probability below 1e-6 counts as that in ``logp``. A turn next to an unknown
belief (NaN) gets 0, cost included.

Shapes: ``N`` games, ``K`` turns of the longest game, ``H`` hidden states, ``R`` rows of the turn
table. Beliefs are ``[N, K + 1]``, NaN behind the last of a game.

Source: question credit for clinical dialogue. Confidence: reconstructed from a short description;
the normalisation of the entropy, the signed form, beta, and what counts as sure are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.types import BoolArray, FloatArray, IntArray

FORMS = ("entropy", "logp", "positive")
LEAST_PROBABILITY = 1e-6
SURE = 0.8
"""Probability of a hidden state from which on a decision for it is not premature."""


@dataclass(frozen=True, slots=True)
class ClinicalSettings:
    """Knobs of ``question_credit``; ``beta`` and ``cost`` in reward units."""

    form: str = "entropy"
    beta: float = 0.5
    cost: float = 0.0

    def __post_init__(self) -> None:
        require_choice("algorithm.clinical.form", self.form, FORMS)
        require_range("algorithm.clinical.beta", self.beta, 0.0)
        require_range("algorithm.clinical.cost", self.cost, 0.0)


def entropies(beliefs: FloatArray) -> FloatArray:
    """``E`` over the last axis, 0 for a single hidden state; NaN where a belief is unknown."""
    if beliefs.shape[-1] < 2:
        return np.where(np.isfinite(beliefs).all(axis=-1), 0.0, np.nan)
    logs = np.log(beliefs, out=np.zeros_like(beliefs), where=beliefs > 0.0)
    # Adding 0.0 turns the -0.0 of a certain belief into 0.0.
    return -(beliefs * logs).sum(axis=-1) / np.log(beliefs.shape[-1]) + 0.0


def true_state_logp(beliefs: FloatArray, truth: IntArray) -> FloatArray:
    """Log-probability of the true state, in nats, ``[N, K + 1, H]`` and ``[N] -> [N, K + 1]``."""
    index = np.broadcast_to(truth[:, None, None], (*beliefs.shape[:2], 1))
    own = np.take_along_axis(beliefs, index, axis=2)[..., 0]
    return np.log(np.maximum(own, LEAST_PROBABILITY))


def question_credit(
    measure: FloatArray, asks: BoolArray, settings: ClinicalSettings | None = None
) -> FloatArray:
    """``q`` of every turn, ``[N, K]``.

    Args:
        measure: ``[N, K + 1]``: from ``true_state_logp`` for ``form="logp"``, from ``entropies``
            else.
        asks: ``[N, K]``, the turns that ask.
        settings: The knobs.

    Raises:
        ValueError: The two arrays do not fit.
    """
    knobs = settings or ClinicalSettings()
    if asks.shape != (measure.shape[0], measure.shape[1] - 1):
        raise ValueError(f"{measure.shape} beliefs for {asks.shape} turns")
    measure = np.where(np.isfinite(measure), measure, np.nan)
    gain = measure[:, 1:] - measure[:, :-1]
    if knobs.form != "logp":
        gain = -gain
    if knobs.form == "positive":
        gain = np.maximum(gain, 0.0)
    return np.where(asks & np.isfinite(gain), knobs.beta * gain - knobs.cost, 0.0)
