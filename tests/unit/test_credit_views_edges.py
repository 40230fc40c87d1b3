"""Methods with views: rows that are not valid, degenerate groups, games without a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from view_tables import (
    CHANGING,
    ESTIMATING,
    EXACT,
    FIXTURE_A,
    any_of,
    changed,
    run,
    table_of,
    tokens_of,
)

from delta_belief_rl.algo.base import VIEW
from delta_belief_rl.types import TurnTable


def random_table(seed: int, games: int = 6) -> TurnTable:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, games).tolist()
    rows = sum(lengths)
    tokens = rng.integers(1, 4, rows).tolist()
    table = table_of(
        lengths=lengths,
        returns=rng.integers(0, 2, games).tolist(),
        group=[0] * (games // 2) + [1] * (games - games // 2),
        states=[str(x) for x in rng.integers(0, 3, rows)],
        told=[0.0] * rows,
        played=[0.0] * rows,
        tokens=tokens,
        gains=rng.normal(size=rows).tolist(),
    )
    columns = {name: -rng.random(sum(tokens)) for name in table.tokens}
    return replace(table, tokens=columns)


def reordered(table: TurnTable, games: Sequence[int]) -> tuple[TurnTable, np.ndarray, np.ndarray]:
    """The games in another order, and the old places of its rows and tokens."""
    rows = np.concatenate([np.flatnonzero(table.traj == game) for game in games])
    ends = np.concatenate([[0], np.cumsum(table.n_tokens)])
    tokens = np.concatenate([np.arange(int(ends[row]), int(ends[row + 1])) for row in rows])
    number = np.argsort(games)
    columns: dict[str, Any] = {
        item.name: getattr(table, item.name)[rows]
        for item in fields(table)
        if isinstance(getattr(table, item.name), np.ndarray) and len(getattr(table, item.name))
    }
    columns["traj"] = number[columns["traj"]]
    return (
        replace(
            table,
            **columns,
            state_key=tuple(table.state_key[row] for row in rows),
            rewards={name: column[rows] for name, column in table.rewards.items()},
            tokens={name: column[tokens] for name, column in table.tokens.items()},
        ),
        rows,
        tokens,
    )


@pytest.mark.parametrize("name", [*ESTIMATING, *CHANGING])
def test_A13_the_order_of_the_games_does_not_matter(name: str) -> None:
    apply = any_of(name)
    for seed in range(5):
        table = random_table(seed)
        other, rows, tokens = reordered(table, np.random.default_rng(seed).permutation(6).tolist())
        one, two = apply(table), apply(other)
        np.testing.assert_allclose(one.turns[rows], two.turns, atol=EXACT)
        np.testing.assert_array_equal(one.weight[rows], two.weight)
        np.testing.assert_allclose(tokens_of(table, one)[tokens], tokens_of(other, two), atol=EXACT)


@pytest.mark.parametrize("name", [*ESTIMATING, *CHANGING])
def test_A13_what_stands_on_rows_that_are_not_valid_does_not_leak(name: str) -> None:
    apply = any_of(name)
    for seed in range(5):
        table = random_table(seed)
        valid = np.random.default_rng(100 + seed).random(table.num_rows) > 0.3
        masked = np.repeat(~valid, table.n_tokens)
        results = []
        for junk in (0.0, np.nan, 9e9, -np.inf):
            tokens = {n: np.where(masked, junk, column) for n, column in table.tokens.items()}
            paid = 0.0 if np.isnan(junk) else junk
            rewards = {n: np.where(valid, column, paid) for n, column in table.rewards.items()}
            results.append(apply(replace(table, valid=valid, tokens=tokens, rewards=rewards)))
        for found in results:
            assert not found.turns[~valid].any()
            assert not found.weight[~valid].any()
            assert not tokens_of(table, found)[masked].any()
            assert found.distil is None or not found.distil[~valid].any()
            np.testing.assert_array_equal(found.turns, results[0].turns)
            assert np.isfinite(tokens_of(table, found)).all()


@pytest.mark.parametrize("name", [*ESTIMATING, *CHANGING])
@pytest.mark.parametrize(
    ("lengths", "returns"),
    [
        ((1,), (1,)),
        ((3,), (0,)),
        ((2, 2, 2), (1, 1, 1)),
        ((2, 1, 3), (0, 0, 0)),
        ((1, 1), (1, 0)),
    ],
)
def test_A13_degenerate_groups_give_finite_numbers(
    name: str, lengths: tuple[int, ...], returns: tuple[float, ...]
) -> None:
    rows = sum(lengths)
    table = table_of(
        lengths=lengths,
        returns=returns,
        states=["s"] * rows,
        told=np.linspace(-2, -1, rows),
        played=np.linspace(-1, -2, rows),
    )
    found = any_of(name)(table)
    assert np.isfinite(found.turns).all()
    assert np.isfinite(tokens_of(table, found)).all()
    if name == "igpo" and len(set(returns)) == 1:
        assert not found.turns.any()


@pytest.mark.parametrize("name", [*ESTIMATING, *CHANGING])
def test_an_empty_table_has_no_advantages(name: str) -> None:
    found = any_of(name)(emptied(table_of()))
    assert found.turns.shape == (0,)
    assert all(np.isfinite(value) for value in found.stats.values())


def emptied(table: TurnTable) -> TurnTable:
    """The table without a row."""
    columns: dict[str, Any] = {
        item.name: getattr(table, item.name)[:0]
        for item in fields(table)
        if isinstance(getattr(table, item.name), np.ndarray)
    }
    return replace(
        table,
        **columns,
        state_key=(),
        rewards={name: column[:0] for name, column in table.rewards.items()},
        tokens={name: column[:0] for name, column in table.tokens.items()},
    )


@pytest.mark.parametrize(
    ("name", "view"),
    [("rlsd", "reference"), ("opid", "retry"), ("orsd", "rubric"), ("sdar", "reference")],
)
def test_a_game_without_the_view_keeps_its_advantages(name: str, view: str) -> None:
    table = random_table(3)
    lost = np.repeat(table.traj == 2, table.n_tokens)
    told = np.where(lost, np.nan, table.tokens[VIEW + view])
    partly = replace(table, tokens={**table.tokens, VIEW + view: told})
    before = run("grpo", table)
    found = changed(name, partly)
    np.testing.assert_allclose(
        tokens_of(table, found)[lost], tokens_of(table, before)[lost], atol=1e-12
    )
    np.testing.assert_allclose(found.turns[table.traj == 2], before.turns[table.traj == 2])
    assert found.stats["view_share"] == pytest.approx(5 / 6)
    if found.distil is not None:
        np.testing.assert_array_equal(found.distil, (table.traj != 2).astype(float))


def test_one_token_that_is_no_number_takes_the_view_from_its_game() -> None:
    table = random_table(4)
    told = table.tokens[VIEW + "hindsight"].copy()
    told[0] = np.nan
    hurt = run("hcapo", replace(table, tokens={**table.tokens, VIEW + "hindsight": told}))
    assert hurt.stats["view_share"] == pytest.approx(5 / 6)
    assert np.isfinite(hurt.turns).all()


def test_a_table_without_the_view_is_an_error_of_the_program() -> None:
    bare = replace(FIXTURE_A, tokens={"logp": FIXTURE_A.tokens["logp"]})
    for name in ("hcapo", "relace", "opsd", "sdpo"):
        with pytest.raises(ValueError, match="no column view:"):
            run(name, bare)
    for name in CHANGING:
        with pytest.raises(ValueError, match="no column view:"):
            changed(name, bare)
