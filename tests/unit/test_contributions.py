"""The head of contributions beside the policy: its readings, its loss, its training, its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import contribution_fakes as heads
import numpy as np
import pytest
import torch
import training_fakes as fakes
from contribution_fakes import head_of

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.credit.spa_rl import COLUMN, GAME, TARGET
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.models.adapters import use_adapter
from delta_belief_rl.trainer import steps
from delta_belief_rl.trainer.actor import POLICY, PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.contributions import ContributionSettings, solved
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.types import TrainBatch, UserError
from tests.runs import assert_same_state

GROUPS = fakes.make_groups()
REQUESTS = fakes.requests(GROUPS, None)
ROWS = 13
FAST = OptimizerSettings(lr=1e-2)
EACH = pytest.mark.parametrize("source", heads.SOURCES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("head") / "model")


def make(folder: Path, source: str = "base", stirred: bool = True, **changes: Any) -> PolicyActor:
    actor = PolicyActor(heads.settings_of(folder, source, **changes))
    return heads.stir(actor) if stirred else actor


def batch_of(actor: PolicyActor, **options: Any) -> TrainBatch:
    return heads.make_batch(GROUPS, actor.score(REQUESTS), **options)


def run(
    actor: PolicyActor, batch: TrainBatch, training_step: int = 1, **options: Any
) -> dict[str, float]:
    plan = fakes.one_step(batch, **options)
    return merge_pairs([actor.update(fakes.share(batch, plan), training_step)])


def weight_of(actor: PolicyActor) -> np.ndarray:
    return head_of(actor).weight.numpy().copy()


def assert_metrics_close(got: Mapping[str, float], want: Mapping[str, float]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value == pytest.approx(want[name], abs=1e-6, rel=2e-5), name


@torch.no_grad()
def states_of(actor: PolicyActor, source: str = "base") -> list[np.ndarray]:
    """Scaled states at the sampled tokens, game by game through the model's own interface."""
    out: list[np.ndarray] = []
    with use_adapter(actor.model, None if source == "base" else POLICY):
        for request in REQUESTS:
            ids = torch.tensor([list(request.token_ids)])
            hidden = actor.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            out.append(scaled(hidden[request.action_positions].numpy()))
    return out


def scaled(states: np.ndarray) -> np.ndarray:
    """Mean 0 and length 1, with the small constant that keeps a state without spread finite."""
    apart = states - states.mean(axis=1, keepdims=True)
    variance = (apart**2).mean(axis=1, keepdims=True)
    return apart / np.sqrt((variance + 1e-5) * states.shape[1])


def end_states(actor: PolicyActor, source: str = "base") -> np.ndarray:
    """Scaled states at the last token of each turn, ``[R, hidden]``."""
    return np.concatenate(states_of(actor, source))[np.cumsum(build_table(GROUPS).n_tokens) - 1]


