"""The token-level estimators against a direct implementation over padded token rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.credit.whitening import whiten
from delta_belief_rl.types import FloatArray, TurnTable, UserError

EXACT = 1e-6


@dataclass(frozen=True)
class Game:
    """A game by its turns: sampled tokens, reward of each, and the end-of-game reward."""

    tokens: tuple[int, ...]
    rewards: tuple[float, ...]
    eog: float
    group: int = 0


GAMES = (
    Game((3, 1, 2), (0.5, -1.0, 0.25), 2.0),
    Game((2, 4), (0.0, 0.125), -0.1),
    Game((1,), (-5.0,), 0.0, group=1),
    Game((2, 1, 5), (0.25, 0.0, 0.0), 1.5, group=1),
    Game((4, 2), (1.0, 0.5), 0.0, group=2),
)
"""Two groups of two, and one game alone."""


def table_of(games: Sequence[Game], invalid: Sequence[tuple[int, int]] = ()) -> TurnTable:
    rows = [(i, k) for i, game in enumerate(games) for k in range(len(game.tokens))]
    last = np.array([k == len(games[i].tokens) - 1 for i, k in rows])
    size = len(rows)
    return TurnTable(
        group=np.array([games[i].group for i, _ in rows]),
        traj=np.array([i for i, _ in rows]),
        turn=np.array([k for _, k in rows]),
        n_tokens=np.array([games[i].tokens[k] for i, k in rows]),
        valid=np.array([(i, k) not in invalid for i, k in rows]),
        terminal=last,
        truncated=np.zeros(size, dtype=np.bool_),
        won=np.zeros(size, dtype=np.bool_),
        rewards={
            "validity": np.array([games[i].rewards[k] for i, k in rows]),
            "outcome": np.where(last, [games[i].eog for i, _ in rows], 0.0),
        },
    )


def per_token(table: TurnTable, advantage: Advantage) -> FloatArray:
    """Advantage of every sampled token, all rows end to end."""
    if advantage.tokens is not None:
        return advantage.tokens
    return np.repeat(advantage.turns, table.n_tokens)


# --- the direct implementation --------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Padded rows: after each turn two tokens of the environment, then padding; all ``[B, L]``."""

    mask: FloatArray
    turn: FloatArray
    rewards: FloatArray


def rows_of(games: Sequence[Game], *, reward_on: str) -> Rows:
    """Rows with a turn's reward on its ``last`` token, end of game included, or on ``all``."""
    width = max(sum(game.tokens) + 2 * len(game.tokens) for game in games) + 3
    mask, turn, rewards = (np.zeros((len(games), width)) for _ in range(3))
    turn -= 1
    for i, game in enumerate(games):
        at = 0
        for k, (count, reward) in enumerate(zip(game.tokens, game.rewards, strict=True)):
            span = slice(at, at + count)
            mask[i, span], turn[i, span] = 1, k
            if reward_on == "all":
                rewards[i, span] = reward
            else:
                rewards[i, at + count - 1] = reward + game.eog * (k == len(game.tokens) - 1)
            at += count + 2
    return Rows(mask, turn, rewards)


def masked_whiten(values: FloatArray, mask: FloatArray) -> FloatArray:
    n = mask.sum()
    mean = (values * mask).sum() / n
    variance = (((values - mean) ** 2) * mask).sum() / n * n / (n - 1)
    return (values - mean) / np.sqrt(variance + 1e-8)


def sampled(values: FloatArray, rows: Rows) -> FloatArray:
    return np.concatenate([value[keep > 0] for value, keep in zip(values, rows.mask, strict=True)])


def direct_reinforce_plus_plus(games: Sequence[Game], gamma: float, *, resets: bool) -> FloatArray:
    rows = rows_of(games, reward_on="last")
    returns = np.zeros_like(rows.rewards)
    for i in range(len(games)):
        running = 0.0
        for t in range(rows.mask.shape[1] - 1, -1, -1):
            if rows.mask[i, t]:
                running = rows.rewards[i, t] + gamma * running
                returns[i, t] = running
            elif resets:
                running = 0.0
    return sampled(masked_whiten(returns, rows.mask), rows)


def direct_baseline(games: Sequence[Game]) -> FloatArray:
    rows = rows_of(games, reward_on="last")
    scores = rows.rewards.sum(axis=1)
    centred = np.zeros_like(scores)
    for i, game in enumerate(games):
        members = [j for j, other in enumerate(games) if other.group == game.group]
        centred[i] = scores[i] - (scores[members].mean() if len(members) > 1 else 0.0)
    tiled = centred[:, None] * rows.mask
    return sampled(masked_whiten(tiled, rows.mask), rows)


