"""One training rank: scoring, updating, the slow adapter, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_fakes as fakes

from delta_belief_rl.algo.losses.policy import PolicyInputs, PolicyLossSettings
from delta_belief_rl.algo.losses.registry import LOSSES
from delta_belief_rl.belief.naive import naive_scores
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.models.loading import (
    adapter_state,
    add_lora,
    load_causal_lm,
    state_checksum,
    use_adapter,
)
from delta_belief_rl.models.merged import MergedLora
from delta_belief_rl.trainer.actor import (
    BASE,
    EMA,
    POLICY,
    PolicyActor,
    dump_state,
    parse_state,
)
from delta_belief_rl.trainer.optimizer import (
    OptimizerSettings,
    build_optimizer,
    gradient_norm,
    learning_rate,
)
from delta_belief_rl.trainer.packing import flat_trajectories
from delta_belief_rl.types import TrainBatch, UserError

GROUPS = fakes.make_groups()
REQUESTS = fakes.requests(GROUPS)
EMA_ADAPTER = replace(fakes.ADAPTER, ema=True, ema_beta=0.75)
NO_GUARDS = PolicyLossSettings(tis_imp_ratio_cap=0.0, sequence_reject_ratio=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("actor") / "model")


def make(folder: Path, stirred: bool = True, **changes: Any) -> PolicyActor:
    actor = PolicyActor(fakes.settings_of(folder, **changes))
    return fakes.stir(actor) if stirred else actor


def batch_of(actor: PolicyActor, **changes: Any) -> TrainBatch:
    batch = fakes.make_batch(GROUPS, actor.score(REQUESTS))
    return replace(batch, **changes)


def run(
    actor: PolicyActor, batch: TrainBatch, training_step: int = 1, **options: Any
) -> dict[str, float]:
    """One training step; metrics as means."""
    plan = fakes.one_step(batch, **options)
    return merge_pairs([actor.update(fakes.share(batch, plan), training_step)])


def assert_metrics_close(got: Mapping[str, float], want: Mapping[str, float]) -> None:
    """Equal but for the rounding of float32 sums."""
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value == pytest.approx(want[name], abs=1e-6, rel=1e-5), name


# --- scoring --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 70, 10**6])
def test_B5_scores_are_those_of_a_plain_reforward_for_every_turn(folder: Path, tokens: int) -> None:
    actor = make(
        folder,
        adapter=EMA_ADAPTER,
        beliefs=(POLICY, EMA, BASE),
        views=(BASE,),
        temperature=0.7,
        score_tokens=tokens,
    )
    scores = actor.score(REQUESTS)
    for name in (POLICY, EMA, BASE):
        with use_adapter(actor.model, None if name == BASE else name):
            want = naive_scores(actor.model, REQUESTS, 0.7)
        for score, plain in zip(scores, want, strict=True):
            np.testing.assert_allclose(score.beliefs[name], plain.beliefs, atol=1e-5)
            if name == POLICY:
                np.testing.assert_allclose(score.logp, plain.logp, atol=1e-5)
            if name == BASE:
                np.testing.assert_allclose(score.views[BASE], plain.logp, atol=1e-5)


@torch.no_grad()
def test_entropy_is_the_mean_over_the_sampled_tokens_at_the_sampling_temperature(
    folder: Path,
) -> None:
    actor = make(folder, temperature=0.7)
    for score, request in zip(actor.score(REQUESTS), REQUESTS, strict=True):
        logits = actor.model(input_ids=torch.tensor([list(request.token_ids)])).logits[0] / 0.7
        rows = torch.distributions.Categorical(logits=logits[request.action_positions - 1])
        assert score.entropy == pytest.approx(float(rows.entropy().mean()), abs=1e-5)


def test_the_reference_view_is_the_model_without_adapter(folder: Path) -> None:
    actor = make(folder, views=(BASE,))
    bare = load_causal_lm(folder)
    want = naive_scores(bare, fakes.requests(GROUPS, None))
    for score, plain in zip(actor.score(REQUESTS), want, strict=True):
        np.testing.assert_allclose(score.views[BASE], plain.logp, atol=1e-5)
        assert np.abs(score.logp - plain.logp).max() > 1e-2


def test_scoring_without_beliefs_gives_none_and_costs_the_trunk_only(folder: Path) -> None:
    actor = make(folder, beliefs=())
    for score, request in zip(actor.score(fakes.requests(GROUPS, None)), REQUESTS, strict=True):
        assert dict(score.beliefs) == {}
        assert len(score.logp) == len(request.action_positions)
    assert actor.score([]) == []


def test_scoring_under_other_models_leaves_the_policy_trainable_and_active(folder: Path) -> None:
    actor = make(folder, adapter=EMA_ADAPTER, beliefs=(BASE, EMA), views=(BASE,))
    before = [name for name, p in actor.model.named_parameters() if p.requires_grad]
    actor.score(REQUESTS)
    assert [name for name, p in actor.model.named_parameters() if p.requires_grad] == before
    assert before
    assert all(f".{POLICY}." in name for name in before)
    assert actor.model.active_adapter == POLICY
    assert not actor.model.training


# --- the update does not depend on the layout -----------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["token-mean", "turn-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_A11_A14_micro_batches_and_order_change_neither_loss_nor_gradient_nor_adapter(
    folder: Path, mode: str
) -> None:
    options = {
        "loss": PolicyLossSettings(loss_agg_mode=mode),
        "views": (BASE,),
        "kl_coef": 0.2,
        "entropy_coeff": 0.01,
    }
    start = make(folder, **options)
    weight = np.ones(13)
    weight[3] = 0.0
    batch = fakes.make_batch(GROUPS, start.score(REQUESTS), weight)
    shuffled = batch.select(np.array([3, 5, 0, 4, 1, 2]))
    want = run(start, batch, length=30.0)
    state = start.snapshot().state
    for games, tokens in ((batch, 1), (batch, 40), (shuffled, 10**6), (shuffled, 40)):
        actor = make(folder, **options)
        got = run(actor, games, max_tokens=tokens, length=30.0)
        assert_metrics_close(got, want)
        fakes.assert_states_close(actor.snapshot().state, state, 1e-6)
    assert want["actor/grad_norm"] > 1e-3


def test_A9_values_at_untrained_tokens_have_no_influence_at_all(folder: Path) -> None:
    start = make(folder, views=(BASE,), kl_coef=0.2)
    weight = np.ones(13)
    weight[[0, 7]] = 0.0
    batch = fakes.make_batch(GROUPS, start.score(REQUESTS), weight)
    junk = np.where(batch.weight == 0, np.nan, 0.0)
    dirty = replace(
        batch,
        advantages=batch.advantages + junk,
        old_logp=batch.old_logp + junk,
        rollout_logp=batch.rollout_logp - junk,
        views={BASE: batch.views[BASE] + junk},
    )
    other = make(folder, views=(BASE,), kl_coef=0.2)
    assert run(other, dirty) == run(start, batch)
    assert other.snapshot().checksum == start.snapshot().checksum


def test_A9_tokens_behind_the_last_action_have_no_influence_at_all(folder: Path) -> None:
    start = make(folder)
    batch = batch_of(start)
    ids = batch.token_ids.copy()
    for span, game in zip(batch.games(), flat_trajectories(GROUPS), strict=True):
        tail = slice(span.start + game.turns[-1].end, span.stop)
        ids[tail] = (ids[tail] + 1) % fakes.VOCAB
    assert (ids != batch.token_ids).any()
    other = make(folder)
    assert run(other, replace(batch, token_ids=ids)) == run(start, batch)
    assert other.snapshot().checksum == start.snapshot().checksum


def test_A14_an_empty_micro_batch_and_games_without_weight_add_nothing(folder: Path) -> None:
    start = make(folder)
    batch = batch_of(start)
    (micro, counts), *_ = fakes.share(batch, fakes.one_step(batch))
    idle = replace(batch, weight=np.zeros_like(batch.weight))
    other = make(folder)
    got = merge_pairs([other.update([([None, *micro, idle, None], counts)], 1)])
    assert_metrics_close(got, run(start, batch))
    fakes.assert_states_close(other.snapshot().state, start.snapshot().state, 1e-6)


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    start = make(folder)
    batch = batch_of(start)
    other = make(folder, gradient_checkpointing=True)
    assert_metrics_close(run(other, batch), run(start, batch))
    fakes.assert_states_close(other.snapshot().state, start.snapshot().state, 1e-6)


# --- the terms of the loss ------------------------------------------------------------------------


def test_P6_with_one_update_a_batch_the_ratio_is_exactly_one(folder: Path) -> None:
    actor = make(folder, loss=NO_GUARDS)
    batch = batch_of(actor)
    batch = replace(batch, old_logp=batch.old_logp - 3.0)
    metrics = run(actor, batch, max_tokens=40)
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0
    used = batch.weight > 0
    assert metrics["actor/pg_loss"] == pytest.approx(-batch.advantages[used].mean(), abs=1e-6)


def test_P6_the_log_probs_of_the_score_pass_are_those_of_the_update(folder: Path) -> None:
    actor = make(folder, old_is_new=False, temperature=0.7)
    metrics = run(actor, batch_of(actor))
    assert abs(metrics["actor/ppo_kl"]) < 1e-6
    assert metrics["actor/rollout_logp_gap"] < 1e-6


def test_clipped_tokens_have_no_gradient(folder: Path) -> None:
    actor = make(folder, old_is_new=False, loss=NO_GUARDS)
    batch = batch_of(actor)
    ones = np.ones_like(batch.advantages)
    far = replace(batch, advantages=ones, old_logp=batch.old_logp - 1.0)
    metrics = run(actor, far)
    assert metrics["actor/pg_clipfrac"] == 1.0
    assert metrics["actor/grad_norm"] == 0.0
    assert metrics["actor/pg_loss"] == pytest.approx(-1.28, abs=1e-6)


def test_P4_tokens_that_the_engine_saw_otherwise_are_reweighted_and_rejected(folder: Path) -> None:
    actor = make(folder)
    batch = fakes.make_batch(GROUPS, actor.score(REQUESTS), on_policy=False)
    metrics = run(actor, batch)
    assert metrics["actor/sequence_reject_frac"] > 0
    assert metrics["actor/rollout_logp_gap"] > 0.1


def test_P7_a_token_without_a_finite_sampling_log_prob_is_dropped_and_counted(folder: Path) -> None:
    actor = make(folder)
    batch = batch_of(actor)
    rollout = batch.rollout_logp.copy()
    rollout[np.flatnonzero(batch.weight)[2]] = np.nan
    metrics = run(actor, replace(batch, rollout_logp=rollout))
    assert metrics["actor/rollout_nonfinite_frac"] == pytest.approx(1 / (batch.weight > 0).sum())
    assert metrics["actor/skipped_updates"] == 0.0


def test_A15_the_kl_term_pulls_towards_the_model_without_adapter(folder: Path) -> None:
    actor = make(folder, views=(BASE,), kl_coef=1.0, optimizer=OptimizerSettings(lr=1e-3))
    batch = batch_of(actor)
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    metrics = run(actor, batch)
    assert metrics["actor/grad_norm"] > 1e-3
    assert run(actor, batch)["actor/kl_loss"] < metrics["actor/kl_loss"]


def test_A15_the_kl_term_is_zero_where_policy_and_reference_are_equal(folder: Path) -> None:
    actor = make(folder, stirred=False, views=(BASE,), kl_coef=1.0)
    batch = batch_of(actor)
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    metrics = run(actor, batch)
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["actor/grad_norm"] < 1e-5


def test_the_entropy_bonus_raises_entropy(folder: Path) -> None:
    actor = make(folder, entropy_coeff=1.0, optimizer=OptimizerSettings(lr=1e-3))
    batch = batch_of(actor)
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    before = run(actor, batch)["actor/entropy_loss"]
    assert run(actor, batch)["actor/entropy_loss"] > before


def test_an_update_raises_what_was_good_and_lowers_what_was_bad(folder: Path) -> None:
    actor = make(folder, optimizer=OptimizerSettings(lr=1e-3))
    batch = batch_of(actor)
    run(actor, batch)
    after = fakes.make_batch(GROUPS, actor.score(REQUESTS))
    gain = (batch.advantages * (after.old_logp - batch.old_logp))[batch.weight > 0]
    assert gain.sum() > 0


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_policy_loss_of_the_settings_is_the_one_that_is_minimised(
    folder: Path, name: str
) -> None:
    options: dict[str, Any] = {"old_is_new": False, "loss": NO_GUARDS, "loss_name": name}
    actor = make(folder, **options)
    batch = batch_of(actor)
    # Ratios far from 1 that differ from token to token, so that no two losses agree.
    shift = np.random.default_rng(1).uniform(-0.6, 0.6, len(batch.old_logp))
    batch = replace(batch, old_logp=batch.old_logp + shift)
    used = np.flatnonzero(batch.weight)
    rows = np.repeat(np.arange(batch.num_games), batch.lengths())
    inputs = PolicyInputs(
        logp=torch.from_numpy((batch.old_logp - shift)[used]),
        old_logp=torch.from_numpy(batch.old_logp[used]),
        advantages=torch.from_numpy(batch.advantages[used]),
        weight=torch.ones(len(used), dtype=torch.float64),
        rows=torch.from_numpy(rows[used]),
        turns=torch.from_numpy(rows[used] * 100 + batch.turn_ids[used]),
    )
    want, _ = LOSSES[name](inputs, NO_GUARDS, {"tokens": float(len(used))})
    others = [LOSSES[other](inputs, NO_GUARDS, {"tokens": 1.0})[0] for other in LOSSES]
    assert len({round(float(value), 6) for value in others}) == len(LOSSES)
    assert run(actor, batch)["actor/pg_loss"] == pytest.approx(float(want), abs=1e-4)


# --- the slow adapter and beliefs -----------------------------------------------------------------


def mixed(
    old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], beta: float
) -> dict[str, np.ndarray]:
    return {name: beta * value + (1 - beta) * new[name] for name, value in old.items()}


def test_the_slow_adapter_starts_as_a_copy_and_moves_by_its_beta(folder: Path) -> None:
    actor = make(folder, stirred=False, adapter=EMA_ADAPTER)
    start = actor.snapshot(EMA).state
    assert state_checksum(start) == actor.snapshot().checksum
    batch = batch_of(actor)
    run(actor, batch)
    slow, policy = actor.snapshot(EMA).state, actor.snapshot().state
    fakes.assert_states_close(slow, mixed(start, policy, 0.75), 1e-6)
    run(actor, batch, 2)
    fakes.assert_states_close(
        actor.snapshot(EMA).state, mixed(slow, actor.snapshot().state, 0.75), 1e-6
    )
    assert state_checksum(slow) != state_checksum(start)


def test_the_slow_adapter_copies_during_its_warm_up_and_lags_after_it(folder: Path) -> None:
    actor = make(folder, adapter=replace(EMA_ADAPTER, ema_warmup_steps=1))
    batch = batch_of(actor)
    run(actor, batch, 1)
    assert actor.snapshot(EMA).checksum == actor.snapshot().checksum
    run(actor, batch, 2)
    assert actor.snapshot(EMA).checksum != actor.snapshot().checksum


def test_beliefs_of_the_models_agree_before_an_update_and_differ_after_it(folder: Path) -> None:
    actor = make(folder, stirred=False, adapter=EMA_ADAPTER, beliefs=(POLICY, EMA, BASE))
    first = actor.score(REQUESTS)
    for score in first:
        for name in (EMA, BASE):
            np.testing.assert_allclose(score.beliefs[name], score.beliefs[POLICY], atol=1e-5)
    run(actor, fakes.make_batch(GROUPS, first))
    for before, after in zip(first, actor.score(REQUESTS), strict=True):
        np.testing.assert_allclose(after.beliefs[BASE], before.beliefs[BASE], atol=1e-5)
        moved = np.abs(after.beliefs[POLICY] - before.beliefs[POLICY]).max()
        lag = np.abs(after.beliefs[EMA] - before.beliefs[EMA]).max()
        assert 1e-4 < lag < moved


# --- steps that are not made ----------------------------------------------------------------------


def test_A18_an_update_without_steps_changes_nothing_and_is_counted(folder: Path) -> None:
    actor = make(folder, adapter=EMA_ADAPTER)
    before = dump_state(actor.state())
    batch = batch_of(actor, weight=np.zeros(len(batch_of(actor).weight)))
    metrics = run(actor, batch)
    assert dump_state(actor.state()) == before
    assert metrics["actor/empty_updates"] == 1.0
    assert metrics["actor/optimizer_steps"] == 0.0
    assert "actor/grad_norm" not in metrics


def test_A20_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(folder: Path) -> None:
    actor, twin = make(folder), make(folder)
    batch = batch_of(actor)
    advantages = batch.advantages.copy()
    advantages[np.flatnonzero(batch.weight)[0]] = np.nan
    before = actor.snapshot().checksum
    metrics = run(actor, replace(batch, advantages=advantages))
    assert metrics["actor/skipped_updates"] == 1.0
    assert "actor/grad_norm" not in metrics
    assert actor.snapshot().checksum == before
    assert not actor.optimizer.state
    # Nothing of the broken step is left behind.
    assert run(actor, batch, 2) == run(twin, batch, 2)
    assert actor.snapshot().checksum == twin.snapshot().checksum


def test_A20_only_the_broken_one_of_several_steps_is_skipped(folder: Path) -> None:
    actor = make(folder)
    batch = batch_of(actor)
    broken = np.where(np.arange(len(batch.weight)) < batch.offsets[3], np.nan, batch.advantages)
    metrics = run(actor, replace(batch, advantages=broken), games_per_step=3)
    assert metrics["actor/optimizer_steps"] == 2.0
    assert metrics["actor/skipped_updates"] == 1.0
    assert np.isfinite(metrics["actor/grad_norm"])


# --- weights and state ----------------------------------------------------------------------------


def test_L6_a_snapshot_is_owned_memory(folder: Path) -> None:
    actor = make(folder)
    snapshot = actor.snapshot()
    assert all(value.flags.owndata for value in snapshot.state.values())
    run(actor, batch_of(actor))
    assert state_checksum(snapshot.state) == snapshot.checksum != actor.snapshot().checksum


def test_R11_a_resumed_run_continues_bit_by_bit(folder: Path) -> None:
    straight = make(folder, adapter=EMA_ADAPTER)
    batch = batch_of(straight)
    run(straight, batch, 1, games_per_step=3)
    data, saved = dump_state(straight.state()), straight.snapshot()
    metrics = run(straight, batch, 2, games_per_step=3)
    resumed = make(folder, stirred=False, adapter=EMA_ADAPTER)
    resumed.load_state(parse_state(data))
    assert resumed.snapshot().checksum == saved.checksum
    assert resumed.version == saved.version == 1
    assert run(resumed, batch, 2, games_per_step=3) == metrics
    assert dump_state(resumed.state()) == dump_state(straight.state())


def test_R11_the_order_of_loading_and_scoring_does_not_matter(folder: Path) -> None:
    straight = make(folder)
    batch = batch_of(straight)
    run(straight, batch)
    data = dump_state(straight.state())
    resumed = make(folder, stirred=False)
    resumed.score(REQUESTS)
    run(resumed, batch)
    resumed.load_state(parse_state(data))
    run(resumed, batch, 2)
    run(straight, batch, 2)
    assert resumed.snapshot().checksum == straight.snapshot().checksum


def test_R11_a_state_without_the_slow_adapter_is_refused_where_one_is_needed(folder: Path) -> None:
    data = dump_state(make(folder).state())
    with pytest.raises(UserError, match="no slow adapter"):
        make(folder, adapter=EMA_ADAPTER).load_state(parse_state(data))


def engine_of(folder: Path, merged: bool) -> HFEngine:
    model, lora = load_causal_lm(folder), fakes.ADAPTER
    loader = MergedLora(model, lora.alpha / lora.rank).load if merged else None
    if not merged:
        model = add_lora(model, lora.rank, lora.alpha, name=POLICY)
    return HFEngine(model, max_sequences=2, max_len=64, adapter=POLICY, loader=loader)


@pytest.mark.parametrize("merged", [False, True])
def test_L9_the_probe_is_what_an_engine_with_the_same_adapter_computes(
    folder: Path, merged: bool
) -> None:
    actor = make(folder)
    run(actor, batch_of(actor))
    engine = engine_of(folder, merged)
    ids = (3, 1, 4, 1, 5, 9, 2, 6)
    unsynced = engine.score([ids])[0][1:]
    assert np.abs(actor.probe(ids) - unsynced).max() > 1e-2
    engine.load_adapter(actor.snapshot().state, 1)
    np.testing.assert_allclose(actor.probe(ids), engine.score([ids])[0][1:], atol=1e-4)


def test_the_same_seed_builds_the_same_policy(folder: Path) -> None:
    one, two = make(folder, stirred=False), make(folder, stirred=False)
    assert one.snapshot().checksum == two.snapshot().checksum
    assert make(folder, stirred=False, seed=1).snapshot().checksum != one.snapshot().checksum


def test_adapters_of_a_half_precision_model_are_kept_in_full_precision(folder: Path) -> None:
    actor = make(folder, adapter=EMA_ADAPTER, dtype="bfloat16")
    kinds = {p.dtype for n, p in actor.model.named_parameters() if ".lora_" in n}
    assert kinds == {torch.float32}
    before = adapter_state(actor.model, EMA)
    run(actor, batch_of(actor))
    assert state_checksum(adapter_state(actor.model, EMA)) != state_checksum(before)


def test_models_that_need_adapters_are_refused_without_them(folder: Path) -> None:
    bare = replace(fakes.ADAPTER, rank=0)
    for changes in ({"beliefs": (BASE,)}, {"views": (BASE,)}, {"beliefs": (EMA,)}):
        with pytest.raises(UserError, match="needs LoRA"):
            make(folder, stirred=False, adapter=bare, **changes)
    actor = make(folder, stirred=False, adapter=bare)
    with pytest.raises(UserError, match="Full fine-tuning"):
        actor.snapshot()


# --- the optimizer --------------------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    settings = OptimizerSettings(
        lr=2.0, warmup_steps=4, schedule="cosine", min_ratio=0.1, total_steps=12
    )
    rates = [learning_rate(settings, step) for step in range(1, 15)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[11] == rates[13] == pytest.approx(0.2)
    assert np.all(np.diff(rates[4:12]) < 0)
    constant = replace(settings, schedule="constant")
    assert [learning_rate(constant, step) for step in (4, 9, 40)] == [2.0, 2.0, 2.0]
    assert learning_rate(OptimizerSettings(lr=3.0), 1) == 3.0


def test_the_rate_of_the_training_step_is_the_one_used_and_reported(folder: Path) -> None:
    settings = OptimizerSettings(lr=1e-2, weight_decay=0.0, warmup_steps=4, total_steps=4)
    moves = []
    for step in (1, 4):
        actor = make(folder, optimizer=settings)
        before = actor.snapshot().state
        metrics = run(actor, batch_of(actor), step)
        assert metrics["actor/lr"] == pytest.approx(1e-2 * step / 4)
        after = actor.snapshot().state
        moves.append(max(np.abs(after[name] - before[name]).max() for name in after))
    # The first step of Adam moves a weight by the learning rate.
    assert moves == pytest.approx([2.5e-3, 1e-2], rel=1e-3)


def test_the_gradient_is_clipped_as_a_whole_and_its_norm_reported_before() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    unused = torch.nn.Parameter(torch.zeros(5))
    optimizer = build_optimizer([*weights, unused], OptimizerSettings())
    weights[0].grad, weights[1].grad = torch.tensor([2.0, 1.0]), torch.tensor([2.0])
    assert gradient_norm(optimizer, 1.0) == pytest.approx(3.0)
    assert gradient_norm(optimizer, 1.0) == pytest.approx(1.0, rel=1e-5)
    weights[0].grad[0] = torch.nan
    assert np.isnan(gradient_norm(optimizer, 1.0))
    assert weights[1].grad == pytest.approx(2 / 3, rel=1e-5)


def test_frozen_parameters_are_not_given_to_the_optimizer() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    moving = torch.nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer([frozen, moving], OptimizerSettings())
    assert [p is moving for group in optimizer.param_groups for p in group["params"]] == [True]
