"""DTCA: a denoiser's tokens are paid by what their part of speech does for places still masked.

Not an estimator: it weighs the advantages of the method before it, token by token. A response is a
row of the turn table; ``g_i`` is the gain of token ``i`` (``models.denoising``: the mean change of
confidence over the places that are masked after its step), undefined at the last step::

    m_c   = mean of the defined g of category c,  m = mean of all        over the step's responses
    M_c  <- decay M_c + (1 - decay) m_c                                  M likewise; the first is m
    w_i   = exp((M_c(i) - M) / tau), 1 for a category never met          then / mean of the response
    c_i   = clip(1 + (w_i - 1) clip(H_i / mean H, 0, 2), low, high)      then / mean of the response
    p_t   ~ mean of c over the tokens of step t
    T     = ceil(step_share * steps) of the response's steps, drawn without replacement by p
    A_i  <- A_i c_i n / n_T  for the n_T tokens of the steps in T, of n;  0 for all others

``H_i`` is the entropy of the distribution that the token was drawn from. The factor ``n / n_T``
makes the mean of the loss over all tokens that over the tokens of the steps drawn. Draws are a
function of the update, the game's number and the turn, so rows have no order, and of the odds.

Source: DTCA, credit by parts of speech for diffusion language models, in the spirit of. Confidence:
DIGEST. Ours are: confidence as the largest probability, tokens of one step sharing their gain, the
exponential weights, their running means, the calibration by entropy, the drawing of steps, and that
steps are not weighed by the inverse of their probability. Leave-one-out attribution is not here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from delta_belief_rl.algo.base import (
    Advantage,
    Grain,
    paid_rewards,
    require_previous,
    require_range,
)
from delta_belief_rl.algo.credit.views import token_advantages, token_column, with_tokens
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable, UserError

MOST_ENTROPY = 2.0
"""Entropy beyond so many times the response's mean counts no more."""
NOTHING = -1.0
"""Category of a token that is not looked at."""
_COLUMNS = ("gain", "commit_entropy", "commit_step", "category")


@dataclass(frozen=True, slots=True)
class DtcaSettings:
    """Knobs of ``Dtca``; ``tau`` in units of confidence."""

    tau: float = 0.2
    decay: float = 0.9
    weight_low: float = 0.25
    weight_high: float = 4.0
    step_share: float = 0.5

    def __post_init__(self) -> None:
        require_range("algorithm.dtca.tau", self.tau, 0.0, open_low=True)
        require_range("algorithm.dtca.decay", self.decay, 0.0, 1.0)
        require_range("algorithm.dtca.weight_low", self.weight_low, 0.0, 1.0, open_low=True)
        require_range("algorithm.dtca.weight_high", self.weight_high, 1.0)
        require_range("algorithm.dtca.step_share", self.step_share, 0.0, 1.0, open_low=True)