def direct_multi_turn(
    games: Sequence[Game], gamma: float, *, only_eog: bool, norm: bool, clip: bool
) -> FloatArray:
    rows = rows_of(games, reward_on="all")
    returns = np.zeros_like(rows.rewards)
    for i, game in enumerate(games):
        running, later = game.eog, None
        for t in range(rows.mask.shape[1] - 1, -1, -1):
            if not rows.mask[i, t]:
                continue
            k = int(rows.turn[i, t])
            if later is not None and k != later[0]:
                # The later turn's first token is the one that was seen last.
                running = gamma * (running if only_eog else later[1])
            returns[i, t] = rows.rewards[i, t] + running
            later = (k, returns[i, t])
    advantages = masked_whiten(returns, rows.mask) if norm else returns
    return sampled(np.clip(advantages, -1.0, 0.9) if clip else advantages, rows)


# --- equality -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("parity", ["ours", "reference"])
def test_A13_reinforce_plus_plus_equals_the_direct_loop_over_tokens(
    gamma: float, parity: str
) -> None:
    table = table_of(GAMES)
    advantage = build_credit("reinforce_plus_plus", {"gamma": gamma, "parity": parity}).apply(table)
    want = direct_reinforce_plus_plus(GAMES, gamma, resets=parity == "reference")
    np.testing.assert_allclose(per_token(table, advantage), want, atol=EXACT)
    assert (advantage.tokens is None) == (gamma == 1.0)


def test_A13_reinforce_plus_plus_with_baseline_equals_the_direct_loop() -> None:
    table = table_of(GAMES)
    credit = build_credit("reinforce_plus_plus_baseline", {"parity": "reference"})
    np.testing.assert_allclose(
        per_token(table, credit.apply(table)), direct_baseline(GAMES), atol=EXACT
    )
    pairs = GAMES[:4]
    ours = build_credit("reinforce_plus_plus_baseline").apply(table_of(pairs))
    np.testing.assert_allclose(per_token(table_of(pairs), ours), direct_baseline(pairs), atol=EXACT)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("only_eog", [True, False])
@pytest.mark.parametrize(("norm", "clip"), [(False, False), (True, False), (True, True)])
def test_A13_multi_turn_reinforce_equals_the_direct_loop(
    gamma: float, only_eog: bool, norm: bool, clip: bool
) -> None:
    table = table_of(GAMES)
    credit = build_credit(
        "multi_turn_reinforce",
        {
            "gamma": gamma,
            "only_propagate_eog_in_mtr": only_eog,
            "norm_adv_in_mtr": norm,
            "clip_adv_in_mtr": clip,
            "clip_adv_min": -1.0,
            "clip_adv_max": 0.9,
        },
    )
    want = direct_multi_turn(GAMES, gamma, only_eog=only_eog, norm=norm, clip=clip)
    np.testing.assert_allclose(per_token(table, credit.apply(table)), want, atol=EXACT)


games_of = st.lists(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(-8, 8).map(lambda x: x / 4)),
        min_size=1,
        max_size=4,
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=30, deadline=None)
@given(shape=games_of, gamma=st.sampled_from([1.0, 0.7]), resets=st.booleans())
def test_A8_reinforce_plus_plus_equals_the_loop_on_any_shape(
    shape: list[list[tuple[int, float]]], gamma: float, resets: bool
) -> None:
    games = [
        Game(tuple(n for n, _ in turns), tuple(r for _, r in turns), float(i % 2))
        for i, turns in enumerate(shape)
    ]
    table = table_of(games)
    knobs = {"gamma": gamma, "parity": "reference" if resets else "ours"}
    got = per_token(table, build_credit("reinforce_plus_plus", knobs).apply(table))
    np.testing.assert_allclose(
        got, direct_reinforce_plus_plus(games, gamma, resets=resets), atol=EXACT
    )


# --- worked examples ------------------------------------------------------------------------------


def test_reinforce_plus_plus_worked_by_hand() -> None:
    """One game of two turns (2 and 1 tokens), rewards 1 and 2, gamma 1/2.

    The last token has 2; the second has 1 + 2 / 2 = 2; the first 1. Mean 5/3, variance 1/3.
    """
    table = table_of([Game((2, 1), (1.0, 2.0), 0.0)])
    advantage = build_credit("reinforce_plus_plus", {"gamma": 0.5}).apply(table)
    spread = np.sqrt(1 / 3 + 1e-8)
    want = [(1 - 5 / 3) / spread, (2 - 5 / 3) / spread, (2 - 5 / 3) / spread]
    np.testing.assert_allclose(advantage.tokens, want, atol=EXACT)
    np.testing.assert_allclose(advantage.turns, [(want[0] + want[1]) / 2, want[2]], atol=EXACT)


