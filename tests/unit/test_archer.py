"""ArCHer's critics beside the policy: what they read, what they learn, and their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import archer_fakes
import numpy as np
import pytest
import torch
import training_fakes as fakes

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.models.adapters import use_adapter
from delta_belief_rl.models.double_critic import DoubleCritic
from delta_belief_rl.trainer import steps
from delta_belief_rl.trainer.actor import PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.archer import ArcherCriticSettings, Teacher, transitions_of
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.trainer.replay import Replay, Transitions
from delta_belief_rl.types import TrainBatch, UserError
from tests.runs import assert_same_state

GROUPS = fakes.make_groups()
REQUESTS = fakes.requests(GROUPS, None)
GAMES = [game for group in GROUPS for game in group.trajectories]
ROWS = 13
SETTINGS = archer_fakes.SETTINGS
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("archer") / "model")


def make(
    folder: Path,
    archer: ArcherCriticSettings | None = SETTINGS,
    stirred: bool = True,
    **changes: Any,
) -> PolicyActor:
    actor = PolicyActor(archer_fakes.settings_of(folder, archer, **changes))
    if not stirred:
        return actor
    return fakes.stir(actor) if archer is None else archer_fakes.stir(actor)


def batch_of(actor: PolicyActor, **options: Any) -> TrainBatch:
    return archer_fakes.make_batch(GROUPS, actor.score(REQUESTS), **options)


def run(
    actor: PolicyActor, batch: TrainBatch, training_step: int = 1, **options: Any
) -> dict[str, float]:
    plan = fakes.one_step(batch, **options)
    return merge_pairs([actor.update(fakes.share(batch, plan), training_step)])


def steps_of(
    rewards: Sequence[float],
    done: Sequence[float],
    features: torch.Tensor | None = None,
    hidden: int = 4,
) -> Transitions:
    """Transitions between random states, in the order of one game's turns."""
    count = len(rewards)
    if features is None:
        features = torch.randn(count, 3, hidden, generator=torch.Generator().manual_seed(0))
    keys = torch.stack([torch.zeros(count), torch.arange(count)], dim=1).double()
    told, ended = (torch.tensor(values, dtype=torch.float64) for values in (rewards, done))
    return Transitions(features, told, ended, keys)


def last_layers(critics: DoubleCritic, kind: str) -> list[torch.nn.Linear]:
    """The last layer of each critic of a kind."""
    found = [list(network.children())[-1] for network in getattr(critics, kind)]
    return [layer for layer in found if isinstance(layer, torch.nn.Linear)]


def constant(teacher: Teacher, **values: tuple[float, float]) -> None:
    """Make critics say the same of everything: ``q``, ``v`` and the slow ``slow_q``, ``slow_v``."""
    for name, wanted in values.items():
        critics = teacher.slow if name.startswith("slow_") else teacher.critic
        for layer, value in zip(last_layers(critics, name[-1]), wanted, strict=True):
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.constant_(layer.bias, value)


# --- targets --------------------------------------------------------------------------------------


def test_the_targets_are_those_of_the_worked_example() -> None:
    teacher = Teacher(replace(SETTINGS, gamma=0.95), 4, CPU)
    constant(teacher, slow_v=(0.6, 0.5), slow_q=(0.7, 0.65))
    seen = steps_of([0.0, 1.0, 0.25], [0.0, 1.0, 0.0])
    q, v = teacher.targets(seen, steps_of([9.0, 9.0], [0.0, 1.0]))
    np.testing.assert_allclose(q, [[0.57, 1.0, 0.82], [0.475, 1.0, 0.725]], atol=1e-5)
    np.testing.assert_allclose(v, [[0.7, 0.7], [0.65, 0.65]], atol=1e-5)


def test_A9_what_lies_behind_the_end_of_a_game_has_no_influence() -> None:
    teacher = Teacher(SETTINGS, 4, CPU)
    constant(teacher, slow_v=(0.6, 0.5))
    seen = steps_of([1.0, 0.5], [1.0, 1.0])
    seen.features[:, 2] = float("nan")
    q, _ = teacher.targets(seen, seen)
    np.testing.assert_allclose(q, [[1.0, 0.5], [1.0, 0.5]])


