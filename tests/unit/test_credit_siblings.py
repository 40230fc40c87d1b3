"""GRPO for pass@k, OPO and MT-GRPO: worked examples, plain loops, what they reduce to, edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.types import (
    FloatArray,
    Group,
    StopReason,
    Task,
    Trajectory,
    Turn,
    TurnTable,
    Verdict,
)

Rewards = Sequence[Sequence[float]]


def table_of(
    outcome: Sequence[float],
    turns: Rewards,
    *,
    tokens: Rewards | None = None,
    group: Sequence[int] | None = None,
    unanswered: Sequence[tuple[int, int]] = (),
    invalid: Sequence[tuple[int, int]] = (),
) -> TurnTable:
    """Outcome of each game on its last turn, and a reward of each turn."""
    rows = [(i, k) for i, game in enumerate(turns) for k in range(len(game))]
    last = np.array([k == len(turns[i]) - 1 for i, k in rows])
    traj = np.array([i for i, _ in rows], dtype=np.int64)
    return TurnTable(
        group=np.array(group or [0] * len(turns), dtype=np.int64)[traj],
        traj=traj,
        turn=np.array([k for _, k in rows], dtype=np.int64),
        n_tokens=np.array([tokens[i][k] if tokens else 1 for i, k in rows], dtype=np.int64),
        valid=np.array([row not in invalid for row in rows], dtype=np.bool_),
        terminal=last,
        truncated=np.zeros(len(rows), dtype=np.bool_),
        won=np.zeros(len(rows), dtype=np.bool_),
        answered=np.array([row not in unanswered for row in rows], dtype=np.bool_),
        rewards={
            "outcome": np.where(last, np.asarray(outcome)[traj], 0.0),
            "belief": np.array([turns[i][k] for i, k in rows], dtype=np.float64),
        },
    )


def games_of(returns: Sequence[float], **more: Sequence[int]) -> TurnTable:
    """Games of one turn with these returns."""
    return table_of(returns, [[0.0] for _ in returns], **more)


def run(name: str, table: TurnTable, **knobs: object) -> Advantage:
    return build_credit(name, knobs).apply(table)


# --- pass@k ---------------------------------------------------------------------------------------


def test_A13_pass_at_k_matches_its_worked_example() -> None:
    table = games_of([0.2, 0.9, 0.5, 0.0])
    np.testing.assert_allclose(run("grpo_passk", table).turns, [0, 1.021505, 0, 0], atol=1e-5)
    plain = run("grpo_passk", table, norm_adv_by_std_in_grpo=False).turns
    np.testing.assert_allclose(plain, [0, 0.4, 0, 0], atol=1e-12)


def test_pass_at_k_spreads_the_lead_over_all_turns_of_the_best_game() -> None:
    table = table_of([1.0, 0.0], [[0.0, 0.0, 0.0], [0.0, 0.0]])
    size = 1 / (np.std([1, 0], ddof=1) + 1e-6)
    np.testing.assert_allclose(run("grpo_passk", table).turns, [size] * 3 + [0, 0])


@pytest.mark.parametrize(
    "returns", [[1.0, 1.0, 0.0], [0.3, 0.1 + 0.2, 0.0], [2.0, 2.0], [7.0], [-1.0, -1.0, -3.0]]
)
def test_A3_pass_at_k_teaches_nothing_where_the_best_are_tied_or_alone(
    returns: list[float],
) -> None:
    advantage = run("grpo_passk", games_of(returns))
    assert not advantage.turns.any()
    assert advantage.stats["frac_dead_groups"] == 1.0


def test_J1_a_best_game_without_outcome_does_not_lead() -> None:
    turns = [[0.0], [0.0], [0.0]]
    table = table_of([9.0, 1.0, 0.25], turns, invalid=[(0, 0)])
    plain = run("grpo_passk", table, norm_adv_by_std_in_grpo=False)
    np.testing.assert_allclose(plain.turns, [0, 0.75, 0])


# --- OPO ------------------------------------------------------------------------------------------


def test_A13_opo_matches_its_worked_example() -> None:
    table = table_of([0.2, 0.9, 0.5, 0.0], [[0.0]] * 4, tokens=[[2], [4], [1], [3]])
    np.testing.assert_allclose(
        run("opo", table).turns, np.array([0.2, 0.9, 0.5, 0.0]) - 0.45, atol=1e-12
    )


def test_opo_counts_the_trained_tokens_of_all_turns() -> None:
    tokens = [[2, 3], [1, 4]]
    table = table_of([1.0, 0.0], [[0.0, 0.0]] * 2, tokens=tokens, invalid=[(1, 0)])
    np.testing.assert_allclose(run("opo", table).turns, [1 - 5 / 9, 1 - 5 / 9, 0, -5 / 9])


def test_opo_of_games_of_one_length_is_grpo_without_division() -> None:
    table = games_of([0.2, 0.9, 0.5, 0.0, 3.0, 1.0], group=[0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(
        run("opo", table).turns, run("grpo", table, norm_adv_by_std_in_grpo=False).turns
    )


@settings(max_examples=30, deadline=None)
@given(games=st.lists(st.tuples(st.integers(1, 9), st.integers(-8, 8)), min_size=2, max_size=6))
def test_advantages_of_opo_weighted_by_length_sum_to_zero(games: list[tuple[int, int]]) -> None:
    tokens, returns = zip(*games, strict=True)
    table = table_of(returns, [[0.0]] * len(games), tokens=[[n] for n in tokens])
    assert abs((run("opo", table).turns * table.n_tokens).sum()) < 1e-9


# --- MT-GRPO --------------------------------------------------------------------------------------

CALLS = table_of([1, 0, 1, 0], [[1, 0], [1, 0], [0, 0], [0, 0]])
"""Four games with a call in the first turn, of which two were useful, and an answer."""
BEFORE, AFTER = [1.731751, 0, 0, -1.731751], [0.865875, -0.865875, 0.865875, -0.865875]


@pytest.mark.parametrize("form", ["each", "boundary"])
def test_A13_mt_grpo_matches_its_worked_example_before_and_after_the_result(form: str) -> None:
    turns = CALLS.grid(run("mt_grpo", CALLS, turn_credit=form).turns)
    np.testing.assert_allclose(turns[:, 0], BEFORE, atol=1e-5)
    np.testing.assert_allclose(turns[:, 1], AFTER, atol=1e-5)


def test_A13_mt_grpo_without_any_result_standardises_the_sum() -> None:
    silent = replace(CALLS, answered=np.zeros(CALLS.num_rows, dtype=np.bool_))
    turns = CALLS.grid(run("mt_grpo", silent, turn_credit="boundary").turns)
    expected = np.array([1.224595, 0, 0, -1.224595])[:, None].repeat(2, axis=1)
    np.testing.assert_allclose(turns, expected, atol=1e-5)


def loop_boundary(table: TurnTable, w: float) -> FloatArray:
    """The published rule for one group, game by game."""
    outcome = table.grid(table.rewards["outcome"]).sum(axis=1)
    reward = table.grid(table.rewards["belief"]).sum(axis=1)

    def norm(x: FloatArray) -> FloatArray:
        return (x - x.mean()) / (x.std(ddof=1) + 1e-4)

    o, r, both = norm(outcome), norm(reward), norm(outcome + reward)
    out = np.zeros(table.num_rows)
    for row, (i, k) in enumerate(zip(table.traj, table.turn, strict=True)):
        answers = table.turn[(table.traj == i) & table.answered]
        if not len(answers):
            out[row] = both[i]
        elif k <= answers[0]:
            out[row] = o[i] + w * r[i]
        else:
            out[row] = o[i]
    return out


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(
        st.lists(st.tuples(st.integers(-6, 6), st.booleans()), min_size=1, max_size=4),
        min_size=3,
        max_size=5,
    ),
    w=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_mt_grpo_pays_up_to_the_first_answer_of_each_game(
    shape: list[list[tuple[int, bool]]], w: float
) -> None:
    # Different outcomes and sums, so that every term has a spread.
    outcome = [3.0**i for i in range(len(shape))]
    turns = [[r + 0.01 * 7.0**i for r, _ in game] for i, game in enumerate(shape)]
    silent = [
        (i, k) for i, game in enumerate(shape) for k, (_, answered) in enumerate(game) if answered
    ]
    table = table_of(outcome, turns, unanswered=silent)
    got = run("mt_grpo", table, turn_credit="boundary", turn_advantage_w=w).turns
    np.testing.assert_allclose(got, loop_boundary(table, w), atol=1e-9)


def test_mt_grpo_compares_a_turn_only_with_siblings_that_have_it() -> None:
    table = table_of([0, 0, 0], [[0.0, 1.0, 5.0], [0.0, 3.0], [0.0]])
    turns = table.grid(run("mt_grpo", table).turns, fill=np.nan)
    half = 1 / (np.sqrt(2) + 1e-4)
    expected = [[0, -half, 0], [0, half, np.nan], [0, np.nan, np.nan]]
    np.testing.assert_allclose(turns, expected)


@pytest.mark.parametrize("form", ["each", "boundary"])
def test_mt_grpo_without_its_turn_term_is_grpo_on_the_outcome(form: str) -> None:
    table = table_of([1, 0, 0, 2], [[0.3, 0.1], [0.2], [0.0, 0.5, 0.1], [0.9]], group=[0, 0, 1, 1])
    alone = replace(table, rewards={"outcome": table.rewards["outcome"]})
    got = run("mt_grpo", table, turn_advantage_w=0.0, turn_credit=form).turns
    np.testing.assert_allclose(got, run("grpo", alone, epsilon=1e-4).turns)
    without = run("mt_grpo", alone, turn_credit=form).turns
    np.testing.assert_allclose(without, got)


def test_mt_grpo_pays_equal_outcomes_for_their_turns() -> None:
    advantage = run("mt_grpo", table_of([1, 1], [[0.4, 0.0], [0.0, 0.4]]))
    size = 0.2 / (np.std([0.4, 0.0], ddof=1) + 1e-4)
    np.testing.assert_allclose(advantage.turns, [size, -size, -size, size])
    assert advantage.stats["frac_dead_groups"] == 0.0


@pytest.mark.parametrize("form", ["each", "boundary"])
def test_J1_an_answer_to_a_turn_that_is_not_valid_is_none(form: str) -> None:
    table = table_of([1, 0, 0], [[0.3, 0.1], [0.2, 0.0], [0.0, 0.7]], invalid=[(0, 0)])
    advantage = run("mt_grpo", table, turn_credit=form)
    assert not advantage.turns[~table.valid].any()
    silent = replace(table, answered=table.answered & table.valid)
    np.testing.assert_array_equal(advantage.turns, run("mt_grpo", silent, turn_credit=form).turns)


def test_the_table_says_which_actions_were_answered() -> None:
    verdicts = [
        *(Verdict.YES, Verdict.INVALID, Verdict.REPEATED, Verdict.NO),
        *(Verdict.OTHER, Verdict.ERROR, Verdict.WIN),
    ]
    turns = tuple(
        Turn(k, k, k + 1, (0.0,), 0, "a", "b", verdict) for k, verdict in enumerate(verdicts)
    )
    task = Task("t", "tw_q", "dog", ())
    game = Trajectory(task, 0, tuple(range(7)), turns, StopReason.WIN)
    table = build_table([Group(task, (game,))])
    assert table.answered.tolist() == [True, False, False, True, True, False, True]
    assert build_table([]).answered.shape == (0,)