class Dtca:
    """See the module's head. The running means are its state."""

    requires: ClassVar[tuple[str, ...]] = (
        "valid",
        *(f"tokens:{name}" for name in _COLUMNS),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    def __init__(self, settings: DtcaSettings | None = None) -> None:
        self.settings = settings or DtcaSettings()
        self.means: dict[int, float] = {}
        self.overall: float | None = None

    @property
    def needs_group(self) -> bool:
        """It compares tokens, not games."""
        return False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """The advantages of ``previous``, weighed by token.

        Raises:
            UserError: It is the first of its chain.
            ValueError: The table lacks a column.
        """
        before = require_previous(previous, "dtca")
        columns = {name: token_column(table, name) for name in _COLUMNS}
        used = np.repeat(table.valid, table.n_tokens)
        self._learn(columns["gain"], columns["category"], used)
        weights = self.category_weights(np.where(used, columns["category"], NOTHING))
        factor, trained = np.zeros(len(used)), np.zeros(len(used), dtype=np.bool_)
        ends = np.cumsum(table.n_tokens)
        for row in np.flatnonzero(table.valid & (table.n_tokens > 0)):
            span = slice(int(ends[row] - table.n_tokens[row]), int(ends[row]))
            own = {name: column[span] for name, column in columns.items()}
            credit = self.token_credit(weights[span], own["commit_entropy"])
            step = own["commit_step"].astype(np.int64)
            name = f"dtca/{table.update}/{table.traj[row]}/{table.turn[row]}"
            trained[span] = np.isin(step, self._draw(step, credit, name))
            factor[span] = credit * len(step) / trained[span].sum()
        tokens = np.where(trained, token_advantages(table, before) * factor, 0.0)
        gains = columns["gain"][used & np.isfinite(columns["gain"])]
        stats = {
            "confidence_gain": float(gains.mean()) if len(gains) else 0.0,
            "token_weight_std": _within(weights, used),
            "trained_token_share": float(trained[used].mean()) if used.any() else 0.0,
        }
        return with_tokens(table, before, tokens, stats)

    def paid(self, table: TurnTable) -> FloatArray:
        """The rewards of the method before, ``[R]``."""
        return paid_rewards(table)

    def category_weights(self, category: FloatArray) -> FloatArray:
        """``w`` of each token before the mean of its response is taken out, ``[S]``."""
        overall = self.overall
        if overall is None:
            return np.ones(len(category))
        known = {kind: (mean - overall) / self.settings.tau for kind, mean in self.means.items()}
        # Confidences differ by at most 1, but tau may be small: nothing may overflow.
        leads = np.array([known.get(int(code), 0.0) for code in category])
        return np.exp(np.clip(leads, -50.0, 50.0))

    def token_credit(self, weights: FloatArray, entropy: FloatArray) -> FloatArray:
        """``c`` of the tokens of one response, with mean 1."""
        share = weights / weights.mean()
        level = float(entropy.mean())
        surprise = (
            np.clip(entropy / level, 0.0, MOST_ENTROPY) if level > 0 else np.zeros(len(share))
        )
        knobs = self.settings
        credit = np.clip(1.0 + (share - 1.0) * surprise, knobs.weight_low, knobs.weight_high)
        return credit / credit.mean()

    def state_dict(self) -> dict[str, object]:
        """The running means, as plain values in a fixed order."""
        return {"overall": self.overall, "means": [[k, v] for k, v in sorted(self.means.items())]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over saved means.

        Raises:
            UserError: The state is not one of ``state_dict``.
        """
        overall, means = state.get("overall"), state.get("means")
        if set(state) != {"overall", "means"} or not _are_means(overall, means):
            raise UserError(
                "The checkpoint's means of dtca cannot be read; resume with the algorithm that "
                "wrote it."
            )
        self.overall = cast("float | None", overall)
        self.means = {kind: float(mean) for kind, mean in cast("list[tuple[int, float]]", means)}

    def _learn(self, gain: FloatArray, category: FloatArray, used: BoolArray) -> None:
        """Move the running means by those of a step."""
        seen = used & np.isfinite(gain)
        if not seen.any():
            return
        # Exact sums do not depend on the order of rows.
        self.overall = self._moved(self.overall, _mean(gain[seen]))
        for kind in np.unique(category[seen]):
            mean = _mean(gain[seen & (category == kind)])
            self.means[int(kind)] = self._moved(self.means.get(int(kind)), mean)

    def _moved(self, old: float | None, new: float) -> float:
        decay = self.settings.decay
        return new if old is None else decay * old + (1.0 - decay) * new

    def _draw(self, step: IntArray, credit: FloatArray, name: str) -> IntArray:
        """The steps of a response that are trained; ``name`` says which response it is."""
        steps, odds = step_odds(step, credit)
        count = math.ceil(self.settings.step_share * len(steps))
        if count == len(steps):
            return steps
        # The smallest of exponential times: a draw without replacement by these odds.
        # Not of any float: rounding on another machine must not draw other steps.
        seed = hashlib.blake2b(name.encode(), digest_size=16).digest()
        rng = np.random.default_rng(int.from_bytes(seed, "big"))
        times = rng.exponential(size=len(steps)) / odds
        return steps[np.argsort(times, kind="stable")[:count]]


def step_odds(step: IntArray, credit: FloatArray) -> tuple[IntArray, FloatArray]:
    """The steps of a response and the probability with which each is drawn first."""
    steps, place = np.unique(step, return_inverse=True)
    means = np.bincount(place, credit) / np.bincount(place)
    return steps, means / means.sum()


def _mean(values: FloatArray) -> float:
    return math.fsum(values.tolist()) / len(values)


def _within(weights: FloatArray, used: BoolArray) -> float:
    return float(weights[used].std()) if used.any() else 0.0


def _are_means(overall: object, means: object) -> bool:
    """Whether these are the values of a ``state_dict``."""
    if not isinstance(means, list) or not (overall is None or isinstance(overall, float)):
        return False
    entries = cast("list[object]", means)
    pairs = [cast("list[object]", entry) for entry in entries if isinstance(entry, list)]
    return len(pairs) == len(entries) and all(
        len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], float) for pair in pairs
    )
