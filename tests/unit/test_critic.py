"""The critic beside the policy: its values, its loss, its training, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import critic_fakes
import numpy as np
import pytest
import torch
import training_fakes as fakes

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.losses.value import value_loss
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.models.adapters import switch_adapter
from delta_belief_rl.models.loading import adapter_state, state_checksum
from delta_belief_rl.models.value_head import ValueHead
from delta_belief_rl.trainer import steps
from delta_belief_rl.trainer.actor import EMA, POLICY, PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.critic import CRITIC, Critic, CriticSettings
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.types import TrainBatch, UserError
from tests.runs import assert_same_state

GROUPS = fakes.make_groups()
REQUESTS = fakes.requests(GROUPS, None)
ROWS = 13
SHARED, ATTACHED, OWN = critic_fakes.FORMS
EACH = pytest.mark.parametrize("critic", critic_fakes.FORMS, ids=critic_fakes.NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("critic") / "model")


def make(
    folder: Path, critic: CriticSettings | None = SHARED, stirred: bool = True, **changes: Any
) -> PolicyActor:
    actor = PolicyActor(critic_fakes.settings_of(folder, critic, **changes))
    if not stirred:
        return actor
    return fakes.stir(actor) if critic is None else critic_fakes.stir(actor)


def critic_of(actor: PolicyActor) -> Critic:
    assert actor.critic is not None
    return actor.critic


def batch_of(actor: PolicyActor, **options: Any) -> TrainBatch:
    return critic_fakes.make_batch(GROUPS, actor.score(REQUESTS), **options)


def run(
    actor: PolicyActor, batch: TrainBatch, training_step: int = 1, **options: Any
) -> dict[str, float]:
    plan = fakes.one_step(batch, **options)
    return merge_pairs([actor.update(fakes.share(batch, plan), training_step)])


def assert_metrics_close(got: Mapping[str, float], want: Mapping[str, float]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value == pytest.approx(want[name], abs=1e-6, rel=2e-5), name


def assert_critics_close(got: PolicyActor, want: PolicyActor, atol: float) -> None:
    fakes.assert_states_close(critic_of(got).head.arrays(), critic_of(want).head.arrays(), atol)
    if critic_of(want).settings.own:
        one, other = adapter_state(got.model, CRITIC), adapter_state(want.model, CRITIC)
        fakes.assert_states_close(one, other, atol)


# --- the loss -------------------------------------------------------------------------------------


def loss_of(
    v: list[float], old: list[float], target: list[float], count: float = 1.0
) -> tuple[float, list[float], dict[str, float]]:
    values = torch.tensor(v, requires_grad=True)
    loss, metrics = value_loss(
        values, torch.tensor(old), torch.tensor(target), torch.ones(len(v)), 0.5, count
    )
    loss.backward()
    assert values.grad is not None
    means = {name: float(s) / max(float(n), 1.0) for name, (s, n) in metrics.items()}
    return float(loss.detach()), values.grad.tolist(), means


def test_a_value_that_went_too_far_is_no_longer_helped_and_one_on_the_wrong_side_is() -> None:
    # 1.0 is held at 0.7: 1.3^2 / 2 without gradient, instead of 1 / 2.
    for target, want, slope, clipped in ((2.0, 0.845, 0.0, 1.0), (0.0, 0.5, 1.0, 0.0)):
        loss, gradient, metrics = loss_of([1.0], [0.2], [target])
        assert loss == pytest.approx(want)
        assert gradient == pytest.approx([slope])
        named = {"critic/vf_loss": want, "critic/vf_clipfrac": clipped}
        assert metrics == pytest.approx(named)
    assert loss_of([-1.0], [0.0], [-2.0])[0] == pytest.approx(0.5 * 1.5**2)
    assert loss_of([0.4], [0.2], [2.0])[1] == pytest.approx([-1.6])


def test_A9_values_without_a_target_have_no_part_in_the_loss_whatever_they_are() -> None:
    nan, inf = float("nan"), float("inf")
    want = loss_of([0.3], [0.0], [1.0], 4.0)
    got = loss_of([0.3, nan, inf], [0.0, nan, 0.0], [1.0, nan, nan], 4.0)
    assert got[0] == want[0] == pytest.approx(0.5 * 0.7**2 / 4)
    assert got[1] == [want[1][0], 0.0, 0.0]
    assert got[2] == want[2]
    assert loss_of([1.0], [0.0], [nan]) == (0.0, [0.0], dict.fromkeys(want[2], 0.0))


def test_A11_the_shares_of_a_loss_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    v, old, target = (rng.normal(size=6).tolist() for _ in range(3))
    whole, gradient, _ = loss_of(v, old, target, 6.0)
    parts = [loss_of(v[i : i + 2], old[i : i + 2], target[i : i + 2], 6.0) for i in (0, 2, 4)]
    assert sum(part[0] for part in parts) == pytest.approx(whole)
    assert [slope for part in parts for slope in part[1]] == pytest.approx(gradient)


# --- values ---------------------------------------------------------------------------------------


@torch.no_grad()
def plain_values(actor: PolicyActor) -> list[np.ndarray]:
    """Game by game through the model's own interface."""
    out: list[np.ndarray] = []
    for request in REQUESTS:
        ids = torch.tensor([list(request.token_ids)])
        hidden = actor.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        places = [*(request.action_positions - 1), len(request.token_ids) - 1]
        out.append(critic_of(actor).head(hidden[places]).numpy())
    return out


