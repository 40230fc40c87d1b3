"""Fading rewards of turns, the price on length, and returns put on one scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_tables import FIXTURE_A, Act, by_turn, part_of, rows_in_order, table_of, tables

from delta_belief_rl.algo.base import Component
from delta_belief_rl.algo.credit.grpo import Grpo, GrpoSettings
from delta_belief_rl.algo.shapers.decay import SCHEDULES, Decay, DecaySettings
from delta_belief_rl.algo.shapers.length import (
    LengthPrice,
    LengthPriceSettings,
    last_valid,
)
from delta_belief_rl.algo.shapers.normalise import (
    METHODS,
    NormaliseSettings,
    normalised_rewards,
)
from delta_belief_rl.types import FloatArray, TurnTable, UserError

SCORES = np.array([0.8, 0.6, 0.9, 0.7, 0.9, 0.9, 0.5, 0.4, 0.9, 0.9, 0.9])


def returns(table: TurnTable, *channels: FloatArray) -> list[float]:
    """Sum of the channels over each game."""
    return table.grid(np.sum(channels, axis=0)).sum(axis=1).tolist()


def with_channel(table: TurnTable, name: str, value: FloatArray) -> TurnTable:
    return replace(table, rewards={**table.rewards, name: value})


# --- decay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (0, [1.383333, 0.416667, 1.225, 0.45]),
        (50, [1.191667, 0.208333, 1.1125, 0.225]),
        (100, [1.0, 0.0, 1.0, 0.0]),
    ],
)
def test_a_fading_reward_matches_its_worked_example(update: int, expected: list[float]) -> None:
    decay = Decay(DecaySettings(weight=0.5, horizon=100))
    channel = decay.channel(FIXTURE_A, SCORES, update)
    got = returns(FIXTURE_A, FIXTURE_A.rewards["outcome"], channel)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_grpo_on_a_fading_reward_matches_its_worked_example() -> None:
    decay = Decay(DecaySettings(weight=0.5, horizon=100))
    table = with_channel(FIXTURE_A, "process", decay.channel(FIXTURE_A, SCORES, 0))
    games = table.grid(Grpo().apply(table).turns)[:, 0]
    np.testing.assert_allclose(games, [1.014762, -0.891511, 0.702527, -0.825778], atol=1e-5)
    summed = Decay(DecaySettings(weight=0.5, horizon=100, aggregation="sum"))
    got = returns(table, FIXTURE_A.rewards["outcome"], summed.channel(FIXTURE_A, SCORES, 0))
    np.testing.assert_allclose(got, [2.15, 1.25, 1.45, 1.35], atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(table=tables(), schedule=st.sampled_from(["linear", "cosine"]), beyond=st.integers(0, 5))
def test_from_the_horizon_on_it_is_the_outcome_alone(
    table: TurnTable, schedule: str, beyond: int
) -> None:
    decay = Decay(DecaySettings(schedule=schedule, horizon=7))
    scores = np.linspace(0.0, 1.0, table.num_rows)
    paid = with_channel(table, "process", decay.channel(table, scores, 7 + beyond))
    np.testing.assert_array_equal(Grpo().apply(paid).turns, Grpo().apply(table).turns)
    assert not decay.needed(7 + beyond)
    assert decay.needed(6)


def test_the_weight_follows_its_schedule() -> None:
    linear = Decay(DecaySettings(weight=2.0, horizon=4))
    assert [linear.weight(u) for u in range(6)] == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    cosine = Decay(DecaySettings(weight=2.0, horizon=4, schedule="cosine"))
    np.testing.assert_allclose(
        [cosine.weight(u) for u in range(6)], [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0, 0.0]
    )
    halved = Decay(DecaySettings(weight=0.5, half_life=2.0, schedule="exp"))
    np.testing.assert_allclose(
        [halved.weight(u) for u in (0, 2, 4, 16)], 0.5 / 2.0 ** np.array([0, 1, 2, 8])
    )
    # 0.5 / 2 ** 9 is below a thousandth.
    assert halved.weight(18) == 0.0
    assert not halved.needed(18)


@given(schedule=st.sampled_from(SCHEDULES), update=st.integers(0, 500))
def test_the_weight_never_rises_and_is_never_negative(schedule: str, update: int) -> None:
    decay = Decay(DecaySettings(schedule=schedule, horizon=100))
    assert decay.weight(0) >= decay.weight(update) >= decay.weight(update + 1) >= 0.0


def test_the_horizon_is_half_of_the_planned_updates_unless_it_is_given() -> None:
    assert Decay(DecaySettings(), planned=60).weight(30) == 0.0
    assert Decay(DecaySettings(), planned=60).weight(15) == 0.25
    assert Decay(DecaySettings(horizon=10), planned=60).weight(10) == 0.0
    with pytest.raises(UserError, match=r"algorithm\.process_reward\.horizon is 0"):
        Decay(DecaySettings())
    assert Decay(DecaySettings(schedule="exp")).weight(0) == 0.5


def test_a_resumed_run_reads_the_weight_off_the_number_of_updates() -> None:
    straight, resumed = (Decay(DecaySettings(horizon=9)) for _ in range(2))
    first = [straight.channel(FIXTURE_A, SCORES, u) for u in range(6)]
    resumed.load_state_dict(straight.state_dict())
    np.testing.assert_array_equal(resumed.channel(FIXTURE_A, SCORES, 5), first[5])


def test_J1_turns_without_a_score_are_paid_nothing_and_enter_no_mean() -> None:
    table = table_of([[Act("s")] * 4, [Act("s")]], invalid=[(0, 3)])
    scores = np.array([0.5, np.nan, 0.7, 9.0, np.nan])
    paid = Decay(DecaySettings(weight=1.0, horizon=2)).channel(table, scores, 0)
    np.testing.assert_allclose(paid, [0.25, 0, 0.35, 0, 0])
    summed = DecaySettings(weight=1.0, horizon=2, aggregation="sum")
    np.testing.assert_allclose(Decay(summed).channel(table, scores, 1), [0.25, 0, 0.35, 0, 0])


def test_any_channel_can_fade_under_its_own_name() -> None:
    table = with_channel(FIXTURE_A, "belief", SCORES)
    decay = Decay(DecaySettings(weight=1.0, horizon=10, aggregation="sum"))
    faded = decay.faded(table, "belief", 4)
    np.testing.assert_allclose(faded["belief"], 0.6 * SCORES)
    np.testing.assert_array_equal(faded["outcome"], table.rewards["outcome"])
    with pytest.raises(UserError, match="fades the reward channel 'judge'"):
        decay.faded(table, "judge", 4)
    with pytest.raises(ValueError, match="for 11 turns"):
        decay.channel(table, SCORES[:3], 0)
    assert decay.channel(table_of([]), np.zeros(0), 0).shape == (0,)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("weight", -0.1),
        ("schedule", "step"),
        ("aggregation", "max"),
        ("horizon", -1),
        ("half_life", 0.0),
    ],
)
def test_decay_settings_out_of_range_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.process_reward\.{knob} is"):
        DecaySettings(**{knob: value})


# --- length --------------------------------------------------------------------------------------


def tokens_of(lengths: list[list[int]], invalid: list[tuple[int, int]] | None = None) -> TurnTable:
    table = table_of([[Act("s")] * len(game) for game in lengths], invalid=invalid or [])
    return replace(table, n_tokens=np.array([n for game in lengths for n in game], dtype=np.int64))


def test_the_price_on_length_matches_its_worked_example() -> None:
    table = tokens_of([[700], [900], [1000], [1100]])
    price = LengthPrice(LengthPriceSettings(max_tokens=1000, buffer_tokens=200))
    np.testing.assert_allclose(price.channel(table), [0, -0.5, -1.0, -1.5], atol=1e-12)
    double = LengthPrice(LengthPriceSettings(1000, 200, factor=2.0))
    np.testing.assert_allclose(double.channel(table), [0, -1.0, -2.0, -3.0], atol=1e-12)


def test_a_game_is_one_response_that_is_charged_at_its_end() -> None:
    table = tokens_of([[300, 300, 300], [400, 300]])
    whole = LengthPrice(LengthPriceSettings(1000, 200))
    np.testing.assert_allclose(whole.channel(table), [0, 0, -0.5, 0, 0])
    each = LengthPrice(LengthPriceSettings(400, 200, unit="turn"))
    np.testing.assert_allclose(each.channel(table), [-0.5, -0.5, -0.5, -1.0, -0.5])


def test_J1_tokens_of_turns_that_are_not_valid_are_not_counted() -> None:
    lengths = [[500, 9999, 400], [9999], [400, 500, 9999]]
    table = tokens_of(lengths, [(0, 1), (1, 0), (2, 2)])
    whole = LengthPrice(LengthPriceSettings(1000, 200))
    np.testing.assert_allclose(whole.channel(table), [0, 0, -0.5, 0, 0, -0.5, 0])
    each = LengthPrice(LengthPriceSettings(400, 200, unit="turn"))
    np.testing.assert_allclose(each.channel(table), [-1.5, 0, -1.0, 0, -1.0, -1.5, 0])


@settings(max_examples=25, deadline=None)
@given(table=tables(), unit=st.sampled_from(["game", "turn"]), data=st.data())
def test_A9_the_price_is_never_positive_and_does_not_depend_on_the_order_of_rows(
    table: TurnTable, unit: str, data: st.DataObject
) -> None:
    order = np.array(data.draw(st.permutations(range(table.num_rows))), dtype=np.int64)
    price = LengthPrice(LengthPriceSettings(6, 4, unit=unit))
    straight = price.channel(table)
    np.testing.assert_array_equal(price.channel(rows_in_order(table, order)), straight[order])
    assert (straight <= 0.0).all()
    assert not straight[~table.valid].any()


def test_the_last_valid_turn_of_each_game() -> None:
    table = tokens_of([[1, 1, 1], [1], [1, 1]], [(0, 2), (1, 0)])
    assert np.flatnonzero(last_valid(table)).tolist() == [1, 5]
    assert last_valid(table_of([])).shape == (0,)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_tokens": 0}, r"algorithm\.overlong\.max_tokens is"),
        ({"max_tokens": 10, "buffer_tokens": 0}, r"algorithm\.overlong\.buffer_tokens is"),
        ({"max_tokens": 10, "buffer_tokens": 11}, "no longer than the limit"),
        ({"max_tokens": 10, "buffer_tokens": 5, "factor": -1.0}, r"overlong\.factor is"),
        ({"max_tokens": 10, "buffer_tokens": 5, "unit": "token"}, r"overlong\.unit is"),
    ],
)
def test_length_settings_out_of_range_are_refused_by_name(
    knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        LengthPriceSettings(**knobs)


def test_shapers_declare_what_they_need() -> None:
    for shaper in (Decay(DecaySettings(horizon=1)), LengthPrice(LengthPriceSettings(8, 4))):
        assert isinstance(shaper, Component)
        shaper.load_state_dict(shaper.state_dict())


# --- one scale -----------------------------------------------------------------------------------


def scaled(table: TurnTable, method: str, **knobs: Any) -> TurnTable:
    chosen = replace(NormaliseSettings(), method=method, **knobs)
    return replace(table, rewards=normalised_rewards(table, chosen))


# Returns 4, 0, 0, 0 and, in another group, 1, 1 and 2.
SPREAD = table_of(
    [
        *([Act("s", "", 1.0), Act("s", "", 3.0)], [Act("s")], [Act("s")], [Act("s")]),
        *([Act("s", "", 1.0)], [Act("s", "", 1.0)], [Act("s", "", 2.0)]),
    ],
    group=[0, 0, 0, 0, 1, 1, 1],
)


def test_returns_are_put_on_a_scale_and_paid_at_the_end_of_the_game() -> None:
    mean = scaled(SPREAD, "mean").rewards
    assert set(mean) == {"normalised"}
    np.testing.assert_allclose(mean["normalised"][:5], [0, 3, -1, -1, -1])
    np.testing.assert_allclose(mean["normalised"][5:], [-1 / 3, -1 / 3, 2 / 3])
    # The deviations are 2 and 1 / sqrt(3).
    divided = scaled(SPREAD, "mean_std").rewards["normalised"]
    np.testing.assert_allclose(divided[:5], [0, 1.5, -0.5, -0.5, -0.5], atol=1e-5)
    np.testing.assert_allclose(divided[5:], np.array([-1, -1, 2]) / 3**0.5, atol=1e-5)


def test_the_clamp_cuts_on_both_sides() -> None:
    low = scaled(SPREAD, "mean_std_clamp", clamp_low=-0.4, clamp_high=1.1).rewards["normalised"]
    np.testing.assert_allclose(low[:5], [0, 1.1, -0.4, -0.4, -0.4], atol=1e-5)
    np.testing.assert_allclose(low[5:], [-0.4, -0.4, 1.1], atol=1e-5)
    # One of twenty that lost lies 4.2 deviations below the mean.
    odd = table_of([[Act("s", "", 0.0)], *[[Act("s", "", 1.0)]] * 19])
    column = scaled(odd, "mean_std_clamp").rewards["normalised"]
    assert column[0] == -1.0
    np.testing.assert_allclose(column[1:], 0.05 / 0.05**0.5, atol=1e-5)
    won = table_of([[Act("s", "", 1.0)], *[[Act("s", "", 0.0)]] * 19])
    assert scaled(won, "mean_std_clamp").rewards["normalised"][0] == 3.0


def test_the_whole_step_can_be_the_scale() -> None:
    column = scaled(SPREAD, "mean", over="batch").rewards["normalised"]
    np.testing.assert_allclose(column[[1, 2, 5, 7]], [4 - 8 / 7, -8 / 7, 1 - 8 / 7, 2 - 8 / 7])


@settings(max_examples=25, deadline=None)
@given(table=tables(), over=st.sampled_from(["group", "batch"]))
def test_identity_changes_nothing_and_grpo_sees_no_shift(table: TurnTable, over: str) -> None:
    assert scaled(table, "identity").rewards is table.rewards
    shifted = scaled(table, "mean", over=over)
    for divided in (True, False):
        grpo = Grpo(GrpoSettings(divided))
        np.testing.assert_allclose(
            grpo.apply(shifted).turns, grpo.apply(table).turns, atol=1e-6, rtol=1e-6
        )
    one_scale = Grpo().apply(scaled(table, "mean_std")).turns
    np.testing.assert_allclose(one_scale, Grpo().apply(table).turns, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(table=tables(), method=st.sampled_from(METHODS[1:]), data=st.data())
def test_A9_J1_scales_do_not_depend_on_order_or_on_turns_that_are_not_valid(
    table: TurnTable, method: str, data: st.DataObject
) -> None:
    order = np.array(data.draw(st.permutations(range(table.num_rows))), dtype=np.int64)
    straight = scaled(table, method).rewards["normalised"]
    mixed = scaled(rows_in_order(table, order), method).rewards["normalised"]
    np.testing.assert_allclose(mixed, straight[order], atol=1e-9)
    dirty = replace(
        table, rewards={"outcome": np.where(table.valid, table.rewards["outcome"], 1e6)}
    )
    np.testing.assert_array_equal(scaled(dirty, method).rewards["normalised"], straight)
    assert not straight[~table.valid].any()


def test_A11_the_scale_of_a_group_does_not_depend_on_the_shards() -> None:
    whole = scaled(SPREAD, "mean_std_clamp").rewards["normalised"]
    for groups in ([0], [1], [0, 1]):
        shard, rows = part_of(SPREAD, groups)
        np.testing.assert_array_equal(
            scaled(shard, "mean_std_clamp").rewards["normalised"], whole[rows]
        )


@pytest.mark.parametrize("method", METHODS[1:])
def test_A3_one_game_and_equal_games_give_zero(method: str) -> None:
    for games in (
        [[Act("s", "", 1.0)]],
        [[Act("s", "", 1.0)], [Act("s", "", 1.0)]],
        [[Act("s", "", 0.1 + 0.2)], [Act("s", "", 0.3)]],
    ):
        assert not scaled(table_of(games), method).rewards["normalised"].any()
    assert scaled(table_of([]), method).rewards["normalised"].shape == (0,)


def test_a_game_is_paid_on_its_last_valid_turn() -> None:
    table = table_of([[Act("s", "", 1.0), Act("s")], [Act("s")]], invalid=[(0, 1)])
    paid = by_turn(table, scaled(table, "mean").rewards["normalised"])
    assert paid == {(0, 0): 0.5, (0, 1): 0.0, (1, 0): -0.5}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"method": "rank"}, r"reward_normalisation\.method is"),
        ({"over": "state"}, r"reward_normalisation\.over is"),
        ({"clamp_low": float("nan")}, r"reward_normalisation\.clamp_low is"),
        ({"clamp_low": 4.0}, "must not be above the upper one"),
        ({"epsilon": -1.0}, "epsilon"),
    ],
)
def test_scale_settings_out_of_range_are_refused_by_name(
    knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        NormaliseSettings(**knobs)