def game_sums(values: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """``[R, ...] -> [N, ...]``."""
    table = build_table(GROUPS)
    rows = np.ones(ROWS, dtype=np.bool_) if kept is None else kept
    out = np.zeros((table.num_games, *values.shape[1:]))
    np.add.at(out, table.traj[rows], values[rows])
    return out


# --- readings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 70, 10**6])
@EACH
def test_a_reading_is_the_head_at_the_tokens_own_place(
    folder: Path, source: str, tokens: int
) -> None:
    actor = make(folder, source, score_tokens=tokens)
    weight = weight_of(actor)
    for score, states in zip(actor.score(REQUESTS), states_of(actor, source), strict=True):
        np.testing.assert_allclose(score.columns[COLUMN], states @ weight, atol=1e-5)
    other = states_of(actor, "policy" if source == "base" else "base")
    assert np.abs(states_of(actor, source)[0] - other[0]).max() > 1e-3


@EACH
def test_a_new_head_says_zero_and_changes_nothing_else_that_is_scored(
    folder: Path, source: str
) -> None:
    bare = make(folder, source, stirred=False, learners=())
    actor = make(folder, source, stirred=False)
    for got, want in zip(actor.score(REQUESTS), bare.score(REQUESTS), strict=True):
        assert (got.columns[COLUMN] == 0).all()
        assert len(got.columns[COLUMN]) == len(got.logp)
        assert want.columns == {}
        np.testing.assert_array_equal(got.logp, want.logp)
    assert actor.score([]) == []


def test_scoring_leaves_the_policy_trainable_and_active(folder: Path) -> None:
    actor = make(folder)
    before = [name for name, p in actor.model.named_parameters() if p.requires_grad]
    actor.score(REQUESTS)
    run(actor, batch_of(actor))
    assert [name for name, p in actor.model.named_parameters() if p.requires_grad] == before
    assert {name.split(".")[-2] for name in before} == {POLICY}
    assert actor.model.active_adapter == POLICY


def test_a_state_of_any_size_is_read_the_same(folder: Path) -> None:
    head = head_of(make(folder))
    states = torch.randn(5, len(head.weight), generator=torch.Generator().manual_seed(1))
    index = torch.arange(5)
    want = head._read(states, index)
    np.testing.assert_allclose(head._read(100.0 * states + 7.0, index), want, atol=1e-4)
    assert want.abs().max() > 1e-3


# --- the loss -------------------------------------------------------------------------------------


@EACH
def test_the_loss_is_the_mean_squared_gap_between_sum_and_outcome(
    folder: Path, source: str
) -> None:
    actor = make(folder, source)
    outcomes = np.random.default_rng(3).normal(size=6)
    weight, batch = weight_of(actor), batch_of(actor, outcomes=outcomes)
    sums = game_sums(end_states(actor, source) @ weight)
    metrics = run(actor, batch, max_tokens=40)
    assert metrics["contributions/loss"] == pytest.approx(((sums - outcomes) ** 2).mean(), rel=1e-4)


def loss_of(weight: np.ndarray, sums: np.ndarray, outcomes: np.ndarray, ridge: float) -> float:
    return float(((sums @ weight - outcomes) ** 2).mean() + ridge * (weight**2).sum())


@pytest.mark.parametrize("games", [4, 30])
def test_A15_no_head_near_the_new_one_has_a_smaller_loss(games: int) -> None:
    rng = np.random.default_rng(games)
    sums, outcomes = rng.normal(size=(games, 9)), rng.normal(size=games)
    best = solved(torch.from_numpy(sums), torch.from_numpy(outcomes), 0.1).numpy()
    least = loss_of(best, sums, outcomes, 0.1)
    for step in rng.normal(size=(50, 9)) * 1e-3:
        assert loss_of(best + step, sums, outcomes, 0.1) > least
    weight = torch.from_numpy(best.copy()).requires_grad_()
    gap = torch.from_numpy(sums) @ weight - torch.from_numpy(outcomes)
    ((gap**2).mean() + 0.1 * (weight**2).sum()).backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() < 1e-10
    assert np.abs(best).max() > 0.05


def test_the_worked_numbers_of_a_head() -> None:
    # One number, two games: (4 + ridge) w = mean of 2 * 1 and 2 * 3.
    one = solved(torch.tensor([[2.0], [2.0]]), torch.tensor([1.0, 3.0]), 4.0)
    np.testing.assert_allclose(one, [0.5], atol=1e-12)
    # One game of two numbers: its sum times R / (|x|^2 + ridge).
    two = solved(torch.tensor([[1.0, 2.0]]), torch.tensor([3.0]), 1.0)
    np.testing.assert_allclose(two, [0.5, 1.0], atol=1e-12)


@pytest.mark.parametrize("tokens", [40, 10**6])
@EACH
def test_the_new_head_is_the_best_one_on_the_sums_of_valid_turns(
    folder: Path, source: str, tokens: int
) -> None:
    actor = make(folder, source)
    valid = np.ones(ROWS, dtype=np.bool_)
    valid[[1, 5, 6]] = False
    outcomes = np.random.default_rng(4).normal(size=6)
    states = game_sums(end_states(actor, source), valid)
    taught = np.isin(np.arange(6), build_table(GROUPS).traj[valid])
    run(actor, batch_of(actor, outcomes=outcomes, valid=valid), max_tokens=tokens)
    ridge = head_of(actor).settings.ridge
    want = solved(torch.from_numpy(states[taught]), torch.from_numpy(outcomes[taught]), ridge)
    np.testing.assert_allclose(weight_of(actor), want, atol=2e-3, rtol=2e-3)
    assert np.abs(weight_of(actor)).max() > 0.1


@EACH
def test_A11_micro_batches_and_order_change_neither_loss_nor_head(
    folder: Path, source: str
) -> None:
    start = make(folder, source)
    batch = batch_of(start)
    shuffled = batch.select(np.array([3, 5, 0, 4, 1, 2]))
    want = run(start, batch)
    for games, tokens in ((batch, 1), (batch, 40), (shuffled, 10**6), (shuffled, 40)):
        actor = make(folder, source)
        assert_metrics_close(run(actor, games, max_tokens=tokens), want)
        np.testing.assert_allclose(weight_of(actor), weight_of(start), atol=1e-3)
    assert np.abs(weight_of(start)).max() > 0.1
    # What is kept is in the order of games, whoever read them.
    assert head_of(start).state()["games"]["rows"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


@EACH
def test_A9_numbers_at_other_tokens_have_no_influence_at_all(folder: Path, source: str) -> None:
    start, other = make(folder, source), make(folder, source)
    batch = batch_of(start)
    target = np.where(batch.turn_ids < 0, 9.0, batch.views[TARGET])
    assert (target == 9.0).any()
    dirty = replace(batch, views={**batch.views, TARGET: target})
    assert run(other, dirty) == run(start, batch)
    assert_same_state(other.state(), start.state())


def test_turns_without_weight_stay_in_the_sum_and_games_without_weight_do_not(
    folder: Path,
) -> None:
    weight = np.ones(ROWS)
    weight[[0, 7]] = 0.0
    actors = [make(folder) for _ in range(2)]
    one, two = batch_of(actors[0]), batch_of(actors[1], weight=weight)
    assert build_table(GROUPS).traj[[0, 7]].tolist() == [0, 3]
    losses = [run(*pair)["contributions/loss"] for pair in zip(actors, (one, two), strict=True)]
    assert losses[0] == losses[1] > 0
    np.testing.assert_array_equal(weight_of(actors[0]), weight_of(actors[1]))
    table = build_table(GROUPS)
    silent = np.where(table.traj == 2, 0.0, 1.0)
    without, none = make(folder), make(folder)
    got = run(without, batch_of(without, weight=silent))
    want = run(none, batch_of(none, weight=silent, valid=table.traj != 2))
    assert got["contributions/loss"] == pytest.approx(want["contributions/loss"])
    np.testing.assert_array_equal(weight_of(without), weight_of(none))


@EACH
def test_A14_an_empty_micro_batch_and_games_without_weight_add_nothing(
    folder: Path, source: str
) -> None:
    start, other = make(folder, source), make(folder, source)
    batch = batch_of(start)
    (micro, counts), *_ = fakes.share(batch, fakes.one_step(batch))
    idle = replace(batch, weight=np.zeros_like(batch.weight))
    got = merge_pairs([other.update([([None, *micro, idle, None], counts)], 1)])
    assert_metrics_close(got, run(start, batch))
    np.testing.assert_allclose(weight_of(other), weight_of(start), atol=1e-3)


# --- training -------------------------------------------------------------------------------------


@EACH
def test_the_policy_is_bit_for_bit_that_of_a_run_without_a_head(folder: Path, source: str) -> None:
    actor = make(folder, source)
    bare = fakes.stir(make(folder, source, stirred=False, learners=()))
    batch = batch_of(actor)
    for step in (1, 2):
        run(actor, batch, step, max_tokens=40)
        run(bare, batch, step, max_tokens=40)
        assert actor.snapshot().checksum == bare.snapshot().checksum
    assert actor.snapshot().state.keys() == bare.snapshot().state.keys()


@EACH
def test_sums_of_readings_come_to_the_outcomes(folder: Path, source: str) -> None:
    actor = make(folder, source, stirred=False)
    planted = np.random.default_rng(8).normal(size=weight_of(actor).size)
    outcomes = game_sums(end_states(actor, source) @ planted)
    outcomes = outcomes / np.abs(outcomes).max()
    losses: list[float] = []
    for step in (1, 2, 3):
        batch = heads.make_batch(GROUPS, actor.score(REQUESTS), outcomes)
        metrics = run(actor, batch, step)
        losses.append(metrics["contributions/loss"])
        assert metrics["contributions/fit"] > 0.99
    assert max(losses[1:]) < 0.05 * losses[0]
    read = np.concatenate([score.columns[COLUMN] for score in actor.score(REQUESTS)])
    shares = read[np.cumsum(build_table(GROUPS).n_tokens) - 1]
    np.testing.assert_allclose(game_sums(shares), outcomes, atol=0.1)


def planted_games(seed: int, games: int, width: int) -> np.ndarray:
    """Rows as the head keeps them, of games of unequal numbers of turns.

    All turns share a large part that says nothing; a small one says what a turn contributed.
    """
    rng = np.random.default_rng(seed)
    rows = np.zeros((games, 2 + width))
    rows[:, 0] = np.arange(games)
    taught = np.random.default_rng(0).normal(size=width)
    for row in rows:
        turns = rng.normal(size=(int(rng.integers(3, 14)), width))
        row[1] = (turns @ taught).sum() + 0.3 * rng.normal()
        row[2:] = scaled(turns + 8.0 * np.sin(np.arange(width))).sum(axis=0)
    return rows.astype(np.float32)


def test_from_a_few_steps_the_head_explains_games_that_it_has_not_seen(folder: Path) -> None:
    head = head_of(make(folder, stirred=False))
    width = len(head.weight)
    for step in range(1, 7):
        rows = torch.from_numpy(planted_games(step, 64, width))
        head._new = [torch.cat([torch.ones(len(rows), 1), rows], dim=1)]
        head.finish(step)
    fresh = planted_games(99, 400, width)
    missed = fresh[:, 1] - fresh[:, 2:] @ head.weight.numpy()
    assert missed.var() < 0.1 * fresh[:, 1].var()


def test_the_latest_games_are_kept_and_a_second_pass_adds_none(folder: Path) -> None:
    few = ContributionSettings(games=8)
    actor = make(folder, learners=(few,))
    batch = batch_of(actor)
    assert run(actor, batch, 1, epochs=2)["contributions/games"] == 6.0
    first = head_of(actor).state()["games"]["rows"]
    other = replace(batch, views={**batch.views, TARGET: batch.views[TARGET] + 1.0})
    assert run(actor, other, 2)["contributions/games"] == 8.0
    kept = head_of(actor).state()["games"]["rows"]
    assert kept[:, 0].tolist() == [4, 5, 0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(kept[:2], first[4:])
    np.testing.assert_allclose(kept[2:, 1], first[:, 1] + 1.0, atol=1e-6)


def test_a_game_is_kept_as_the_policy_first_read_it(folder: Path) -> None:
    once, twice = (make(folder, "policy", optimizer=FAST) for _ in range(2))
    batch = batch_of(once)
    run(once, batch)
    run(twice, batch, epochs=2)
    assert_same_state(head_of(twice).state(), head_of(once).state())
    moved = make(folder, "policy", optimizer=FAST)
    run(moved, batch)
    run(moved, batch, 2)
    rows = head_of(moved).state()["games"]["rows"]
    assert np.abs(rows[6:, 2:] - rows[:6, 2:]).max() > 1e-3


def test_the_step_is_scored_before_the_head_learns_from_it(folder: Path) -> None:
    actor = make(folder, stirred=False)
    before = actor.score(REQUESTS)
    run(actor, heads.make_batch(GROUPS, before))
    assert all((score.columns[COLUMN] == 0).all() for score in before)
    assert all((score.columns[COLUMN] != 0).all() for score in actor.score(REQUESTS))


@EACH
def test_without_a_target_the_head_stays_as_it_is(folder: Path, source: str) -> None:
    actor = make(folder, source)
    before = head_of(actor).state()
    batch = batch_of(actor)
    nothing = batch_of(actor, valid=np.zeros(ROWS, dtype=np.bool_))
    for other in (nothing, replace(batch, views={})):
        metrics = run(actor, other)
        assert "contributions/loss" not in metrics
        assert "contributions/fit" not in metrics
    assert_same_state(head_of(actor).state(), before)


def test_A20_a_broken_outcome_leaves_its_game_out_and_the_policy_alone(folder: Path) -> None:
    actor, other = make(folder), make(folder)
    batch = batch_of(actor)
    target = np.where(batch.views[GAME] == 2, batch.views[TARGET] * 1e40, batch.views[TARGET])
    metrics = run(actor, replace(batch, views={**batch.views, TARGET: target}))
    assert metrics["contributions/skipped_games"] == 1.0
    assert metrics["contributions/games"] == 5.0
    assert metrics["actor/skipped_updates"] == 0.0
    run(other, batch_of(other, valid=build_table(GROUPS).traj != 2))
    np.testing.assert_array_equal(weight_of(actor), weight_of(other))
    assert np.isfinite(weight_of(actor)).all()


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    for source in heads.SOURCES:
        start, other = make(folder, source), make(folder, source, gradient_checkpointing=True)
        batch = batch_of(start)
        assert_metrics_close(run(other, batch), run(start, batch))
        np.testing.assert_allclose(weight_of(other), weight_of(start), atol=1e-3)


# --- state ----------------------------------------------------------------------------------------


@EACH
def test_R2_a_loaded_head_goes_on_bit_for_bit(folder: Path, source: str) -> None:
    straight = make(folder, source)
    run(straight, batch_of(straight), 1, games_per_step=3)
    saved = dump_state(straight.state())
    other = make(folder, source, stirred=False)
    other.load_state(parse_state(saved))
    assert_same_state(parse_state(dump_state(other.state())), parse_state(saved))
    for actor in (straight, other):
        run(actor, batch_of(actor), 2, games_per_step=3)
    assert_same_state(other.state(), straight.state())


def test_R11_a_checkpoint_of_another_head_is_refused(folder: Path) -> None:
    states = {name: parse_state(dump_state(make(folder, name).state())) for name in heads.SOURCES}
    bare = make(folder, stirred=False, learners=())
    with pytest.raises(UserError, match="The checkpoint has no state of contributions"):
        make(folder).load_state(parse_state(dump_state(bare.state())))
    with pytest.raises(UserError, match=r"head reads hidden states of algorithm\.spa_rl\.source=p"):
        make(folder, "base").load_state(states["policy"])
    state = states["base"]["learners"]["contributions"]
    with pytest.raises(UserError, match="head of contributions belongs to another model"):
        head_of(make(folder)).load_state({**state, "head": {"weight": np.zeros(3)}})
    bare.load_state(states["base"])
    assert "learners" not in bare.state()


def test_the_base_cannot_be_read_apart_without_an_adapter(folder: Path) -> None:
    none = replace(fakes.ADAPTER, rank=0)
    with pytest.raises(UserError, match=r"algorithm\.spa_rl\.source=base needs LoRA adapters"):
        make(folder, "base", stirred=False, adapter=none)
    assert head_of(make(folder, "policy", stirred=False, adapter=none)).settings.source == "policy"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": "ema"}, "algorithm.spa_rl.source is 'ema'"),
        ({"games": 0}, "algorithm.spa_rl.games is 0"),
        ({"ridge": 0.0}, "algorithm.spa_rl.ridge is 0.0"),
    ],
)
def test_a_setting_out_of_its_range_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        ContributionSettings(**changes)
    assert said in str(error.value)


# --- the way through a step -----------------------------------------------------------------------


def test_readings_travel_from_the_score_pass_to_credit_and_outcomes_to_the_head(
    folder: Path,
) -> None:
    actor = make(folder)
    scores, table = actor.score(REQUESTS), build_table(GROUPS)
    columns = steps.token_columns(scores)
    outcome = np.where(table.terminal, np.arange(ROWS) / 4, 0.0)
    count = len(columns[COLUMN])
    table = replace(
        table, tokens={**columns, "values": np.zeros(count)}, rewards={"outcome": outcome}
    )
    advantage = build_credit("spa_rl", {"warmup_steps": 0}).apply(table)
    ends = np.cumsum(table.n_tokens) - 1
    np.testing.assert_allclose(advantage.rewards, columns[COLUMN][ends] + 0.5)
    views = steps.batch_columns(table, advantage, scores)
    logp = [score.logp for score in scores]
    batch = build_batch(
        GROUPS, table, advantage.turns, advantage.weight, logp, views, advantage.tokens
    )
    metrics = run(actor, replace(batch, rollout_logp=batch.old_logp))
    assert metrics["contributions/loss"] == pytest.approx(
        advantage.stats["contribution_error"], rel=1e-4
    )
