"""Closed forms, degenerate groups and invariances of the credit methods."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import delta_belief_rl.algo
from delta_belief_rl.algo import CREDITS, SCORERS, TRANSFORMS, build_credit
from delta_belief_rl.algo.base import Advantage, Credit, check_group_size
from delta_belief_rl.algo.credit.groups import return_to_go, standardised
from delta_belief_rl.algo.credit.grpo import whole_games
from delta_belief_rl.types import FloatArray, IntArray, TurnTable, UserError

Channels = Mapping[str, Sequence[Sequence[float]]]


def table_of(
    channels: Channels,
    group: Sequence[int] | None = None,
    invalid: Sequence[tuple[int, int]] = (),
) -> TurnTable:
    """A table from ``channel -> game -> turn`` rewards; ``invalid`` lists (game, turn).

    All games are in one state at the same turn, with one token in each. What models would say of it
    tells nothing: values are zero, and every view is as likely as the game itself.
    """
    first = next(iter(channels.values()))
    group = group or [0] * len(first)
    rows = [(g, i, k) for i, g in enumerate(group) for k in range(len(first[i]))]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    last = np.array([k == len(first[i]) - 1 for _, i, k in rows], dtype=np.bool_)
    return TurnTable(
        group=table[:, 0],
        traj=table[:, 1],
        turn=table[:, 2],
        n_tokens=np.ones(len(rows), dtype=np.int64),
        valid=np.array([(i, k) not in invalid for _, i, k in rows], dtype=np.bool_),
        terminal=last,
        truncated=np.zeros(len(rows), dtype=np.bool_),
        won=np.zeros(len(rows), dtype=np.bool_),
        state_key=tuple(f"s{k}" for _, _, k in rows),
        action_key=tuple(f"a{first[i][k]}" for _, i, k in rows),
        footprint=(((), ()),) * len(rows),
        progress=np.zeros(len(rows)),
        tokens={
            "logp": np.full(len(rows), -1.0),
            "values": np.zeros(len(rows)),
            "contribution": np.zeros(len(rows)),
            "archer_q": np.zeros(len(rows)),
            "archer_v": np.zeros(len(rows)),
            "prm": np.full(len(rows), -1.0),
            **{f"view:{name}": np.full(len(rows), -1.0) for name in SCORERS},
        },
        answered=np.ones(len(rows), dtype=np.bool_),
        rewards={
            name: np.array([x for game in value for x in game]) for name, value in channels.items()
        },
    )


def run(name: str, table: TurnTable, **knobs: object) -> Advantage:
    return build_credit(name, knobs).apply(table)


def grid(table: TurnTable, advantage: Advantage) -> FloatArray:
    return table.grid(advantage.turns, fill=np.nan)


FIXTURE_A = {"outcome": [[0, 0, 1], [0, 0, 0], [0, 1], [0, 0, 0]]}
NEEDS_GROUP = [
    *("grpo", "grpo_turn", "grpo_turn_rtg", "rloo"),
    *("grpo_passk", "opo", "mt_grpo", "gigpo", "hgpo"),
    *("graphgpo", "relace", "tree_grpo", "istar"),
]
"""These compare games or turns of different games with one another and nothing else."""
BELIEF = {
    "outcome": [[0, 0, 1], [0, 0, 0], [0, 1], [0, 0, 0]],
    "length": [[0, 0, -0.15], [0, 0, -0.15], [0, -0.1], [0, 0, -0.15]],
    "belief": [[0.05, 0.15, 0], [0, 0.04, 0], [0.15, 0], [0, 0, 0.01]],
}


@pytest.mark.parametrize(
    ("name", "knobs", "size"),
    [
        ("grpo", {}, 0.866024),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, 0.5),
        ("rloo", {}, 0.666667),
    ],
)
def test_A13_episode_methods_match_their_closed_form_on_fixture_a(
    name: str, knobs: dict[str, object], size: float
) -> None:
    table = table_of(FIXTURE_A)
    advantage = run(name, table, **knobs)
    signs = np.array([1, -1, 1, -1])[table.traj]
    np.testing.assert_allclose(advantage.turns, size * signs, atol=1e-5)


def test_rloo_equals_the_score_minus_the_mean_of_the_others() -> None:
    table = table_of({"outcome": [[0.2], [0.9], [0.5], [0.0]]})
    expected = [-0.266667, 0.666667, 0.133333, -0.533333]
    np.testing.assert_allclose(run("rloo", table).turns, expected, atol=1e-5)


def test_turn_wise_grpo_masks_finished_games_as_in_the_worked_example() -> None:
    table = table_of(BELIEF)
    expected = [
        [0.74724, 0.943868, 1.154655],
        [-0.862201, -0.831883, -0.586031],
        [0.977161, 0.78389, np.nan],
        [-0.862201, -0.895874, -0.568624],
    ]
    np.testing.assert_allclose(grid(table, run("grpo_turn", table)), expected, atol=1e-5)


def test_turn_wise_grpo_reference_parity_counts_finished_games_as_zero() -> None:
    table = table_of(BELIEF)
    column = grid(table, run("grpo_turn", table, parity="reference"))[:, 2]
    expected = [1.484543, -0.606363, np.nan, -0.585453]
    np.testing.assert_allclose(column, expected, atol=1e-5)


def test_reference_parity_blows_up_one_tiny_belief_gain_and_the_floor_does_not() -> None:
    table = table_of({"belief": [[0.002]] + [[0.0]] * 15})
    published = run("grpo_turn", table, parity="reference").turns
    assert published[0] == pytest.approx(3.74, abs=0.01)
    ours = run("grpo_turn", table).turns
    assert ours[0] == pytest.approx(0.001875 / 0.010001, abs=1e-5)


def test_turn_wise_grpo_gives_the_outcome_to_every_turn() -> None:
    table = table_of(BELIEF)
    advantage = run("grpo_turn", table)
    expected = [0.9, 1.0, 0.85, -0.15, -0.11, -0.15, 1.05, 0.9, -0.15, -0.15, -0.14]
    np.testing.assert_allclose(advantage.rewards, expected, atol=1e-12)


def loop_grpo_turn(table: TurnTable, group: IntArray, *, published: bool) -> FloatArray:
    """The published double loop, written plainly."""
    eog = np.zeros(len(group))
    np.add.at(eog, table.traj, table.rewards["outcome"] + table.rewards["length"])
    reward = table.grid(table.rewards["belief"]) + eog[:, None] * table.exists()
    out = np.zeros_like(reward)
    for g in np.unique(group):
        for k in range(table.num_turns):
            members = np.flatnonzero(group == g)
            if not published:
                members = members[table.exists()[members, k]]
            values = reward[members, k]
            if len(members) < 2:
                out[members, k] = values / (1 + 1e-6) if published else 0.0
                continue
            std = values.std(ddof=1)
            floor = std if published else max(std, 0.01)
            out[members, k] = (values - values.mean()) / (floor + 1e-6)
    return out[table.traj, table.turn]


@pytest.mark.parametrize("parity", ["reference", "ours"])
def test_vectorised_turn_wise_grpo_equals_the_plain_double_loop(parity: str) -> None:
    rng = np.random.default_rng(3)
    group = np.repeat([0, 1, 2, 3], [4, 1, 3, 2])
    turns = rng.integers(1, 6, size=len(group))
    last = [[0.0] * (k - 1) for k in turns]
    table = table_of(
        {
            "outcome": [[*row, float(rng.integers(0, 2))] for row in last],
            "length": [[*row, -0.05 * k] for row, k in zip(last, turns, strict=True)],
            "belief": [list(rng.exponential(0.1, size=k)) for k in turns],
        },
        list(group),
    )
    expected = loop_grpo_turn(table, group, published=parity == "reference")
    np.testing.assert_allclose(run("grpo_turn", table, parity=parity).turns, expected, atol=1e-9)


@pytest.mark.parametrize(
    ("divided", "expected"),
    [(True, [-0.8, 0.0, 0.8, 0.0, 0.0, 0.0, 0.0]), (False, [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0])],
)
def test_what_is_masked_alone_or_without_spread_is_not_standardised(
    divided: bool, expected: list[float]
) -> None:
    values = np.array([1.0, 3.0, 5.0, np.nan, 7.0, 4.0, 4.0])
    mask, group = ~np.isnan(values), np.array([0, 0, 0, 0, 1, 2, 2])
    out = standardised(values, mask, group, 0.5, divided=divided)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    # Column by column on a grid.
    grid = standardised(
        np.stack([values, -values], axis=1), np.stack([mask, mask], axis=1), group, 0.5,
        divided=divided,
    )  # fmt: skip
    np.testing.assert_array_equal(grid, np.stack([out, -out], axis=1))


@pytest.mark.parametrize("divided", [True, False])
def test_the_comparison_of_whole_games_is_that_of_grpo(divided: bool) -> None:
    table = table_of({"outcome": [[0.0, 1.0], [0.5], [0.0, 0.0, 2.0]]}, invalid=[(2, 1)])
    knobs = {"norm_adv_by_std_in_grpo": divided, "epsilon": 0.1}
    expected = build_credit("grpo", knobs).apply(table).turns
    np.testing.assert_array_equal(whole_games(table, divided, 0.1), expected)
    assert expected[0] < 0 < expected[-1]


def test_return_to_go_stops_at_the_end_and_discounts() -> None:
    out = return_to_go(np.array([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0]]), 0.5)
    np.testing.assert_allclose(out, [[3.0, 4.0, 4.0], [1.0, 0.0, 0.0]])


def test_return_to_go_advantage_is_the_leave_one_out_difference() -> None:
    table = table_of({"r": [[1.0, 2.0], [5.0], [0.0, 3.0]]})
    # G: [3, 2], [5, 0 after its end], [3, 3].
    expected = [[3 - 4, 2 - 1.5], [5 - 3, np.nan], [3 - 4, 3 - 1]]
    np.testing.assert_allclose(grid(table, run("grpo_turn_rtg", table)), expected)


def test_return_to_go_scale_is_one_number_for_each_group_with_a_floor() -> None:
    table = table_of({"r": [[1.0, 2.0], [5.0], [0.0, 3.0]]})
    plain = run("grpo_turn_rtg", table).turns
    scaled = run("grpo_turn_rtg", table, scale_by_std=True, epsilon=0.0).turns
    np.testing.assert_allclose(scaled, plain / np.std([3, 5, 3], ddof=1))
    floored = run("grpo_turn_rtg", table, scale_by_std=True, epsilon=0.0, std_floor=10.0).turns
    np.testing.assert_allclose(floored, plain / 10)


def test_reinforce_without_baseline_is_the_return_to_go() -> None:
    table = table_of({"r": [[1.0, 2.0], [5.0]]}, group=[0, 1])
    np.testing.assert_allclose(run("reinforce", table, baseline="none").turns, [3, 2, 5])
    np.testing.assert_allclose(run("reinforce", table).turns, [-2, 2, 2])


def test_A2_one_episode_is_one_unit_of_group_statistics_whatever_its_turns() -> None:
    short = table_of({"r": [[1.0], [0.0], [0.0]]})
    long = table_of({"r": [[1.0], [0.0] * 9, [0.0]]})
    for name in ("grpo", "rloo"):
        games = [run(name, t).turns[np.flatnonzero(t.turn == 0)] for t in (short, long)]
        np.testing.assert_allclose(games[0], games[1])


@pytest.mark.parametrize("name", NEEDS_GROUP)
def test_A3_singletons_and_equal_rewards_give_zero_and_are_counted(name: str) -> None:
    table = table_of(
        {"r": [[0.1, 0.2], [0.7], [0.7], [0.7], [1.0, 1.0], [0.0, 1.0]]}, group=[0, 1, 1, 1, 2, 2]
    )
    advantage = run(name, table)
    assert not advantage.turns[table.group < 2].any()
    assert advantage.turns[table.group == 2].any()
    assert advantage.stats["frac_dead_groups"] == pytest.approx(2 / 3)
    assert advantage.stats["frac_singleton_groups"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["grpo", "grpo_turn"])
def test_reference_parity_pays_singletons_their_raw_score(name: str) -> None:
    table = table_of({"outcome": [[0.0, 2.0]]})
    np.testing.assert_allclose(run(name, table, parity="reference").turns, [2, 2], atol=1e-5)


# Alone, graph_opd trains the turns of its mask only.
@pytest.mark.parametrize("name", [name for name in CREDITS if name != "graph_opd"])
def test_A4_turns_exist_by_their_rows_even_when_every_reward_is_zero(name: str) -> None:
    table = table_of({"r": [[0.0, 0.0, 0.0], [0.0]]})
    advantage = run(name, table)
    np.testing.assert_array_equal(advantage.turns, np.zeros(4))
    np.testing.assert_array_equal(advantage.weight, np.ones(4))


def test_A4_a_zero_reward_turn_keeps_its_own_place() -> None:
    table = table_of({"r": [[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]})
    advantage = grid(table, run("grpo_turn_rtg", table))
    np.testing.assert_allclose(advantage, [[3, 2, 2], [-3, -2, -2]])


@pytest.mark.parametrize("name", [name for name in CREDITS if name != "graph_opd"])
def test_A5_every_valid_turn_of_a_live_group_has_weight(name: str) -> None:
    table = table_of(BELIEF, invalid=[(1, 1)])
    advantage = run(name, table)
    np.testing.assert_array_equal(advantage.weight > 0, table.valid)


@pytest.mark.parametrize("name", list(CREDITS))
def test_A6_the_logged_rewards_of_an_evaluation_are_those_that_training_uses(name: str) -> None:
    table, credit = table_of(BELIEF), build_credit(name)
    np.testing.assert_array_equal(credit.paid(table), credit.apply(table).rewards)


# Turn-wise GRPO pays the outcome on every turn, and IGPO nothing but the outcome on the last.
@pytest.mark.parametrize("name", [name for name in CREDITS if name not in ("grpo_turn", "igpo")])
def test_A6_the_logged_sum_of_channels_is_the_sum_used(name: str) -> None:
    table = table_of(BELIEF)
    advantage = run(name, table)
    channels = {c: float(np.sum(v)) for c, v in table.rewards.items()}
    for channel, total in channels.items():
        assert advantage.stats[f"reward_sum/{channel}"] == pytest.approx(total)
    assert advantage.stats["reward_sum"] == pytest.approx(sum(channels.values()))
    assert advantage.rewards.sum() == pytest.approx(sum(channels.values()))


def test_A6_turn_wise_grpo_logs_the_outcome_once_for_each_turn_it_pays() -> None:
    table = table_of(BELIEF)
    stats = run("grpo_turn", table).stats
    assert stats["reward_sum/outcome"] == pytest.approx(3 + 2)
    assert stats["reward_sum/length"] == pytest.approx(-0.15 * 9 - 0.1 * 2)
    parts = ("outcome", "length", "belief")
    assert stats["reward_sum"] == pytest.approx(sum(stats[f"reward_sum/{p}"] for p in parts))


@pytest.mark.parametrize("name", list(CREDITS))
def test_A8_games_of_unequal_length_and_an_early_win_are_fine(name: str) -> None:
    table = table_of({"outcome": [[1.0], [0.0] * 20, [0.0] * 7 + [1.0]]})
    assert np.isfinite(run(name, table).turns).all()


@pytest.mark.parametrize("name", list(CREDITS))
def test_J1_junk_on_turns_that_are_not_valid_does_not_leak(name: str) -> None:
    clean = table_of(BELIEF, invalid=[(0, 1), (3, 0), (3, 1), (3, 2)])
    junk = {c: np.where(clean.valid, v, 999.0) for c, v in clean.rewards.items()}
    dirty = TurnTable(
        **{f: getattr(clean, f) for f in clean.__slots__ if f != "rewards"}, rewards=junk
    )
    first, second = run(name, clean), run(name, dirty)
    np.testing.assert_array_equal(first.turns, second.turns)
    assert not first.turns[~clean.valid].any()


@pytest.mark.parametrize("name", NEEDS_GROUP)
def test_J1_a_game_without_outcome_does_not_move_its_siblings(name: str) -> None:
    three = table_of({"outcome": [[0.0, 1.0], [0.0], [0.0, 0.0]]})
    four = table_of(
        {"outcome": [[0.0, 1.0], [0.0], [0.0, 0.0], [0.0, 0.0]]}, invalid=[(3, 0), (3, 1)]
    )
    np.testing.assert_allclose(run(name, four).turns[:-2], run(name, three).turns)


@pytest.mark.parametrize("name", NEEDS_GROUP)
def test_A16_a_group_of_one_with_a_group_baseline_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"train\.n"):
        check_group_size(build_credit(name), 1)
    check_group_size(build_credit(name), 2)


def test_A16_methods_without_a_group_baseline_accept_one_game() -> None:
    check_group_size(build_credit("reinforce"), 1)
    check_group_size(build_credit("grpo", {"parity": "reference"}), 1)
    with pytest.raises(UserError, match="at least 1"):
        check_group_size(build_credit("reinforce"), 0)


ragged = st.lists(
    st.lists(st.floats(-5, 5, allow_nan=False).map(lambda x: round(x, 3)), min_size=1, max_size=4),
    min_size=2,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(games=ragged, name=st.sampled_from(list(CREDITS)), seed=st.integers(0, 99))
def test_A9_advantages_do_not_depend_on_the_order_of_games(
    games: list[list[float]], name: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 2, size=len(games))
    order = rng.permutation(len(games))
    straight = table_of({"r": games}, list(group))
    shuffled = table_of({"r": [games[i] for i in order]}, list(group[order]))
    first, second = run(name, straight), run(name, shuffled)
    a, b = straight.grid(first.turns), shuffled.grid(second.turns)
    np.testing.assert_allclose(a[order], b, rtol=1e-6, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(games=ragged, name=st.sampled_from(NEEDS_GROUP))
def test_A9_advantages_of_a_group_do_not_depend_on_the_other_groups(
    games: list[list[float]], name: str
) -> None:
    alone = run(name, table_of({"r": games})).turns
    other = [[9.0] * 7, [1.0]]
    both = run(name, table_of({"r": [*games, *other]}, [0] * len(games) + [1, 1])).turns
    np.testing.assert_allclose(both[: len(alone)], alone)


@settings(max_examples=25, deadline=None)
@given(games=ragged)
def test_group_advantages_sum_to_zero_over_games(games: list[list[float]]) -> None:
    table = table_of({"r": games})
    for name in ("grpo", "rloo"):
        per_game = table.grid(run(name, table).turns)[:, 0]
        assert abs(per_game.sum()) < 1e-5 * max(1, np.abs(per_game).max())


def test_one_turn_games_make_turn_wise_grpo_equal_grpo() -> None:
    table = table_of({"outcome": [[1.0], [0.0], [0.3], [0.9]]})
    np.testing.assert_allclose(run("grpo_turn", table).turns, run("grpo", table).turns)
    np.testing.assert_allclose(run("grpo_turn_rtg", table).turns, run("rloo", table).turns)


def test_an_estimator_refuses_to_throw_away_an_earlier_one() -> None:
    table = table_of(FIXTURE_A)
    # These two are estimators and transforms.
    for name in [name for name in CREDITS if name not in TRANSFORMS]:
        credit = build_credit(name)
        with pytest.raises(UserError, match="first in the credit chain"):
            credit.apply(table, credit.apply(table))


def test_unknown_names_and_knobs_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'grpo_turn'"):
        build_credit("grpo_trun")
    with pytest.raises(UserError, match="did you mean 'std_floor'"):
        build_credit("grpo_turn", {"std_flor": 1})


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("grpo", {"epsilon": -1.0}),
        ("grpo", {"parity": "verl"}),
        ("grpo_turn", {"std_floor": float("nan")}),
        ("grpo_turn_rtg", {"gamma": 1.5}),
        ("reinforce", {"baseline": "critic"}),
        ("grpo_passk", {"epsilon": -1e-9}),
        ("mt_grpo", {"turn_advantage_w": -0.1}),
        ("mt_grpo", {"turn_credit": "some"}),
        ("mt_grpo", {"epsilon": float("inf")}),
        ("gigpo", {"step_advantage_w": float("nan")}),
        ("gigpo", {"gamma": 1.01}),
        ("gigpo", {"episode_weighting": "row"}),
        ("gigpo", {"epsilon": -1.0}),
        ("hgpo", {"history": -1}),
        ("hgpo", {"length_weight_alpha": -1.0}),
        ("hgpo", {"gamma": -0.1}),
        ("hgpo", {"epsilon": -1.0}),
    ],
)
def test_settings_out_of_range_are_refused(name: str, knobs: dict[str, object]) -> None:
    with pytest.raises(UserError):
        build_credit(name, knobs)


@pytest.mark.parametrize("name", list(CREDITS))
def test_credit_methods_meet_the_protocol_and_keep_no_state(name: str) -> None:
    credit = build_credit(name)
    assert isinstance(credit, Credit)
    credit.load_state_dict(credit.state_dict())
    with pytest.raises(UserError, match="keeps no state"):
        credit.load_state_dict({"memory": 1})


@pytest.mark.parametrize("name", list(CREDITS))
def test_A18_a_batch_without_any_valid_turn_gives_zeros(name: str) -> None:
    table = table_of({"r": [[1.0], [2.0]]}, invalid=[(0, 0), (1, 0)])
    advantage = run(name, table)
    assert not advantage.turns.any()
    assert not advantage.weight.any()
    assert advantage.stats["frac_invalid_turns"] == 1.0
    empty = run(name, table_of({"r": []}, group=[]))
    assert empty.turns.shape == (0,)


def test_registries_that_need_torch_are_loaded_only_when_asked_for() -> None:
    code = (
        "import sys, delta_belief_rl.algo as algo; "
        "assert 'torch' not in sys.modules; "
        "assert set(algo.KL) and set(algo.LOSSES) and set(algo.AGGREGATIONS); "
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="TEACHERS"):
        getattr(delta_belief_rl.algo, "TEACHERS")  # noqa: B009
