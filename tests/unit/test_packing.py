"""Batches of finished games and the plan of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import training_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.trainer.packing import (
    UpdatePlan,
    build_batch,
    deal,
    denominators,
    flat_trajectories,
    plan_update,
    split_by_tokens,
    trained_games,
)
from delta_belief_rl.types import Group, TrainBatch, Trajectory, Turn

GROUPS = fakes.make_groups()
GAMES = flat_trajectories(GROUPS)
SAMPLED = [np.flatnonzero(game.action_mask()) for game in GAMES]


def logps(groups: Sequence[Group] = GROUPS, seed: int = 0) -> list[np.ndarray]:
    """A log-prob for each sampled token of each game."""
    rng = np.random.default_rng(seed)
    return [-rng.random(int(game.action_mask().sum())) for game in flat_trajectories(groups)]


def build(groups: Sequence[Group] = GROUPS, **changes: Any) -> TrainBatch:
    table = build_table(groups)
    advantages, weight = fakes.credit(table)
    given = {
        "table": table,
        "turn_advantages": advantages,
        "turn_weight": weight,
        "old_logp": logps(groups),
    }
    return build_batch(groups, **(given | changes))


def with_turn(game: Trajectory, **changes: Any) -> list[Group]:
    """The game alone, with its first turn changed."""
    turns = (replace(game.turns[0], **changes), *game.turns[1:])
    changed = replace(game, turns=turns)
    return [Group(game.task, (changed,))]


# --- building a batch -----------------------------------------------------------------------------


def test_C4_the_trained_tokens_are_the_sampled_tokens_in_their_places() -> None:
    batch = build()
    for game, span, sampled in zip(GAMES, batch.games(), SAMPLED, strict=True):
        assert batch.token_ids[span].tolist() == list(game.token_ids)
        np.testing.assert_array_equal(np.flatnonzero(batch.turn_ids[span] >= 0), sampled)
    assert batch.num_games == len(GAMES)
    assert batch.offsets[-1] == len(batch.token_ids)


def test_C4_every_turn_keeps_its_own_log_probs_advantage_and_number() -> None:
    table = build_table(GROUPS)
    advantages, weight = fakes.credit(table)
    batch = build()
    row = 0
    for game, span in zip(GAMES, batch.games(), strict=True):
        for turn in game.turns:
            place = slice(span.start + turn.start, span.start + turn.end)
            assert batch.rollout_logp[place].tolist() == list(turn.logprobs)
            assert set(batch.turn_ids[place]) == {turn.index}
            assert set(batch.advantages[place]) == {advantages[row]}
            assert set(batch.weight[place]) == {weight[row]}
            row += 1


def test_C4_tokens_of_a_turn_may_differ_in_their_advantage() -> None:
    total = sum(len(sampled) for sampled in SAMPLED)
    tokens = np.random.default_rng(2).normal(size=total)
    batch, plain = build(token_advantages=tokens), build()
    np.testing.assert_array_equal(batch.advantages[batch.turn_ids >= 0], tokens)
    assert not batch.advantages[batch.turn_ids < 0].any()
    np.testing.assert_array_equal(batch.weight, plain.weight)
    first = GAMES[0].turns[0]
    place = slice(first.start, first.end)
    assert batch.advantages[place].tolist() == tokens[: first.n_tokens].tolist()
    with pytest.raises(ValueError, match=f"{total} sampled tokens but {total - 1}"):
        build(token_advantages=tokens[1:])


def test_C4_log_probs_of_the_trainer_lie_at_the_sampled_tokens_and_nowhere_else() -> None:
    old, base = logps(seed=1), logps(seed=2)
    batch = build(old_logp=old, views={"base": base})
    for values, name in ((batch.old_logp, old), (batch.views["base"], base)):
        for span, sampled, row in zip(batch.games(), SAMPLED, name, strict=True):
            np.testing.assert_array_equal(values[span][sampled], row)
            assert np.count_nonzero(values[span]) == len(sampled)


def test_A5_every_sampled_token_has_the_weight_of_its_turn_and_no_other_token_has_any() -> None:
    batch = build()
    np.testing.assert_array_equal(batch.weight != 0, batch.turn_ids >= 0)
    rng = np.random.default_rng(3)
    weight = rng.integers(0, 2, build_table(GROUPS).num_rows).astype(float)
    masked = build(turn_weight=weight)
    turns = [turn for game in GAMES for turn in game.turns]
    kept = sum(turn.n_tokens for turn, w in zip(turns, weight, strict=True) if w)
    assert np.count_nonzero(masked.weight) == kept


def test_B6_C4_a_game_with_too_few_or_too_many_log_probs_is_refused() -> None:
    for name in ("policy", "base"):
        for change in (-1, 1):
            rows = logps()
            rows[1] = np.resize(rows[1], len(rows[1]) + change)
            changes: dict[str, Any] = {"old_logp": rows}
            if name == "base":
                changes = {"views": {"base": rows}}
            with pytest.raises(ValueError, match=rf"t0/1 .* of view '{name}'"):
                build(**changes)


def test_B6_C4_two_wrong_lengths_with_the_right_sum_are_refused() -> None:
    rows = logps()
    rows[0], rows[2] = rows[0][:-1], np.append(rows[2], 0.0)
    with pytest.raises(ValueError, match="t0/0"):
        build(old_logp=rows)


def test_B6_a_missing_game_is_refused() -> None:
    with pytest.raises(ValueError, match="5 games, the batch 6"):
        build(old_logp=logps()[:-1])


@pytest.mark.parametrize("given", [(), (-0.5,)])
def test_B6_C4_sampling_log_probs_are_never_repeated_or_filled_in(given: tuple[float, ...]) -> None:
    long = next(game for game in GAMES if game.turns[0].n_tokens > 1)
    with pytest.raises(ValueError, match="sampling log-probs"):
        build(with_turn(long, logprobs=given))


@pytest.mark.parametrize("start", [0, 10**3])
def test_C4_a_span_outside_the_stream_is_refused(start: int) -> None:
    with pytest.raises(ValueError, match="turn 0 of game t0/0 claims"):
        build(with_turn(GAMES[0], start=start, end=start + 2, logprobs=(-1.0, -1.0)))


def test_C4_overlapping_turns_are_refused() -> None:
    first, second = GAMES[0].turns[:2]
    reach = replace(first, end=second.start + 1)
    reach = replace(reach, logprobs=(-1.0,) * reach.n_tokens)
    game = replace(GAMES[0], turns=(reach, *GAMES[0].turns[1:]))
    with pytest.raises(ValueError, match="turn 1 of game t0/0 claims"):
        build([Group(game.task, (game,))])


def test_A5_credit_for_other_turns_is_refused() -> None:
    table = build_table(GROUPS)
    swapped = [GROUPS[1], GROUPS[0]]
    with pytest.raises(ValueError, match="not the turns of the games"):
        build(table=build_table(swapped))
    with pytest.raises(ValueError, match="13 turns need as many"):
        build(turn_advantages=np.zeros(table.num_rows + 1))
    with pytest.raises(ValueError, match="table has"):
        build(table=build_table(GROUPS[:1]))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_A5_a_weight_that_is_no_weight_is_refused(bad: float) -> None:
    weight = np.ones(build_table(GROUPS).num_rows)
    weight[2] = bad
    with pytest.raises(ValueError, match="weight of a turn"):
        build(turn_weight=weight)


def test_no_games_make_an_empty_batch_and_an_empty_plan() -> None:
    batch = build([], views={"base": []})
    assert batch.num_games == 0
    assert plan_update(batch, ranks=2, max_tokens=10, games_per_step=4).steps == ()


def test_a_game_without_turns_is_carried_but_not_trained() -> None:
    idle = fakes.make_game(99, 0)
    groups = [Group(idle.task, (idle, fakes.make_game(98, 2)))]
    batch = build(groups)
    assert batch.num_games == 2
    assert trained_games(batch).tolist() == [1]


# --- planning -------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Games of any lengths; some have no trained token at all."""
    turns = draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=4))
    groups = [
        Group(game.task, (game,))
        for i, counts in enumerate(turns)
        for game in [fakes.make_game(i, counts[0], task=f"t{i}")]
    ] + fakes.make_groups(turns)
    rows = build_table(groups).num_rows
    weight = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=rows, max_size=rows))
    return build(groups, turn_weight=np.array(weight, dtype=float))