def test_the_published_reset_keeps_the_outcome_from_earlier_turns() -> None:
    games = [Game((1, 1), (0.0, 0.0), 1.0), Game((1, 1), (0.0, 0.0), 0.0)]
    table = table_of(games)
    reset = build_credit("reinforce_plus_plus", {"parity": "reference"}).apply(table).turns
    assert reset[0] == reset[2]
    ours = build_credit("reinforce_plus_plus").apply(table).turns
    np.testing.assert_allclose(ours, [0.866025, 0.866025, -0.866025, -0.866025], atol=1e-5)


def test_multi_turn_reinforce_worked_by_hand() -> None:
    """Turn rewards 1, 2, 4 and an end-of-game reward of 8, gamma 1/2."""
    table = table_of([Game((1, 3, 2), (1.0, 2.0, 4.0), 8.0)])
    only = build_credit("multi_turn_reinforce", {"gamma": 0.5}).apply(table).turns
    np.testing.assert_allclose(only, [1 + 2, 2 + 4, 4 + 8])
    whole = build_credit(
        "multi_turn_reinforce", {"gamma": 0.5, "only_propagate_eog_in_mtr": False}
    ).apply(table)
    np.testing.assert_allclose(whole.turns, [1 + 4, 2 + 6, 12])
    assert whole.stats["reward_sum"] == whole.rewards.sum() == 15


def test_whitening_counts_a_turn_once_for_each_token() -> None:
    values, tokens = np.array([1.0, 4.0]), np.array([3, 1])
    each = np.repeat(values, tokens)
    want = (values - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten(values, tokens), want)
    assert whiten(values, np.array([1, 0])).tolist() == [0.0, 0.0]
    assert whiten(np.array([0.1, 0.1, 0.1]), np.array([2, 3, 1])).tolist() == [0.0, 0.0, 0.0]


# --- edges ----------------------------------------------------------------------------------------


def test_A3_the_baseline_leaves_groups_that_teach_nothing_at_zero() -> None:
    flat = [Game((2,), (1.0,), 0.0, 3), Game((5,), (1.0,), 0.0, 3)]
    games = [*GAMES, *flat]
    table = table_of(games)
    ours = build_credit("reinforce_plus_plus_baseline").apply(table)
    assert not ours.turns[table.group >= 2].any()
    assert ours.turns[table.group < 2].all()
    assert ours.stats["frac_dead_groups"] == pytest.approx(0.5)
    alone = build_credit("reinforce_plus_plus_baseline").apply(table_of(GAMES[:4]))
    np.testing.assert_allclose(ours.turns[table.group < 2], alone.turns)
    published = build_credit("reinforce_plus_plus_baseline", {"parity": "reference"}).apply(table)
    assert published.turns[table.group == 3].all()


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("reinforce_plus_plus", {"gamma": 0.5}),
        ("reinforce_plus_plus", {"gamma": 0.5, "parity": "reference"}),
        ("reinforce_plus_plus", {}),
        ("reinforce_plus_plus_baseline", {}),
        ("multi_turn_reinforce", {"norm_adv_in_mtr": True, "clip_adv_in_mtr": True}),
    ],
)
def test_J1_tokens_of_turns_that_are_not_valid_move_nothing(
    name: str, knobs: dict[str, object]
) -> None:
    table = table_of(GAMES, invalid=[(0, 1), (2, 0)])
    credit = build_credit(name, knobs)
    one = credit.apply(table)
    longer = replace(table, n_tokens=np.where(table.valid, table.n_tokens, 9))
    other = credit.apply(longer)
    np.testing.assert_allclose(other.turns, one.turns, atol=1e-12)
    assert not one.turns[~table.valid].any()
    tokens = per_token(longer, other)
    assert not tokens[~np.repeat(longer.valid, longer.n_tokens)].any()


def test_a_turn_without_tokens_hands_its_reward_to_the_token_before_it() -> None:
    empty = table_of([Game((1, 0, 1), (1.0, 2.0, 4.0), 0.0), Game((1,), (0.0,), 0.0)])
    advantage = build_credit("reinforce_plus_plus", {"gamma": 0.5}).apply(empty)
    assert advantage.tokens is not None
    assert len(advantage.tokens) == 3
    # 1 + 2 + 4 / 2, then 4, then the other game's 0.
    np.testing.assert_allclose(
        advantage.tokens, masked_whiten(np.array([5.0, 4.0, 0.0]), np.ones(3)), atol=EXACT
    )


def test_a_clip_without_room_is_refused() -> None:
    with pytest.raises(UserError, match="clip_adv_min must be less"):
        build_credit("multi_turn_reinforce", {"clip_adv_min": 1.0, "clip_adv_max": 1.0})