def test_the_slow_copies_go_their_share_of_the_way_and_the_targets_do_not_move_otherwise() -> None:
    teacher = Teacher(replace(SETTINGS, tau=0.25, epochs=1), 4, CPU)
    before = teacher.slow.arrays()
    teacher.learn(steps_of([1.0, 0.5, 0.0], [0.0, 0.0, 1.0]), 1)
    online, after = teacher.critic.arrays(), teacher.slow.arrays()
    for name, value in after.items():
        np.testing.assert_allclose(value, 0.75 * before[name] + 0.25 * online[name], atol=1e-6)
    assert np.abs(online["q.0.4.bias"] - before["q.0.4.bias"]).max() > 1e-3


def test_A15_the_loss_is_the_sum_of_four_mean_squares() -> None:
    teacher = Teacher(replace(SETTINGS, gamma=0.5, grad_clip=1e9, lr=1e-12, epochs=1), 4, CPU)
    constant(teacher, q=(0.2, 0.4), v=(0.1, 0.3), slow_q=(0.5, 0.7), slow_v=(0.6, 0.8))
    told = teacher.learn(steps_of([1.0], [0.0]), 1)
    # Towards 1 + 0.5 * 0.6 and 1 + 0.5 * 0.8; towards 0.5 and 0.7.
    assert told["archer/q_loss"][0] == pytest.approx(1.1**2 + 1.0**2, abs=1e-5)
    assert told["archer/v_loss"][0] == pytest.approx(0.4**2 + 0.4**2, abs=1e-5)
    layers = [*last_layers(teacher.critic, "q"), *last_layers(teacher.critic, "v")]
    slopes = [layer.bias.grad.item() for layer in layers if layer.bias.grad is not None]
    assert slopes == pytest.approx([-2.2, -2.0, -0.8, -0.8], abs=1e-5)


def test_q_learns_from_what_was_kept_and_v_from_the_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = Teacher(SETTINGS, 4, CPU)
    taught: list[tuple[set[float], set[float]]] = []

    def note(_teacher: Teacher, seen: Transitions, fresh: Transitions) -> dict[str, float]:
        taught.append((set(seen.rewards.tolist()), set(fresh.rewards.tolist())))
        return {}

    monkeypatch.setattr(Teacher, "_improve", note)
    for step, rewards in enumerate(([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]), start=1):
        taught.clear()
        teacher.learn(steps_of(rewards, [0.0, 1.0]), step)
        assert len(taught) == SETTINGS.epochs
        assert set().union(*(fresh for _, fresh in taught)) == set(rewards)
    assert set().union(*(seen for seen, _ in taught)) == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}


# --- the buffer -----------------------------------------------------------------------------------