@pytest.mark.parametrize("tokens", [1, 70, 10**6])
@EACH
def test_a_value_is_that_of_the_state_before_its_token(
    folder: Path, critic: CriticSettings, tokens: int
) -> None:
    actor = make(folder, critic, score_tokens=tokens)
    if critic.own:
        with switch_adapter(actor.model, CRITIC):
            want = plain_values(actor)
        assert np.abs(want[0] - plain_values(actor)[0]).max() > 1e-2
    else:
        want = plain_values(actor)
    for score, values in zip(actor.score(REQUESTS), want, strict=True):
        assert score.values is not None
        np.testing.assert_allclose(score.values, values[:-1], atol=1e-5)
        assert score.end_value == pytest.approx(values[-1], abs=1e-5)


@EACH
def test_a_new_critic_says_zero_and_changes_nothing_else_that_is_scored(
    folder: Path, critic: CriticSettings
) -> None:
    bare, actor = make(folder, None, stirred=False), make(folder, critic, stirred=False)
    for got, want in zip(actor.score(REQUESTS), bare.score(REQUESTS), strict=True):
        assert got.values is not None
        assert (got.values == 0).all()
        assert got.end_value == 0.0
        assert want.values is None
        np.testing.assert_array_equal(got.logp, want.logp)
    assert actor.score([]) == []


def test_scoring_leaves_policy_and_critic_trainable_and_the_policy_active(folder: Path) -> None:
    actor = make(folder, OWN)
    before = [name for name, p in actor.model.named_parameters() if p.requires_grad]
    actor.score(REQUESTS)
    assert [name for name, p in actor.model.named_parameters() if p.requires_grad] == before
    assert {CRITIC, POLICY} == {name.split(".")[-2] for name in before}
    assert actor.model.active_adapter == POLICY


# --- training -------------------------------------------------------------------------------------


@EACH
def test_A11_micro_batches_and_order_change_neither_loss_nor_gradient_nor_critic(
    folder: Path, critic: CriticSettings
) -> None:
    start = make(folder, critic)
    weight = np.ones(ROWS)
    weight[3] = 0.0
    batch = batch_of(start, weight=weight, share=0.6)
    shuffled = batch.select(np.array([3, 5, 0, 4, 1, 2]))
    want = run(start, batch)
    for games, tokens in ((batch, 1), (batch, 40), (shuffled, 10**6), (shuffled, 40)):
        actor = make(folder, critic)
        assert_metrics_close(run(actor, games, max_tokens=tokens), want)
        assert_critics_close(actor, start, 2e-5)
        fakes.assert_states_close(actor.snapshot().state, start.snapshot().state, 1e-5)
    assert want["critic/grad_norm"] > 1e-2
    assert want["critic/vf_loss"] > 0.1


