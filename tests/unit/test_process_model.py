"""The process model beside the policy: its column, its gradient, its training, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import istar_fakes
import numpy as np
import pytest
import torch
import training_fakes as fakes

from delta_belief_rl.algo.credit.istar import SLOPE
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.models.adapters import adapter_parameters, adapter_state, switch_adapter
from delta_belief_rl.trainer.actor import POLICY, PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.packing import trained_games
from delta_belief_rl.trainer.process_model import ADAPTER, ProcessModelSettings
from delta_belief_rl.trainer.settings import actor_settings, learner_settings
from delta_belief_rl.types import TrainBatch, UserError
from tests.runs import assert_same_state

GROUPS = istar_fakes.make_groups()
REQUESTS = fakes.requests(GROUPS, None)
MODEL = istar_fakes.MODEL
SMALL = ["experiment=quickstart", "algorithm=istar"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("prm") / "model")


def make(
    folder: Path,
    model: ProcessModelSettings | None = MODEL,
    stirred: bool = True,
    **changes: Any,
) -> PolicyActor:
    actor = PolicyActor(istar_fakes.settings_of(folder, model, **changes))
    if not stirred:
        return actor
    return fakes.stir(actor) if model is None else istar_fakes.stir(actor)


def batch_of(actor: PolicyActor, **knobs: Any) -> TrainBatch:
    return istar_fakes.make_batch(GROUPS, actor.score(REQUESTS), **knobs)


def run(
    actor: PolicyActor, batch: TrainBatch, training_step: int = 1, **options: Any
) -> dict[str, float]:
    plan = fakes.one_step(batch, **options)
    return merge_pairs([actor.update(fakes.share(batch, plan), training_step)])


def gradients(actor: PolicyActor, batch: TrainBatch, **options: Any) -> dict[str, np.ndarray]:
    """What the micro-batches of an update leave at the adapter before its step."""
    for micro, counts in fakes.share(batch, fakes.one_step(batch, **options)):
        istar_fakes.model_of(actor).begin(micro)
        for part in micro:
            actor._backward(part, counts)
    found: dict[str, np.ndarray] = {}
    for name, parameter in adapter_parameters(actor.model, ADAPTER).items():
        assert parameter.grad is not None
        found[name] = parameter.grad.numpy().copy()
    return found


def plain_logps(actor: PolicyActor) -> list[torch.Tensor]:
    """Game by game through the model's own interface, with whichever adapter is on."""
    out: list[torch.Tensor] = []
    for request in REQUESTS:
        ids = torch.tensor([list(request.token_ids)])
        logits = actor.model(input_ids=ids).logits[0] / actor.settings.temperature
        places = torch.as_tensor(request.action_positions)
        chosen = torch.log_softmax(logits[places - 1], dim=-1)
        out.append(chosen.gather(-1, ids[0, places][:, None])[:, 0])
    return out


def assert_models_close(got: PolicyActor, want: PolicyActor, atol: float) -> None:
    one, other = adapter_state(got.model, ADAPTER), adapter_state(want.model, ADAPTER)
    fakes.assert_states_close(one, other, atol)


def assert_metrics_close(got: Mapping[str, float], want: Mapping[str, float]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value == pytest.approx(want[name], abs=1e-6, rel=2e-5), name


# --- the column -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 70, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_column_is_the_adapters_log_prob_at_the_policys_temperature(
    folder: Path, tokens: int, temperature: float
) -> None:
    model = replace(MODEL, temperature=temperature)
    actor = make(folder, model, score_tokens=tokens, temperature=temperature)
    with torch.no_grad(), switch_adapter(actor.model, ADAPTER):
        want = plain_logps(actor)
    for score, logp in zip(actor.score(REQUESTS), want, strict=True):
        assert set(score.columns) == {"prm"}
        np.testing.assert_allclose(score.columns["prm"], logp.numpy(), atol=1e-5)
        assert np.abs(score.columns["prm"] - score.logp).max() > 1e-2
    assert actor.score([]) == []


def test_a_new_model_says_what_a_new_policy_says_and_changes_nothing_else(folder: Path) -> None:
    bare, actor = make(folder, None, stirred=False), make(folder, stirred=False)
    for got, want in zip(actor.score(REQUESTS), bare.score(REQUESTS), strict=True):
        np.testing.assert_allclose(got.columns["prm"], got.logp, atol=1e-6)
        np.testing.assert_array_equal(got.logp, want.logp)
        assert not want.columns


def test_scoring_leaves_both_adapters_trainable_and_the_policy_active(folder: Path) -> None:
    actor = make(folder)
    before = [name for name, p in actor.model.named_parameters() if p.requires_grad]
    actor.score(REQUESTS)
    assert [name for name, p in actor.model.named_parameters() if p.requires_grad] == before
    assert {ADAPTER, POLICY} == {name.split(".")[-2] for name in before}
    assert actor.model.active_adapter == POLICY


