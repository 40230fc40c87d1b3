"""SPA-RL: worked numbers, reductions to PPO, what must not leak, and turns that are told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.catalogue import needs_of
from delta_belief_rl.algo.chain import chain_of
from delta_belief_rl.algo.credit.spa_rl import COLUMN, GAME, TARGET, contributions, executed
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable, UserError

NOW: dict[str, Any] = {"warmup_steps": 0}
KNOBS: tuple[dict[str, Any], ...] = (
    {**NOW, "gamma": 0.9, "lam": 0.8},
    {**NOW, "estimator": "turn_ppo", "gamma": 0.95, "lam": 0.9},
    {"warmup_steps": 3},
)


def table_of(
    games: list[list[int]],
    outcome: list[float],
    shares: FloatArray | None = None,
    answered: list[bool] | None = None,
    valid: list[bool] | None = None,
    update: int = 0,
) -> TurnTable:
    """Games as the numbers of tokens of their turns, paid on their last valid turn.

    Args:
        shares: ``c_k``, ``[R]``, at the last tokens; the head's other readings are junk.
    """
    rows = [(g, k, n) for g, game in enumerate(games) for k, n in enumerate(game)]
    traj, turn, tokens = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    size, count = len(rows), int(tokens.sum())
    fine = np.ones(size, dtype=np.bool_) if valid is None else np.array(valid)
    paid = np.zeros(size)
    for game, value in enumerate(outcome):
        paid[np.flatnonzero((traj == game) & fine)[-1]] = value
    read = np.full(count, 99.0)
    read[(np.cumsum(tokens) - 1)[tokens > 0]] = 0.0 if shares is None else shares[tokens > 0]
    rng = np.random.default_rng(5)
    return TurnTable(
        group=np.zeros(size, dtype=np.int64),
        traj=traj,
        turn=turn,
        n_tokens=tokens,
        valid=fine,
        terminal=np.append(np.diff(traj) > 0, True),
        truncated=np.zeros(size, dtype=np.bool_),
        won=np.zeros(size, dtype=np.bool_),
        answered=np.ones(size, dtype=np.bool_) if answered is None else np.array(answered),
        rewards={"outcome": paid, "validity": np.where(fine, -0.25 * (turn == 1), 0.0)},
        tokens={"values": rng.normal(size=count), COLUMN: read},
        update=update,
    )


def random_table(seed: int, games: int = 6) -> TurnTable:
    rng = np.random.default_rng(seed)
    made = [rng.integers(1, 5, int(rng.integers(1, 5))).tolist() for _ in range(games)]
    size = sum(len(game) for game in made)
    shares, flags = rng.normal(size=size), (rng.random(size) < 0.7).tolist()
    return table_of(made, rng.normal(size=games).tolist(), shares, flags)


def apply(table: TurnTable, name: str = "spa_rl", **knobs: Any) -> Advantage:
    return build_credit(name, knobs).apply(table)


def paid_turns(table: TurnTable, rewards: FloatArray) -> TurnTable:
    """The table with one channel of known rewards."""
    return replace(table, rewards={"known": rewards})


def assert_same(got: Advantage, want: Advantage) -> None:
    np.testing.assert_allclose(got.turns, want.turns, atol=1e-12)
    assert got.targets is not None
    assert want.targets is not None
    np.testing.assert_allclose(got.targets, want.targets, atol=1e-12)
    assert (got.tokens is None) == (want.tokens is None)
    if got.tokens is not None and want.tokens is not None:
        np.testing.assert_allclose(got.tokens, want.tokens, atol=1e-12)
    np.testing.assert_array_equal(got.weight, want.weight)
    np.testing.assert_allclose(got.rewards, want.rewards, atol=1e-12)


# --- worked numbers -------------------------------------------------------------------------------


def worked(**changes: Any) -> TurnTable:
    table = table_of([[2, 3, 1]], [1.0], np.array([0.2, 0.3, 0.4]), [True, False, False])
    return replace(table, rewards={"outcome": table.rewards["outcome"]}, **changes)


def test_spa_rl_has_the_numbers_of_the_worked_example() -> None:
    table = worked()
    # The last turn counts as executed, whatever was said of it.
    np.testing.assert_array_equal(executed(table), [1, 0, 1])
    found = apply(table, **NOW)
    np.testing.assert_allclose(found.rewards, [0.7, 0.3, 0.9], atol=1e-5)
    assert contributions(table).sum() == pytest.approx(0.9, abs=1e-5)
    assert found.stats["contribution_error"] == pytest.approx(0.01, abs=1e-5)
    assert found.stats["executed_turns"] == pytest.approx(2 / 3)
    assert found.stats["reward_sum/contribution"] == pytest.approx(0.9)
    assert found.stats["reward_sum/grounding"] == pytest.approx(1.0)
    # One game has nothing to explain.
    assert "contribution_explained" not in found.stats
    nan = np.nan
    np.testing.assert_array_equal(found.columns[TARGET], [nan, 1, nan, nan, 1, 1])
    np.testing.assert_array_equal(found.columns[GAME], np.zeros(6))
    two = apply(table_of([[2, 1], [3]], [1.0, 0.0]), **NOW)
    np.testing.assert_array_equal(two.columns[GAME], [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("knobs", "rewards"),
    [
        ({"alpha": 0.0}, [0.5, 0.0, 0.5]),
        ({"beta": 0.0}, [0.2, 0.3, 0.4]),
        ({"alpha": 2.0, "beta": 1.0}, [1.4, 0.6, 1.8]),
    ],
)
def test_each_part_has_its_weight(knobs: dict[str, Any], rewards: list[float]) -> None:
    np.testing.assert_allclose(apply(worked(), **NOW, **knobs).rewards, rewards, atol=1e-12)


def test_contributions_are_not_clamped() -> None:
    table = table_of([[1, 1]], [0.0], np.array([-7.0, 9.0]))
    np.testing.assert_allclose(apply(table, **NOW, beta=0.0).rewards, [-7.0, 9.0 - 0.25])


# --- reductions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["gae", "turn_ppo"])
@pytest.mark.parametrize("seed", range(3))
def test_the_estimator_sees_the_new_rewards_and_what_else_is_paid(
    seed: int, estimator: str
) -> None:
    table = random_table(seed)
    shared: dict[str, Any] = {"gamma": 0.9, "lam": 0.8}
    rewards = 2 * contributions(table) + 0.3 * executed(table) + table.rewards["validity"]
    found = apply(table, alpha=2.0, beta=0.3, estimator=estimator, **NOW, **shared)
    assert_same(found, apply(paid_turns(table, rewards), estimator, **shared))
    assert np.abs(found.turns).max() > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_with_all_of_the_outcome_on_its_own_turn_and_no_bonus_it_is_ppo(seed: int) -> None:
    table = random_table(seed)
    exact = np.full(int(table.n_tokens.sum()), 9.0)
    exact[np.cumsum(table.n_tokens) - 1] = table.rewards["outcome"]
    table = replace(table, tokens={**table.tokens, COLUMN: exact})
    assert_same(apply(table, beta=0.0, **NOW), apply(table, "gae"))


@pytest.mark.parametrize("seed", range(3))
def test_in_the_warm_up_the_outcome_is_paid_and_the_head_is_taught(seed: int) -> None:
    table = replace(random_table(seed), update=4)
    found = apply(table, warmup_steps=5)
    assert_same(found, apply(table, "gae"))
    assert np.isfinite(found.columns[TARGET]).sum() == table.num_rows
    after = apply(replace(table, update=5), warmup_steps=5)
    assert not np.allclose(after.rewards, found.rewards)
    np.testing.assert_array_equal(after.columns[TARGET], found.columns[TARGET])


def test_without_refresh_the_head_is_taught_in_the_warm_up_alone() -> None:
    knobs = {"warmup_steps": 2, "refresh": False}
    assert TARGET in apply(worked(update=1), **knobs).columns
    assert not {TARGET, GAME} & apply(worked(update=2), **knobs).columns.keys()


def test_A6_what_evaluations_log_adds_up_to_what_a_perfect_head_would_pay() -> None:
    table, credit = worked(), build_credit("spa_rl", {**NOW, "alpha": 2.0})
    np.testing.assert_array_equal(credit.paid(table), credit.apply(table).rewards)
    blind = replace(table, tokens={})
    np.testing.assert_allclose(credit.paid(blind), [0.5, 0.0, 2.0 + 0.5])
    # A run's first validation is inside the warm-up.
    early = build_credit("spa_rl", {"warmup_steps": 1}).paid(blind)
    np.testing.assert_array_equal(early, [0.0, 0.0, 1.0])


def test_returns_on_one_scale_are_shared_out_like_the_outcome() -> None:
    table = worked()
    scaled = replace(table, rewards={"normalised": table.rewards["outcome"]})
    want, got = apply(table, **NOW), apply(scaled, **NOW)
    assert_same(got, want)
    np.testing.assert_array_equal(got.columns[TARGET], want.columns[TARGET])


# --- what must not matter -------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", KNOBS, ids=["gae", "turn_ppo", "warm-up"])
def test_A9_junk_on_turns_that_are_not_valid_changes_nothing(knobs: dict[str, Any]) -> None:
    valid = [True, False, True, True, False]
    games, rng = [[2, 3, 1], [1, 2]], np.random.default_rng(0)
    shares, broken = rng.normal(size=5), np.repeat(~np.array(valid), [2, 3, 1, 1, 2])
    found: list[Advantage] = []
    for junk in (0.0, 9.0, np.nan, np.inf):
        table = table_of(games, [1.0, 0.0], shares, valid=valid)
        tokens = {name: np.where(broken, junk, column) for name, column in table.tokens.items()}
        rewards = {
            name: np.where(table.valid, column, junk) for name, column in table.rewards.items()
        }
        found.append(apply(replace(table, tokens=tokens, rewards=rewards), **knobs))
    for other in found[1:]:
        assert_same(other, found[0])
        assert other.stats == found[0].stats
        np.testing.assert_array_equal(other.columns[TARGET], found[0].columns[TARGET])
    target = found[0].columns[TARGET]
    assert np.isnan(target[broken]).all()
    np.testing.assert_array_equal(target[~broken], [np.nan, 1.0, 1.0, 0.0])
    np.testing.assert_array_equal(found[0].weight, valid)


def test_readings_at_other_tokens_than_a_turns_last_say_nothing() -> None:
    table = random_table(2)
    inner = np.ones(int(table.n_tokens.sum()), dtype=np.bool_)
    inner[np.cumsum(table.n_tokens) - 1] = False
    assert inner.any()
    tokens = {**table.tokens, COLUMN: np.where(inner, np.nan, table.tokens[COLUMN])}
    assert_same(apply(replace(table, tokens=tokens), **NOW), apply(table, **NOW))


def test_a_turn_without_tokens_has_no_part_in_the_sum_and_keeps_its_bonus() -> None:
    table = table_of([[2, 0, 1]], [1.0], np.array([0.2, 5.0, 0.4]))
    found = apply(table, **NOW)
    np.testing.assert_allclose(found.rewards, [0.7, 0.5 - 0.25, 0.9])
    np.testing.assert_array_equal(found.columns[TARGET], [np.nan, 1.0, 1.0])
    assert found.stats["contribution_error"] == pytest.approx(0.16)


def in_order(table: TurnTable, order: IntArray) -> TurnTable:
    """The same turns, their rows in another order."""
    ends = np.cumsum(table.n_tokens)
    counts = table.n_tokens.tolist()
    spans = [np.arange(int(ends[row]) - counts[row], int(ends[row])) for row in order.tolist()]
    tokens = np.concatenate(spans)
    names = ("group", "traj", "turn", "n_tokens", "valid", "terminal", "truncated", "won")
    return replace(
        table,
        **{name: getattr(table, name)[order] for name in (*names, "answered")},
        rewards={name: column[order] for name, column in table.rewards.items()},
        tokens={name: column[tokens] for name, column in table.tokens.items()},
    )


@pytest.mark.parametrize("knobs", KNOBS, ids=["gae", "turn_ppo", "warm-up"])
def test_the_order_of_rows_does_not_matter(knobs: dict[str, Any]) -> None:
    table = random_table(7)
    order = np.random.default_rng(1).permutation(table.num_rows).astype(np.int64)
    want, got = apply(table, **knobs), apply(in_order(table, order), **knobs)
    np.testing.assert_allclose(got.turns, want.turns[order], atol=1e-9)
    ends = (np.cumsum(table.n_tokens) - 1)[order]
    theirs = np.cumsum(table.n_tokens[order]) - 1
    np.testing.assert_array_equal(got.columns[TARGET][theirs], want.columns[TARGET][ends])
    assert got.stats == pytest.approx(want.stats)


@pytest.mark.parametrize("knobs", KNOBS, ids=["gae", "turn_ppo", "warm-up"])
@pytest.mark.parametrize(
    ("games", "outcome"),
    [
        ([[1]], [1.0]),
        ([[2, 1], [3]], [1.0, 1.0]),
        ([[2, 1], [3]], [0.0, 0.0]),
        ([[1] * 20, [4]], [0.0, 1.0]),
    ],
)
def test_single_games_equal_outcomes_and_single_turns_are_fine(
    knobs: dict[str, Any], games: list[list[int]], outcome: list[float]
) -> None:
    found = apply(table_of(games, outcome), **knobs)
    assert np.isfinite(found.turns).all()
    assert all(np.isfinite(value) for value in found.stats.values())


def test_a_table_without_a_valid_turn_teaches_nothing() -> None:
    table = table_of([[1, 2]], [1.0])
    void = replace(table, valid=np.zeros(2, dtype=np.bool_))
    found = apply(void, **NOW)
    assert not found.turns.any()
    assert not found.weight.any()
    assert np.isnan(found.columns[TARGET]).all()
    assert "contribution_error" not in found.stats


def test_turns_that_a_transform_takes_the_weight_of_stay_in_the_sum() -> None:
    table = random_table(3)
    tree: dict[str, IntArray] = {
        "tree": np.zeros(table.num_rows, dtype=np.int64),
        # The first turns of all games are one turn.
        "node": np.where(table.turn == 0, 0, np.arange(table.num_rows)),
    }
    table = replace(table, **tree)
    parts = [("spa_rl", build_credit("spa_rl", NOW))]
    parts.append(("shared_once", build_credit("shared_once", transform=True)))
    found = chain_of(parts).apply(table)
    assert (found.weight == 0).sum() == table.num_games - 1
    assert np.isfinite(found.columns[TARGET]).sum() == table.num_rows


# --- learning -------------------------------------------------------------------------------------


def chain_world(
    policy: FloatArray, rng: np.random.Generator, games: int
) -> tuple[BoolArray, FloatArray]:
    """Actions ``[N, K]`` of a chain whose first turn alone decides, and its delayed outcomes."""
    right = rng.random((games, len(policy))) < policy
    return right, right[:, 0].astype(np.float64)


def learn(seed: int, shared_out: bool) -> FloatArray:
    """Chances of the right action after training on the chain."""
    rng = np.random.default_rng(seed)
    turns, games = 4, 32
    logits, head = np.zeros(turns), np.zeros(2 * turns)
    for _ in range(60):
        right, outcome = chain_world(1 / (1 + np.exp(-logits)), rng, games)
        features = np.eye(2 * turns)[2 * np.arange(turns) + right]
        shares = features @ head
        table = table_of([[1] * turns] * games, outcome.tolist(), shares.reshape(-1))
        table = replace(
            table,
            rewards={"outcome": table.rewards["outcome"]},
            tokens={**table.tokens, "values": np.zeros(table.num_rows)},
        )
        # Without what comes later, a turn hears of the outcome through its own reward alone.
        knobs: dict[str, Any] = {**NOW, "beta": 0.0, "estimator": "turn_ppo"} if shared_out else {}
        name = "spa_rl" if shared_out else "turn_ppo"
        advantage = table.grid(apply(table, name, gamma=0.0, **knobs).turns)
        chance = 1 / (1 + np.exp(-logits))
        logits += 0.3 * (advantage * (right - chance)).mean(axis=0)
        error = shares.sum(axis=1) - outcome
        head -= 0.1 * 2 * (error[:, None, None] * features).mean(axis=0).sum(axis=0)
    return 1 / (1 + np.exp(-logits))


def test_the_turn_that_decides_is_told_from_sums_alone() -> None:
    found = np.mean([learn(seed, True) for seed in range(5)], axis=0)
    plain = np.mean([learn(seed, False) for seed in range(5)], axis=0)
    assert found[0] > 0.9
    assert np.abs(found[1:] - 0.5).max() < 0.2
    assert abs(plain[0] - 0.5) < 0.2


# --- refusals -------------------------------------------------------------------------------------


def test_what_it_needs_is_said() -> None:
    needs = needs_of(build_credit("spa_rl"))
    assert "critic" in needs
    assert f"learner {COLUMN}" in needs
    assert not build_credit("spa_rl").needs_group


def test_a_table_without_readings_and_a_second_place_are_refused() -> None:
    table = worked()
    bare = replace(table, tokens={"values": table.tokens["values"]})
    with pytest.raises(UserError, match="spa_rl needs the token column contribution of a head"):
        apply(bare)
    chain = chain_of([("gae", build_credit("gae")), ("spa_rl", build_credit("spa_rl"))])
    with pytest.raises(UserError, match="spa_rl makes advantages itself; put it first"):
        chain.apply(table)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"alpha": -1.0}, "algorithm.spa_rl.alpha is -1.0"),
        ({"beta": float("nan")}, "algorithm.spa_rl.beta is nan"),
        ({"warmup_steps": -1}, "algorithm.spa_rl.warmup_steps is -1"),
        ({"estimator": "mpo"}, "algorithm.spa_rl.estimator is 'mpo'"),
        ({"gamma": 2.0}, "algorithm.gamma is 2.0"),
        ({"lam": -0.1}, "algorithm.lam is -0.1"),
        ({"refresh": False, **NOW}, "algorithm.spa_rl.refresh=false leaves the head untrained"),
    ],
)
def test_a_setting_out_of_its_range_is_named(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        build_credit("spa_rl", knobs)
    assert said in str(error.value)