@EACH
def test_A9_numbers_at_untrained_tokens_have_no_influence_at_all(
    folder: Path, critic: CriticSettings
) -> None:
    start = make(folder, critic)
    weight = np.ones(ROWS)
    weight[[0, 7]] = 0.0
    batch = batch_of(start, weight=weight, share=0.6)
    unused = (batch.weight == 0) | ~np.isfinite(batch.views["targets"])
    junk = np.where(batch.weight == 0, 9.0, 0.0)
    dirty = {
        "values": np.where(unused, np.nan, batch.views["values"]),
        "targets": batch.views["targets"] + junk,
    }
    other = make(folder, critic)
    assert run(other, replace(batch, views=dirty)) == run(start, batch)
    assert_same_state(other.state(), start.state())


@EACH
def test_A14_an_empty_micro_batch_and_games_without_weight_add_nothing(
    folder: Path, critic: CriticSettings
) -> None:
    start = make(folder, critic)
    batch = batch_of(start)
    (micro, counts), *_ = fakes.share(batch, fakes.one_step(batch))
    idle = replace(batch, weight=np.zeros_like(batch.weight))
    other = make(folder, critic)
    got = merge_pairs([other.update([([None, *micro, idle, None], counts)], 1)])
    assert_metrics_close(got, run(start, batch))
    assert_critics_close(other, start, 1e-5)


@pytest.mark.parametrize("critic", [SHARED, OWN], ids=["shared", "own"])
def test_a_critic_of_its_own_gradient_leaves_the_policy_as_it_would_be_without_one(
    folder: Path, critic: CriticSettings
) -> None:
    actor, bare = make(folder, critic), make(folder, None)
    batch = batch_of(actor)
    for step in (1, 2):
        run(actor, batch, step, max_tokens=40)
        run(bare, batch, step, max_tokens=40)
        assert actor.snapshot().checksum == bare.snapshot().checksum
    assert actor.snapshot().state.keys() == bare.snapshot().state.keys()


def test_an_attached_critic_reaches_the_policy_by_its_weight(folder: Path) -> None:
    norms: list[float] = []
    for coef in (0.25, 0.5):
        actor = make(folder, replace(ATTACHED, vf_coef=coef), grad_clip=1e9)
        batch = batch_of(actor)
        still = replace(batch, advantages=np.zeros_like(batch.advantages))
        before = actor.snapshot().checksum
        norms.append(run(actor, still)["actor/grad_norm"])
        assert actor.snapshot().checksum != before
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-4)
    assert norms[0] > 1e-3


def test_A15_the_gradient_of_the_head_is_the_mean_error_times_the_state(folder: Path) -> None:
    actor = make(folder, replace(SHARED, grad_clip=1e9))
    critic, batch = critic_of(actor), batch_of(actor, share=0.6)
    (micro, counts), *_ = fakes.share(batch, fakes.one_step(batch, max_tokens=40))
    critic.begin(micro)
    for part in micro:
        actor._backward(part, counts)
    rows: list[np.ndarray] = []
    with torch.no_grad():
        for span in batch.games():
            ids = torch.from_numpy(batch.token_ids[span])[None]
            hidden = actor.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            # The state at a position belongs to the next one.
            rows.append(np.vstack([np.zeros_like(hidden[:1]), hidden[:-1].numpy()]))
    kept = np.isfinite(batch.views["targets"]) & (batch.turn_ids >= 0)
    states = np.vstack(rows)[kept]
    error = batch.views["values"][kept] - batch.views["targets"][kept]
    gradients = [p.grad for p in critic.head.parameters()]
    assert all(gradient is not None for gradient in gradients)
    want = (error[:, None] * states).sum(0) / kept.sum()
    np.testing.assert_allclose(np.asarray(gradients[0]), want, atol=1e-5)
    np.testing.assert_allclose(np.asarray(gradients[1]), [error.mean()], atol=1e-5)


@EACH
def test_values_come_to_their_targets(folder: Path, critic: CriticSettings) -> None:
    actor = make(folder, critic, stirred=False)
    first = loss = 0.0
    for step in range(1, 31):
        batch = batch_of(actor)
        loss = run(actor, batch, step)["critic/vf_loss"]
        first = first or loss
    assert loss < 0.3 * first


