"""Best and worst of j games: against enumeration, and against the published way of drawing."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.eval.best_of import best_of, draw_sizes, rank_weights
from delta_belief_rl.eval.source_metrics import source_metrics
from delta_belief_rl.eval.statistics import pass_at_k
from delta_belief_rl.types import Group, StopReason, Task, Trajectory, Turn, UserError, Verdict

VALUES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=5)


def moments(draws: list[float]) -> tuple[float, float]:
    return float(np.mean(draws)), float(np.std(draws))


@settings(max_examples=60, deadline=None)
@given(values=VALUES, data=st.data(), worst=st.booleans(), replacing=st.booleans())
def test_V1_the_closed_form_equals_enumeration_of_all_draws(
    values: list[float], data: st.DataObject, worst: bool, replacing: bool
) -> None:
    j = data.draw(st.integers(1, 4 if replacing else len(values)))
    reduce = min if worst else max
    every = product(values, repeat=j) if replacing else combinations(values, j)
    want = moments([reduce(draw) for draw in every])
    got = best_of(np.array([values]), j, worst=worst, replace=replacing)
    assert got == pytest.approx(want, abs=1e-9)


def test_V1_on_wins_the_best_of_j_is_pass_at_j() -> None:
    wins = np.array([[0.0, 0.0, 0.0, 1.0]])
    for j in range(1, 5):
        assert best_of(wins, j)[0] == pytest.approx(pass_at_k(4, 1, j))


def test_the_published_bootstrap_estimates_the_form_with_replacement() -> None:
    values = np.array([[-4.0, 0.5, 2.0, 2.0, 7.0, 9.5], [1.0, 1.0, 1.0, 1.0, 1.0, 3.0]])
    rng = np.random.default_rng([11, 1000])
    for j in (2, 4, 6):
        drawn = [rng.choice(row, size=(20_000, j), replace=True).max(axis=1) for row in values]
        mean, deviation = best_of(values, j, replace=True)
        assert mean == pytest.approx(np.mean([d.mean() for d in drawn]), abs=0.05)
        assert deviation == pytest.approx(np.mean([d.std() for d in drawn]), abs=0.05)
    # One win in four games: certain without replacement, 0.684 with it.
    one = np.array([[0.0, 0.0, 0.0, 1.0]])
    assert best_of(one, 4)[0] == 1.0
    assert best_of(one, 4, replace=True)[0] == pytest.approx(1 - 0.75**4)


def test_secrets_count_alike_and_missing_values_stay_out() -> None:
    values = np.array([[1.0, 3.0, np.nan], [10.0, 10.0, 10.0]])
    assert best_of(values, 2) == pytest.approx(((3 + 10) / 2, 0.0))
    assert best_of(values, 2, worst=True)[0] == pytest.approx((1 + 10) / 2)
    assert np.isnan(best_of(values, 3)).all(), "a mean over one secret would be another number"
    assert np.isnan(best_of(np.zeros((0, 4)), 2)).all()


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, ()), (2, (2,)), (4, (2, 4)), (6, (2, 4, 6)), (16, (2, 4, 8, 16))]
)
def test_sizes_are_powers_of_two_below_n_and_n(n: int, sizes: tuple[int, ...]) -> None:
    assert draw_sizes(n) == sizes


@pytest.mark.parametrize("replacing", [False, True])
def test_weights_are_a_distribution_at_any_size(replacing: bool) -> None:
    assert rank_weights(200, 150, replace=replacing).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(("m", "j"), [(3, 4), (3, 0), (0, 1)])
def test_V1_impossible_draws_are_refused(m: int, j: int) -> None:
    with pytest.raises(UserError, match="best of"):
        rank_weights(m, j)


# --- by source and variable -----------------------------------------------------------------------


def game(task: Task, number: int, verdicts: str) -> Trajectory:
    """``n`` no, ``i`` invalid, ``r`` repeated, ``w`` won, ``e`` judge error."""
    kinds = {
        "n": Verdict.NO,
        "i": Verdict.INVALID,
        "r": Verdict.REPEATED,
        "w": Verdict.WIN,
        "e": Verdict.ERROR,
    }
    turns = tuple(
        Turn(k, 3 * k + 1, 3 * k + 2, (-1.0,), 0, "q", "a", kinds[c], c == "w", c == "w")
        for k, c in enumerate(verdicts)
    )
    stop = {"w": StopReason.WIN, "e": StopReason.JUDGE_FAILED}
    ended = stop.get(verdicts[-1], StopReason.TURN_LIMIT)
    return Trajectory(task, number, tuple(range(3 * len(turns) + 1)), turns, ended)


def group(source: str, name: str, *games: str) -> Group:
    task = Task(name, source, name, ())
    return Group(task, tuple(game(task, i, verdicts) for i, verdicts in enumerate(games)))


GROUPS = [group("tw_q", "a", "nnw", "iir"), group("tw_q", "b", "nnnn", "w")]
REWARDS = [2.0, -11.0, -0.2, 1.5]


def test_every_variable_of_a_source_has_the_published_names() -> None:
    out = source_metrics(GROUPS, rewards=REWARDS)
    aux, core = "val-aux/tw_q", "val-core/tw_q/reward"
    assert out[f"{core}/mean@2"] == pytest.approx(np.mean(REWARDS))
    assert out[f"{core}/best@2/mean"] == pytest.approx((2.0 + 1.5) / 2)
    assert out[f"{core}/best@2/std"] == 0.0
    assert out[f"{aux}/reward/worst@2/mean"] == pytest.approx((-11 - 0.2) / 2)
    assert out[f"{aux}/reward/std@2"] == pytest.approx((6.5 + 0.85) / 2)
    assert out[f"{aux}/invalid_count/mean@2"] == 0.5
    assert out[f"{aux}/invalid_count/best@2/mean"] == 1.0
    assert out[f"{aux}/repeated_count/worst@2/mean"] == 0.0
    assert out[f"{aux}/num_questions/mean@2"] == pytest.approx((3 + 2.5) / 2)
    parts = {"mean@2", "std@2", *(f"{w}@2/{s}" for w in ("best", "worst") for s in ("mean", "std"))}
    names = {
        f"{aux}/{v}/{p}"
        for v in ("invalid_count", "repeated_count", "num_questions")
        for p in parts
    }
    names |= {f"{aux}/reward/{p}" for p in ("std@2", "worst@2/mean", "worst@2/std")}
    names |= {f"{core}/{p}" for p in ("mean@2", "best@2/mean", "best@2/std")}
    assert out.keys() == names


def test_sources_are_kept_apart_and_rewards_follow_their_games() -> None:
    mixed = [GROUPS[0], group("city", "c", "n", "w"), GROUPS[1]]
    out = source_metrics(mixed, rewards=[2.0, -11.0, 7.0, 9.0, -0.2, 1.5])
    assert out["val-core/city/reward/mean@2"] == 8.0
    alone = source_metrics(GROUPS, rewards=REWARDS)
    assert {name: out[name] for name in alone} == alone


def test_games_without_outcome_stay_out() -> None:
    void = [group("tw_q", "a", "nnw", "e"), GROUPS[1]]
    out = source_metrics(void, rewards=REWARDS)
    assert out["val-aux/tw_q/num_questions/mean@2"] == pytest.approx((3 + 2.5) / 2)
    assert not any("best@" in name for name in out)
    assert source_metrics([group("tw_q", "a", "e", "e")]) == {}


def test_V4_unequal_groups_have_no_n_and_so_no_name() -> None:
    uneven = [GROUPS[0], replace(GROUPS[1], trajectories=GROUPS[1].trajectories[:1])]
    assert source_metrics(uneven) == {}
    assert source_metrics([]) == {}


def test_one_reward_for_each_game_is_demanded() -> None:
    with pytest.raises(ValueError, match="3 rewards for 4 games"):
        source_metrics(GROUPS, rewards=REWARDS[:3])
