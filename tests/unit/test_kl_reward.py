"""The price on divergence as a reward channel, and its controller."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from delta_belief_rl.algo import KL
from delta_belief_rl.algo.losses.kl import kl_penalty
from delta_belief_rl.algo.shapers.kl_reward import DIVERGENCES, KlReward, KlRewardSettings
from delta_belief_rl.types import FloatArray, TurnTable, UserError

LOGP = [np.array([-1.0, -2.0, -0.5]), np.array([-3.0, -0.1])]
REF = [np.array([-1.5, -1.0, -0.5]), np.array([-2.0, -0.6])]
"""Game 0 has turns of 2 and 1 tokens, game 1 one turn of 2."""


def table(valid: tuple[bool, ...] = (True, True, True)) -> TurnTable:
    flags = np.zeros(3, dtype=np.bool_)
    return TurnTable(
        group=np.array([0, 0, 0]),
        traj=np.array([0, 0, 1]),
        turn=np.array([0, 1, 0]),
        n_tokens=np.array([2, 1, 2]),
        valid=np.array(valid),
        terminal=flags,
        truncated=flags,
        won=flags,
    )


def charge(reward: KlReward, **options: tuple[bool, ...]) -> tuple[FloatArray, dict[str, float]]:
    return reward.charge(table(**options), LOGP, REF)


def test_A13_the_names_and_values_are_those_of_the_loss() -> None:
    assert DIVERGENCES.keys() == KL.keys()
    logp = np.array([-0.3, -2.0, -50.0, -1.0, -7.0])
    ref = np.array([-0.3, -1.0, -1.0, -60.0, -4.5])
    for kind, divergence in DIVERGENCES.items():
        want = kl_penalty(torch.from_numpy(logp), torch.from_numpy(ref), kind)
        np.testing.assert_allclose(divergence(logp, ref), want.numpy(), atol=1e-12, err_msg=kind)


def test_a_turn_pays_for_the_sum_over_its_tokens() -> None:
    channel, metrics = charge(KlReward(KlRewardSettings(kl_coef=0.1)))
    # k1: (0.5 - 1.0), 0, (-1.0 + 0.5)
    np.testing.assert_allclose(channel, [0.05, 0.0, 0.05])
    squares, _ = charge(KlReward(KlRewardSettings("k2", kl_coef=0.1)))
    np.testing.assert_allclose(squares, -0.1 * np.array([0.625, 0.0, 0.625]))
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    # A mean over games of their token means: -0.5 / 3 and -0.5 / 2.
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((-0.5 / 3 - 0.25) / 2)


def test_A15_turns_that_are_not_valid_and_tokens_without_a_number_cost_nothing() -> None:
    channel, metrics = charge(
        KlReward(KlRewardSettings("abs", kl_coef=1.0)), valid=(False, True, True)
    )
    np.testing.assert_allclose(channel, [0.0, 0.0, -1.5])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.0 + 0.75) / 2)
    broken = [LOGP[0], np.array([np.nan, -0.1])]
    channel, _ = KlReward(KlRewardSettings("abs", kl_coef=1.0)).charge(table(), broken, REF)
    np.testing.assert_allclose(channel, [-1.5, 0.0, -0.5])


def test_a_fixed_coefficient_stays() -> None:
    reward = KlReward(KlRewardSettings(kl_coef=0.2))
    first, _ = charge(reward)
    second, _ = charge(reward)
    np.testing.assert_array_equal(first, second)
    assert reward.state_dict() == {"kl_coef": 0.2}


@pytest.mark.parametrize(
    ("target", "error"),
    [(10.0, -0.2), (0.01, 0.2), (0.625, None)],
)
def test_an_adaptive_coefficient_moves_by_the_clipped_error_of_the_step(
    target: float, error: float | None
) -> None:
    """Mean divergence (abs): game 0 has 1.5 / 3, game 1 has 1.5 / 2, so 0.625."""
    settings = KlRewardSettings("abs", "adaptive", kl_coef=0.2, horizon=20, target_kl=target)
    reward = KlReward(settings)
    channel, metrics = charge(reward)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.2, "the step is charged before it adapts"
    np.testing.assert_allclose(channel, -0.2 * np.array([1.5, 0.0, 1.5]))
    assert reward.coef == pytest.approx(0.2 * (1 + (error or 0.0) * 2 / 20))


def test_R2_a_saved_coefficient_is_taken_over_and_a_foreign_state_refused() -> None:
    settings = KlRewardSettings("abs", "adaptive", horizon=10, target_kl=0.01)
    one, other = KlReward(settings), KlReward(settings)
    charge(one)
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        np.testing.assert_array_equal(charge(one)[0], charge(other)[0])
    fixed = KlReward(replace(settings, controller="fixed"))
    fixed.load_state_dict(one.state_dict())
    assert fixed.coef == settings.kl_coef
    for state in ({}, {"coef": 1.0}, {"kl_coef": float("nan")}):
        with pytest.raises(UserError, match="coefficient of the KL reward"):
            one.load_state_dict(state)


def test_C4_log_probs_that_are_not_those_of_the_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match="5 sampled tokens but 4"):
        KlReward(KlRewardSettings()).charge(table(), [LOGP[0], LOGP[1][:1]], REF)


@pytest.mark.parametrize(
    "knobs",
    [
        {"kl_penalty": "k4"},
        {"controller": "pid"},
        {"kl_coef": -1.0},
        {"horizon": 0.0},
        {"target_kl": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(knobs: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"algorithm\.kl_"):
        KlRewardSettings(**knobs)  # type: ignore[arg-type]


def test_a_coefficient_stays_a_price_however_many_games_a_step_has() -> None:
    settings = KlRewardSettings("abs", "adaptive", kl_coef=0.2, horizon=0.1, target_kl=10.0)
    reward = KlReward(settings)
    charge(reward)
    assert reward.coef == pytest.approx(0.16)