# --- the gradient ---------------------------------------------------------------------------------


def whole_gradient(actor: PolicyActor) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of all pairs in one graph, and its gradient."""
    old = [torch.from_numpy(score.logp) for score in actor.score(REQUESTS)]
    with switch_adapter(actor.model, ADAPTER):
        logps = plain_logps(actor)
        scores: list[list[tuple[torch.Tensor, bool]]] = []
        flat = iter(zip(logps, old, strict=True))
        for group in GROUPS:
            scores.append([])
            for game in group.trajectories:
                new, before = next(flat)
                sizes = [turn.n_tokens for turn in game.turns]
                worth = [part.sum() for part in torch.split(new - before, sizes)]
                mean = istar_fakes.BETA * torch.stack(worth).mean()
                scores[-1].append((mean, game.compatible_win))
        pairs = [
            -torch.nn.functional.logsigmoid(better - worse)
            for group in scores
            for better, won in group
            for worse, other in group
            if won and not other
        ]
        loss = torch.stack(pairs).mean()
        parameters = adapter_parameters(actor.model, ADAPTER)
        found = torch.autograd.grad(loss, list(parameters.values()))
    return float(loss.detach()), {
        name: slope.numpy() for name, slope in zip(parameters, found, strict=True)
    }


@pytest.mark.parametrize("tokens", [1, 40, 10**6])
@pytest.mark.parametrize("games_per_step", [3, 8])
def test_A15_the_gradient_is_that_of_the_whole_loss_over_micro_batches_and_steps(
    folder: Path, tokens: int, games_per_step: int
) -> None:
    actor = make(folder)
    loss, want = whole_gradient(actor)
    batch = batch_of(actor)
    _, advantage = istar_fakes.credited(GROUPS, actor.score(REQUESTS))
    assert advantage.stats["istar_loss"] == pytest.approx(loss, abs=1e-5)
    assert advantage.stats["istar_pairs"] == 4
    got = gradients(actor, batch, max_tokens=tokens, games_per_step=games_per_step)
    fakes.assert_states_close(got, want, 1e-5)
    assert max(np.abs(slope).max() for slope in want.values()) > 1e-2


def test_further_passes_over_the_batch_leave_one_gradient(folder: Path) -> None:
    actor, other = make(folder), make(folder, replace(MODEL, passes=3))
    batch = batch_of(actor)
    want = gradients(actor, batch)
    got = gradients(other, batch, epochs=3, games_per_step=4)
    fakes.assert_states_close(got, want, 1e-6)


def test_all_optimizer_steps_are_taken_at_the_weights_that_were_scored(folder: Path) -> None:
    """Score first, then learn: the one step of the training step comes after the last of them."""
    start, other = make(folder), make(folder)
    batch = batch_of(start)
    before = [score.columns["prm"] for score in start.score(REQUESTS)]
    one = run(start, batch)
    many = run(other, batch, max_tokens=40, games_per_step=3)
    assert many["actor/optimizer_steps"] == 3
    assert many["prm/grad_norm"] == pytest.approx(one["prm/grad_norm"], rel=1e-4)
    assert_models_close(other, start, 2e-5)
    after = [score.columns["prm"] for score in start.score(REQUESTS)]
    assert np.abs(np.concatenate(after) - np.concatenate(before)).max() > 1e-3


def test_every_game_of_a_pair_is_in_the_update_though_others_are_left_out(folder: Path) -> None:
    groups = istar_fakes.make_groups(failed=((0, 1), (2, 0), (2, 1)))
    actor = make(folder)
    batch = istar_fakes.make_batch(groups, actor.score(REQUESTS))
    kept = trained_games(batch)
    sloped = [i for i, span in enumerate(batch.games()) if (batch.views[SLOPE][span] != 0).any()]
    assert kept.tolist() == [0, 2, 3, 4, 5]
    assert sloped == [0, 2, 3, 4, 5]
    # Groups that end alike are trained by their turns, and are in no pair.
    alike = istar_fakes.make_batch(GROUPS, actor.score(REQUESTS))
    assert trained_games(alike).tolist() == list(range(8))
    assert not any(alike.views[SLOPE][span].any() for span in list(alike.games())[6:])


# --- training -------------------------------------------------------------------------------------


def test_A11_order_and_micro_batches_change_nothing(folder: Path) -> None:
    start = make(folder)
    batch = batch_of(start)
    shuffled = batch.select(np.array([3, 5, 0, 7, 4, 1, 6, 2]))
    want = run(start, batch)
    for games, tokens in ((batch, 1), (shuffled, 10**6), (shuffled, 40)):
        actor = make(folder)
        assert_metrics_close(run(actor, games, max_tokens=tokens), want)
        assert_models_close(actor, start, 2e-5)
    assert want["prm/grad_norm"] > 1e-2


def test_A9_what_stands_at_tokens_that_were_not_sampled_has_no_influence(folder: Path) -> None:
    start, other = make(folder), make(folder)
    batch = batch_of(start)
    junk = np.where(batch.turn_ids < 0, np.nan, batch.views[SLOPE])
    dirty = replace(batch, views={**batch.views, SLOPE: junk})
    assert run(other, dirty) == run(start, batch)
    assert_same_state(other.state(), start.state())


def test_a_turn_that_the_policy_is_not_trained_on_counts_in_its_pair(folder: Path) -> None:
    actor, other = make(folder), make(folder)
    batch = batch_of(actor)
    first = (batch.turn_ids == 0) & (np.arange(len(batch.turn_ids)) < batch.offsets[1])
    lighter = replace(batch, weight=np.where(first, 0.0, batch.weight))
    fakes.assert_states_close(gradients(other, lighter), gradients(actor, batch), 1e-6)


def test_A14_an_empty_micro_batch_adds_nothing(folder: Path) -> None:
    start, other = make(folder), make(folder)
    batch = batch_of(start)
    (micro, counts), *_ = fakes.share(batch, fakes.one_step(batch))
    got = merge_pairs([other.update([([None, *micro, None], counts)], 1)])
    assert_metrics_close(got, run(start, batch))
    assert_models_close(other, start, 1e-5)


def test_the_policy_is_what_it_would_be_without_a_process_model(folder: Path) -> None:
    actor, bare = make(folder), make(folder, None)
    batch = batch_of(actor)
    for step in (1, 2):
        run(actor, batch, step, max_tokens=40)
        run(bare, batch, step, max_tokens=40)
        assert actor.snapshot().checksum == bare.snapshot().checksum


def test_the_adapter_is_trained_and_the_base_is_not(folder: Path) -> None:
    actor = make(folder, stirred=False)
    frozen = {name: p.clone() for name, p in actor.model.named_parameters() if "lora" not in name}
    start = adapter_state(actor.model, ADAPTER)
    run(actor, batch_of(actor))
    moved = adapter_state(actor.model, ADAPTER)
    assert max(np.abs(moved[name] - start[name]).max() for name in start) > 1e-4
    for name, parameter in actor.model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name


def test_the_loss_falls_and_pairs_come_into_order(folder: Path) -> None:
    actor = make(folder, stirred=False)
    losses: list[float] = []
    ordered = 0.0
    for step in range(1, 26):
        scores = actor.score(REQUESTS)
        _, advantage = istar_fakes.credited(GROUPS, scores)
        losses.append(advantage.stats["istar_loss"])
        ordered = advantage.stats["istar_ordered"]
        run(actor, istar_fakes.make_batch(GROUPS, scores), step)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses[-1] < 0.4 * losses[0]
    assert ordered == 1.0


def test_without_a_pair_the_model_stays_as_it_is(folder: Path) -> None:
    actor = make(folder)
    run(actor, batch_of(actor))
    before = istar_fakes.model_of(actor).state()
    alike = istar_fakes.make_groups(wins=())
    for batch in (
        istar_fakes.make_batch(alike, actor.score(REQUESTS)),
        replace(batch_of(actor), views={}),
    ):
        policy = actor.snapshot().checksum
        assert run(actor, batch, 2)["prm/grad_norm"] == 0
        assert actor.snapshot().checksum != policy
    assert actor.update([], 3)["prm/grad_norm"] == (0.0, 1.0)
    assert_same_state(istar_fakes.model_of(actor).state(), before)


def test_A20_a_broken_slope_skips_the_process_model_and_not_the_policy(folder: Path) -> None:
    actor = make(folder)
    batch = batch_of(actor)
    before, policy = istar_fakes.model_of(actor).state(), actor.snapshot().checksum
    broken = {**batch.views, SLOPE: np.where(batch.views[SLOPE] != 0, np.inf, 0.0)}
    metrics = run(actor, replace(batch, views=broken))
    assert metrics["prm/skipped_updates"] == 1.0
    assert metrics["actor/skipped_updates"] == 0.0
    assert "prm/grad_norm" not in metrics
    assert actor.snapshot().checksum != policy
    assert_same_state(istar_fakes.model_of(actor).state(), before)
    assert run(actor, batch, 2)["prm/skipped_updates"] == 0.0


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    start, other = make(folder), make(folder, gradient_checkpointing=True)
    batch = batch_of(start)
    assert_metrics_close(run(other, batch), run(start, batch))
    assert_models_close(other, start, 1e-5)


def test_it_has_a_learning_rate_and_a_clip_of_its_own(folder: Path) -> None:
    actor = make(folder, replace(MODEL, grad_clip=1e-12, optimizer=OptimizerSettings(lr=2e-3)))
    before = adapter_state(actor.model, ADAPTER)
    metrics = run(actor, batch_of(actor))
    assert metrics["prm/lr"] == pytest.approx(2e-3)
    assert metrics["actor/lr"] == pytest.approx(fakes.OPTIMIZER.lr)
    # What AdamW adds to the denominator is far above a gradient that was cut so low.
    fakes.assert_states_close(adapter_state(actor.model, ADAPTER), before, 1e-4)
    assert metrics["prm/grad_norm"] > 1e-2


# --- state ----------------------------------------------------------------------------------------


def test_R2_a_loaded_process_model_goes_on_bit_for_bit(folder: Path) -> None:
    straight = make(folder)
    run(straight, batch_of(straight), 1, games_per_step=3)
    saved = dump_state(straight.state())
    other = make(folder, stirred=False)
    other.load_state(parse_state(saved))
    assert_same_state(parse_state(dump_state(other.state())), parse_state(saved))
    for actor in (straight, other):
        run(actor, batch_of(actor), 2, games_per_step=3)
    assert_same_state(other.state(), straight.state())


def test_R11_a_checkpoint_of_another_learner_is_refused(folder: Path) -> None:
    actor = make(folder)
    bare = parse_state(dump_state(make(folder, None).state()))
    with pytest.raises(UserError, match="The checkpoint has no state of prm"):
        actor.load_state(bare)
    state = parse_state(dump_state(actor.state()))
    learner = istar_fakes.model_of(actor)
    with pytest.raises(UserError, match="state of prm is not that of a process model"):
        learner.load_state({**state["learners"][ADAPTER], "head": {}})
    other = make(folder, adapter=replace(fakes.ADAPTER, rank=3))
    with pytest.raises(UserError, match="has shape"):
        istar_fakes.model_of(other).load_state(state["learners"][ADAPTER])


def test_a_policy_plays_from_the_checkpoint_of_a_process_model(folder: Path) -> None:
    trained, player = make(folder), make(folder, None, stirred=False)
    player.load_state(parse_state(dump_state(trained.state())))
    assert player.snapshot().checksum == trained.snapshot().checksum
    assert "learners" not in player.state()


# --- settings -------------------------------------------------------------------------------------


def test_a_model_without_adapters_is_refused(folder: Path) -> None:
    none = replace(fakes.ADAPTER, rank=0)
    with pytest.raises(UserError, match=r"needs LoRA adapters: set actor_rollout_ref\.model"):
        make(folder, stirred=False, adapter=none)
    bare = ["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.adapters=[]"]
    cfg, _ = load_config([*SMALL, *bare])
    with pytest.raises(UserError, match=r"istar trains an adapter of its own .*\.lora_rank"):
        learner_settings(cfg)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grad_clip": 0.0}, "algorithm.istar.grad_clip is 0.0"),
        ({"temperature": 0.0}, "The temperature of sampling is 0.0"),
        ({"passes": 0}, "actor_rollout_ref.actor.ppo_epochs is 0"),
        ({"optimizer": OptimizerSettings(lr=0.0)}, "algorithm.istar.lr is 0.0"),
        (
            {"optimizer": OptimizerSettings(weight_decay=-1.0)},
            "algorithm.istar.weight_decay is -1.0",
        ),
    ],
)
def test_a_setting_out_of_its_range_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        ProcessModelSettings(**changes)
    assert said in str(error.value)


def test_the_configuration_arrives() -> None:
    cfg, _ = load_config(
        [
            *SMALL,
            "algorithm.istar={lr: 1e-3, weight_decay: 0.2, grad_clip: 3.0}",
            "actor_rollout_ref.rollout.temperature=0.8",
            "actor_rollout_ref.rollout.do_sample=true",
            "actor_rollout_ref.actor.ppo_epochs=2",
        ]
    )
    (made,) = learner_settings(cfg, "cpu", 10)
    assert isinstance(made, ProcessModelSettings)
    assert (made.name, made.columns, made.adapter) == ("prm", ("tokens:prm",), "prm")
    assert (made.optimizer.lr, made.optimizer.weight_decay, made.grad_clip) == (1e-3, 0.2, 3.0)
    assert (made.temperature, made.passes, made.optimizer.offload) == (0.8, 2, False)
    assert made.temperature == actor_settings(cfg, "cpu", 10, None).temperature
    assert learner_settings(load_config([*SMALL, "trainer.val_only=true"])[0]) == ()
    assert learner_settings(load_config([SMALL[0], "algorithm=grpo"])[0]) == ()
