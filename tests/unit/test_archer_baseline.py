"""ArCHer's token baseline beside the policy: what it reads, what it learns, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import archer_fakes
import numpy as np
import pytest
import torch
import training_fakes as fakes
from archer_fakes import baseline_of, critics_of

from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.models.adapters import use_adapter
from delta_belief_rl.models.double_critic import TokenBaseline
from delta_belief_rl.trainer import steps, token_baseline
from delta_belief_rl.trainer.actor import PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.archer import ArcherCriticSettings
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.trainer.token_baseline import BaselineTeacher
from delta_belief_rl.types import TrainBatch, UserError
from tests.runs import assert_same_state

GROUPS = fakes.make_groups()
REQUESTS = fakes.requests(GROUPS, None)
GAMES = [game for group in GROUPS for game in group.trajectories]
SETTINGS = replace(archer_fakes.SETTINGS, token_baseline=True, baseline_lr=1e-2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("baseline") / "model")


def make(
    folder: Path, archer: ArcherCriticSettings = SETTINGS, stirred: bool = True, **changes: Any
) -> PolicyActor:
    actor = PolicyActor(archer_fakes.settings_of(folder, archer, **changes))
    return archer_fakes.stir(actor) if stirred else actor


def batch_of(actor: PolicyActor, **options: Any) -> TrainBatch:
    return archer_fakes.make_batch(GROUPS, actor.score(REQUESTS), token_baseline=True, **options)


def run(
    actor: PolicyActor, batch: TrainBatch, training_step: int = 1, **options: Any
) -> dict[str, float]:
    plan = fakes.one_step(batch, **options)
    return merge_pairs([actor.update(fakes.share(batch, plan), training_step)])


def weights(actor: PolicyActor) -> Mapping[str, np.ndarray]:
    return baseline_of(actor).baseline.arrays()


def last_layer(baseline: TokenBaseline) -> torch.nn.Linear:
    layer = list(baseline.network.children())[-1]
    assert isinstance(layer, torch.nn.Linear)
    return layer


def constant(teacher: BaselineTeacher, value: float) -> None:
    """Make it say the same of every token."""
    layer = last_layer(teacher.baseline)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.constant_(layer.bias, value)


def told(leads: list[float], weight: list[float] | None = None) -> TrainBatch:
    """One game of so many sampled tokens behind a first one that was not sampled."""
    count = len(leads)
    zeros = np.zeros(count + 1)
    return TrainBatch(
        token_ids=np.arange(count + 1),
        offsets=np.array([0, count + 1]),
        turn_ids=np.array([-1, *[0] * count]),
        old_logp=zeros,
        rollout_logp=zeros,
        advantages=zeros,
        weight=np.array([0.0, *(weight or [1.0] * count)]),
        views={"archer_lead": np.array([9.0, *leads])},
    )


def states(count: int, hidden: int = 4) -> torch.Tensor:
    return torch.randn(count + 1, hidden, generator=torch.Generator().manual_seed(0))


def alone(lr: float = 1e-2, grad_clip: float = 1e9) -> BaselineTeacher:
    """A baseline on given states, with weights that are not the initial ones."""
    teacher = BaselineTeacher(TokenBaseline(4, 8, 0), lr, grad_clip, CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in teacher.baseline.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return teacher


def slopes(teacher: BaselineTeacher) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in teacher.baseline.parameters()]
    return [grad.clone() for grad in found if grad is not None]


# --- the loss -------------------------------------------------------------------------------------


def test_A15_the_loss_is_the_mean_square_of_what_is_missing_of_the_lead() -> None:
    teacher = alone()
    constant(teacher, 0.05)
    batch = told([0.15, 0.15, -0.1])
    teacher.begin([batch])
    total, count = teacher.backward(states(3), batch)["archer/baseline_loss"]
    # Twice 0.1, once 0.15 too little and too much.
    assert float(total) / float(count) == pytest.approx((2 * 0.01 + 0.0225) / 3, abs=1e-5)
    bias = last_layer(teacher.baseline).bias.grad
    assert bias is not None
    assert bias.item() == pytest.approx(2 * (-0.1 - 0.1 + 0.15) / 3, abs=1e-5)


def test_a_batch_in_parts_has_the_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    leads, rows = [0.5, -1.0, 0.25, 2.0, 0.0], states(5)
    parts = [(told(leads[:2]), rows[:3]), (told(leads[2:]), rows[2:])]
    found: list[list[torch.Tensor]] = []
    for games, chunk in (([(told(leads), rows)], 4096), (parts, 4096), (parts, 2)):
        monkeypatch.setattr(token_baseline, "CHUNK", chunk)
        teacher = alone()
        teacher.begin([None, *(batch for batch, _ in games)])
        for batch, hidden in games:
            teacher.backward(hidden, batch)
        found.append(slopes(teacher))
    assert max(float(grad.abs().max()) for grad in found[0]) > 0.1
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_A9_tokens_without_weight_or_without_a_lead_have_no_part_in_it() -> None:
    rows, leads = states(3), [0.5, float("nan"), 2.0]
    want, got = alone(), alone()
    batch = told([0.5])
    want.begin([batch])
    want.backward(rows[:2], batch)
    batch = told(leads, weight=[1.0, 1.0, 0.0])
    junk = rows.clone()
    junk[1:] = float("nan")
    got.begin([batch])
    got.backward(junk, batch)
    for one, other in zip(slopes(got), slopes(want), strict=True):
        assert torch.equal(one, other)


def test_it_comes_to_the_lead_to_be_expected_after_each_beginning() -> None:
    teacher, rows = alone(), states(3)
    constant(teacher, 0.0)
    # The first two tokens are said in one state, once with a good end and once with a bad one.
    hidden = rows[[0, 0, 1, 2]]
    batch = told([1.0, 0.0, -0.5])
    losses: list[float] = []
    for _ in range(300):
        teacher.begin([batch])
        total, count = teacher.backward(hidden, batch)["archer/baseline_loss"]
        losses.append(float(total) / float(count))
        teacher.step()
    values = teacher.values(hidden, np.array([0, 1, 2]))
    np.testing.assert_allclose(values, [0.5, 0.5, -0.5], atol=0.02)
    # What differs behind the same beginning is left: 0.5 squared, for two tokens of three.
    assert losses[-1] == pytest.approx(0.5 / 3, abs=0.01)
    assert losses[0] > 2 * losses[-1]


# --- what it reads --------------------------------------------------------------------------------


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
def test_a_token_has_what_is_expected_in_the_state_before_it(folder: Path, tokens: int) -> None:
    actor = make(folder, score_tokens=tokens)
    network, found = baseline_of(actor).baseline, list[float]()
    for game, score, hidden in zip(GAMES, actor.score(REQUESTS), plain_states(actor), strict=True):
        before = [place - 1 for turn in game.turns for place in range(turn.start, turn.end)]
        with torch.no_grad():
            want = network(hidden[before]).numpy()
        np.testing.assert_allclose(score.columns["archer_baseline"], want, atol=1e-5)
        found += want.tolist()
    assert np.ptp(found) > 1e-2


def test_it_does_not_know_the_token_that_it_is_a_baseline_of(folder: Path) -> None:
    actor = make(folder)
    request = REQUESTS[0]
    place = 1
    ids = list(request.token_ids)
    spoken = int(request.action_positions[place])
    ids[spoken] = ids[spoken] + 1
    one, other = actor.score([request, replace(request, token_ids=tuple(ids))])
    change = np.abs(one.columns["archer_baseline"] - other.columns["archer_baseline"])
    np.testing.assert_allclose(change[: place + 1], 0.0, atol=1e-6)
    assert change[place + 1] > 1e-3


def test_a_new_one_says_zero_and_the_policy_gets_the_lead_itself(folder: Path) -> None:
    actor = make(folder, stirred=False)
    scores = actor.score(REQUESTS)
    assert {value for score in scores for value in score.columns["archer_baseline"]} == {0.0}
    names = {"archer_q", "archer_v", "archer_baseline"}
    assert all(set(score.columns) == names for score in scores)
    assert actor.score([]) == []


def test_the_policy_is_handed_the_lead_less_the_baseline_token_by_token(folder: Path) -> None:
    actor = make(folder)
    scores = actor.score(REQUESTS)
    table, advantage = archer_fakes.credited(GROUPS, scores, token_baseline=True)
    batch = build_batch(
        GROUPS,
        table,
        advantage.turns,
        advantage.weight,
        [score.logp for score in scores],
        steps.batch_columns(table, advantage, scores),
        advantage.tokens,
    )
    columns = {
        name: np.concatenate([score.columns[name] for score in scores])
        for name in ("archer_q", "archer_v", "archer_baseline")
    }
    lead = columns["archer_q"] - columns["archer_v"]
    sampled = batch.turn_ids >= 0
    np.testing.assert_allclose(batch.advantages[sampled], lead - columns["archer_baseline"])
    np.testing.assert_allclose(batch.views["archer_lead"][sampled], lead)
    assert np.abs(columns["archer_baseline"]).max() > 1e-2


# --- training -------------------------------------------------------------------------------------


def test_reduction_policy_and_critics_are_what_they_are_without_it(folder: Path) -> None:
    actor, bare = make(folder), make(folder, archer_fakes.SETTINGS)
    batch = batch_of(actor)
    for step in (1, 2):
        with_it = run(actor, batch, step, max_tokens=40)
        without = run(bare, batch, step, max_tokens=40)
        own = {name for name in with_it if "baseline" in name}
        assert own == {
            *("archer/baseline_loss", "archer/baseline_grad_norm"),
            "archer/baseline_skipped_updates",
        }
        assert {name: value for name, value in with_it.items() if name not in own} == without
    assert actor.snapshot().checksum == bare.snapshot().checksum
    assert_same_state(critics_of(actor).teacher.state(), critics_of(bare).teacher.state())
    assert set(bare.state()["learners"]["archer"]) == {"critic", "slow", "replay", "optimizer"}


def test_A11_micro_batches_do_not_matter_and_each_step_of_the_policy_is_one_of_it(
    folder: Path,
) -> None:
    start = make(folder)
    batch = batch_of(start)
    want = run(start, batch)
    cut = run(make(folder), batch.select(np.array([3, 5, 0, 4, 1, 2])), max_tokens=1)
    for name in ("archer/baseline_loss", "archer/baseline_grad_norm"):
        assert cut[name] == pytest.approx(want[name], rel=1e-4)
        assert want[name] > 1e-2
    for options, count in (({}, 1), ({"games_per_step": 3}, 2), ({"epochs": 3}, 3)):
        actor = make(folder)
        run(actor, batch, **options)
        counters = {int(slot["step"]) for slot in baseline_of(actor).optimizer.state.values()}
        assert counters == {count}


def test_A14_games_without_weight_and_steps_without_games_leave_it_as_it_is(folder: Path) -> None:
    actor, other = make(folder), make(folder)
    before = weights(actor)
    assert "archer/baseline_loss" not in merge_pairs([actor.update([], 1)])
    bare = run(actor, replace(batch_of(actor), views={}))
    assert "archer/baseline_loss" not in bare
    assert "archer/baseline_skipped_updates" not in bare
    fakes.assert_states_close(weights(actor), before, 0.0)
    batch = batch_of(other)
    (micro, counts), *_ = fakes.share(batch, fakes.one_step(batch))
    idle = replace(batch, weight=np.zeros_like(batch.weight))
    start = make(folder)
    got = merge_pairs([other.update([([None, *micro, idle, None], counts)], 1)])
    want = run(start, batch)
    assert got["archer/baseline_loss"] == want["archer/baseline_loss"]
    fakes.assert_states_close(weights(other), weights(start), 0.0)
    assert max(np.abs(weights(other)[name] - before[name]).max() for name in before) > 1e-3


def test_in_the_warm_up_it_learns_and_the_policy_waits(folder: Path) -> None:
    actor = make(folder, replace(SETTINGS, policy_waits=1))
    before, policy = weights(actor), actor.snapshot().checksum
    metrics = run(actor, batch_of(actor))
    assert metrics["archer/baseline_grad_norm"] > 0
    assert max(np.abs(weights(actor)[name] - before[name]).max() for name in before) > 1e-3
    assert actor.snapshot().checksum == policy


def test_A20_a_broken_gradient_leaves_it_and_stops_nobody_else(folder: Path) -> None:
    actor = make(folder)
    batch = batch_of(actor)
    with torch.no_grad():
        last_layer(baseline_of(actor).baseline).bias.fill_(float("inf"))
    before = weights(actor)
    metrics = run(actor, batch)
    assert metrics["archer/baseline_skipped_updates"] == 1.0
    assert "archer/baseline_grad_norm" not in metrics
    assert metrics["archer/skipped_updates"] == metrics["actor/skipped_updates"] == 0.0
    for name, value in weights(actor).items():
        np.testing.assert_array_equal(value, before[name])


# --- state ----------------------------------------------------------------------------------------


def test_R2_a_loaded_one_goes_on_bit_for_bit(folder: Path) -> None:
    straight = make(folder)
    run(straight, batch_of(straight), 1, games_per_step=3)
    saved = dump_state(straight.state())
    other = make(folder, stirred=False)
    other.load_state(parse_state(saved))
    assert_same_state(parse_state(dump_state(other.state())), parse_state(saved))
    for actor in (straight, other):
        run(actor, batch_of(actor, seed=4), 2, games_per_step=3)
    assert_same_state(other.state(), straight.state())


def test_R11_a_checkpoint_with_one_is_no_checkpoint_without(folder: Path) -> None:
    actor, bare = make(folder), make(folder, archer_fakes.SETTINGS)
    for one in (actor, bare):
        run(one, batch_of(actor))
    with_it, without = (parse_state(dump_state(one.state())) for one in (actor, bare))
    with pytest.raises(UserError, match=r"token_baseline=true: resume with it"):
        make(folder, archer_fakes.SETTINGS).load_state(with_it)
    with pytest.raises(UserError, match=r"token_baseline=false: resume with it"):
        make(folder).load_state(without)
    with pytest.raises(UserError, match=r"algorithm\.archer\.width"):
        make(folder, replace(SETTINGS, width=9)).load_state(with_it)


def test_its_learning_rate_has_a_range() -> None:
    for rate in (0.0, float("nan")):
        with pytest.raises(UserError, match=r"algorithm\.archer\.baseline_lr is"):
            ArcherCriticSettings(baseline_lr=rate)
