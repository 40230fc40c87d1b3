"""iStar: worked numbers, the loss of its pairs, what it reduces to, and edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.catalogue import CATALOGUE, Label, needs_of
from delta_belief_rl.algo.credit.istar import SLOPE, pair_loss
from delta_belief_rl.algo.credit.whitening import whiten
from delta_belief_rl.types import FloatArray, TurnTable, UserError

BETA = 0.05
STEPS = [0.01, 0.005, 0.02, -0.01, 0.0, 0.015]
RLOO = [0.004, -0.002, 0.016, -0.02, -0.008, 0.01]


def table_of(
    worth: Sequence[Sequence[float]],
    won: Sequence[bool],
    group: Sequence[int] | None = None,
    invalid: Sequence[tuple[int, int]] = (),
    seed: int = 0,
) -> TurnTable:
    """Games whose turns are worth ``worth`` at ``beta`` 0.05, in turns of 1 to 3 tokens."""
    rng = np.random.default_rng(seed)
    lengths = [len(game) for game in worth]
    traj = np.repeat(np.arange(len(worth)), lengths).astype(np.int64)
    turn = np.concatenate([np.arange(n) for n in lengths]).astype(np.int64)
    places = list(zip(traj.tolist(), turn.tolist(), strict=True))
    last = turn == np.array(lengths)[traj] - 1
    sizes = 1 + (3 * traj + turn) % 3
    logp = -rng.random(int(sizes.sum()))
    ratio = np.repeat(np.concatenate(list(worth)) / BETA / sizes, sizes)
    wins = np.array(won, dtype=np.bool_)[traj]
    return TurnTable(
        group=np.array(group or [0] * len(worth), dtype=np.int64)[traj],
        traj=traj,
        turn=turn,
        n_tokens=sizes,
        valid=np.array([place not in invalid for place in places], dtype=np.bool_),
        terminal=last,
        truncated=np.zeros(len(traj), dtype=np.bool_),
        won=wins,
        rewards={"outcome": np.where(last & wins, 1.0, 0.0)},
        tokens={"logp": logp, "prm": logp + ratio},
    )


def run(table: TurnTable, **knobs: object) -> Advantage:
    return build_credit("istar", knobs).apply(table)


def local(table: TurnTable, **knobs: object) -> FloatArray:
    """The part of the turns."""
    return run(table, **knobs).turns - build_credit("grpo").apply(table).turns


def reference_loss(table: TurnTable, logp: torch.Tensor) -> torch.Tensor:
    """The loss of all pairs, turn by turn and pair by pair, from the process model's log-probs."""
    ratio = logp - torch.from_numpy(table.tokens["logp"])
    row = table.token_row()
    scores: dict[int, torch.Tensor] = {}
    for game in range(table.num_games):
        turns = np.flatnonzero((table.traj == game) & table.valid)
        worth = [BETA * ratio[torch.from_numpy(row == turn)].sum() for turn in turns]
        if worth:
            scores[game] = torch.stack(worth).mean()
    losses: list[torch.Tensor] = []
    for one, better in scores.items():
        for other, worse in scores.items():
            wins = [bool(table.won[table.traj == game][0]) for game in (one, other)]
            same = table.game_group()[one] == table.game_group()[other]
            if same and wins == [True, False]:
                losses.append(-torch.nn.functional.logsigmoid(better - worse))
    return torch.stack(losses).mean() if losses else logp.sum() * 0.0


MIXED = table_of(
    [[0.3, -0.1], [0.2], [-0.4, 0.1, 0.52], [0.05], [0.6, -0.2], [0.1], [0.2], [0.4]],
    won=[True, False, False, True, True, False, True, True],
    group=[0, 0, 0, 0, 1, 1, 2, 2],
    invalid=[(2, 1)],
)
"""Four pairs in a group, one in the next, none in the last, and a turn without a verdict."""


# --- worked numbers -------------------------------------------------------------------------------


