"""Methods with a critic: worked numbers, reductions, what must not leak, and a chain to learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import VALUES, Advantage
from delta_belief_rl.algo.catalogue import needs_of
from delta_belief_rl.algo.chain import chain_of
from delta_belief_rl.types import FloatArray, IntArray, TurnTable, UserError

METHODS = ("gae", "turn_ppo", "bilevel_gae", "mpo")
KNOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gae", {"gamma": 0.9, "lam": 0.8}),
    ("turn_ppo", {"gamma": 0.95, "lam": 0.9}),
    ("bilevel_gae", {"lam": 0.95}),
    ("bilevel_gae", {"lam": 0.95, "lam_turn": 0.9, "version": "v2"}),
    ("mpo", {"lam": 0.9}),
    ("mpo", {"lam": 0.9, "signal": "gae"}),
    ("mpo", {"lam": 0.9, "signal": "external", "column": "hint"}),
)
RAW = {"normalise": False}
N_TOKENS = np.array([2, 3, 1])
REWARDS = np.array([0.1, 0.2, 1.0])
V = np.array([0.5, 0.4, 0.6, 0.7, 0.5, 0.8])
"""Fixture B without its observation tokens, which are no sampled tokens."""


def table_of(
    games: list[list[tuple[int, float]]],
    values: FloatArray,
    *,
    valid: list[bool] | None = None,
    **more: Any,
) -> TurnTable:
    """Games as lists of turns ``(tokens, reward)``."""
    rows = [(g, k, n, r) for g, game in enumerate(games) for k, (n, r) in enumerate(game)]
    traj, turn, tokens, rewards = (np.array(column) for column in zip(*rows, strict=True))
    size = len(rows)
    table = TurnTable(
        group=np.zeros(size, dtype=np.int64),
        traj=traj,
        turn=turn,
        n_tokens=tokens,
        valid=np.ones(size, dtype=np.bool_) if valid is None else np.array(valid),
        terminal=np.append(np.diff(traj) > 0, True),
        truncated=np.zeros(size, dtype=np.bool_),
        won=np.zeros(size, dtype=np.bool_),
        answered=np.ones(size, dtype=np.bool_),
        rewards={"outcome": rewards * 0.75, "belief": rewards * 0.25},
        tokens={"values": values},
    )
    return replace(table, **more)


def fixture_b(values: FloatArray = V) -> TurnTable:
    return table_of([list(zip(N_TOKENS.tolist(), REWARDS.tolist(), strict=True))], values)


def apply(name: str, table: TurnTable, **knobs: Any) -> Advantage:
    return build_credit(name, knobs).apply(table)


def tokens_of(advantage: Advantage, table: TurnTable) -> FloatArray:
    if advantage.tokens is not None:
        return advantage.tokens
    return advantage.turns[table.token_row()]


def targets_of(advantage: Advantage) -> FloatArray:
    assert advantage.targets is not None
    return advantage.targets


def random_table(seed: int, games: int = 5, one_token: bool = False) -> TurnTable:
    rng = np.random.default_rng(seed)
    made = [
        [
            (1 if one_token else int(rng.integers(1, 5)), float(rng.normal()))
            for _ in range(rng.integers(1, 6))
        ]
        for _ in range(games)
    ]
    count = sum(n for game in made for n, _ in game)
    table = table_of(made, rng.normal(size=count))
    end = rng.normal(size=games)[table.traj[table.token_row()]]
    tokens = {**table.tokens, "hint": rng.normal(size=count), "end_value": end}
    return replace(table, tokens=tokens)


# --- worked numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "advantages", "targets"),
    [
        (
            {"lam": 0.95, **RAW},
            [0.665784, 0.806089, 0.532725, 0.4555, 0.69, 0.2],
            [1.165784, 1.206089, 1.132725, 1.1555, 1.19, 1.0],
        ),
        (
            {"gamma": 0.9, "lam": 0.8, **RAW},
            [0.106609, 0.342512, 0.142378, 0.15608, 0.564, 0.2],
            [0.606609, 0.742512, 0.742378, 0.85608, 1.064, 1.0],
        ),
        (
            {"gamma": 0.9, "lam": 0.8},
            [-0.837348, 0.521939, -0.631245, -0.552291, 1.798165, -0.299221],
            [0.606609, 0.742512, 0.742378, 0.85608, 1.064, 1.0],
        ),
    ],
)
def test_gae_has_the_numbers_of_the_worked_example(
    knobs: Mapping[str, Any], advantages: list[float], targets: list[float]
) -> None:
    found = apply("gae", fixture_b(), **knobs)
    assert found.tokens == pytest.approx(advantages, abs=1e-5)
    assert targets_of(found) == pytest.approx(targets, abs=1e-5)
    means = [np.mean(advantages[:2]), np.mean(advantages[2:5]), advantages[5]]
    assert found.turns == pytest.approx(means, abs=1e-5)


def test_turn_ppo_has_the_numbers_of_the_worked_example() -> None:
    raw = apply("turn_ppo", fixture_b(), gamma=0.95, lam=0.9, **RAW)
    assert raw.turns == pytest.approx([0.624005, 0.531, 0.2], abs=1e-5)
    assert raw.tokens is None
    nan = np.nan
    want = [1.124005, nan, 1.131, nan, nan, 1.0]
    np.testing.assert_allclose(targets_of(raw), want, atol=1e-5)
    scaled = apply("turn_ppo", fixture_b(), gamma=0.95, lam=0.9)
    assert scaled.turns == pytest.approx([0.773306, 0.355976, -1.129282], abs=1e-5)
    np.testing.assert_allclose(targets_of(scaled), want, atol=1e-5)


def test_bilevel_gae_v1_has_the_numbers_of_the_worked_example() -> None:
    found = apply("bilevel_gae", fixture_b(), lam=0.95, **RAW)
    want = [0.615399, 0.753051, 0.488051, 0.408475, 0.6405, 0.2]
    assert found.tokens == pytest.approx(want, abs=1e-5)
    # The last token of each turn has the turn's advantage.
    assert np.array(found.tokens)[[1, 4, 5]] == pytest.approx([0.753051, 0.6405, 0.2], abs=1e-5)
    assert targets_of(found) == pytest.approx(np.array(want) + V, abs=1e-5)


def test_bilevel_gae_v2_has_the_numbers_of_the_worked_example() -> None:
    found = apply("bilevel_gae", fixture_b(), lam=0.95, lam_turn=0.9, version="v2", **RAW)
    want = [0.664227, 0.80445, 0.532725, 0.4555, 0.69, 0.2]
    assert found.tokens == pytest.approx(want, abs=1e-5)
    assert targets_of(found) == pytest.approx(np.array(want) + V, abs=1e-5)


def test_mpo_has_the_numbers_of_the_worked_example() -> None:
    found = apply("mpo", fixture_b(), lam=0.9, **RAW)
    assert found.turns == pytest.approx([0.722, 0.58, 0.2], abs=1e-5)
    want = [0.522, 0.922, 0.546667, 0.246667, 0.946667, 0.2]
    assert found.tokens == pytest.approx(want, abs=1e-5)
    # Every token of a turn is worth what the turn is.
    assert targets_of(found) == pytest.approx([1.222, 1.222, 1.18, 1.18, 1.18, 1.0], abs=1e-5)


def test_mpo_holds_differences_to_the_size_of_the_turn() -> None:
    table = replace(
        table_of([[(3, 0.6)]], np.array([0.5, 0.0, 0.0])),
        tokens={"values": np.array([0.5, 0.0, 0.0]), "z": np.array([-0.3, 0.5, 0.1])},
    )
    found = apply("mpo", table, signal="external", column="z", **RAW)
    assert found.turns == pytest.approx([0.1])
    assert found.tokens == pytest.approx([0.0, 0.2, 0.1], abs=1e-5)
    assert found.stats["mpo_scale"] == pytest.approx(0.25)
    twice = apply("mpo", table, signal="external", column="z", kappa=2.0, **RAW)
    assert twice.tokens == pytest.approx([-0.1, 0.3, 0.1], abs=1e-5)


# --- reductions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_without_values_gae_is_the_reward_still_to_come(seed: int) -> None:
    table = random_table(seed)
    table = replace(table, tokens={"values": np.zeros(int(table.n_tokens.sum()))})
    for knobs in (dict[str, Any](), {"gamma": 0.9}):
        want = build_credit("reinforce_plus_plus", knobs).apply(table)
        got = apply("gae", table, **knobs)
        np.testing.assert_allclose(tokens_of(got, table), tokens_of(want, table), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scaled", [True, False])
def test_turns_of_one_token_make_all_recursions_one(seed: int, scaled: bool) -> None:
    table = random_table(seed, one_token=True)
    knobs = {"gamma": 0.9, "lam": 0.8, "normalise": scaled}
    want = apply("turn_ppo", table, **knobs)
    both = {**knobs, "gamma_turn": 0.9}
    for name, options in (
        ("gae", knobs),
        ("bilevel_gae", both),
        ("bilevel_gae", {**both, "version": "v2"}),
        ("mpo", knobs),
    ):
        got = apply(name, table, **options)
        np.testing.assert_allclose(tokens_of(got, table), want.turns, atol=1e-12)
        np.testing.assert_allclose(targets_of(got), targets_of(want), atol=1e-12)


@pytest.mark.parametrize("signal", ["td", "gae", "external"])
@pytest.mark.parametrize("seed", range(3))
def test_mpo_keeps_the_mean_of_each_turn_and_no_sign_turns_over(seed: int, signal: str) -> None:
    table = random_table(seed)
    knobs = {"gamma": 0.95, "lam": 0.9}
    column = {"column": "hint"} if signal == "external" else {}
    want = apply("turn_ppo", table, **knobs)
    found = apply("mpo", table, signal=signal, eta=5.0, **column, **knobs)
    each, row = tokens_of(found, table), table.token_row()
    np.testing.assert_allclose(found.turns, want.turns, atol=1e-12)
    means = np.bincount(row, weights=each) / table.n_tokens
    np.testing.assert_allclose(means, want.turns, atol=1e-12)
    assert (each * want.turns[row] >= -1e-12).all()
    assert np.abs(each - want.turns[row]).max() > 0.1
    none = apply("mpo", table, signal=signal, eta=0.0, **column, **knobs)
    np.testing.assert_array_equal(tokens_of(none, table), want.turns[row])


def test_the_sums_of_the_td_signal_are_the_errors_of_turns() -> None:
    table = fixture_b()
    level = apply("turn_ppo", table, lam=0.0, **RAW).turns
    assert level == pytest.approx([0.2, 0.4, 0.2])
    one = apply("gae", table, lam=0.0, **RAW)
    assert np.bincount(table.token_row(), weights=tokens_of(one, table)) == pytest.approx(level)


def test_with_the_gae_signal_of_no_reach_mpo_is_that_of_td() -> None:
    table = random_table(1)
    for knobs in ({"lam": 0.0}, {"lam": 0.0, "normalise": False}):
        one, other = (apply("mpo", table, signal=name, **knobs) for name in ("td", "gae"))
        np.testing.assert_allclose(tokens_of(one, table), tokens_of(other, table), atol=1e-12)


def test_behind_another_method_mpo_tells_the_tokens_of_its_turns_apart() -> None:
    table = random_table(4)
    table = replace(table, group=table.traj % 2)
    alone = build_credit("rloo").apply(table)
    behind = build_credit("mpo", {"lam": 0.9}, transform=True)
    found = chain_of([("rloo", build_credit("rloo")), ("mpo", behind)]).apply(table)
    np.testing.assert_array_equal(found.turns, alone.turns)
    each = tokens_of(found, table)
    means = np.bincount(table.token_row(), weights=each) / table.n_tokens
    np.testing.assert_allclose(means, alone.turns, atol=1e-12)
    assert np.isfinite(targets_of(found)).all()
    assert "explained_variance" in found.stats
    chained = chain_of([("turn_ppo", build_credit("turn_ppo", {"lam": 0.9})), ("mpo", behind)])
    first = apply("turn_ppo", table, lam=0.9)
    np.testing.assert_array_equal(targets_of(chained.apply(table)), targets_of(first))


# --- what must not matter -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "knobs"), KNOBS)
def test_A9_junk_on_turns_that_are_not_valid_changes_nothing(
    name: str, knobs: dict[str, Any]
) -> None:
    games = [[(2, 1.0), (3, 2.0), (1, 3.0)], [(1, 0.5), (2, -1.0)]]
    valid = [True, False, True, True, False]
    rng = np.random.default_rng(0)
    values, hint = rng.normal(size=9), rng.normal(size=9)
    broken = np.repeat(~np.array(valid), [2, 3, 1, 1, 2])
    found: list[Advantage] = []
    for junk in (0.0, 9.0, np.nan, np.inf):
        table = table_of(games, np.where(broken, junk, values), valid=valid)
        table = replace(
            table,
            rewards={"outcome": np.where(table.valid, table.rewards["outcome"], junk)},
            tokens={**table.tokens, "hint": np.where(broken, junk, hint)},
        )
        found.append(apply(name, table, **knobs))
    for other in found[1:]:
        np.testing.assert_array_equal(other.turns, found[0].turns)
        np.testing.assert_array_equal(targets_of(other), targets_of(found[0]))
        if other.tokens is not None:
            np.testing.assert_array_equal(other.tokens, found[0].tokens)
        assert other.stats == found[0].stats
    first = found[0]
    assert (first.turns[[1, 4]] == 0).all()
    assert (first.weight == valid).all()
    assert np.isnan(targets_of(first)[broken]).all()
    if first.tokens is not None:
        assert (first.tokens[broken] == 0).all()


@pytest.mark.parametrize(("name", "knobs"), KNOBS)
def test_A4_a_turn_that_is_paid_nothing_is_a_turn(name: str, knobs: dict[str, Any]) -> None:
    hint = np.arange(6) % 4 / 3
    found: list[Advantage] = []
    for little in (0.0, 1e-13):
        table = table_of([[(2, little), (3, little), (1, 1.0)]], V)
        table = replace(table, tokens={**table.tokens, "hint": hint})
        found.append(apply(name, table, **knobs))
    np.testing.assert_allclose(found[0].turns, found[1].turns, atol=1e-9)
    np.testing.assert_allclose(targets_of(found[0]), targets_of(found[1]), atol=1e-9)


@pytest.mark.parametrize(("name", "knobs"), KNOBS)
def test_a_turn_that_is_not_valid_is_stepped_over_as_if_it_were_not_there(
    name: str, knobs: dict[str, Any]
) -> None:
    values, hint = np.arange(6) / 7, np.arange(6) % 4 / 3
    with_gap = table_of([[(2, 1.0), (3, 5.0), (1, 2.0)]], values, valid=[True, False, True])
    without = table_of([[(2, 1.0), (1, 2.0)]], values[[0, 1, 5]])
    gap = apply(name, replace(with_gap, tokens={**with_gap.tokens, "hint": hint}), **knobs)
    tokens = {**without.tokens, "hint": hint[[0, 1, 5]]}
    none = apply(name, replace(without, tokens=tokens), **knobs)
    np.testing.assert_allclose(gap.turns[[0, 2]], none.turns)
    np.testing.assert_allclose(targets_of(gap)[[0, 1, 5]], targets_of(none))


@pytest.mark.parametrize(("name", "knobs"), KNOBS)
@pytest.mark.parametrize("bootstrap", [True, False])
def test_the_order_of_rows_does_not_matter(
    name: str, knobs: dict[str, Any], bootstrap: bool
) -> None:
    table = random_table(7)
    table = replace(table, truncated=table.terminal & (table.traj % 2 == 0))
    order = np.random.default_rng(1).permutation(table.num_rows)
    starts = np.cumsum(table.n_tokens) - table.n_tokens
    index = np.concatenate([starts[row] + np.arange(int(table.n_tokens[row])) for row in order])
    changed = replace(
        table,
        **{
            column: getattr(table, column)[order]
            for column in ("group", "traj", "turn", "n_tokens", "valid", "terminal", "truncated")
        },
        rewards={channel: values[order] for channel, values in table.rewards.items()},
        tokens={column: values[index] for column, values in table.tokens.items()},
    )
    options = {**knobs, "bootstrap_truncated": bootstrap}
    want, got = apply(name, table, **options), apply(name, changed, **options)
    np.testing.assert_allclose(got.turns, want.turns[order], atol=1e-12)
    np.testing.assert_allclose(targets_of(got), targets_of(want)[index], atol=1e-12)
    np.testing.assert_allclose(tokens_of(got, changed), tokens_of(want, table)[index], atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_games_without_a_difference_teach_nothing_and_no_number_breaks(name: str) -> None:
    alike = table_of([[(1, 1.0)], [(1, 1.0)]], np.zeros(2))
    found = apply(name, alike)
    assert (tokens_of(found, alike) == 0).all()
    assert "explained_variance" not in found.stats
    lone = table_of([[(1, 2.0)]], np.array([0.5]))
    assert (tokens_of(apply(name, lone), lone) == 0).all()
    assert tokens_of(apply(name, lone, **RAW), lone) == pytest.approx([1.5])
    nothing = table_of([[(2, 1.0), (1, 1.0)]], np.ones(3), valid=[False, False])
    void = apply(name, nothing)
    assert (tokens_of(void, nothing) == 0).all()
    assert np.isnan(targets_of(void)).all()
    empty = replace(
        alike,
        **{
            column: getattr(alike, column)[:0]
            for column in ("group", "traj", "turn", "n_tokens", "valid", "terminal", "truncated")
        },
        won=alike.won[:0],
        rewards={},
        tokens={"values": np.zeros(0)},
    )
    assert apply(name, empty).turns.shape == (0,)


@pytest.mark.parametrize("name", METHODS)
def test_the_reward_of_a_turn_without_a_token_is_paid_to_the_turn_before(name: str) -> None:
    values = np.array([0.3, 0.1, 0.2])
    silent = table_of([[(2, 1.0), (0, -5.0), (1, 2.0), (0, 7.0)]], values)
    whole = table_of([[(2, -4.0), (1, 9.0)]], values)
    got, want = apply(name, silent, **RAW), apply(name, whole, **RAW)
    np.testing.assert_allclose(tokens_of(got, silent), tokens_of(want, whole))
    np.testing.assert_allclose(targets_of(got), targets_of(want))
    assert got.rewards.sum() == pytest.approx(5.0)


def test_a_game_that_was_cut_off_goes_on_behind_its_end_where_that_is_wanted() -> None:
    table = replace(fixture_b(), truncated=np.array([False, False, True]))
    table = replace(table, tokens={**table.tokens, "end_value": np.full(6, 0.4)})
    # As if a last turn of value 0.4 and no error followed.
    longer = table_of([[(2, 0.1), (3, 0.2), (1, 1.0), (1, 0.4)]], np.append(V, 0.4))
    for name, knobs in (
        ("gae", {"gamma": 0.9, "lam": 0.8}),
        ("turn_ppo", {"gamma": 0.9, "lam": 0.8}),
        ("bilevel_gae", {"lam": 0.8}),
        ("bilevel_gae", {"lam": 0.8, "version": "v2"}),
        ("mpo", {"lam": 0.8}),
    ):
        want = apply(name, longer, **knobs, **RAW)
        got = apply(name, table, bootstrap_truncated=True, **knobs, **RAW)
        np.testing.assert_allclose(targets_of(got), targets_of(want)[:6], atol=1e-12)
        off = apply(name, table, **knobs, **RAW)
        np.testing.assert_array_equal(off.turns, apply(name, fixture_b(), **knobs, **RAW).turns)
        ended = replace(table, truncated=np.zeros(3, dtype=np.bool_))
        on = apply(name, ended, bootstrap_truncated=True, **knobs, **RAW)
        np.testing.assert_array_equal(on.turns, off.turns)


# --- what is told and refused ---------------------------------------------------------------------


def test_how_well_the_critic_told_its_targets_is_reported() -> None:
    table = random_table(3)
    found = apply("gae", table, lam=0.9)
    target, value = targets_of(found), table.tokens["values"]
    assert found.stats["values_mean"] == pytest.approx(value.mean())
    assert found.stats["returns_mean"] == pytest.approx(target.mean())
    want = 1 - (target - value).var() / target.var()
    assert found.stats["explained_variance"] == pytest.approx(want)
    turns = apply("turn_ppo", table, lam=0.9)
    kept = np.isfinite(targets_of(turns))
    assert turns.stats["values_mean"] == pytest.approx(value[kept].mean())
    exact = replace(table, tokens={"values": np.where(np.isnan(target), 0.0, value)})
    perfect = apply("gae", replace(exact, tokens={"values": _returns(table)}))
    assert perfect.stats["explained_variance"] == pytest.approx(1.0)


def _returns(table: TurnTable) -> FloatArray:
    """The reward still to come at each token, undiscounted."""
    reward = sum(table.rewards.values())
    later = (table.traj[:, None] == table.traj) & (table.turn[:, None] <= table.turn)
    return (later @ reward)[table.token_row()]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_names_the_critic_among_its_needs_and_refuses_to_go_without(name: str) -> None:
    method = build_credit(name)
    assert VALUES in method.requires
    assert needs_of(method) == ("critic",)
    bare = replace(fixture_b(), tokens={})
    with pytest.raises(UserError, match=f"{name} needs the token column values"):
        method.apply(bare)
    with pytest.raises(UserError, match=f"{name} needs the token column end_value"):
        apply(name, fixture_b(), bootstrap_truncated=True)
    if name != "mpo":
        with pytest.raises(UserError, match="put it first"):
            method.apply(fixture_b(), method.apply(fixture_b()))


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("gae", {"lam": 1.1}, "algorithm.lam is 1.1"),
        ("turn_ppo", {"gamma": -0.1}, "algorithm.gamma is -0.1"),
        ("bilevel_gae", {"gamma_turn": 2.0}, "algorithm.bilevel_gae.gamma_turn is 2.0"),
        ("bilevel_gae", {"lam_turn": -1.0}, "algorithm.bilevel_gae.lam_turn is -1.0"),
        ("bilevel_gae", {"version": "v3"}, "algorithm.bilevel_gae.version is 'v3'"),
        ("mpo", {"eta": -1.0}, "algorithm.mpo.eta is -1.0"),
        ("mpo", {"kappa": float("nan")}, "algorithm.mpo.kappa is nan"),
        ("mpo", {"signal": "entropy"}, "algorithm.mpo.signal is 'entropy'"),
        ("mpo", {"signal": "external"}, "algorithm.mpo.column is ''"),
        ("mpo", {"column": "logp"}, "algorithm.mpo.column is 'logp'"),
    ],
)
def test_a_setting_out_of_its_range_is_named(name: str, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        build_credit(name, knobs)
    assert said in str(error.value)


def test_an_external_signal_that_is_not_there_is_named_and_one_that_is_not_finite_is_left() -> None:
    table = random_table(2)
    knobs = {"signal": "external", "column": "view:x", "lam": 0.9}
    with pytest.raises(UserError, match=r"algorithm.mpo.column is 'view:x', which nothing"):
        apply("mpo", table, **knobs)
    row = table.token_row()
    signal = np.where(row == row[0], np.nan, table.tokens["hint"])
    found = apply("mpo", replace(table, tokens={**table.tokens, "view:x": signal}), **knobs)
    whole = apply("mpo", table, signal="external", column="hint", lam=0.9)
    each = tokens_of(found, table)
    assert (each[row == row[0]] == found.turns[row[0]]).all()
    np.testing.assert_array_equal(each[row != row[0]], tokens_of(whole, table)[row != row[0]])


# --- learning -------------------------------------------------------------------------------------

LENGTH, TURNS, GAMES, UPDATES, RATE = 4, 5, 16, 60, 1.0
RIGHT = np.array([0, 1, 1, 0])
"""The action that leads on from each place of a chain; the other one stays."""


def sampled(
    logits: FloatArray, critic: FloatArray, rng: np.random.Generator
) -> tuple[TurnTable, IntArray, IntArray, IntArray]:
    """Games on the chain, paid at its end; and place, turn and action of each token.

    A turn has two tokens: one that says nothing and the action.
    """
    games: list[list[tuple[int, float]]] = []
    rows: list[tuple[int, int, int]] = []
    for _ in range(GAMES):
        place = turn = 0
        games.append([])
        while place < LENGTH and turn < TURNS:
            first = 1 / (1 + np.exp(logits[place, 1] - logits[place, 0]))
            action = int(rng.random() > first)
            rows.append((place, turn, action))
            place += int(action == RIGHT[place])
            games[-1].append((2, float(place == LENGTH)))
            turn += 1
    places, turns, actions = (np.array(column) for column in zip(*rows, strict=True))
    table = table_of(games, np.repeat(critic[places, turns], 2))
    return table, places, turns, actions


def win_rate(logits: FloatArray) -> float:
    """Exact: the chance to get to the end in time."""
    right = np.exp(logits - logits.max(axis=1, keepdims=True))
    right = (right / right.sum(axis=1, keepdims=True))[np.arange(LENGTH), RIGHT]
    at = np.eye(LENGTH + 1)[0]
    for _ in range(TURNS):
        moved = at[:LENGTH] * right
        at = at - np.append(moved, 0.0) + np.insert(moved, 0, 0.0)
    return float(at[LENGTH])


def trained(name: str, knobs: Mapping[str, Any], seed: int) -> float:
    """The win rate after some updates of a tabular policy and a tabular critic."""
    rng, credit = np.random.default_rng(seed), build_credit(name, knobs)
    logits, critic = np.zeros((LENGTH, 2)), np.zeros((LENGTH, TURNS))
    for _ in range(UPDATES):
        table, places, turns, actions = sampled(logits, critic, rng)
        advantage = credit.apply(table)
        # The second token of a turn is the one that acts.
        step, chosen = np.zeros_like(logits), np.exp(logits - logits.max(axis=1, keepdims=True))
        chosen = chosen / chosen.sum(axis=1, keepdims=True)
        signal = tokens_of(advantage, table)[1::2]
        np.add.at(step, (places, actions), signal)
        np.add.at(step, places, -signal[:, None] * chosen[places])
        logits = logits + RATE * step / GAMES
        targets = targets_of(advantage).reshape(-1, 2)
        seen, total = np.zeros_like(critic), np.zeros_like(critic)
        np.add.at(seen, (places, turns), np.isfinite(targets).sum(axis=1))
        np.add.at(total, (places, turns), np.nansum(targets, axis=1))
        mean = total / np.maximum(seen, 1)
        critic = np.where(seen > 0, critic + 0.3 * (mean - critic), critic)
    return win_rate(logits)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("gae", {"lam": 0.95}),
        ("turn_ppo", {"lam": 0.95}),
        ("bilevel_gae", {"lam": 0.95}),
        ("bilevel_gae", {"lam": 0.95, "version": "v2"}),
        ("mpo", {"lam": 0.95}),
        ("mpo", {"lam": 0.95, "signal": "gae"}),
    ],
)
def test_a_method_learns_a_chain_that_is_paid_at_its_end(name: str, knobs: dict[str, Any]) -> None:
    by_chance = win_rate(np.zeros((LENGTH, 2)))
    assert by_chance == pytest.approx(6 / 32)
    rates = [trained(name, knobs, seed) for seed in range(5)]
    assert min(rates) > 0.8, rates
