"""Which games of a group leave which others: three rules as pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo.samplers.at2po_expansion import Expansion, ExpansionSettings
from delta_belief_rl.algo.samplers.branches import (
    ALONE,
    BranchRule,
    Draw,
    Leave,
    Played,
    mean_surprisal,
)
from delta_belief_rl.algo.samplers.entropy_branching import (
    Arpo,
    ArpoSettings,
    branch_probability,
)
from delta_belief_rl.algo.samplers.uniform_branching import TreeGrowth, TreeGrowthSettings
from delta_belief_rl.rollout.seeds import named_uniform
from delta_belief_rl.types import UserError

VOCAB = 100
SCALE = math.log(VOCAB)


def draws(step: int = 1) -> Draw:
    return partial(named_uniform, "tree", 7, "t0", step)


def always(*_name: str | int) -> float:
    return 0.0


def never(*_name: str | int) -> float:
    return 1.0 - 1e-12


def game(
    number: int,
    surprisal: Sequence[float],
    *,
    tree: int | None = None,
    shared: int = 0,
    left: int = ALONE,
    round: int = 1,
    open: bool = True,
) -> Played:
    values = tuple(surprisal)
    return Played(
        number, number if tree is None else tree, shared, values, values, left, round, open
    )


# --- ARPO ----------------------------------------------------------------------------------------


def test_the_probability_of_a_branch_matches_its_worked_example() -> None:
    knobs = ArpoSettings(vocab=VOCAB)
    assert [branch_probability(knobs, rise) for rise in (0.0, 0.5, -0.5)] == [0.5, 0.6, 0.4]


@pytest.mark.parametrize(("rise", "expected"), [(9.0, 1.0), (-9.0, 0.0)])
def test_the_probability_of_a_branch_is_clipped(rise: float, expected: float) -> None:
    assert branch_probability(ArpoSettings(vocab=VOCAB), rise) == expected


def test_arpo_compares_a_turn_with_the_first_one_as_a_share_of_the_greatest_hesitation() -> None:
    """At a rise of 0.5 the probability is 0.6: a draw just below branches, one above does not."""
    rule = Arpo(ArpoSettings(vocab=VOCAB))
    played = [game(0, [0.1 * SCALE, 0.6 * SCALE])]

    def at(value: float) -> list[Leave]:
        return rule.more(played, 4, 1, lambda *_name: value)

    assert at(0.5999) == [Leave(0, 1)]
    assert at(0.6001) == [Leave()] * 3


def test_arpo_begins_with_half_of_the_group() -> None:
    assert Arpo(ArpoSettings(vocab=VOCAB)).first(16) == [Leave()] * 8
    assert Arpo(ArpoSettings(vocab=VOCAB)).first(5) == [Leave()] * 3
    assert Arpo(ArpoSettings(vocab=VOCAB, initial=4)).first(16) == [Leave()] * 4
    assert Arpo(ArpoSettings(vocab=VOCAB, initial=9)).first(3) == [Leave()] * 3


@pytest.mark.parametrize("beam", [1, 2, 3])
def test_arpo_leaves_a_game_at_most_beam_minus_one_times_and_never_before_its_first_turn(
    beam: int,
) -> None:
    played = [game(0, [1.0] * 6), game(1, [1.0] * 6)]
    found = Arpo(ArpoSettings(vocab=VOCAB, beam=beam)).more(played, 20, 1, always)
    left = Counter(leave.parent for leave in found if leave.parent != ALONE)
    assert left == ({0: beam - 1, 1: beam - 1} if beam > 1 else {})
    assert all(leave.turn >= 1 for leave in found if leave.parent != ALONE)
    if beam == 1:
        assert found == [Leave()] * 18


def test_arpo_cuts_what_the_budget_does_not_allow_late_turns_first() -> None:
    played = [game(0, [1.0] * 4), game(1, [1.0] * 4), game(2, [1.0] * 4)]
    rule = Arpo(ArpoSettings(vocab=VOCAB, beam=4))
    assert rule.more(played, 8, 1, always) == [
        *(Leave(0, 1), Leave(1, 1), Leave(2, 1), Leave(0, 2), Leave(1, 2))
    ]


def test_arpo_plays_what_is_left_over_from_the_opening() -> None:
    played = [game(0, [1.0] * 4), game(1, [1.0] * 4)]
    assert Arpo(ArpoSettings(vocab=VOCAB)).more(played, 6, 1, never) == [Leave()] * 4


def test_arpo_looks_at_branches_too_but_not_at_the_place_where_they_left() -> None:
    rule = Arpo(ArpoSettings(vocab=VOCAB))
    first = game(0, [1.0] * 4)
    branch = game(1, [1.0] * 4, tree=0, shared=2, left=0, round=2)
    assert rule.more([first, branch], 4, 2, always) == [Leave(1, 3)]
    # The game of the first round was looked at before.
    last = game(1, [1.0] * 4, tree=0, shared=3, left=0, round=2)
    assert rule.more([first, last], 4, 2, always) == [Leave()] * 2


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_arpo_does_not_leave_at_a_turn_whose_hesitation_is_unknown(value: float) -> None:
    rule = Arpo(ArpoSettings(vocab=VOCAB))
    assert rule.more([game(0, [1.0, value])], 2, 1, always) == [Leave()]
    assert rule.more([game(0, [value, 1.0])], 2, 1, always) == [Leave()]


# --- Tree-GRPO -----------------------------------------------------------------------------------


def test_tree_growth_expands_as_many_turns_of_each_tree_as_it_is_told() -> None:
    rule = TreeGrowth(TreeGrowthSettings(trees=2, rounds=1, expand=2))
    assert rule.first(6) == [Leave()] * 2
    played = [game(0, [1.0] * 5), game(1, [1.0] * 5)]
    found = rule.more(played, 6, 1, draws())
    assert Counter(leave.parent for leave in found) == {0: 2, 1: 2}
    # Not after the last turn, without repetition, and never from the opening.
    assert all(1 <= leave.turn <= 4 for leave in found)
    assert len(set(found)) == 4
    assert rule.more([*played, *played], 6, 2, draws()) == []


def test_tree_growth_draws_every_turn_that_is_not_a_leaf_equally_often() -> None:
    rule = TreeGrowth(TreeGrowthSettings(trees=1, rounds=9, expand=1))
    played = [game(0, [1.0] * 4), game(1, [1.0] * 4, tree=0, shared=2, left=0)]
    count = Counter(
        (leave.parent, leave.turn)
        for step in range(2000)
        for leave in rule.more(played, 9, 2, draws(step))
    )
    # The turns 0 to 2 of game 0 and turn 2 of game 1; shared turns are one node.
    assert set(count) == {(0, 1), (0, 2), (0, 3), (1, 3)}
    assert all(abs(times - 500) < 5 * math.sqrt(2000 * 3 / 16) for times in count.values())


def test_a_tree_with_too_few_turns_takes_them_again_and_one_without_begins_anew() -> None:
    rule = TreeGrowth(TreeGrowthSettings(trees=2, rounds=1, expand=3))
    found = rule.more([game(0, [1.0, 1.0]), game(1, [1.0])], 8, 1, draws())
    assert found == [Leave(0, 1)] * 3 + [Leave(1, 0)] * 3


@pytest.mark.parametrize(("expand", "size", "leaves"), [(2, 6, 3), (3, 6, 4), (None, 6, 3)])
def test_tree_growth_trains_on_as_many_leaves_of_each_tree(
    expand: int | None, size: int, leaves: int
) -> None:
    rule = TreeGrowth(TreeGrowthSettings(trees=2, rounds=1, expand=expand))
    played = [game(0, [1.0] * 5), game(1, [1.0] * 5)]
    for leave in rule.more(played, size, 1, draws()):
        number = len(played)
        more = game(number, [1.0] * 5, tree=leave.parent, shared=leave.turn, left=leave.parent)
        played.append(more)
    assert len(played) == 2 * leaves
    kept = rule.kept(played, size, draws())
    assert kept == sorted(kept)
    assert Counter(played[number].tree for number in kept) == {0: 3, 1: 3}
    if leaves == 3:
        assert kept == list(range(6))


def test_every_leaf_is_kept_equally_often() -> None:
    rule = TreeGrowth(TreeGrowthSettings(trees=1, rounds=1, expand=3))
    played = [game(number, [1.0], tree=0) for number in range(4)]
    count = Counter(n for step in range(2000) for n in rule.kept(played, 2, draws(step)))
    assert all(abs(count[n] - 1000) < 5 * math.sqrt(500) for n in range(4))


# --- AT2PO ---------------------------------------------------------------------------------------


def test_at2po_plays_the_published_numbers() -> None:
    rule = Expansion()
    first = rule.first(22)
    assert first == [Leave(), *[Leave(0, 0)] * 9]
    played = [game(n, [1.0] * 5, tree=0) for n in range(10)]
    assert len(rule.more(played, 22, 1, draws())) == 6
    played += [game(n, [1.0] * 5, tree=0, shared=1, left=0) for n in range(10, 16)]
    assert len(rule.more(played, 22, 2, draws())) == 6
    played += [game(n, [1.0] * 5, tree=0, shared=1, left=0) for n in range(16, 22)]
    assert rule.more(played, 22, 3, draws()) == []


def test_at2po_resamples_the_least_certain_turns_but_no_last_one() -> None:
    rule = Expansion(ExpansionSettings(rounds=1, beam=3))
    played = [game(0, [0.1, 2.0, 9.0], tree=0), game(1, [0.5, 1.9, 9.0], tree=0)]
    assert rule.more(played, 9, 1, draws()) == [Leave(0, 1), Leave(1, 1), Leave(1, 0)]


def test_at2po_takes_a_penalty_off_for_each_sibling() -> None:
    """Turn 1 of game 0 has two siblings beside it, so it falls behind by twice the penalty."""
    played = [
        game(0, [0.1, 1.10, 0.0], tree=0),
        game(1, [0.1, 0.3, 0.0], tree=0, shared=1, left=0),
        game(2, [0.1, 0.3, 0.0], tree=0, shared=1, left=0),
        game(3, [0.2, 1.02, 0.0], tree=0),
    ]
    rule = Expansion(ExpansionSettings(rounds=1, beam=2, branch_penalty=0.05))
    assert rule.more(played, 9, 1, draws()) == [Leave(3, 1), Leave(0, 1)]
    free = Expansion(ExpansionSettings(rounds=1, beam=2, branch_penalty=0.0))
    assert free.more(played, 9, 1, draws()) == [Leave(0, 1), Leave(3, 1)]
    # The first turns of the two games that share none are siblings under the opening.
    close = [game(0, [1.0, 0.0], tree=0), game(1, [0.9, 0.97, 0.0], tree=0)]
    assert rule.more(close, 9, 1, draws())[0] == Leave(1, 1)
    assert free.more(close, 9, 1, draws())[0] == Leave(0, 0)


def test_at2po_shares_nothing_where_every_game_has_one_turn() -> None:
    rule = Expansion(ExpansionSettings(rounds=1, beam=2))
    assert rule.more([game(0, [1.0], tree=0)], 3, 1, draws()) == [Leave(0, 0)] * 2


# --- all of them ---------------------------------------------------------------------------------


RULES: dict[str, BranchRule] = {
    "arpo": Arpo(ArpoSettings(vocab=VOCAB, beam=3)),
    "tree_grpo": TreeGrowth(TreeGrowthSettings(trees=2, rounds=2)),
    "at2po": Expansion(),
}


def grow(rule: BranchRule, size: int, lengths: Sequence[int], draw: Draw) -> list[list[Played]]:
    """Play a group of games of given lengths; the games after each round."""
    played: list[Played] = []
    rounds: list[list[Played]] = []
    plan, number = rule.first(size), 1
    while plan:
        known = list(played)
        for leave in plan:
            here = len(played)
            length = lengths[here % len(lengths)]
            values = [named_uniform("h", here, turn) for turn in range(leave.turn + length)]
            own = game(here, values, round=number, open=length < 4)
            if leave.parent != ALONE:
                parent = known[leave.parent] if leave.parent < len(known) else None
                assert parent is not None or leave.turn == 0, "left before it was played"
                assert parent is None or leave.turn == 0 or parent.open
                assert parent is None or leave.turn < max(parent.num_turns, 1)
                own = replace(
                    own,
                    tree=parent.tree if parent else leave.parent,
                    shared=leave.turn,
                    left=leave.parent if leave.turn else ALONE,
                )
            played.append(own)
        rounds.append(list(played))
        assert number < 50
        plan = rule.more(list(played), size, number, draw)
        number += 1
    return rounds


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(RULES)),
    size=st.integers(1, 12).map(lambda half: 2 * half),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    step=st.integers(0, 5),
)
def test_every_rule_ends_with_the_games_of_a_group_and_never_more(
    name: str, size: int, lengths: list[int], step: int
) -> None:
    rule = RULES[name]
    rounds = grow(rule, size, lengths, draws(step))
    played = rounds[-1]
    kept = rule.kept(played, size, draws(step))
    assert len(kept) == len(set(kept)) == size
    if name == "tree_grpo":
        # Rounds are whole, so what rounding adds is played and not trained on.
        assert size <= len(played) < size + 2 * 2
    else:
        assert len(played) == size
    assert grow(rule, size, lengths, draws(step)) == rounds


@pytest.mark.parametrize("name", RULES)
def test_R2_a_round_depends_on_names_and_not_on_the_order_of_the_games(name: str) -> None:
    rounds = grow(RULES[name], 12, [3, 2, 3], draws())
    for number, played in enumerate(rounds, start=1):
        again = RULES[name].more(played[::-1], 12, number, draws())
        assert Counter(again) == Counter(RULES[name].more(played, 12, number, draws()))
    others = [grow(RULES[name], 12, [3, 2, 3], draws(step))[-1] for step in range(2, 7)]
    changed = any(other != rounds[-1] for other in others)
    # AT2PO draws nothing: it is a function of the games alone.
    assert changed == (name != "at2po")


@pytest.mark.parametrize("name", RULES)
def test_nobody_leaves_a_game_that_a_failure_ended(name: str) -> None:
    played = [game(0, [1.0] * 5, tree=0, open=False), game(1, [1.0] * 5, tree=1, open=False)]
    found = RULES[name].more(played, 6, 1, always)
    assert found
    assert all(leave.turn == 0 for leave in found)


@pytest.mark.parametrize(
    ("make", "knob"),
    [
        (lambda: ArpoSettings(vocab=9, beam=0), "algorithm.tree.arpo.beam"),
        (lambda: ArpoSettings(vocab=9, initial=0), "algorithm.tree.arpo.initial"),
        (lambda: ArpoSettings(vocab=9, base_probability=1.1), "algorithm.tree.arpo.base_prob"),
        (lambda: ArpoSettings(vocab=9, entropy_weight=-0.1), "algorithm.tree.arpo.entropy_weight"),
        (lambda: ArpoSettings(vocab=1), "vocabulary has 1 tokens"),
        (lambda: TreeGrowthSettings(trees=0), "algorithm.tree.tree_grpo.trees"),
        (lambda: TreeGrowthSettings(rounds=-1), "algorithm.tree.tree_grpo.rounds"),
        (lambda: TreeGrowthSettings(expand=0), "algorithm.tree.tree_grpo.expand"),
        (lambda: ExpansionSettings(rounds=-1), "algorithm.tree.at2po.rounds"),
        (lambda: ExpansionSettings(beam=0), "algorithm.tree.at2po.beam"),
        (lambda: ExpansionSettings(branch_penalty=-1), "algorithm.tree.at2po.branch_penalty"),
    ],
)
def test_a_knob_out_of_range_is_refused_by_its_name(make: type, knob: str) -> None:
    with pytest.raises(UserError, match=knob):
        make()


def test_surprisal_is_a_mean_over_all_or_the_first_tokens() -> None:
    assert mean_surprisal((-1.0, -2.0, -6.0)) == 3.0
    assert mean_surprisal((-1.0, -2.0, -6.0), 2) == 1.5
    assert mean_surprisal((-1.0,), 20) == 1.0
    assert mean_surprisal((-1.0, -math.inf)) == math.inf