def test_A13_a_turn_is_worth_beta_times_its_log_ratio() -> None:
    table = table_of([[0.0, 0.0], [0.0]], [True, False])
    logp = table.tokens["logp"]
    sums = np.array([0.2, 0.1, 0.0])
    told = logp + np.repeat(sums / table.n_tokens, table.n_tokens)
    stats = run(replace(table, tokens={"logp": logp, "prm": told})).stats
    # q = .01 and .005, so the game's score is .0075.
    assert stats["istar_loss"] == pytest.approx(np.logaddexp(0, -0.0075), abs=1e-9)
    assert stats["istar_worth_std"] == pytest.approx(np.std([0.01, 0.005, 0.0]), abs=1e-9)


def test_A13_the_loss_of_a_pair_matches_its_worked_example() -> None:
    two, both, same = np.array([0.03, -0.01]), np.ones(2, dtype=bool), np.zeros(2, dtype=np.int64)
    found = pair_loss(two, np.array([True, False]), both, same)
    assert found.loss == pytest.approx(0.673347, abs=1e-6)
    assert (found.pairs, found.ordered) == (1, 1.0)
    np.testing.assert_allclose(found.slopes, [-0.490001, 0.490001], atol=1e-6)
    table = table_of([[0.05, 0.01], [-0.01]], [True, False])
    assert run(table).stats["istar_loss"] == pytest.approx(0.673347, abs=1e-6)