PLANS = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 4),
        "max_tokens": st.integers(1, 120),
        "games_per_step": st.integers(1, 9),
        "epochs": st.integers(1, 2),
    }
)


def games_of(plan: UpdatePlan) -> list[int]:
    return [
        int(game)
        for step in plan.steps
        for rank in step.ranks
        for micro in rank
        for game in micro.games
    ]


@settings(max_examples=60, deadline=None)
@given(batches(), PLANS)
def test_A19_H7_a_plan_gives_every_rank_equally_many_calls_and_every_game_once_an_epoch(
    batch: TrainBatch, options: dict[str, int]
) -> None:
    plan = plan_update(batch, **options)
    trained = trained_games(batch).tolist()
    assert sorted(games_of(plan)) == sorted(trained * options["epochs"])
    for step in plan.steps:
        assert len(step.ranks) == options["ranks"]
        assert len({len(rank) for rank in step.ranks}) == 1
    assert plan.num_micro_batches == sum(len(step.ranks[-1]) for step in plan.steps)


@settings(max_examples=60, deadline=None)
@given(batches(), PLANS)
def test_a_micro_batch_exceeds_the_budget_only_as_a_single_game(
    batch: TrainBatch, options: dict[str, int]
) -> None:
    lengths = batch.lengths()
    for step in plan_update(batch, **options).steps:
        for rank in step.ranks:
            for micro in rank:
                tokens = int(lengths[micro.games].sum())
                assert tokens <= options["max_tokens"] or len(micro.games) == 1


