"""The reward by requirements: worked numbers, identities, junk, degenerate cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from delta_belief_rl.algo.shapers.requirements_met import (
    RequirementsSettings,
    game_return,
    grade,
    regressed_share,
    requirements_channel,
    satisfied_share,
    task_reward,
)
from delta_belief_rl.types import FloatArray, TurnTable, UserError

WEIGHTS = np.array([2.0, 1.0, 1.0])
BEFORE = np.array([1.0, 1.0, 0.0])
AFTER = np.array([1.0, 0.0, 1.0])
YES, NO = np.array(True), np.array(False)


def table(valid: list[bool]) -> TurnTable:
    rows = len(valid)
    whole = np.zeros(rows, dtype=np.int64)
    flags = np.zeros(rows, dtype=np.bool_)
    return TurnTable(
        group=whole,
        traj=whole,
        turn=np.arange(rows, dtype=np.int64),
        n_tokens=np.ones(rows, dtype=np.int64),
        valid=np.array(valid, dtype=np.bool_),
        terminal=flags,
        truncated=flags,
        won=flags,
    )


def reward(before: FloatArray, after: FloatArray, settings: RequirementsSettings) -> float:
    return float(task_reward(WEIGHTS, before, after, built=YES, keeps=YES, settings=settings))


def test_the_worked_example() -> None:
    assert satisfied_share(WEIGHTS, BEFORE) == pytest.approx(0.75, abs=1e-5)
    assert satisfied_share(WEIGHTS, AFTER) == pytest.approx(0.75, abs=1e-5)
    assert regressed_share(WEIGHTS, BEFORE, AFTER) == pytest.approx(0.25, abs=1e-5)
    assert reward(BEFORE, AFTER, RequirementsSettings()) == pytest.approx(0.625, abs=1e-5)


def test_without_a_price_or_in_a_task_that_may_break_things_only_the_share_counts() -> None:
    assert reward(BEFORE, AFTER, RequirementsSettings(regression=0.0)) == 0.75
    free = task_reward(WEIGHTS, BEFORE, AFTER, built=YES, keeps=NO)
    assert float(free) == 0.75


@pytest.mark.parametrize(("gate", "expected"), [(True, 0.0), (False, 0.625)])
def test_a_failed_build_earns_nothing_while_the_gate_is_on(gate: bool, expected: float) -> None:
    settings = RequirementsSettings(gate=gate)
    got = task_reward(WEIGHTS, BEFORE, AFTER, built=NO, keeps=YES, settings=settings)
    assert float(got) == pytest.approx(expected)


def test_a_requirement_that_held_in_part_is_not_broken_and_one_that_fell_in_part_is() -> None:
    half = np.array([0.5, 0.0, 0.0])
    assert regressed_share(WEIGHTS, half, np.zeros(3)) == 0.0
    assert regressed_share(WEIGHTS, np.array([1.0, 0.0, 0.0]), half) == 0.5
    assert satisfied_share(WEIGHTS, half) == 0.25


def test_breaking_everything_costs_the_whole_price_and_the_grade_is_clamped() -> None:
    lost = reward(np.ones(3), np.zeros(3), RequirementsSettings(regression=0.5))
    assert lost == -0.5
    assert game_return(np.array([lost, lost]), 2) == -0.5
    assert grade(np.array([lost, lost]), 2) == 0.0
    assert grade(np.array([1.0, lost]), 2) == 0.25


def test_requirements_may_stand_in_any_order_and_games_beside_each_other() -> None:
    order = np.array([2, 0, 1])
    assert task_reward(
        WEIGHTS[order], BEFORE[order], AFTER[order], built=YES, keeps=YES
    ) == pytest.approx(0.625)
    rows = task_reward(
        WEIGHTS,
        np.stack([BEFORE, BEFORE, np.zeros(3)]),
        np.stack([AFTER, AFTER, np.ones(3)]),
        built=np.array([True, False, True]),
        keeps=np.array([True, True, True]),
    )
    assert rows.tolist() == pytest.approx([0.625, 0.0, 1.0])


def test_scaling_all_weights_changes_nothing() -> None:
    scaled = task_reward(7.0 * WEIGHTS, BEFORE, AFTER, built=YES, keeps=YES)
    assert float(scaled) == pytest.approx(0.625)


def test_tasks_that_were_not_reached_count_nothing_towards_the_return() -> None:
    assert game_return(np.array([1.0, 0.5]), 4) == pytest.approx(0.375)
    assert game_return(np.zeros(0), 4) == 0.0
    assert game_return(np.ones(4), 4) == 1.0


def test_A4_A9_the_channel_pays_ends_of_tasks_and_nothing_on_rows_that_are_not_valid() -> None:
    rewards = np.array([np.nan, 0.625, np.nan, 0.0, 9.0])
    valid = [True, True, True, True, False]
    assert requirements_channel(table(valid), rewards).tolist() == [0.0, 0.625, 0.0, 0.0, 0.0]
    junk = rewards.copy()
    junk[4] = np.inf
    assert requirements_channel(table(valid), junk).tolist() == [0.0, 0.625, 0.0, 0.0, 0.0]
    assert requirements_channel(table([]), np.zeros(0)).shape == (0,)


def test_A6_the_channel_of_a_game_adds_up_to_its_return() -> None:
    rewards = np.array([np.nan, 1.0, 0.5, np.nan, -0.25])
    channel = requirements_channel(table([True] * 5), rewards)
    assert channel.sum() / 3 == pytest.approx(game_return(rewards[np.isfinite(rewards)], 3))


def test_a_row_may_stand_anywhere() -> None:
    rewards = np.array([np.nan, 0.5, 1.0, np.nan])
    order = np.array([3, 1, 0, 2])
    valid = [True, False, True, True]
    whole = requirements_channel(table(valid), rewards)
    moved = replace(table(valid), valid=np.array(valid)[order])
    assert requirements_channel(moved, rewards[order]).tolist() == whole[order].tolist()


@pytest.mark.parametrize(
    ("weights", "met"),
    [
        ([1.0, 1.0], [1.0]),
        ([], []),
        ([1.0, 0.0], [1.0, 1.0]),
        ([1.0, -1.0], [1.0, 1.0]),
        ([1.0, np.nan], [1.0, 1.0]),
        ([1.0, 1.0], [1.0, np.nan]),
        ([1.0, 1.0], [1.0, 1.5]),
        ([1.0, 1.0], [1.0, -0.1]),
    ],
)
def test_numbers_that_mean_nothing_are_refused(weights: list[float], met: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weight|result"):
        satisfied_share(np.array(weights), np.array(met))


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rewards for 2 tasks"):
        game_return(np.ones(3), 2)
    with pytest.raises(ValueError, match="for 0 tasks"):
        game_return(np.zeros(0), 0)
    with pytest.raises(ValueError, match="for 2 turns"):
        requirements_channel(table([True, True]), np.zeros(3))


@pytest.mark.parametrize("price", [-0.1, np.nan, np.inf, 11.0])
def test_the_price_of_a_regression_has_a_range(price: float) -> None:
    with pytest.raises(UserError, match=r"env_kwargs\.regression"):
        RequirementsSettings(regression=price)