@EACH
def test_in_the_warm_up_the_critic_alone_moves(folder: Path, critic: CriticSettings) -> None:
    ema = replace(fakes.ADAPTER, ema=True, ema_beta=0.5)
    actor = make(folder, replace(critic, warmup_steps=2), adapter=ema)
    policy, slow = actor.snapshot(), actor.snapshot(EMA).checksum
    for step in (1, 2):
        before = state_checksum(critic_of(actor).head.arrays())
        metrics = run(actor, batch_of(actor), step, max_tokens=40)
        assert actor.snapshot().checksum == policy.checksum
        assert actor.snapshot(EMA).checksum == slow
        assert actor.version == policy.version
        assert state_checksum(critic_of(actor).head.arrays()) != before
        assert metrics["actor/optimizer_steps"] == 0.0
        assert metrics["actor/empty_updates"] == 0.0
        assert metrics["critic/vf_loss"] > 0
        assert "actor/grad_norm" not in metrics
    assert "actor/grad_norm" in run(actor, batch_of(actor), 3)
    assert actor.snapshot().checksum != policy.checksum
    assert actor.version == policy.version + 1


def test_the_critic_of_the_warm_up_is_that_of_a_run_that_trains_both(folder: Path) -> None:
    for critic in (SHARED, OWN):
        alone, both = make(folder, replace(critic, warmup_steps=1)), make(folder, critic)
        batch = batch_of(both)
        run(alone, batch)
        run(both, batch)
        assert_critics_close(alone, both, 0.0)


def test_the_own_adapter_is_trained_and_the_base_is_not(folder: Path) -> None:
    actor = make(folder, OWN, stirred=False)
    frozen = {name: p.clone() for name, p in actor.model.named_parameters() if "lora" not in name}
    start = adapter_state(actor.model, CRITIC)
    for step in (1, 2):
        run(actor, batch_of(actor), step)
    moved = adapter_state(actor.model, CRITIC)
    assert max(np.abs(moved[name] - start[name]).max() for name in start) > 1e-4
    for name, parameter in actor.model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name


@EACH
def test_without_a_target_the_critic_stays_as_it_is(folder: Path, critic: CriticSettings) -> None:
    actor = make(folder, critic)
    before = critic_of(actor).state()
    for batch in (batch_of(actor, share=0.0), replace(batch_of(actor), views={})):
        metrics = run(actor, batch)
        assert "critic/vf_loss" not in metrics
        assert "critic/grad_norm" not in metrics
    assert_same_state(critic_of(actor).state(), before)


def test_A20_a_broken_value_skips_the_critic_and_not_the_policy(folder: Path) -> None:
    for critic in (SHARED, OWN):
        actor = make(folder, critic)
        batch, head = batch_of(actor), state_checksum(critic_of(actor).head.arrays())
        policy = actor.snapshot().checksum
        values = {**batch.views, "values": batch.views["values"] * np.nan}
        metrics = run(actor, replace(batch, views=values))
        assert metrics["critic/skipped_updates"] == 1.0
        assert metrics["actor/skipped_updates"] == 0.0
        assert state_checksum(critic_of(actor).head.arrays()) == head
        assert actor.snapshot().checksum != policy


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    for critic in critic_fakes.FORMS:
        start, other = make(folder, critic), make(folder, critic, gradient_checkpointing=True)
        batch = batch_of(start)
        assert_metrics_close(run(other, batch), run(start, batch))
        assert_critics_close(other, start, 1e-5)


def test_the_critic_has_a_learning_rate_of_its_own(folder: Path) -> None:
    optimizer = OptimizerSettings(lr=1e-2, warmup_steps=4)
    actor = make(folder, replace(SHARED, optimizer=optimizer))
    metrics = run(actor, batch_of(actor))
    assert metrics["critic/lr"] == pytest.approx(2.5e-3)
    assert metrics["actor/lr"] == pytest.approx(fakes.OPTIMIZER.lr)


# --- state ----------------------------------------------------------------------------------------


@EACH
def test_R2_a_loaded_critic_goes_on_bit_for_bit(folder: Path, critic: CriticSettings) -> None:
    straight = make(folder, critic)
    run(straight, batch_of(straight), 1, games_per_step=3)
    saved = dump_state(straight.state())
    other = make(folder, critic, stirred=False)
    other.load_state(parse_state(saved))
    assert_same_state(parse_state(dump_state(other.state())), parse_state(saved))
    for actor in (straight, other):
        run(actor, batch_of(actor), 2, games_per_step=3)
    assert_same_state(other.state(), straight.state())