@settings(max_examples=60, deadline=None)
@given(batches(), PLANS, st.integers(1, 4), st.integers(1, 120))
def test_A11_steps_and_denominators_do_not_depend_on_ranks_and_budget(
    batch: TrainBatch, options: dict[str, int], ranks: int, max_tokens: int
) -> None:
    one = plan_update(batch, **options)
    two = plan_update(batch, **(options | {"ranks": ranks, "max_tokens": max_tokens}))
    assert [step.denominators for step in one.steps] == [step.denominators for step in two.steps]
    for a, b in zip(one.steps, two.steps, strict=True):
        flat = [
            sorted(int(g) for rank in step.ranks for micro in rank for g in micro.games)
            for step in (a, b)
        ]
        assert flat[0] == flat[1]


@settings(max_examples=30, deadline=None)
@given(batches(), PLANS)
def test_H7_a_plan_is_a_function_of_its_arguments(
    batch: TrainBatch, options: dict[str, int]
) -> None:
    def listed(plan: UpdatePlan) -> list[Any]:
        return [
            [[micro.games.tolist() for micro in rank] for rank in step.ranks] for step in plan.steps
        ]

    assert listed(plan_update(batch, **options)) == listed(plan_update(batch, **options))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 5), st.integers(1, 60))
def test_H7_split_by_tokens_is_a_partition_with_equal_counts(
    lengths: list[int], ranks: int, budget: int
) -> None:
    games = np.arange(len(lengths))[::2]
    parts = split_by_tokens(np.array(lengths, dtype=np.int64), games, ranks, budget)
    assert len(parts) == ranks
    assert len({len(part) for part in parts}) == 1
    flat = [int(game) for part in parts for micro in part for game in micro]
    assert sorted(flat) == games.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 5))
def test_dealing_by_length_leaves_ranks_at_most_one_longest_item_apart(
    lengths: list[int], ranks: int
) -> None:
    parts = deal(lengths, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    totals = [sum(lengths[i] for i in part) for part in parts]
    assert max(totals) - min(totals) <= max(lengths, default=0)


def test_dealing_turns_round_at_the_end_of_each_lap() -> None:
    assert deal([6, 9, 8, 7], 2) == [[1, 0], [2, 3]]


def test_A11_denominators_count_what_carries_weight() -> None:
    table = build_table(GROUPS)
    weight = np.ones(table.num_rows)
    weight[[0, 4]] = 0.0
    batch = build(turn_weight=weight)
    turns = [(number, turn) for number, game in enumerate(GAMES) for turn in game.turns]
    kept: list[tuple[int, Turn]] = [turn for turn, w in zip(turns, weight, strict=True) if w]
    (step,) = fakes.one_step(batch, length=77.0).steps
    assert step.denominators == {
        "tokens": float(sum(turn.n_tokens for _, turn in kept)),
        "turns": float(len(kept)),
        "rows": float(len({number for number, _ in kept})),
        "length": 77.0,
    }


def test_A11_a_fractional_weight_counts_as_one_token() -> None:
    table = build_table(GROUPS)
    half = build(turn_weight=np.full(table.num_rows, 0.5))
    games = np.arange(half.num_games)
    assert denominators(half, games) == denominators(build(), games)


def test_games_without_weight_are_left_out_of_every_pass() -> None:
    table = build_table(GROUPS)
    weight = np.where(np.isin(table.traj, [1, 4]), 0.0, 1.0)
    batch = build(turn_weight=weight)
    assert trained_games(batch).tolist() == [0, 2, 3, 5]
    assert sorted(games_of(fakes.one_step(batch, ranks=2))) == [0, 2, 3, 5]


def test_A18_a_batch_without_weight_has_an_empty_plan_for_any_number_of_ranks() -> None:
    batch = build(turn_weight=np.zeros(build_table(GROUPS).num_rows))
    for ranks in (1, 2, 3):
        plan = fakes.one_step(batch, ranks=ranks, epochs=2)
        assert plan.steps == ()
        assert plan.num_micro_batches == 0


def test_A18_a_mini_batch_without_weight_is_no_optimizer_step() -> None:
    table = build_table(GROUPS)
    batch = build(turn_weight=np.where(table.traj < 3, 0.0, 1.0))
    plan = fakes.one_step(batch, games_per_step=3)
    assert len(plan.steps) == 1
    assert sorted(games_of(plan)) == [3, 4, 5]
