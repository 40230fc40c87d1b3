"""Distillation on a model: what the teacher says, and what the update makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_fakes as fakes
from torch import Tensor

from delta_belief_rl.algo.credit.distilling import Distillation
from delta_belief_rl.algo.losses.distil import (
    close,
    divergence,
)
from delta_belief_rl.belief.branched import ScoreRequest, View
from delta_belief_rl.belief.naive import naive_scores
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.models.adapters import use_adapter
from delta_belief_rl.models.logprobs import hidden_states
from delta_belief_rl.models.packed import PackSegment, pack
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.actor import BASE, POLICY, PolicyActor
from delta_belief_rl.trainer.distil import (
    TOP_IDS,
    TOP_LOGP,
    TopScore,
    chosen_logprobs,
    score_tops,
    with_tops,
)
from delta_belief_rl.types import TrainBatch

REFERENCE = "reference"
SAMPLED = Distillation(REFERENCE, ratio_cap=0.0)
GATE = Distillation(REFERENCE, form="gate", ratio_cap=0.0)


def top(beta: float = 0.5, **changes: Any) -> Distillation:
    return Distillation(
        **{"view": REFERENCE, "form": "top", "top_k": 3, "beta": beta, "ratio_cap": 0.0} | changes
    )


# --- the teacher's tokens, on a model -------------------------------------------------------------

GROUPS = fakes.make_groups()
EXTRA = (5, 11, 2, 30)
"""The words of a hint, as tokens."""


def hinted(request: ScoreRequest, number: int) -> ScoreRequest:
    """Game 1 has no hint."""
    if number == 1:
        return request
    view = View((*EXTRA, *request.token_ids), request.action_positions + len(EXTRA))
    return replace(request, views={REFERENCE: view})


REQUESTS = [hinted(ask, number) for number, ask in enumerate(fakes.requests(GROUPS, None))]
BEHIND = [
    ScoreRequest(ask.views[REFERENCE].token_ids, ask.views[REFERENCE].action_positions)
    for ask in REQUESTS
    if ask.views
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("distil") / "model")


def make(folder: Path, how: Distillation | None, **changes: Any) -> PolicyActor:
    options: dict[str, Any] = {
        "beliefs": (),
        "contexts": ((REFERENCE, BASE),),
        "distil": how,
        "temperature": 0.8,
    }
    return fakes.stir(PolicyActor(fakes.settings_of(folder, **(options | changes))))


def lesson(actor: PolicyActor, advantage: float = 0.0) -> TrainBatch:
    """A batch with a teacher everywhere but in game 1, whose tokens have no weight."""
    scores = actor.score(REQUESTS)
    batch = fakes.make_batch(GROUPS, scores)
    known = np.isfinite(batch.views[REFERENCE]) & (batch.turn_ids >= 0)
    batch = replace(
        batch,
        advantages=batch.advantages * advantage,
        weight=known.astype(float),
        views={**batch.views, "distil": known.astype(float)},
    )
    return with_tops(batch, [score.top for score in scores])


def update(
    actor: PolicyActor, batch: TrainBatch, step: int = 1, **options: Any
) -> dict[str, float]:
    plan = fakes.one_step(batch, **options)
    return merge_pairs([actor.update(fakes.share(batch, plan), step)])


@pytest.mark.parametrize("how", [SAMPLED, top(top_k=4)])
def test_B5_a_view_is_the_log_prob_behind_the_hint_under_its_reader(
    folder: Path, how: Distillation
) -> None:
    actor = make(folder, how, score_tokens=60)
    scores = actor.score(REQUESTS)
    with use_adapter(actor.model, None):
        want = naive_scores(actor.model, BEHIND, 0.8)
    found = [score.views[REFERENCE] for score in scores]
    assert np.isnan(found.pop(1)).all()
    assert scores[1].top is None
    for got, plain in zip(found, want, strict=True):
        np.testing.assert_allclose(got, plain.logp, atol=1e-5)


@torch.no_grad()
def test_the_kept_tokens_are_the_readers_likeliest(folder: Path) -> None:
    actor = make(folder, top(top_k=4))
    scores = [score for score in actor.score(REQUESTS) if score.top is not None]
    for ask, score in zip(BEHIND, scores, strict=True):
        with use_adapter(actor.model, None):
            logits = actor.model(input_ids=torch.tensor([list(ask.token_ids)])).logits[0] / 0.8
        best = torch.log_softmax(logits[ask.action_positions - 1], -1).topk(4)
        assert score.top is not None
        np.testing.assert_array_equal(score.top.ids, best.indices)
        np.testing.assert_allclose(score.top.top_logp, best.values, atol=1e-5)
    for chunk in (1, 7):
        with use_adapter(actor.model, None):
            again = score_tops(actor.model, BEHIND, 4, 0.8, chunk)
        for one, other in zip(again, scores, strict=True):
            assert other.top is not None
            np.testing.assert_array_equal(one.ids, other.top.ids)
            np.testing.assert_allclose(one.logp, other.top.logp, atol=1e-5)


def test_more_tokens_than_the_vocabulary_has_are_all_of_them(folder: Path) -> None:
    actor = make(folder, top(top_k=10**6))
    found = score_tops(actor.model, BEHIND[:1], 10**6)[0]
    assert found.ids.shape[1] == found.top_logp.shape[1] < 10**6
    np.testing.assert_allclose(np.exp(found.top_logp).sum(axis=1), 1.0, atol=1e-5)
    assert score_tops(actor.model, [], 3) == []
    silent = ScoreRequest(BEHIND[0].token_ids, np.zeros(0, dtype=np.int64))
    (nothing,) = score_tops(actor.model, [silent], 3)
    assert nothing.ids.shape == nothing.top_logp.shape == (0, 3)


def test_tokens_of_the_teacher_lie_at_the_sampled_positions(folder: Path) -> None:
    actor = make(folder, top(top_k=4))
    scores = actor.score(REQUESTS)
    batch = lesson(actor)
    for number, (span, score) in enumerate(zip(batch.games(), scores, strict=True)):
        sampled = batch.turn_ids[span] >= 0
        ids = batch.views[TOP_IDS][span]
        assert not ids[~sampled].any()
        if score.top is None:
            assert number == 1
            assert not ids.any()
            continue
        np.testing.assert_array_equal(ids[sampled], score.top.ids)
        np.testing.assert_allclose(
            batch.views[TOP_LOGP][span][sampled], score.top.top_logp, atol=1e-5
        )
    part = batch.select(np.array([2, 0]))
    assert part.views[TOP_IDS].shape == (len(part.token_ids), 4)
    none: list[TopScore | None] = [None] * batch.num_games
    assert with_tops(batch, none) is batch


def test_the_policys_log_probs_of_chosen_tokens_have_the_gradient_of_the_softmax(
    folder: Path,
) -> None:
    actor = make(folder, None)
    packed = pack([PackSegment(BEHIND[0].token_ids)], actor.device, runs_ragged(actor.model))
    places = torch.tensor([1, 3, 4])
    ids = torch.tensor([[0, 5], [7, 1], [2, 3]])
    head = actor.model.get_output_embeddings()
    grads: list[Tensor] = []
    hidden = torch.zeros(0)
    for chunk in (0, 1, 2):
        hidden = hidden_states(actor.model, packed).detach().requires_grad_()
        if chunk:
            got = chosen_logprobs(head, hidden, places, ids, 0.8, chunk)
        else:
            got = torch.log_softmax(head(hidden[places]) / 0.8, -1).gather(-1, ids)
        got.square().sum().backward()
        assert hidden.grad is not None
        grads.append(hidden.grad)
    assert chosen_logprobs(head, hidden, places[:0], ids[:0]).shape == (0, 2)
    np.testing.assert_allclose(grads[1], grads[0], atol=1e-5)
    np.testing.assert_allclose(grads[2], grads[0], atol=1e-5)


# --- the update -----------------------------------------------------------------------------------

FORMS = [SAMPLED, GATE, top(0.5, top_k=4), top(1.0, top_k=10**6)]


@pytest.mark.parametrize("how", FORMS)
def test_A11_A14_micro_batches_change_neither_the_loss_nor_the_adapter(
    folder: Path, how: Distillation
) -> None:
    whole, parts = make(folder, how), make(folder, how)
    batch = lesson(whole)
    one, many = update(whole, batch), update(parts, batch, max_tokens=1)
    for name in ("actor/distil_loss", "actor/distil_gap", "actor/grad_norm"):
        assert one[name] == pytest.approx(many[name], rel=1e-4, abs=1e-6)
    fakes.assert_states_close(parts.snapshot().state, whole.snapshot().state, 2e-5)


@pytest.mark.parametrize("how", FORMS)
def test_the_loss_of_the_update_is_the_mean_of_its_tokens(folder: Path, how: Distillation) -> None:
    actor = make(folder, how)
    batch = lesson(actor)
    known = batch.views["distil"] > 0
    metrics = update(actor, batch)
    gap = batch.views[REFERENCE][known] - batch.old_logp[known]
    assert metrics["actor/distil_gap"] == pytest.approx(gap.mean(), abs=1e-5)
    if how.form == "sampled":
        want = (-gap * batch.old_logp[known]).mean()
    elif how.form == "gate":
        want = (gap / (1 + np.exp(-how.slope * gap))).mean()
    else:
        want = _divergence_by_hand(folder, how)
    assert metrics["actor/distil_loss"] == pytest.approx(want, abs=1e-5)
    assert metrics["actor/pg_loss"] == 0.0


@torch.no_grad()
def _divergence_by_hand(folder: Path, how: Distillation) -> float:
    """Mean over the tokens that have a teacher, from two plain forwards."""
    actor = make(folder, how)
    found: list[Tensor] = []
    for ask, behind in zip([ask for ask in REQUESTS if ask.views], BEHIND, strict=True):
        rows: list[Tensor] = []
        for game, reader in ((ask, POLICY), (behind, None)):
            with use_adapter(actor.model, reader):
                logits = actor.model(input_ids=torch.tensor([list(game.token_ids)])).logits[0] / 0.8
            rows.append(torch.log_softmax(logits[game.action_positions - 1], -1))
        ids = rows[1].topk(min(how.top_k, rows[1].shape[-1])).indices
        kept = [close(one.gather(-1, ids), how.tail) for one in rows]
        found.append(divergence(kept[0], kept[1], how.beta))
    return float(torch.cat(found).mean())


def test_A9_a_game_without_a_teacher_has_no_part_in_the_update(folder: Path) -> None:
    how = top(0.5, top_k=4)
    one, other = make(folder, how), make(folder, how)
    batch = lesson(one)
    update(one, batch)
    junk = batch.views[REFERENCE].copy()
    junk[batch.offsets[1] : batch.offsets[2]] = 7.0
    update(other, replace(batch, views={**batch.views, REFERENCE: junk}))
    fakes.assert_states_close(other.snapshot().state, one.snapshot().state, 0.0)


def test_A18_a_batch_without_any_teacher_has_no_step(folder: Path) -> None:
    actor = make(folder, SAMPLED)
    before = actor.snapshot()
    batch = lesson(actor)
    blank = np.zeros(len(batch.token_ids))
    metrics = update(actor, replace(batch, weight=blank, views={**batch.views, "distil": blank}))
    assert metrics["actor/empty_updates"] == 1.0
    assert "actor/distil_loss" not in metrics
    assert actor.snapshot().checksum == before.checksum


def test_A13_a_term_with_coefficient_zero_leaves_the_policy_loss_alone(folder: Path) -> None:
    plain, gated = make(folder, None), make(folder, replace(GATE, coefficient=0.0))
    batch = lesson(plain, advantage=1.0)
    update(plain, batch)
    update(gated, batch)
    fakes.assert_states_close(gated.snapshot().state, plain.snapshot().state, 0.0)


def test_a_term_stands_next_to_the_policy_loss(folder: Path) -> None:
    plain, gated = make(folder, None), make(folder, GATE)
    batch = lesson(plain, advantage=1.0)
    one, two = update(plain, batch), update(gated, batch)
    assert two["actor/pg_loss"] == pytest.approx(one["actor/pg_loss"])
    assert two["actor/grad_norm"] != pytest.approx(one["actor/grad_norm"], rel=1e-3)


def test_a_term_over_tokens_of_a_teacher_that_no_game_has_adds_nothing(folder: Path) -> None:
    plain, taught = make(folder, None), make(folder, top(top_k=4))
    batch = lesson(plain, advantage=1.0)
    blank = np.zeros(len(batch.token_ids))
    batch = replace(batch, views={REFERENCE: blank * np.nan, "distil": blank})
    update(plain, batch)
    metrics = update(taught, batch)
    assert "actor/distil_loss" not in metrics
    fakes.assert_states_close(taught.snapshot().state, plain.snapshot().state, 0.0)


@pytest.mark.parametrize("how", [top(0.0, top_k=8), top(0.5, top_k=8), top(1.0, top_k=8)])
def test_the_policy_comes_to_say_what_its_teacher_says(folder: Path, how: Distillation) -> None:
    rate = replace(fakes.OPTIMIZER, lr=5e-3)
    actor = make(folder, how, optimizer=rate, adapter=replace(fakes.ADAPTER, rank=8, alpha=16.0))
    losses: list[float] = []
    for step in range(1, 31):
        # The teacher is the frozen model, so its words stay the same; the policy's do not.
        losses.append(update(actor, lesson(actor), step)["actor/distil_loss"])
    assert losses[-1] < 0.5 * losses[0], losses