def test_the_buffer_keeps_the_latest_and_says_what_it_holds() -> None:
    replay = Replay(5, 4)
    for first in (0, 3, 6):
        replay.add(steps_of([first, first + 1.0, first + 2.0], [0.0, 0.0, 1.0]))
    assert replay.kept.rewards.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert len(replay) == 5
    drawn = replay.draw(64, np.random.default_rng(0)).rewards.tolist()
    assert set(drawn) == {4.0, 5.0, 6.0, 7.0, 8.0}
    small = Replay(2, 4)
    small.load_state(replay.state())
    assert small.kept.rewards.tolist() == [7.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_saved_buffer_is_the_same_in_every_number_format(dtype: torch.dtype) -> None:
    replay, other = Replay(5, 4), Replay(5, 4)
    rows = steps_of([1.0, 2.0], [0.0, 1.0])
    replay.add(replace(rows, features=rows.features.to(dtype)))
    saved = parse_state(dump_state({"adapter": {}, "learners": {"a": {"replay": replay.state()}}}))
    other.load_state(saved["learners"]["a"]["replay"])
    assert other.kept.features.dtype == dtype
    assert torch.equal(other.kept.features, replay.kept.features)
    assert torch.equal(other.kept.rewards, replay.kept.rewards)
    assert torch.equal(other.kept.done, replay.kept.done)


def test_transitions_are_taken_by_game_and_turn_and_each_once() -> None:
    rows = steps_of([0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 1.0])
    shuffled = rows.at(torch.tensor([3, 1, 0, 1, 2, 3]))
    for got, want in zip(
        (shuffled.ordered().rewards, shuffled.ordered().features, shuffled.ordered().keys),
        (rows.rewards, rows.features, rows.keys),
        strict=True,
    ):
        assert torch.equal(got, want)


# --- what is read ---------------------------------------------------------------------------------


@torch.no_grad()
def plain_states(actor: PolicyActor) -> list[torch.Tensor]:
    """Hidden states of the base model game by game, through the model's own interface."""
    out: list[torch.Tensor] = []
    with use_adapter(actor.model, None):
        for game in GAMES:
            found = actor.model(input_ids=torch.tensor([game.token_ids]), output_hidden_states=True)
            out.append(found.hidden_states[-1][0])
    return out


@pytest.mark.parametrize("tokens", [1, 70, 10**6])
def test_a_turn_has_the_smaller_critics_of_its_state_and_of_its_action(
    folder: Path, tokens: int
) -> None:
    actor = make(folder, score_tokens=tokens)
    critic = archer_fakes.critics_of(actor).teacher.critic
    for game, score, hidden in zip(GAMES, actor.score(REQUESTS), plain_states(actor), strict=True):
        before = hidden[[turn.start - 1 for turn in game.turns]]
        behind = hidden[[turn.end - 1 for turn in game.turns]]
        counts = [turn.n_tokens for turn in game.turns]
        with torch.no_grad():
            q, v = critic.actions(before, behind).numpy(), critic.states(before).numpy()
        for name, value in (("archer_q", q), ("archer_v", v)):
            want = np.repeat(value.min(axis=0), counts)
            np.testing.assert_allclose(score.columns[name], want, atol=1e-5)
            assert np.abs(value[0] - value[1]).max() > 1e-2


def test_the_policys_adapter_changes_nothing_that_the_critics_read(folder: Path) -> None:
    actor, other = make(folder), make(folder)
    fakes.stir(other, 1.0)
    for one, two in zip(actor.score(REQUESTS), other.score(REQUESTS), strict=True):
        for name in ("archer_q", "archer_v"):
            np.testing.assert_array_equal(one.columns[name], two.columns[name])
        assert np.abs(one.logp - two.logp).max() > 1e-2


def test_new_critics_say_zero_and_change_nothing_else_that_is_scored(folder: Path) -> None:
    bare, actor = make(folder, None, stirred=False), make(folder, stirred=False)
    for got, want in zip(actor.score(REQUESTS), bare.score(REQUESTS), strict=True):
        assert {name: set(value) for name, value in got.columns.items()} == {
            "archer_q": {0.0},
            "archer_v": {0.0},
        }
        np.testing.assert_array_equal(got.logp, want.logp)
        assert want.columns == {}
    assert actor.score([]) == []


def test_scoring_leaves_the_policy_trainable_and_active(folder: Path) -> None:
    actor = make(folder)
    before = [name for name, p in actor.model.named_parameters() if p.requires_grad]
    actor.score(REQUESTS)
    run(actor, batch_of(actor))
    assert [name for name, p in actor.model.named_parameters() if p.requires_grad] == before
    assert before


def test_transitions_name_the_states_before_an_action_behind_it_and_before_the_next(
    folder: Path,
) -> None:
    actor = make(folder)
    batch = batch_of(actor)
    index, numbers = transitions_of(batch)
    want_index, want = [], []
    table, _ = archer_fakes.credited(GROUPS, actor.score(REQUESTS))
    rows = iter(table.rewards["outcome"].tolist())
    for number, (game, span) in enumerate(zip(GAMES, batch.games(), strict=True)):
        for turn in game.turns:
            last = turn.index == game.num_turns - 1
            after = len(game.token_ids) if last else game.turns[turn.index + 1].start
            places = (turn.start - 1, turn.end - 1, after - 1)
            want_index.append([span.start + place for place in places])
            want.append([number, turn.index, next(rows), float(last)])
    np.testing.assert_array_equal(index, want_index)
    np.testing.assert_allclose(numbers, want)
    assert len(index) == ROWS


def test_a_turn_that_makes_no_transition_is_stepped_over(folder: Path) -> None:
    actor = make(folder)
    table = build_table(GROUPS)
    table = replace(table, rewards={"outcome": np.ones(ROWS)}, valid=table.valid.copy())
    table.valid[[1, 3, 5]] = False  # the middle of game 0, all of game 1, the end of game 2
    scores = actor.score(REQUESTS)
    table = replace(table, tokens=steps.token_columns(scores))
    advantage = build_credit("archer").apply(table)
    batch = build_batch(
        GROUPS,
        table,
        advantage.turns,
        advantage.weight,
        [score.logp for score in scores],
        steps.batch_columns(table, advantage, scores),
    )
    index, numbers = transitions_of(batch)
    first, third = GAMES[0].turns[0], GAMES[0].turns[2]
    assert index[0].tolist() == [first.start - 1, first.end - 1, third.start - 1]
    assert numbers[:3, :2].tolist() == [[0, 0], [0, 2], [2, 0]]
    assert numbers[:3, 3].tolist() == [0.0, 1.0, 1.0]


# --- training -------------------------------------------------------------------------------------


def assert_teachers_close(got: PolicyActor, want: PolicyActor, atol: float) -> None:
    one, other = archer_fakes.critics_of(got).teacher, archer_fakes.critics_of(want).teacher
    fakes.assert_states_close(one.critic.arrays(), other.critic.arrays(), atol)
    fakes.assert_states_close(one.slow.arrays(), other.slow.arrays(), atol)
    assert len(one.replay) == len(other.replay)
    torch.testing.assert_close(one.replay.kept.features, other.replay.kept.features)
    assert torch.equal(one.replay.kept.rewards, other.replay.kept.rewards)


def test_A11_micro_batches_order_and_further_passes_change_no_critic(folder: Path) -> None:
    start = make(folder)
    batch = batch_of(start)
    shuffled = batch.select(np.array([3, 5, 0, 4, 1, 2]))
    want = run(start, batch)
    assert want["archer/transitions"] == want["archer/buffer_size"] == ROWS
    for games, options in (
        (batch, {"max_tokens": 1}),
        (shuffled, {"max_tokens": 40}),
        (shuffled, {"max_tokens": 40, "games_per_step": 2}),
        (batch, {"epochs": 3}),
    ):
        actor = make(folder)
        told = run(actor, games, **options)
        for name in (name for name in want if name.startswith("archer/")):
            assert told[name] == pytest.approx(want[name], abs=1e-5, rel=1e-4), name
        assert_teachers_close(actor, start, 1e-4)


def test_A9_numbers_at_tokens_without_a_transition_have_no_influence_at_all(folder: Path) -> None:
    start, other = make(folder), make(folder)
    batch = batch_of(start)
    idle = batch.turn_ids == 1
    views = {**batch.views, "archer_reward": np.where(idle, np.nan, batch.views["archer_reward"])}
    clean = replace(batch, views=views)
    dirty = {
        **views,
        "archer_q": np.full_like(batch.advantages, np.nan),
        "archer_v": np.full_like(batch.advantages, 9.0),
        "archer_done": np.where(idle, 9.0, views["archer_done"]),
        "archer_reward": np.where(batch.turn_ids < 0, 9.0, views["archer_reward"]),
    }
    assert run(other, replace(clean, views=dirty)) == run(start, clean)
    assert_same_state(other.state(), start.state())


def test_A14_an_empty_micro_batch_and_games_without_weight_add_nothing(folder: Path) -> None:
    start, other = make(folder), make(folder)
    batch = batch_of(start)
    (micro, counts), *_ = fakes.share(batch, fakes.one_step(batch))
    idle = replace(batch, weight=np.zeros_like(batch.weight))
    got = merge_pairs([other.update([([None, *micro, idle, None], counts)], 1)])
    want = run(start, batch)
    assert {k: v for k, v in got.items() if k.startswith("archer/")} == {
        k: v for k, v in want.items() if k.startswith("archer/")
    }
    assert_teachers_close(other, start, 0.0)


def test_the_policy_is_left_as_it_would_be_without_critics(folder: Path) -> None:
    actor, bare = make(folder), make(folder, None)
    batch = batch_of(actor)
    for step in (1, 2):
        run(actor, batch, step, max_tokens=40)
        run(bare, batch, step, max_tokens=40)
        assert actor.snapshot().checksum == bare.snapshot().checksum
    assert {name.split("/")[0] for name in run(actor, batch)} == {"actor", "archer"}


def test_the_columns_of_a_step_are_those_before_its_update(folder: Path) -> None:
    actor = make(folder)
    first = actor.score(REQUESTS)
    batch = archer_fakes.make_batch(GROUPS, first)
    before = archer_fakes.critics_of(actor).teacher.critic.arrays()
    again = actor.score(REQUESTS)
    np.testing.assert_array_equal(first[0].columns["archer_q"], again[0].columns["archer_q"])
    run(actor, batch)
    after = archer_fakes.critics_of(actor).teacher.critic.arrays()
    assert max(np.abs(after[name] - before[name]).max() for name in before) > 1e-3
    moved = actor.score(REQUESTS)[0].columns["archer_q"] - first[0].columns["archer_q"]
    assert np.abs(moved).max() > 1e-3


def test_critics_come_to_the_returns_of_games_that_are_played_again(folder: Path) -> None:
    settings = replace(SETTINGS, width=32, epochs=60, batch=32, tau=0.3, gamma=1.0, lr=3e-3)
    actor = make(folder, settings, stirred=False)
    losses = [run(actor, batch_of(actor), step)["archer/q_loss"] for step in range(1, 7)]
    assert losses[-1] < 0.1 * losses[0]
    table, _ = archer_fakes.credited(GROUPS, actor.score(REQUESTS))
    q = table.tokens["archer_q"][np.cumsum(table.n_tokens) - 1]
    returns = [
        float(table.rewards["outcome"][(table.traj == game) & (table.turn >= turn)].sum())
        for game, turn in zip(table.traj, table.turn, strict=True)
    ]
    np.testing.assert_allclose(q, returns, atol=0.4)


def test_a_step_without_games_leaves_the_critics_as_they_are(folder: Path) -> None:
    actor = make(folder)
    before = actor.state()["learners"]
    metrics = merge_pairs([actor.update([], 1)])
    assert metrics["archer/transitions"] == metrics["archer/buffer_size"] == 0
    assert "archer/q_loss" not in metrics
    bare = replace(batch_of(actor), views={})
    assert run(actor, bare)["archer/transitions"] == 0
    assert_same_state(actor.state()["learners"], before)


def test_A20_a_broken_gradient_moves_neither_critics_nor_slow_copies(folder: Path) -> None:
    # So many that each update has a transition with something behind it.
    actor = make(folder, replace(SETTINGS, batch=64))
    teacher = archer_fakes.critics_of(actor).teacher
    batch, before = batch_of(actor), (teacher.critic.arrays(), teacher.slow.arrays())
    with torch.no_grad():
        last_layers(teacher.slow, "v")[0].bias.fill_(float("inf"))
    held = teacher.slow.arrays()
    metrics = run(actor, batch)
    assert metrics["archer/skipped_updates"] == 1.0
    assert "archer/q_loss" not in metrics
    assert metrics["actor/skipped_updates"] == 0.0
    fakes.assert_states_close(teacher.critic.arrays(), before[0], 0.0)
    fakes.assert_states_close(teacher.slow.arrays(), held, 0.0)


def test_hidden_states_in_half_precision_are_kept_and_saved_as_they_are(folder: Path) -> None:
    actor, other = make(folder, dtype="bfloat16"), make(folder, dtype="bfloat16")
    assert run(actor, batch_of(actor))["archer/q_loss"] > 0
    teacher = archer_fakes.critics_of(actor).teacher
    assert teacher.replay.kept.features.dtype == torch.bfloat16
    assert {p.dtype for p in teacher.critic.parameters()} == {torch.float32}
    other.load_state(parse_state(dump_state(actor.state())))
    for each in (actor, other):
        run(each, batch_of(each), 2)
    assert_same_state(other.state()["learners"], actor.state()["learners"])


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    start, other = make(folder), make(folder, gradient_checkpointing=True)
    batch = batch_of(start)
    run(start, batch)
    run(other, batch)
    assert_teachers_close(other, start, 1e-5)


# --- state ----------------------------------------------------------------------------------------


def test_R2_loaded_critics_go_on_bit_for_bit(folder: Path) -> None:
    straight = make(folder)
    run(straight, batch_of(straight), 1, games_per_step=3)
    saved = dump_state(straight.state())
    other = make(folder, stirred=False)
    other.load_state(parse_state(saved))
    assert_same_state(parse_state(dump_state(other.state())), parse_state(saved))
    for actor in (straight, other):
        run(actor, batch_of(actor, seed=4), 2, games_per_step=3)
    assert_same_state(other.state(), straight.state())
    assert len(archer_fakes.critics_of(other).teacher.replay) == SETTINGS.buffer < 2 * ROWS


def test_what_is_drawn_depends_on_the_step_and_on_the_seed_alone(folder: Path) -> None:
    found: list[Mapping[str, np.ndarray]] = []
    for seed, step in ((42, 1), (42, 1), (42, 2), (7, 1)):
        actor = make(folder, replace(SETTINGS, seed=seed), stirred=False)
        archer_fakes.critics_of(actor).teacher.critic.load_arrays(
            DoubleCritic(actor.model.config.hidden_size, SETTINGS.width, 0).arrays()
        )
        run(actor, batch_of(actor), step)
        found.append(archer_fakes.critics_of(actor).teacher.critic.arrays())
    fakes.assert_states_close(found[1], found[0], 0.0)
    for other in found[2:]:
        assert max(np.abs(other[name] - found[0][name]).max() for name in other) > 1e-5


def test_R11_a_checkpoint_of_other_critics_is_refused(folder: Path) -> None:
    actor = make(folder)
    run(actor, batch_of(actor))
    state = parse_state(dump_state(actor.state()))
    with pytest.raises(UserError, match=r"algorithm\.archer\.width"):
        make(folder, replace(SETTINGS, width=9)).load_state(state)
    with pytest.raises(UserError, match="no state of archer"):
        make(folder).load_state(parse_state(dump_state(make(folder, None).state())))
    with pytest.raises(UserError, match="replay buffer is of another model"):
        Replay(5, 3).load_state(state["learners"]["archer"]["replay"])


def test_a_policy_without_critics_plays_from_the_checkpoint_of_one_with(folder: Path) -> None:
    trained, player = make(folder), make(folder, None, stirred=False)
    player.load_state(parse_state(dump_state(trained.state())))
    assert player.snapshot().checksum == trained.snapshot().checksum
    assert "learners" not in player.state()


def test_critics_need_a_base_model_beside_the_policy(folder: Path) -> None:
    none = replace(fakes.ADAPTER, rank=0)
    with pytest.raises(UserError, match=r"archer reads the base model .*lora_rank"):
        make(folder, stirred=False, adapter=none)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gamma": 1.5}, "algorithm.gamma is 1.5"),
        ({"tau": 0.0}, "algorithm.archer.tau is 0.0"),
        ({"tau": 1.5}, "algorithm.archer.tau is 1.5"),
        ({"lr": 0.0}, "algorithm.archer.lr is 0.0"),
        ({"width": 0}, "algorithm.archer.width is 0"),
        ({"buffer": 0}, "algorithm.archer.buffer is 0"),
        ({"epochs": 0}, "algorithm.archer.critic_epochs is 0"),
        ({"batch": 0}, "algorithm.archer.critic_batch is 0"),
        ({"grad_clip": 0.0}, "algorithm.archer.grad_clip is 0.0"),
    ],
)
def test_a_setting_out_of_its_range_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        ArcherCriticSettings(**changes)
    assert said in str(error.value)