def test_A13_turns_are_compared_with_all_others_of_the_group() -> None:
    table = table_of([STEPS[:2], STEPS[2:5], STEPS[5:]], [True, False, False])
    np.testing.assert_allclose(local(table), RLOO, atol=1e-9)
    np.testing.assert_allclose(local(table, step_advantage_w=0.5), 0.5 * np.array(RLOO), atol=1e-9)
    steps = np.array(STEPS)
    want = (steps - steps.mean()) / (steps.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(local(table, baseline="grpo"), want, atol=1e-9)
    whitened = whiten(steps - steps.mean(), table.n_tokens)
    got = local(table, baseline="reinforce_plus_plus_baseline")
    np.testing.assert_allclose(got, whitened, atol=1e-9)
    assert (got * table.n_tokens).sum() == pytest.approx(0.0, abs=1e-9)


def test_the_largest_sum_to_a_games_end_is_the_unit_of_worth() -> None:
    # To the end: .015, .005; .01, -.01, 0; .015. The last game of the batch has the largest.
    games = [STEPS[:2], STEPS[2:5], STEPS[5:], [0.0, -0.04, -0.01], [0.01]]
    table = table_of(games, [True, False, False, True, False], [0, 0, 0, 1, 1])
    got = local(table, normalise=True)
    np.testing.assert_allclose(got[:6], np.array(RLOO) / 0.05, atol=1e-9)
    np.testing.assert_allclose(got, local(table) / 0.05, atol=1e-9)
    still = table_of([[0.0], [0.0]], [True, False])
    assert not local(still, normalise=True).any()


# --- the loss and its slope -----------------------------------------------------------------------


def test_the_slope_of_every_token_is_that_of_the_whole_loss() -> None:
    logp = torch.from_numpy(MIXED.tokens["prm"]).clone().requires_grad_()
    loss = reference_loss(MIXED, logp)
    loss.backward()
    found = run(MIXED)
    assert found.stats["istar_loss"] == pytest.approx(float(loss.detach()), abs=1e-9)
    assert logp.grad is not None
    np.testing.assert_allclose(found.columns[SLOPE], logp.grad.numpy(), atol=1e-9)
    assert np.abs(found.columns[SLOPE]).max() > 1e-3
    assert found.stats["istar_pairs"] == 5
    # Scores .1 and .05 of games that were won against .2 and .06; .2 against .1.
    assert found.stats["istar_ordered"] == pytest.approx(2 / 5)


def test_a_step_against_the_slope_lowers_the_loss() -> None:
    column = MIXED.tokens["prm"].copy()
    losses: list[float] = []
    for _ in range(40):
        found = run(replace(MIXED, tokens={**MIXED.tokens, "prm": column}))
        losses.append(found.stats["istar_loss"])
        column = column - 100.0 * found.columns[SLOPE]
    assert (np.diff(losses) < 0).all()
    assert losses[-1] < 0.5 * losses[0]


def test_scores_far_apart_neither_overflow_nor_lose_their_slope() -> None:
    ones, same = np.ones(2, dtype=bool), np.zeros(2, dtype=np.int64)
    with np.errstate(all="raise", under="ignore"):
        found = pair_loss(np.array([-1e4, 1e4]), np.array([True, False]), ones, same)
        other = pair_loss(np.array([1e4, -1e4]), np.array([True, False]), ones, same)
    assert found.loss == pytest.approx(2e4)
    np.testing.assert_allclose(found.slopes, [-1, 1])
    assert other.loss == 0
    assert not other.slopes.any()


def test_pairs_of_a_group_pull_alike_whatever_else_is_in_the_batch() -> None:
    """Only the mean over the pairs ties groups together."""
    rows = np.flatnonzero(MIXED.group == 0)
    kept = MIXED.group[MIXED.token_row()] == 0
    alone = replace(
        MIXED,
        **{
            name: getattr(MIXED, name)[rows]
            for name in ("group", "traj", "turn", "n_tokens", "valid", "terminal", "won")
        },
        truncated=MIXED.truncated[rows],
        rewards={name: column[rows] for name, column in MIXED.rewards.items()},
        tokens={name: column[kept] for name, column in MIXED.tokens.items()},
    )
    part, whole = run(alone), run(MIXED)
    np.testing.assert_allclose(part.turns, whole.turns[rows], atol=1e-12)
    np.testing.assert_allclose(4 / 5 * part.columns[SLOPE], whole.columns[SLOPE][kept], atol=1e-12)


def test_every_game_of_a_pair_has_weight_in_the_update() -> None:
    """Games that are left out of the update for want of weight belong to no pair."""
    # Games 1 and 4 have no known outcome, and the last group ends in one way.
    table = replace(MIXED, valid=MIXED.valid & ~np.isin(MIXED.traj, [1, 4]))
    found = run(table)
    sloped = np.unique(table.traj[table.token_row()[found.columns[SLOPE] != 0]])
    weighed = np.unique(table.traj[found.weight > 0])
    assert sloped.tolist() == [0, 2, 3]
    assert weighed.tolist() == [0, 2, 3, 5, 6, 7]
    assert found.stats["istar_pairs"] == 2


# --- what it reduces to, and edges ----------------------------------------------------------------


@pytest.mark.parametrize("by_std", [True, False])
def test_without_its_turns_it_is_grpo(by_std: bool) -> None:
    knobs = {"norm_adv_by_std_in_grpo": by_std}
    got = run(MIXED, step_advantage_w=0.0, **knobs)
    want = build_credit("grpo", knobs).apply(MIXED)
    np.testing.assert_array_equal(got.turns, want.turns)
    np.testing.assert_array_equal(got.weight, want.weight)
    np.testing.assert_array_equal(got.rewards, want.rewards)


@pytest.mark.parametrize("baseline", ["rloo", "grpo", "reinforce_plus_plus_baseline"])
def test_a_model_that_says_what_the_policy_says_leaves_grpo(baseline: str) -> None:
    table = replace(MIXED, tokens={**MIXED.tokens, "prm": MIXED.tokens["logp"]})
    found = run(table, baseline=baseline, normalise=True)
    np.testing.assert_array_equal(found.turns, build_credit("grpo").apply(table).turns)
    assert found.stats["istar_loss"] == pytest.approx(np.log(2))
    assert found.stats["istar_ordered"] == 0.5


def test_a_transform_behind_it_leaves_the_slopes_as_they_are() -> None:
    """A turn that two games share is trained once, and belongs to the pairs of both."""
    node = np.arange(MIXED.num_rows, dtype=np.int64)
    node[2] = node[0]
    table, before = replace(MIXED, node=node), run(MIXED)
    after = build_credit("shared_once", transform=True).apply(table, before)
    assert after.weight[2] == 0 < before.weight[2]
    np.testing.assert_array_equal(after.columns[SLOPE], before.columns[SLOPE])


def test_a_group_with_one_outcome_has_no_pair_and_its_turns_are_told_apart() -> None:
    for won in (True, False):
        table = table_of([[0.1, 0.3], [0.2]], [won, won])
        found = run(table)
        assert (found.stats["istar_loss"], found.stats["istar_pairs"]) == (0.0, 0.0)
        assert "istar_ordered" not in found.stats
        assert not found.columns[SLOPE].any()
        np.testing.assert_allclose(found.turns, [-0.15, 0.15, 0.0], atol=1e-12)
        assert found.stats["frac_dead_groups"] == 0.0


@pytest.mark.parametrize("baseline", ["rloo", "grpo", "reinforce_plus_plus_baseline"])
def test_a_turn_alone_and_turns_of_one_worth_are_told_nothing(baseline: str) -> None:
    table = table_of([[0.4], [0.2, 0.2], [0.2]], [True, True, True], [0, 1, 1])
    found = run(table, baseline=baseline)
    np.testing.assert_allclose(found.turns, 0.0, atol=1e-12)
    assert found.stats["frac_dead_groups"] == 1.0


def test_J1_what_is_said_of_turns_that_are_not_valid_does_not_leak() -> None:
    table = replace(MIXED, valid=MIXED.valid & (MIXED.traj != 1))
    junk = ~table.valid[table.token_row()]
    for baseline in ("rloo", "grpo", "reinforce_plus_plus_baseline"):
        for bad in (np.nan, np.inf, 1e9):
            told = np.where(junk, bad, table.tokens["prm"])
            dirty = replace(table, tokens={**table.tokens, "prm": told})
            knobs = {"baseline": baseline, "normalise": True}
            first, second = run(table, **knobs), run(dirty, **knobs)
            np.testing.assert_array_equal(first.turns, second.turns)
            np.testing.assert_array_equal(first.columns[SLOPE], second.columns[SLOPE])
            assert first.stats == second.stats
            assert not first.columns[SLOPE][junk].any()


@settings(max_examples=30, deadline=None)
@given(
    worth=st.lists(
        st.lists(st.integers(-4, 4).map(lambda x: x / 8), min_size=1, max_size=3),
        min_size=2,
        max_size=6,
    ),
    baseline=st.sampled_from(["rloo", "grpo", "reinforce_plus_plus_baseline"]),
    seed=st.integers(0, 99),
)
def test_A9_neither_advantages_nor_slopes_depend_on_the_order_of_games(
    worth: list[list[float]], baseline: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    won, group = rng.random(len(worth)) < 0.5, rng.integers(0, 2, len(worth))
    straight = table_of(worth, won.tolist(), group.tolist())
    order = rng.permutation(len(worth))
    rows = np.concatenate([np.flatnonzero(straight.traj == game) for game in order])
    place = np.split(np.arange(len(straight.tokens["logp"])), np.cumsum(straight.n_tokens)[:-1])
    tokens = np.concatenate([place[row] for row in rows])
    names = ("group", "turn", "n_tokens", "valid", "terminal", "truncated", "won")
    shuffled = replace(
        straight,
        **{name: getattr(straight, name)[rows] for name in names},
        traj=np.argsort(order)[straight.traj[rows]].astype(np.int64),
        rewards={name: column[rows] for name, column in straight.rewards.items()},
        tokens={name: column[tokens] for name, column in straight.tokens.items()},
    )
    first = run(straight, baseline=baseline, normalise=True)
    second = run(shuffled, baseline=baseline, normalise=True)
    np.testing.assert_allclose(first.turns[rows], second.turns, atol=1e-7)
    np.testing.assert_allclose(first.columns[SLOPE][tokens], second.columns[SLOPE], atol=1e-12)
    assert first.stats == pytest.approx(second.stats)


def test_a_table_without_the_process_models_column_is_refused() -> None:
    with pytest.raises(ValueError, match="no column prm"):
        run(replace(MIXED, tokens={"logp": MIXED.tokens["logp"]}))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"beta": 0.0}, "algorithm.istar.beta is 0"),
        ({"beta": float("nan")}, "algorithm.istar.beta is nan"),
        ({"step_advantage_w": -1.0}, "algorithm.istar.step_advantage_w is -1"),
        ({"baseline": "mean"}, "algorithm.istar.baseline is 'mean'"),
        ({"epsilon": -1.0}, "algorithm epsilon is -1"),
    ],
)
def test_a_setting_out_of_its_range_is_named(knobs: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as error:
        build_credit("istar", knobs)
    assert said in str(error.value)


def test_the_catalogue_says_what_it_needs() -> None:
    assert needs_of(build_credit("istar")) == ("group", "learner prm")
    assert CATALOGUE["istar"].label is Label.CODE
