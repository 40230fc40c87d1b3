"""ArCHer's advantages: the worked number, transitions, what must not leak, and a chain to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from turn_tables import FIXTURE_A, Act, Games, by_turn, part_of, rows_in_order, table_of, with_junk

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.catalogue import needs_of
from delta_belief_rl.algo.chain import chain_of
from delta_belief_rl.algo.losses.aggregate import count_units
from delta_belief_rl.algo.losses.policy import (
    PolicyInputs,
    PolicyLossSettings,
    ppo_loss,
    reinforce_loss,
)
from delta_belief_rl.trainer.archer import ArcherCriticSettings, Teacher
from delta_belief_rl.trainer.replay import Transitions
from delta_belief_rl.types import FloatArray, IntArray, TurnTable, UserError

COLUMNS = ("archer_game", "archer_reward", "archer_done")


def judged(table: TurnTable, q: FloatArray, v: FloatArray) -> TurnTable:
    """The table with critics of turns, ``[R]`` each, at every token."""
    row = table.token_row()
    return replace(table, tokens={"archer_q": q[row], "archer_v": v[row]})


def random_critics(table: TurnTable, seed: int = 0) -> TurnTable:
    rng = np.random.default_rng(seed)
    return judged(table, rng.normal(size=table.num_rows), rng.normal(size=table.num_rows))


def apply(table: TurnTable, **knobs: Any) -> Advantage:
    return build_credit("archer", knobs).apply(table)


def by_token(table: TurnTable, column: FloatArray) -> dict[tuple[int, int], set[float]]:
    """The numbers at the tokens of each (game, turn)."""
    out: dict[tuple[int, int], set[float]] = {}
    for row, value in zip(table.token_row(), column, strict=True):
        place = (int(table.traj[row]), int(table.turn[row]))
        out.setdefault(place, set()).add("nan" if np.isnan(value) else float(value))  # type: ignore[arg-type]
    return out


def one_game(*rewards: float, **changes: Any) -> TurnTable:
    return table_of([[Act("s", "a", reward) for reward in rewards]], **changes)


# --- advantages -----------------------------------------------------------------------------------


def test_the_advantage_is_that_of_the_worked_example() -> None:
    q, v = np.array([[0.7, 0.65], [0.1, 0.9]]), np.array([[0.5, 0.55], [0.3, 0.2]])
    table = judged(one_game(0.0, 1.0), q.min(axis=1), v.min(axis=1))
    found = apply(table)
    np.testing.assert_allclose(found.turns, [0.15, -0.1], atol=1e-5)
    assert found.tokens is None
    assert (found.weight == 1).all()
    assert found.rewards.tolist() == [0.0, 1.0]
    assert found.stats["archer_q_mean"] == pytest.approx((0.65 + 0.1) / 2)
    assert found.stats["archer_v_mean"] == pytest.approx((0.5 + 0.2) / 2)
    # 0 + 0.95 * 0.2 - 0.65 and 1 - 0.1.
    assert found.stats["archer_td_error"] == pytest.approx(np.sqrt((0.46**2 + 0.9**2) / 2))


def test_critics_that_know_their_targets_have_no_error() -> None:
    gamma, v = 0.9, np.array([0.3, 0.6, 0.2])
    rewards = np.array([0.1, 0.0, 1.0])
    q = rewards + gamma * np.array([0.6, 0.2, 0.0])
    found = apply(judged(one_game(*rewards), q, v), gamma=gamma)
    assert found.stats["archer_td_error"] == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(found.turns, q - v)


def test_reduction_critics_that_agree_give_no_advantage_whatever_is_paid() -> None:
    values = np.random.default_rng(0).normal(size=FIXTURE_A.num_rows)
    found = apply(judged(FIXTURE_A, values, values))
    assert (found.turns == 0).all()
    assert (found.weight == 1).all()
    assert found.stats["frac_dead_groups"] == 1.0


def test_in_the_warm_up_nothing_is_taught_to_the_policy_and_all_to_the_critics() -> None:
    table = random_critics(FIXTURE_A)
    plain = apply(table)
    for update, warm in ((0, True), (1, True), (2, False)):
        found = apply(replace(table, update=update), warmup_steps=2)
        assert found.stats["archer_warming"] == float(warm)
        assert (found.turns == (0.0 if warm else plain.turns)).all()
        assert (found.weight == 1).all()
        for name in COLUMNS:
            np.testing.assert_array_equal(found.columns[name], plain.columns[name])


# --- transitions ----------------------------------------------------------------------------------


def test_every_token_of_a_turn_is_told_its_game_its_reward_and_whether_it_ends() -> None:
    found = apply(random_critics(FIXTURE_A))
    places = list(zip(FIXTURE_A.traj.tolist(), FIXTURE_A.turn.tolist(), strict=True))
    want = {
        "archer_game": {place: {float(place[0])} for place in places},
        "archer_reward": {
            place: {reward}
            for place, reward in zip(places, FIXTURE_A.rewards["outcome"].tolist(), strict=True)
        },
        "archer_done": {
            place: {float(last)} for place, last in zip(places, FIXTURE_A.terminal, strict=True)
        },
    }
    for name, column in found.columns.items():
        assert by_token(FIXTURE_A, column) == want[name]
    assert set(found.columns) == set(COLUMNS)


def test_a_turn_that_is_not_valid_makes_no_transition_and_the_one_before_it_may_be_the_last() -> (
    None
):
    table = random_critics(one_game(1.0, 2.0, 3.0, 4.0, invalid=[(0, 1), (0, 3)]))
    found = apply(table)
    row = table.token_row()
    for name, want in (
        ("archer_reward", [1.0, np.nan, 3.0, np.nan]),
        ("archer_done", [0.0, np.nan, 1.0, np.nan]),
        ("archer_game", [0.0] * 4),
    ):
        np.testing.assert_array_equal(found.columns[name], np.array(want)[row])
    assert found.turns[[1, 3]].tolist() == [0.0, 0.0]
    assert found.weight.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_the_reward_of_a_turn_without_a_token_goes_to_the_turn_before() -> None:
    table = replace(one_game(1.0, 2.0, 4.0), n_tokens=np.array([2, 3, 0]))
    found = apply(random_critics(table))
    assert found.columns["archer_reward"].tolist() == [1.0] * 2 + [6.0] * 3
    assert found.columns["archer_done"].tolist() == [0.0] * 2 + [1.0] * 3
    assert found.turns[2] == 0.0


@pytest.mark.parametrize("bootstrap", [True, False])
def test_a_game_that_was_cut_off_goes_on_behind_its_end_only_where_that_is_wanted(
    bootstrap: bool,
) -> None:
    table = table_of([[Act("s", "a", 1.0), Act("s", "b")], [Act("s", "a"), Act("s", "b", 2.0)]])
    table = random_critics(replace(table, truncated=np.array([False, True, False, False])))
    found = apply(table, bootstrap_truncated=bootstrap)
    done = {(0, 0): {0.0}, (0, 1): {float(not bootstrap)}, (1, 0): {0.0}, (1, 1): {1.0}}
    assert by_token(table, found.columns["archer_done"]) == done
    np.testing.assert_array_equal(found.turns, apply(table).turns)


# --- what must not matter -------------------------------------------------------------------------


def test_A9_what_a_turn_that_is_not_valid_might_say_has_no_influence() -> None:
    games = [[Act("s", "a", 0.5), Act("t", "b", 1.0), Act("u", "c", 2.0)], [Act("s", "a", 1.0)]]
    clean = random_critics(table_of(games, invalid=[(0, 1)]))
    want = apply(clean)
    broken = (~clean.valid)[clean.token_row()]
    for junk in (9.0, np.nan, np.inf):
        dirty = with_junk(clean)
        dirty = replace(
            dirty,
            tokens={name: np.where(broken, junk, column) for name, column in clean.tokens.items()},
        )
        got = apply(dirty)
        np.testing.assert_array_equal(got.turns, want.turns)
        assert got.stats == want.stats
        for name in COLUMNS:
            np.testing.assert_array_equal(got.columns[name], want.columns[name])


def test_the_order_of_rows_does_not_matter() -> None:
    table = random_critics(table_of([[Act("s", "a", 1.0)] * 3, [Act("s", "b", 0.5)] * 2]))
    order = np.random.default_rng(2).permutation(table.num_rows)
    starts = np.cumsum(table.n_tokens) - table.n_tokens
    index = np.concatenate([starts[row] + np.arange(int(table.n_tokens[row])) for row in order])
    changed = replace(
        rows_in_order(table, order),
        tokens={name: column[index] for name, column in table.tokens.items()},
    )
    want, got = apply(table), apply(changed)
    assert by_turn(changed, got.turns) == by_turn(table, want.turns)
    for name in COLUMNS:
        assert by_token(changed, got.columns[name]) == by_token(table, want.columns[name])
    assert got.stats == pytest.approx(want.stats)


def test_a_group_on_its_own_has_the_advantages_that_it_has_among_others() -> None:
    games: Games = [[Act("s", "a", 1.0)] * 2, [Act("s", "b")] * 3, [Act("t", "b", 2.0)]]
    table = random_critics(table_of(games, group=[0, 1, 1]))
    want = apply(table)
    for group in (0, 1):
        shard, rows = part_of(table, [group])
        tokens = {
            name: column[np.isin(table.token_row(), rows)] for name, column in table.tokens.items()
        }
        np.testing.assert_array_equal(apply(replace(shard, tokens=tokens)).turns, want.turns[rows])


@pytest.mark.parametrize("rewards", [[[0.0]], [[1.0], [1.0]], [[0.0, 0.0], [0.0]]])
def test_groups_of_one_and_equal_games_are_games_like_others(rewards: list[list[float]]) -> None:
    table = table_of([[Act("s", "a", reward) for reward in game] for game in rewards])
    found = apply(random_critics(table))
    want = random_critics(table).tokens
    first = np.cumsum(table.n_tokens) - table.n_tokens
    np.testing.assert_allclose(found.turns, (want["archer_q"] - want["archer_v"])[first])
    nothing = replace(table, valid=np.zeros(table.num_rows, dtype=np.bool_))
    none = apply(random_critics(nothing))
    assert (none.weight == 0).all()
    assert np.isnan(none.columns["archer_reward"]).all()
    assert "archer_q_mean" not in none.stats


# --- refusals -------------------------------------------------------------------------------------


def test_it_names_its_critics_among_its_needs_and_refuses_to_go_without() -> None:
    credit = build_credit("archer")
    assert not credit.needs_group
    assert needs_of(credit) == ("learner archer_q", "learner archer_v")
    with pytest.raises(UserError, match="archer needs the token column archer_q"):
        credit.apply(FIXTURE_A)
    table = random_critics(FIXTURE_A)
    with pytest.raises(UserError, match="put it first"):
        credit.apply(table, credit.apply(table))
    with pytest.raises(UserError, match="keeps no state"):
        credit.load_state_dict({"a": 1})


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"gamma": -0.1}, "algorithm.gamma is -0.1"),
        ({"warmup_steps": -1}, "algorithm.archer.warmup_steps is -1"),
        ({"tau": 0.1}, "archer has no setting 'tau'"),
    ],
)
def test_a_setting_out_of_its_range_is_named(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        build_credit("archer", knobs)
    assert said in str(error.value)


def test_a_transform_behind_it_leaves_what_the_critics_are_told() -> None:
    table = random_critics(FIXTURE_A)
    parts = [
        ("archer", build_credit("archer")),
        ("pearl", build_credit("pearl", transform=True)),
    ]
    found = chain_of(parts).apply(table)
    for name in COLUMNS:
        np.testing.assert_array_equal(found.columns[name], apply(table).columns[name])


# --- the loss -------------------------------------------------------------------------------------


def loss_inputs(logp: torch.Tensor, old: torch.Tensor, advantages: Sequence[float]) -> PolicyInputs:
    count = len(logp)
    return PolicyInputs(
        logp=logp,
        old_logp=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weight=torch.ones(count, dtype=torch.float64),
        rows=torch.tensor([0, 0, 0, 1]),
        turns=torch.tensor([0, 0, 1, 2]),
    )


def test_A15_reinforce_is_the_advantage_times_the_log_prob_of_the_whole_turn() -> None:
    values, advantages = [-0.5, -1.0, -2.0, -0.25], [0.15, 0.15, -2.0, 1.0]
    settings = PolicyLossSettings(loss_agg_mode="seq-mean-token-sum")
    logp = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.1, -3.0, -2.0, -9.0], dtype=torch.float64)
    inputs = loss_inputs(logp, old, advantages)
    counts = count_units(inputs.weight, inputs.rows, inputs.turns)
    loss, metrics = reinforce_loss(inputs, settings, counts)
    # Turn by turn: 0.15 * -1.5, -2 * -2, 1 * -0.25, over two games.
    assert loss.item() == pytest.approx(-(0.15 * -1.5 + 4.0 - 0.25) / 2, abs=1e-5)
    loss.backward()
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad, -np.array(advantages) / 2, atol=1e-9)
    assert {"actor/pg_loss", "actor/ppo_kl"} <= set(metrics)
    assert "actor/pg_clipfrac" not in metrics


def test_reduction_while_nothing_has_moved_reinforce_has_the_gradient_of_the_ratio() -> None:
    values, advantages = [-0.5, -1.0, -2.0, -0.25], [0.15, -0.3, -2.0, 1.0]
    gradients: list[torch.Tensor] = []
    for loss_of in (reinforce_loss, ppo_loss):
        logp = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        inputs = loss_inputs(logp, logp.detach().clone(), advantages)
        counts = count_units(inputs.weight, inputs.rows, inputs.turns)
        loss_of(inputs, PolicyLossSettings(), counts)[0].backward()
        assert logp.grad is not None
        gradients.append(logp.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_A9_a_token_without_weight_has_no_part_in_reinforce() -> None:
    found: list[tuple[float, list[float]]] = []
    for junk in (0.0, float("nan"), float("inf")):
        logp = torch.tensor([-0.5, -1.0, junk, -0.25], dtype=torch.float64, requires_grad=True)
        inputs = loss_inputs(logp, torch.full((4,), junk).double(), [0.1, 0.2, junk, 1.0])
        weight = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
        inputs = replace(inputs, weight=weight, old_is_new=True)
        counts = count_units(weight, inputs.rows, inputs.turns)
        loss, _ = reinforce_loss(inputs, PolicyLossSettings(), counts)
        loss.backward()
        assert logp.grad is not None
        found.append((float(loss.detach()), logp.grad.tolist()))
    assert found[0] == found[1] == found[2]
    assert found[0][1][2] == 0.0


# --- learning -------------------------------------------------------------------------------------

LENGTH, TURNS, GAMES, UPDATES, RATE = 3, 4, 16, 25, 2.0
RIGHT = np.array([0, 1, 1])
"""The action that leads on from each place of a chain; the other one stays."""
PLACES = LENGTH * TURNS


def sampled(
    logits: FloatArray, rng: np.random.Generator
) -> tuple[TurnTable, IntArray, IntArray, IntArray]:
    """Games on the chain, paid at its end; and place, turn and action of each."""
    games: list[list[Act]] = []
    rows: list[tuple[int, int, int]] = []
    for _ in range(GAMES):
        place = turn = 0
        games.append([])
        while place < LENGTH and turn < TURNS:
            first = 1 / (1 + np.exp(logits[place, 1] - logits[place, 0]))
            action = int(rng.random() > first)
            rows.append((place, turn, action))
            place += int(action == RIGHT[place])
            games[-1].append(Act(str(place), str(action), float(place == LENGTH)))
            turn += 1
    places, turns, actions = (np.array(column) for column in zip(*rows, strict=True))
    return table_of(games), places, turns, actions


def features(places: IntArray, turns: IntArray, actions: IntArray | None = None) -> torch.Tensor:
    """States, or states and actions, as one number each that is not zero."""
    action = 0 if actions is None else 1 + actions
    index = (places * TURNS + turns) * 3 + action
    return torch.eye(3 * PLACES)[torch.from_numpy(index)]


def transitions(
    table: TurnTable, advantage: Advantage, states: torch.Tensor, behind: torch.Tensor
) -> Transitions:
    """What the learner makes of what the method hands to it."""
    first = np.cumsum(table.n_tokens) - table.n_tokens
    told = {name: torch.from_numpy(advantage.columns[name][first]) for name in COLUMNS}
    after = torch.roll(states, -1, dims=0)
    keys = torch.stack([told["archer_game"], torch.from_numpy(table.turn).double()], dim=1)
    rows = torch.stack([states, behind, after], dim=1)
    return Transitions(rows, told["archer_reward"], told["archer_done"], keys)


def critic_of(seed: int) -> Teacher:
    settings = ArcherCriticSettings(
        lr=3e-3, width=32, buffer=800, epochs=25, batch=64, tau=0.2, seed=seed
    )
    return Teacher(settings, 3 * PLACES, torch.device("cpu"))


@torch.no_grad()
def asked(teacher: Teacher, table: TurnTable, *seen: torch.Tensor) -> TurnTable:
    q = teacher.critic.actions(*seen).amin(dim=0).double().numpy()
    return judged(table, q, teacher.critic.states(seen[0]).amin(dim=0).double().numpy())


def test_double_critics_find_which_action_of_a_chain_with_a_late_reward_is_right() -> None:
    rng, teacher, credit = np.random.default_rng(0), critic_of(0), build_credit("archer")
    logits = np.zeros((LENGTH, 2))
    for step in range(1, 16):
        table, places, turns, actions = sampled(logits, rng)
        seen = features(places, turns), features(places, turns, actions)
        table = asked(teacher, table, *seen)
        teacher.learn(transitions(table, credit.apply(table), *seen), step)
    # Places from which the end can still be reached, and a wrong turn leaves less time for it.
    places = np.arange(LENGTH)
    turns = places
    for right in (True, False):
        actions = RIGHT if right else 1 - RIGHT
        table = one_game(*[0.0] * LENGTH)
        found = asked(teacher, table, features(places, turns), features(places, turns, actions))
        advantage = credit.apply(found).turns
        assert (advantage > 0).all() if right else (advantage < 0).all(), advantage


def trained(seed: int) -> float:
    """The win rate after some updates of a tabular policy beside the critics."""
    rng, teacher = np.random.default_rng(seed), critic_of(seed)
    credit, logits = build_credit("archer"), np.zeros((LENGTH, 2))
    for update in range(1, UPDATES + 1):
        table, places, turns, actions = sampled(logits, rng)
        seen = features(places, turns), features(places, turns, actions)
        table = asked(teacher, table, *seen)
        advantage = credit.apply(table)
        step, chosen = np.zeros_like(logits), np.exp(logits - logits.max(axis=1, keepdims=True))
        chosen = chosen / chosen.sum(axis=1, keepdims=True)
        np.add.at(step, (places, actions), advantage.turns)
        np.add.at(step, places, -advantage.turns[:, None] * chosen[places])
        logits = logits + RATE * step / GAMES
        teacher.learn(transitions(table, advantage, *seen), update)
    right = np.exp(logits - logits.max(axis=1, keepdims=True))
    right = (right / right.sum(axis=1, keepdims=True))[np.arange(LENGTH), RIGHT]
    at = np.eye(LENGTH + 1)[0]
    for _ in range(TURNS):
        moved = at[:LENGTH] * right
        at = at - np.append(moved, 0.0) + np.insert(moved, 0, 0.0)
    return float(at[LENGTH])


@pytest.mark.slow
def test_it_learns_a_chain_that_is_paid_at_its_end() -> None:
    rates = [trained(seed) for seed in range(2)]
    # A policy that knows nothing wins 5 of 16 games.
    assert min(rates) > 0.7, rates
