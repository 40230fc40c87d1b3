"""The token baseline in ArCHer's advantages: worked numbers, what it leaves alone, its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from turn_tables import FIXTURE_A, Act, by_turn, rows_in_order, table_of, with_junk

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.chain import chain_of, reads_of
from delta_belief_rl.types import FloatArray, TurnTable, UserError


def judged(table: TurnTable, lead: FloatArray, baseline: FloatArray) -> TurnTable:
    """The table with turns that are ``lead`` ahead, ``[R]``, and a baseline of tokens, ``[S]``."""
    row = table.token_row()
    zeros = np.zeros(len(row))
    columns = {"archer_q": lead[row], "archer_v": zeros, "archer_baseline": baseline}
    return replace(table, tokens=columns)


def random_table(table: TurnTable, seed: int = 0) -> TurnTable:
    rng = np.random.default_rng(seed)
    size = int(table.n_tokens.sum())
    return judged(table, rng.normal(size=table.num_rows), rng.normal(size=size))


def apply(table: TurnTable, token_baseline: bool = True, **knobs: Any) -> Advantage:
    return build_credit("archer", {"token_baseline": token_baseline, **knobs}).apply(table)


def tokens_of(found: Advantage) -> FloatArray:
    assert found.tokens is not None
    return found.tokens


WORKED = judged(
    table_of([[Act("s", "a"), Act("s", "b", 1.0)]]),
    np.array([0.15, -0.1]),
    np.array([0.05, 0.25, 0.0, -0.1, 0.2]),
)
"""A turn of two tokens and one of three."""


def test_a_token_gets_the_lead_of_its_turn_less_the_baseline() -> None:
    found = apply(WORKED)
    np.testing.assert_allclose(tokens_of(found), [0.1, -0.1, -0.1, 0.0, -0.3], atol=1e-5)
    np.testing.assert_allclose(found.turns, [0.0, -0.4 / 3], atol=1e-5)
    # The leads have the variance 0.015 over tokens, what is left of them 0.0176.
    assert found.stats["archer_baseline_explained"] == pytest.approx(1 - 0.0176 / 0.015)
    lead = found.columns["archer_lead"]
    np.testing.assert_allclose(lead, [0.15, 0.15, -0.1, -0.1, -0.1], atol=1e-5)
    assert (found.weight == 1).all()


def test_a_baseline_that_knows_the_leads_leaves_nothing() -> None:
    lead = np.random.default_rng(0).normal(size=FIXTURE_A.num_rows)
    found = apply(judged(FIXTURE_A, lead, lead[FIXTURE_A.token_row()]))
    assert (tokens_of(found) == 0).all()
    np.testing.assert_allclose(found.turns, 0.0, atol=1e-12)
    assert found.stats["archer_baseline_explained"] == 1.0


def test_reduction_a_baseline_of_zero_changes_nothing() -> None:
    table = random_table(FIXTURE_A)
    silent = replace(
        table, tokens={**table.tokens, "archer_baseline": np.zeros(len(table.token_row()))}
    )
    plain, found = apply(table, token_baseline=False), apply(silent)
    np.testing.assert_array_equal(found.turns, plain.turns)
    np.testing.assert_array_equal(tokens_of(found), plain.turns[table.token_row()])
    explained = found.stats["archer_baseline_explained"]
    assert explained == 0.0
    assert found.stats == {**plain.stats, "archer_baseline_explained": explained}


def test_reduction_without_it_nothing_of_it_is_read_or_told() -> None:
    table = random_table(FIXTURE_A)
    bare = {name: table.tokens[name] for name in ("archer_q", "archer_v")}
    want = build_credit("archer").apply(replace(table, tokens=bare))
    got = apply(table, token_baseline=False)
    assert got.tokens is None
    assert set(got.columns) == {"archer_game", "archer_reward", "archer_done"}
    np.testing.assert_array_equal(got.turns, want.turns)
    assert got.stats == want.stats
    assert reads_of(build_credit("archer")) == ()


def test_in_the_warm_up_the_policy_gets_nothing_and_the_baseline_its_leads() -> None:
    table = random_table(FIXTURE_A)
    plain = apply(table)
    for update, warm in ((0, True), (1, False)):
        found = apply(replace(table, update=update), warmup_steps=1)
        assert (found.tokens is None) == warm
        assert (found.turns == (0.0 if warm else plain.turns)).all()
        np.testing.assert_array_equal(found.columns["archer_lead"], plain.columns["archer_lead"])


def test_A9_what_it_says_of_a_turn_that_is_not_valid_has_no_influence() -> None:
    games = [[Act("s", "a", 0.5), Act("t", "b", 1.0), Act("u", "c", 2.0)], [Act("s", "a", 1.0)]]
    clean = random_table(table_of(games, invalid=[(0, 1)]))
    want = apply(clean)
    broken = (~clean.valid)[clean.token_row()]
    assert (tokens_of(want)[broken] == 0).all()
    assert np.isnan(want.columns["archer_lead"][broken]).all()
    for junk in (9.0, np.nan, np.inf):
        tokens = {name: np.where(broken, junk, column) for name, column in clean.tokens.items()}
        got = apply(replace(with_junk(clean), tokens=tokens))
        np.testing.assert_array_equal(tokens_of(got), tokens_of(want))
        np.testing.assert_array_equal(got.turns, want.turns)
        np.testing.assert_array_equal(got.columns["archer_lead"], want.columns["archer_lead"])
        assert got.stats == want.stats


def test_the_order_of_rows_does_not_matter() -> None:
    table = random_table(table_of([[Act("s", "a", 1.0)] * 3, [Act("s", "b", 0.5)] * 2]))
    order = np.random.default_rng(2).permutation(table.num_rows)
    starts = np.cumsum(table.n_tokens) - table.n_tokens
    index = np.concatenate([starts[row] + np.arange(int(table.n_tokens[row])) for row in order])
    changed = replace(
        rows_in_order(table, order),
        tokens={name: column[index] for name, column in table.tokens.items()},
    )
    want, got = apply(table), apply(changed)
    np.testing.assert_array_equal(tokens_of(got), tokens_of(want)[index])
    assert by_turn(changed, got.turns) == pytest.approx(by_turn(table, want.turns))
    assert got.stats == pytest.approx(want.stats)


def test_leads_that_do_not_differ_and_games_without_a_valid_turn_explain_nothing() -> None:
    size = int(FIXTURE_A.n_tokens.sum())
    equal = apply(judged(FIXTURE_A, np.full(FIXTURE_A.num_rows, 0.5), np.arange(size) / size))
    assert "archer_baseline_explained" not in equal.stats
    nothing = replace(FIXTURE_A, valid=np.zeros(FIXTURE_A.num_rows, dtype=np.bool_))
    none = apply(random_table(nothing))
    assert "archer_baseline_explained" not in none.stats
    assert (tokens_of(none) == 0).all()
    assert (none.weight == 0).all()


def test_it_is_named_among_what_the_settings_read_and_refused_where_nothing_makes_it() -> None:
    credit = build_credit("archer", {"token_baseline": True})
    assert reads_of(credit) == ("tokens:archer_baseline",)
    tokens = {name: WORKED.tokens[name] for name in ("archer_q", "archer_v")}
    with pytest.raises(UserError, match="archer needs the token column archer_baseline"):
        credit.apply(replace(WORKED, tokens=tokens))


def test_a_transform_behind_it_goes_on_from_the_tokens() -> None:
    table = random_table(FIXTURE_A)
    parts = [
        ("archer", build_credit("archer", {"token_baseline": True})),
        ("pearl", build_credit("pearl", transform=True)),
    ]
    own, found = apply(table), chain_of(parts).apply(table)
    # A decision that lost before weighs 1.375 times as much, in each of its tokens.
    ratio = tokens_of(found) / tokens_of(own)
    assert set(ratio.round(9).tolist()) == {1.0, 1.375}
    assert (tokens_of(own)[ratio > 1.1] < 0).all()
    np.testing.assert_array_equal(found.columns["archer_lead"], own.columns["archer_lead"])


# --- the gradient ---------------------------------------------------------------------------------

SPOKEN = [(first, second) for first in (0, 1) for second in (0, 1)]
"""All actions of two tokens."""
CHANCES: Mapping[tuple[int, ...], FloatArray] = {
    (): np.array([0.3, 0.7]),
    (0,): np.array([0.6, 0.4]),
    (1,): np.array([0.2, 0.8]),
}
"""Of the next token, by what has been said."""
PLACES = list(CHANCES)
LEADS = np.array([1.0, 2.0, -1.0, -0.5])
"""The first token decides most of it."""
SHARE = np.array([CHANCES[()][a] * CHANCES[(a,)][b] for a, b in SPOKEN])


def gradients(baseline: Mapping[tuple[int, ...], float], *, peeks: bool = False) -> FloatArray:
    """Of every action the gradient in all six logits, ``[4, 3, 2]``.

    Args:
        baseline: By what has been said before the token.
        peeks: Let it know the token as well, which no baseline may.
    """
    table = replace(table_of([[Act("s", "a")] for _ in SPOKEN]), n_tokens=np.full(4, 2))
    said = [baseline[said[:place]] + (peeks and said[place]) for said in SPOKEN for place in (0, 1)]
    each = tokens_of(apply(judged(table, LEADS, np.array(said, dtype=np.float64))))
    out = np.zeros((4, 3, 2))
    for number, spoken in enumerate(SPOKEN):
        for place in (0, 1):
            before = spoken[:place]
            slope = np.eye(2)[spoken[place]] - CHANCES[before]
            out[number, PLACES.index(before)] += each[2 * number + place] * slope
    return out


def expected(each: FloatArray) -> FloatArray:
    return np.einsum("i,ikj->kj", SHARE, each)


def test_a_baseline_that_reads_only_what_was_said_keeps_the_expected_gradient() -> None:
    plain = expected(gradients(dict.fromkeys(PLACES, 0.0)))
    for seed in range(3):
        drawn = dict(zip(PLACES, np.random.default_rng(seed).normal(size=3), strict=True))
        np.testing.assert_allclose(expected(gradients(drawn)), plain, atol=1e-12)
        assert np.abs(expected(gradients(drawn, peeks=True)) - plain).max() > 0.1


def test_where_the_first_token_decides_the_expected_lead_takes_half_of_the_noise_away() -> None:
    known = {
        (): float(SHARE @ LEADS),
        (0,): float(CHANCES[(0,)] @ LEADS[:2]),
        (1,): float(CHANCES[(1,)] @ LEADS[2:]),
    }
    spreads: list[float] = []
    for baseline in (dict.fromkeys(PLACES, 0.0), known):
        each = gradients(baseline)
        left = each - expected(each)
        spreads.append(float(np.einsum("i,ikj,ikj->", SHARE, left, left)))
    assert spreads[1] < 0.5 * spreads[0]
