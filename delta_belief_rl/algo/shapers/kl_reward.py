"""A price on leaving the reference policy, as a reward channel of each turn.

With ``d`` the divergence of one sampled token between the policy that is about to be updated and
the reference (the policy without its adapter)::

    kl_k = -beta * sum over the tokens of turn k of d(logp, ref)

``d`` has the names and clamps of ``losses.kl``. The price is a reward, so credit assignment sees it
like any other; no gradient goes through it.

``beta`` is ``kl_coef``. The ``adaptive`` controller moves it after each step towards
``target_kl``, with ``D`` the mean over games of the mean divergence of a token and ``n`` the
number of games::

    beta <- beta * (1 + clip(D / target_kl - 1, -0.2, 0.2) * n / horizon)

Source: controller 1909.08593; estimators as in ``losses.kl``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.credit.whitening import trained_tokens
from delta_belief_rl.types import FloatArray, TurnTable, UserError

CHANNEL = "kl"
LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0
ERROR_BOUND = 0.2
CONTROLLERS = ("fixed", "adaptive")


def _k1(logp: FloatArray, ref: FloatArray) -> FloatArray:
    return logp - ref


def _absolute(logp: FloatArray, ref: FloatArray) -> FloatArray:
    return np.abs(logp - ref)


def _k2(logp: FloatArray, ref: FloatArray) -> FloatArray:
    return 0.5 * (logp - ref) ** 2


def _k3(logp: FloatArray, ref: FloatArray) -> FloatArray:
    d = np.clip(ref - logp, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return np.clip(np.exp(d) - d - 1.0, -K3_BOUND, K3_BOUND)


DIVERGENCES: dict[str, Callable[[FloatArray, FloatArray], FloatArray]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": _absolute,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


@dataclass(frozen=True, slots=True)
class KlRewardSettings:
    """Knobs by the reference's names; ``target_kl`` in nats per token, ``horizon`` in games."""

    kl_penalty: str = "kl"
    controller: str = "fixed"
    kl_coef: float = 0.001
    horizon: float = 10000
    target_kl: float = 0.1

    def __post_init__(self) -> None:
        require_choice("algorithm.kl_penalty", self.kl_penalty, tuple(DIVERGENCES))
        require_choice("algorithm.kl_ctrl.type", self.controller, CONTROLLERS)
        require_range("algorithm.kl_ctrl.kl_coef", self.kl_coef, 0.0)
        require_range("algorithm.kl_ctrl.horizon", self.horizon, 0.0, open_low=True)
        require_range("algorithm.kl_ctrl.target_kl", self.target_kl, 0.0, open_low=True)


class KlReward:
    """The channel and its coefficient, the one thing that it remembers from step to step."""

    def __init__(self, settings: KlRewardSettings) -> None:
        self.settings = settings
        self.coef = settings.kl_coef

    def charge(
        self, table: TurnTable, logp: Sequence[FloatArray], reference: Sequence[FloatArray]
    ) -> tuple[FloatArray, dict[str, float]]:
        """Price the turns of one step, then let the controller move the coefficient.

        Args:
            table: All turns of the step.
            logp: Per game, the policy's log-probs of its sampled tokens in stream order.
            reference: The same under the reference.

        Returns:
            The channel, ``[R]``, zero on rows that are not valid, and metrics. A token whose
            log-prob is not finite costs nothing.

        Raises:
            ValueError: The log-probs are not those of the table's tokens.
        """
        own, other = (np.concatenate([np.zeros(0), *part]) for part in (logp, reference))
        if not len(own) == len(other) == int(table.n_tokens.sum()):
            raise ValueError(
                f"{int(table.n_tokens.sum())} sampled tokens but {len(own)} log-probs of the "
                f"policy and {len(other)} of the reference"
            )
        known = np.isfinite(own) & np.isfinite(other)
        token = DIVERGENCES[self.settings.kl_penalty](
            np.where(known, own, 0.0), np.where(known, other, 0.0)
        )
        row = np.repeat(np.arange(table.num_rows), table.n_tokens)
        turns = np.bincount(row, weights=token, minlength=table.num_rows)
        turns = np.where(table.valid, turns, 0.0)
        mean, games = _mean_over_games(table, turns)
        metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": self.coef}
        channel = -self.coef * turns
        if self.settings.controller == "adaptive":
            error = np.clip(mean / self.settings.target_kl - 1.0, -ERROR_BOUND, ERROR_BOUND)
            # A step of more games than the horizon must not turn the price into a reward.
            step = float(error) * games / self.settings.horizon
            self.coef *= 1.0 + min(max(step, -ERROR_BOUND), ERROR_BOUND)
        return channel, metrics

    def state_dict(self) -> dict[str, float]:
        """The coefficient as it stands."""
        return {"kl_coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over a saved coefficient; a fixed one is what the settings say.

        Raises:
            UserError: The state is not one of ``state_dict``.
        """
        coef = state.get("kl_coef", math.nan)
        if set(state) != {"kl_coef"} or not math.isfinite(coef):
            raise UserError(
                "The checkpoint's coefficient of the KL reward cannot be read; resume with the "
                "settings that wrote it."
            )
        if self.settings.controller == "adaptive":
            self.coef = float(coef)


def _mean_over_games(table: TurnTable, turns: FloatArray) -> tuple[float, int]:
    """Mean over games of the divergence per trained token, and how many games have such a token."""
    count = np.bincount(table.traj, weights=trained_tokens(table), minlength=table.num_games)
    total = np.bincount(table.traj, weights=turns, minlength=table.num_games)
    games = count > 0
    return (float((total[games] / count[games]).mean()) if games.any() else 0.0), int(games.sum())