def test_R11_a_checkpoint_of_another_critic_is_refused(folder: Path, tmp_path: Path) -> None:
    states = {
        name: parse_state(dump_state(make(folder, critic).state()))
        for name, critic in (("none", None), ("shared", SHARED), ("own", OWN))
    }
    with pytest.raises(UserError, match="The checkpoint has no critic"):
        make(folder, SHARED).load_state(states["none"])
    with pytest.raises(UserError, match=r"not of critic\.form=own"):
        make(folder, OWN).load_state(states["shared"])
    with pytest.raises(UserError, match=r"not of critic\.form=shared"):
        make(folder, SHARED).load_state(states["own"])
    with pytest.raises(UserError, match="The checkpoint's critic belongs to another model"):
        ValueHead(3).load_arrays(states["shared"]["critic"]["head"])


def test_a_state_of_an_adapter_alone_leaves_the_critic_new(folder: Path) -> None:
    trained, actor = make(folder, None), make(folder, SHARED, stirred=False)
    actor.load_state({"version": 3, "adapter": dict(trained.snapshot().state)})
    assert actor.snapshot().checksum == trained.snapshot().checksum
    assert actor.version == 3
    assert (critic_of(actor).head.arrays()["weight"] == 0).all()


def test_a_policy_without_a_critic_plays_from_the_checkpoint_of_one(folder: Path) -> None:
    trained, player = make(folder, OWN), make(folder, None, stirred=False)
    player.load_state(parse_state(dump_state(trained.state())))
    assert player.snapshot().checksum == trained.snapshot().checksum
    assert "critic" not in player.state()


def test_values_travel_from_the_score_pass_to_credit_and_to_the_loss(folder: Path) -> None:
    actor = make(folder)
    scores, table = actor.score(REQUESTS), build_table(GROUPS)
    columns = steps.token_columns(scores)
    row = table.token_row()
    for number, score in enumerate(scores):
        mine = table.traj[row] == number
        np.testing.assert_array_equal(columns["values"][mine], score.values)
        assert set(columns["end_value"][mine]) == {score.end_value}
    rng = np.random.default_rng(0)
    table = replace(table, tokens=columns, rewards={"outcome": rng.normal(size=table.num_rows)})
    advantage = build_credit("turn_ppo", {"lam": 0.9}).apply(table)
    views = steps.batch_columns(table, advantage, scores)
    np.testing.assert_array_equal(np.concatenate(views["values"]), columns["values"])
    np.testing.assert_array_equal(np.concatenate(views["targets"]), advantage.targets)
    logp = [score.logp for score in scores]
    batch = build_batch(GROUPS, table, advantage.turns, advantage.weight, logp, views)
    metrics = run(actor, replace(batch, rollout_logp=batch.old_logp))
    kept = np.isfinite(views["targets"][0])
    assert metrics["critic/vf_loss"] > 0
    assert kept.sum() == GROUPS[0].trajectories[0].num_turns
    bare = make(folder, None).score(REQUESTS)
    assert steps.token_columns(bare).keys() == {"logp"}


def test_a_critic_of_its_own_needs_an_adapter(folder: Path) -> None:
    none = replace(fakes.ADAPTER, rank=0)
    with pytest.raises(UserError, match=r"critic\.form=own needs LoRA"):
        make(folder, OWN, stirred=False, adapter=none)
    assert critic_of(make(folder, SHARED, stirred=False, adapter=none)).settings == SHARED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"form": "both"}, "critic.form is 'both'"),
        ({"vf_coef": 0.0}, "critic.vf_coef is 0.0"),
        ({"cliprange_value": -1.0}, "critic.cliprange_value is -1.0"),
        ({"grad_clip": 0.0}, "critic.grad_clip is 0.0"),
        ({"warmup_steps": -1}, "trainer.critic_warmup is -1"),
        ({"optimizer": OptimizerSettings(lr=0.0)}, "critic.optim.lr is 0.0"),
        ({"optimizer": OptimizerSettings(weight_decay=-1.0)}, "critic.optim.weight_decay is -1.0"),
        ({"optimizer": OptimizerSettings(min_ratio=2.0)}, "critic.optim.min_lr_ratio is 2.0"),
        ({"optimizer": OptimizerSettings(betas=(0.9, 1.0))}, "critic.optim.betas must lie in"),
    ],
)
def test_a_setting_out_of_its_range_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        CriticSettings(**changes)
    assert said in str(error.value)
