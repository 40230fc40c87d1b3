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
from delta_belief_rl.algo.credit.spa_rl import COLUMN, TARGET
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.models.adapters import use_adapter
from delta_belief_rl.trainer import steps
from delta_belief_rl.trainer.actor import POLICY, PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.contributions import ContributionSettings
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.types import TrainBatch, UserError
from tests.runs import assert_same_state

GROUPS = fakes.make_groups()
REQUESTS = fakes.requests(GROUPS, None)
ROWS = 13
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
    return head_of(actor).weight.detach().numpy().copy()


def assert_metrics_close(got: Mapping[str, float], want: Mapping[str, float]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value == pytest.approx(want[name], abs=1e-6, rel=2e-5), name


@torch.no_grad()
def states_of(actor: PolicyActor, source: str = "base") -> list[np.ndarray]:
    """Hidden states at the sampled tokens, game by game through the model's own interface."""
    out: list[np.ndarray] = []
    with use_adapter(actor.model, None if source == "base" else POLICY):
        for request in REQUESTS:
            ids = torch.tensor([list(request.token_ids)])
            hidden = actor.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            out.append(hidden[request.action_positions].numpy())
    return out


def end_states(actor: PolicyActor, source: str = "base") -> np.ndarray:
    """Hidden states at the last token of each turn, ``[R, hidden]``."""
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
    assert np.abs(states_of(actor, source)[0] - other[0]).max() > 1e-2


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


@pytest.mark.parametrize("tokens", [40, 10**6])
@EACH
def test_A15_the_gradient_is_that_of_the_whole_loss(folder: Path, source: str, tokens: int) -> None:
    actor = make(folder, source)
    valid = np.ones(ROWS, dtype=np.bool_)
    valid[[1, 5, 6]] = False
    outcomes = np.random.default_rng(4).normal(size=6)
    batch = batch_of(actor, outcomes=outcomes, valid=valid)
    (micro, counts), *_ = fakes.share(batch, fakes.one_step(batch, max_tokens=tokens))
    states = game_sums(end_states(actor, source), valid)
    head = head_of(actor)
    head.begin(micro)
    for part in micro:
        actor._backward(part, counts)
    taught = np.isin(np.arange(6), build_table(GROUPS).traj[valid])
    weight = torch.tensor(weight_of(actor), requires_grad=True)
    gap = torch.tensor(states[taught], dtype=torch.float32) @ weight - torch.tensor(
        outcomes[taught], dtype=torch.float32
    )
    (gap**2).mean().backward()
    assert head.weight.grad is not None
    assert weight.grad is not None
    np.testing.assert_allclose(head.weight.grad.numpy(), weight.grad.numpy(), atol=1e-5, rtol=1e-4)
    assert weight.grad.abs().max() > 0.1


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
        np.testing.assert_allclose(weight_of(actor), weight_of(start), atol=2e-5)
    assert want["contributions/grad_norm"] > 1e-2


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
    np.testing.assert_allclose(weight_of(other), weight_of(start), atol=1e-6)


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
    for step in range(1, 61):
        batch = heads.make_batch(GROUPS, actor.score(REQUESTS), outcomes)
        losses.append(run(actor, batch, step)["contributions/loss"])
    assert losses[-1] < 0.05 * losses[0]
    read = np.concatenate([score.columns[COLUMN] for score in actor.score(REQUESTS)])
    shares = read[np.cumsum(build_table(GROUPS).n_tokens) - 1]
    np.testing.assert_allclose(game_sums(shares), outcomes, atol=0.25)


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
        assert "contributions/grad_norm" not in metrics
    assert_same_state(head_of(actor).state(), before)


def test_A20_a_broken_outcome_skips_the_head_and_not_the_policy(folder: Path) -> None:
    actor = make(folder)
    batch = batch_of(actor)
    huge = replace(batch, views={TARGET: batch.views[TARGET] * 1e30})
    weight, policy = weight_of(actor), actor.snapshot().checksum
    metrics = run(actor, huge)
    assert metrics["contributions/skipped_updates"] == 1.0
    assert metrics["actor/skipped_updates"] == 0.0
    np.testing.assert_array_equal(weight_of(actor), weight)
    assert actor.snapshot().checksum != policy


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    for source in heads.SOURCES:
        start, other = make(folder, source), make(folder, source, gradient_checkpointing=True)
        batch = batch_of(start)
        assert_metrics_close(run(other, batch), run(start, batch))
        np.testing.assert_allclose(weight_of(other), weight_of(start), atol=1e-6)


def test_the_head_has_a_learning_rate_of_its_own(folder: Path) -> None:
    actor = make(folder)
    metrics = run(actor, batch_of(actor))
    assert metrics["contributions/lr"] == pytest.approx(heads.OPTIMIZER.lr)
    assert metrics["actor/lr"] == pytest.approx(fakes.OPTIMIZER.lr)


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
        ({"grad_clip": 0.0}, "algorithm.spa_rl.grad_clip is 0.0"),
        ({"optimizer": OptimizerSettings(lr=0.0)}, "algorithm.spa_rl.lr is 0.0"),
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
