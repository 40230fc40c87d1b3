"""Belief shaping: worked numbers, laws, and what the published code does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from delta_belief_rl.belief.shaping import (
    METHODS,
    ShapingOptions,
    belief_delta,
    belief_grid,
    belief_summary,
    shape_beliefs,
    shape_rows,
)
from delta_belief_rl.types import FloatArray, TurnTable, UserError

# Four games of one group; the first and the third are won on their last turn.
BELIEFS = belief_grid(
    [[-3, -2.5, -1, -0.5], [-3, -3.2, -2.8, -2.9], [-3, -1.5, -0.2], [-3, -3, -3.5, -3.4]]
)
WON = np.array([True, False, True, False])
GROUP = np.zeros(4, dtype=np.int64)


def shape(
    beliefs: FloatArray = BELIEFS, group: Any = GROUP, won: Any = WON, **options: Any
) -> FloatArray:
    return shape_beliefs(beliefs, np.asarray(group), np.asarray(won), ShapingOptions(**options))


def test_the_worked_example_of_positive_changes() -> None:
    want = [[0.5, 1.5, 0], [0, 0.4, 0], [1.5, 0, 0], [0, 0, 0.1]]
    np.testing.assert_allclose(shape(), want, atol=1e-12)


def test_the_worked_rewards_and_masked_advantages() -> None:
    lengths = np.array([3, 3, 2, 3])
    exists = np.arange(3) < lengths[:, None]
    rewards = WON[:, None] * 1.0 - 0.05 * lengths[:, None] + 0.1 * shape()
    want = [[0.9, 1, 0.85], [-0.15, -0.11, -0.15], [1.05, 0.9, np.nan], [-0.15, -0.15, -0.14]]
    rewards = np.where(exists, rewards, np.nan)
    np.testing.assert_allclose(rewards, want, atol=1e-12)
    spread = np.nanstd(rewards, axis=0, ddof=1) + 1e-6
    advantage = (rewards - np.nanmean(rewards, axis=0)) / spread
    np.testing.assert_allclose(
        advantage[:, 0], [0.74724, -0.862201, 0.977161, -0.862201], atol=1e-5
    )
    np.testing.assert_allclose(advantage[[0, 1, 3], 2], [1.154655, -0.586031, -0.568624], atol=1e-5)


def test_raw_changes_include_the_winning_turn() -> None:
    want = [[0.5, 1.5, 0.5], [-0.2, 0.4, -0.1], [1.5, 1.3, 0], [0, -0.5, 0.1]]
    np.testing.assert_allclose(shape(normalised=False, methods=("tanh",)), want, atol=1e-12)


def test_U2_no_option_but_the_methods_is_ignored_for_raw_changes() -> None:
    dropped = shape(normalised=False, methods=("tanh",), winning_turn="drop")
    np.testing.assert_allclose(dropped, shape(methods=()), atol=1e-12)
    quiet = shape(normalised=False, dead_band=0.25)
    np.testing.assert_allclose(quiet[3], [0, -0.5, 0], atol=1e-12)


def test_naive_shaping_keeps_the_sign_and_drops_the_winning_turn() -> None:
    want = [[0.5, 1.5, 0], [-0.2, 0.4, -0.1], [1.5, 0, 0], [0, -0.5, 0.1]]
    np.testing.assert_allclose(shape(methods=()), want, atol=1e-12)
    kept = shape(methods=(), winning_turn="keep")
    np.testing.assert_allclose(kept[[0, 2], [2, 1]], [0.5, 1.3], atol=1e-12)


def test_squashes_follow_their_formulas() -> None:
    raw = shape(methods=())
    exists = np.arange(3) < np.array([3, 3, 2, 3])[:, None]
    np.testing.assert_allclose(shape(methods=("tanh",), tau=2.0), np.tanh(2 * raw))
    np.testing.assert_allclose(
        shape(methods=("min_max",), clip_min=-0.1, clip_max=0.45), np.clip(raw, -0.1, 0.45)
    )
    paid = exists.copy()
    paid[[0, 2], [2, 1]] = False
    np.testing.assert_allclose(
        shape(methods=("sigmoid",)), np.where(paid, 1 / (1 + np.exp(-raw)), 0), atol=1e-12
    )


def test_the_first_squash_in_order_wins() -> None:
    np.testing.assert_allclose(shape(methods=("positive", "tanh")), shape(methods=("tanh",)))


def test_parity_pays_a_winning_turn_half_under_the_logistic_squash() -> None:
    parity = shape(methods=("sigmoid",), reference_parity=True)
    np.testing.assert_allclose(parity[[0, 2], [2, 1]], 0.5)
    assert parity[2, 2] == 0.0, "a turn that was never played is never paid"


def test_centering_leaves_winners_and_absent_turns_out_of_the_mean() -> None:
    got = shape(methods=("group_centering",))
    raw = belief_delta(BELIEFS)
    third = raw[[1, 3], 2]
    np.testing.assert_allclose(got[[1, 3], 2], third - third.mean(), atol=1e-12)
    assert got[0, 2] == got[2, 2] == got[2, 1] == 0.0
    second = raw[[0, 1, 3], 1]
    np.testing.assert_allclose(got[[0, 1, 3], 1], second - second.mean(), atol=1e-12)


def test_group_and_batch_statistics_differ_by_their_groups() -> None:
    group = [0, 0, 1, 1]
    raw = belief_delta(BELIEFS)[:, 0]
    by_group = shape(group=group, methods=("group_centering",))[:, 0]
    np.testing.assert_allclose(by_group, raw - np.repeat([raw[:2].mean(), raw[2:].mean()], 2))
    by_batch = shape(group=group, methods=("batch_centering",))[:, 0]
    np.testing.assert_allclose(by_batch, raw - raw.mean())
    scaled = shape(group=group, methods=("group_centering", "group_std", "batch_std"))[:, 0]
    np.testing.assert_allclose(scaled, [1, -1, 1, -1], atol=1e-9)
    batch = shape(group=group, methods=("group_centering", "batch_std"))[:, 0]
    np.testing.assert_allclose(batch, by_group / by_group.std(), atol=1e-9)
    # A scale needs a centering, and group_std needs that of the group.
    np.testing.assert_allclose(shape(methods=("batch_std",)), shape(methods=()))
    np.testing.assert_allclose(
        shape(group=group, methods=("batch_centering", "group_std"))[:, 0], by_batch
    )


def test_group_min_max_works_on_the_positive_part() -> None:
    got = shape(methods=("group_min_max",))[:, 0]
    np.testing.assert_allclose(got, [0.5 / 1.5, 0, 1, 0], atol=1e-7)


def test_A3_singletons_and_equal_games_get_zero_from_centering() -> None:
    for methods in (("group_centering", "group_std"), ("group_min_max",)):
        alone = shape(group=[0, 1, 2, 3], methods=methods)
        np.testing.assert_allclose(alone, 0, atol=1e-12)
    equal = np.tile([[-3.0, -2.0, -2.5]], (4, 1))
    got = shape(beliefs=equal, won=[False] * 4, methods=("group_centering", "group_std"))
    np.testing.assert_allclose(got, 0, atol=1e-12)


def test_episode_centering_averages_over_the_turns_that_were_played() -> None:
    got = shape(methods=("episode_centering", "positive"))
    np.testing.assert_allclose(got[2], [0.1, -0.1, 0], atol=1e-12)
    np.testing.assert_allclose(got.sum(axis=1), 0, atol=1e-12)


def test_parity_episode_centering_averages_over_the_whole_budget() -> None:
    got = shape(methods=("episode_centering",), reference_parity=True, turn_budget=20)
    np.testing.assert_allclose(got[2, :2], np.array([1.5, 1.3]) - 2.8 / 20, atol=1e-12)


def test_a_running_maximum_pays_no_oscillation_twice() -> None:
    beliefs = np.array([[-5.0, -3.0, -4.0, -3.5, -2.5, -6.0]])
    got = shape(beliefs=beliefs, group=[0], won=[False], difference="running_maximum")
    np.testing.assert_allclose(got, [[2, 0, 0, 0.5, 0]], atol=1e-12)


def test_dropping_the_first_turn_pays_no_change_of_format() -> None:
    beliefs = np.array([[-15.0, -18.0, -16.0, -16.5]])
    for rule, want in (("step", [0, 2, -0.5]), ("running_maximum", [0, 2, 0])):
        got = shape(
            beliefs=beliefs, group=[0], won=[False], methods=(), difference=rule, first_turn="drop"
        )
        np.testing.assert_allclose(got, [want], atol=1e-12)


def test_a_dead_band_silences_noise() -> None:
    beliefs = np.array([[-3.0, -2.95, -2.0, -2.06]])
    got = shape(beliefs=beliefs, group=[0], won=[False], methods=(), dead_band=0.06 + 1e-9)
    np.testing.assert_allclose(got, [[0, 0.95, 0]], atol=1e-12)


def test_two_belief_models_measure_now_and_before() -> None:
    now, before = np.array([[-3.0, -2.0, -1.0]]), np.array([[-4.0, -3.5, -3.0]])
    options = ShapingOptions(methods=())
    got = shape_beliefs(now, np.array([0]), np.array([False]), options, previous=before)
    np.testing.assert_allclose(got, [[2.0, 2.5]])
    with pytest.raises(UserError, match="one belief model"):
        shape_beliefs(
            now, np.array([0]), np.array([False]),
            ShapingOptions(difference="potential"), previous=before,
        )  # fmt: skip


beliefs_strategy = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(2, 7)), elements=st.floats(-30, 0)
)


@settings(max_examples=60, deadline=None)
@given(beliefs_strategy, st.floats(0.5, 1.0), st.booleans())
def test_the_discounted_potential_of_a_game_sums_to_zero(
    beliefs: FloatArray, gamma: float, won: bool
) -> None:
    games, width = beliefs.shape
    got = shape(
        beliefs=beliefs, group=np.zeros(games, int), won=np.full(games, won),
        methods=(), difference="potential", gamma=gamma,
    )  # fmt: skip
    np.testing.assert_allclose(got @ gamma ** np.arange(width - 1), 0, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(beliefs_strategy, st.sampled_from(METHODS), st.integers(0, 2**31))
def test_order_of_games_and_a_shift_of_all_beliefs_change_nothing(
    beliefs: FloatArray, method: str, seed: int
) -> None:
    games = len(beliefs)
    rng = np.random.default_rng(seed)
    group, won = rng.integers(0, 2, games), rng.integers(0, 2, games).astype(bool)
    got = shape(beliefs=beliefs, group=group, won=won, methods=(method,))
    order = rng.permutation(games)
    permuted = shape(beliefs=beliefs[order], group=group[order], won=won[order], methods=(method,))
    np.testing.assert_allclose(permuted, got[order], atol=1e-9)
    shifted = shape(beliefs=beliefs - 1.0, group=group, won=won, methods=(method,))
    # group_min_max divides by a spread that rounding of the shift can make.
    if method != "group_min_max":
        np.testing.assert_allclose(shifted, got, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(beliefs_strategy, st.lists(st.sampled_from(METHODS), max_size=4, unique=True), st.booleans())
def test_unknown_beliefs_pay_nothing_and_never_spread(
    beliefs: FloatArray, methods: list[str], parity: bool
) -> None:
    games, width = beliefs.shape
    beliefs = np.vstack([beliefs, np.full(width, np.nan)])
    beliefs[0, 1] = -np.inf
    options = ShapingOptions(methods=tuple(methods), reference_parity=parity)
    lengths = np.full(games + 1, width - 1)
    got = shape_beliefs(
        beliefs, np.zeros(games + 1, int), np.zeros(games + 1, bool), options, lengths
    )
    assert np.isfinite(got).all()
    if not parity:
        assert got[0, 0] == 0
        assert (got[-1] == 0).all()


def test_changes_touching_an_unknown_belief_are_left_out_of_statistics() -> None:
    beliefs = np.array([[-3.0, np.nan], [-3.0, -2.0], [-3.0, -1.0]])
    lengths = np.array([1, 1, 1])
    options = ShapingOptions(methods=("group_centering",))
    got = shape_beliefs(beliefs, GROUP[:3], np.zeros(3, bool), options, lengths)
    np.testing.assert_allclose(got[:, 0], [0, -0.5, 0.5])


def table(valid: list[bool] | None = None) -> TurnTable:
    lengths = [3, 3, 2, 3]
    traj = np.repeat(np.arange(4), lengths)
    turn = np.concatenate([np.arange(n) for n in lengths])
    rows = len(traj)
    return TurnTable(
        group=np.zeros(rows, dtype=np.int64),
        traj=traj,
        turn=turn,
        n_tokens=np.ones(rows, dtype=np.int64),
        valid=np.ones(rows, dtype=bool) if valid is None else np.array(valid),
        terminal=turn == np.array(lengths)[traj] - 1,
        truncated=np.zeros(rows, dtype=bool),
        won=WON[traj],
    )


def test_rows_of_a_turn_table_get_their_cells() -> None:
    got = shape_rows(table(), BELIEFS, ShapingOptions())
    np.testing.assert_allclose(got, [0.5, 1.5, 0, 0, 0.4, 0, 1.5, 0, 0, 0, 0.1], atol=1e-12)
    with pytest.raises(ValueError, match="4 games of up to 3 turns"):
        shape_rows(table(), BELIEFS[:, :-1], ShapingOptions())


def test_J1_a_failed_turn_is_not_paid_and_enters_no_statistics() -> None:
    valid = [True] * 11
    valid[4] = False
    got = shape_rows(table(valid), BELIEFS, ShapingOptions(methods=("group_centering",)))
    assert got[4] == 0
    raw = belief_delta(BELIEFS)
    second = raw[[0, 3], 1]
    np.testing.assert_allclose(got[[1, 9]], second - second.mean(), atol=1e-12)
    third = raw[[1, 3], 2]
    np.testing.assert_allclose(got[[5, 10]], third - third.mean(), atol=1e-12)


def test_a_summary_tells_prior_final_gain_and_rises_apart() -> None:
    got = belief_summary(BELIEFS)
    assert got["prior"] == -3
    assert got["final"] == pytest.approx((-0.5 - 2.9 - 0.2 - 3.4) / 4)
    assert got["net_gain"] == pytest.approx(got["final"] + 3)
    assert got["sum_positive"] == pytest.approx((2.5 + 0.4 + 2.8 + 0.1) / 4)
    assert np.isnan(belief_summary(np.full((2, 3), np.nan))["prior"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"methods": ("relu",)}, "'relu'"),
        ({"difference": "leap"}, "'leap'"),
        ({"winning_turn": "half"}, "winning_turn"),
        ({"dead_band": -1.0}, "dead_band"),
    ],
)
def test_unknown_options_are_one_sentence(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        ShapingOptions(**options)
