"""Distillation: worked examples, closed-form gradients, the teacher's tokens, and the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_fakes as fakes
from torch import Tensor

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.chain import chain_of
from delta_belief_rl.algo.credit.distilling import Distillation
from delta_belief_rl.algo.losses.aggregate import mean_metrics, merge_metrics
from delta_belief_rl.algo.losses.distil import (
    DistilInputs,
    close,
    distil_loss,
    divergence,
    token_losses,
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
    distillation_of,
    score_tops,
    with_tops,
)
from delta_belief_rl.types import TrainBatch, UserError

REFERENCE = "reference"
SAMPLED = Distillation(REFERENCE, ratio_cap=0.0)
GATE = Distillation(REFERENCE, form="gate", ratio_cap=0.0)


def top(beta: float = 0.5, **changes: Any) -> Distillation:
    return Distillation(
        **{"view": REFERENCE, "form": "top", "top_k": 3, "beta": beta, "ratio_cap": 0.0} | changes
    )


def log(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


STUDENT = log((0.7, 0.2, 0.1))
SDPO_TEACHER = log((0.4, 0.3, 0.3))

# --- worked examples ------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0.192042), (1.0, 0.183787), (0.5, 0.046201)])
def test_A13_the_divergence_matches_its_worked_example(beta: float, expected: float) -> None:
    found = divergence(STUDENT, log((0.4, 0.4, 0.2)), beta)
    assert float(found) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kept", "tail", "expected"),
    [(3, "renormalise", 0.051912), (1, "bucket", 0.046201), (2, "renormalise", 0.024564)],
)
def test_A13_kept_tokens_match_their_worked_example(kept: int, tail: str, expected: float) -> None:
    student, teacher = close(STUDENT[:, :kept], tail), close(SDPO_TEACHER[:, :kept], tail)
    assert float(divergence(student, teacher, 0.5)) == pytest.approx(expected, abs=1e-5)


def inputs_of(logp: Tensor, teacher: Tensor, **more: Any) -> DistilInputs:
    ones = torch.ones_like(logp)
    return DistilInputs(
        **{"logp": logp, "teacher": teacher, "old_logp": logp.detach()} | {"weight": ones} | more
    )


def test_A13_the_sampled_form_matches_its_worked_example() -> None:
    logp = torch.tensor([-0.5, -1.0], dtype=torch.float64, requires_grad=True)
    losses = token_losses(inputs_of(logp, torch.tensor([-0.2, -1.5])), SAMPLED)
    np.testing.assert_allclose(losses.detach(), [0.15, -0.5], atol=1e-6)
    losses.sum().backward()
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad, [-0.3, 0.5], atol=1e-6)


# --- gradients ------------------------------------------------------------------------------------


def random_logits(seed: int, rows: int = 4, width: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, logits)
    return found


def test_A15_gradients_of_both_divergences_are_their_closed_forms() -> None:
    logits = random_logits(0).requires_grad_()
    teacher = torch.log_softmax(random_logits(1), -1)
    s, t = torch.log_softmax(logits, -1), teacher
    forward = gradient(divergence(s, t, 0.0).sum(), logits)
    np.testing.assert_allclose(forward, (s.exp() - t.exp()).detach(), atol=1e-10)
    s = torch.log_softmax(logits, -1)
    kl = divergence(s, t, 1.0)
    reverse = gradient(kl.sum(), logits)
    want = s.exp() * (s - t - kl[:, None])
    np.testing.assert_allclose(reverse, want.detach(), atol=1e-10)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_A15_the_gradient_between_them_is_its_closed_form(beta: float) -> None:
    """Only ``(1 - beta) log(S / m)`` remains; the terms through ``m`` cancel."""
    logits = random_logits(2).requires_grad_()
    t = torch.log_softmax(random_logits(3), -1)
    s = torch.log_softmax(logits, -1)
    found = gradient(divergence(s, t, beta).sum(), logits)
    with torch.no_grad():
        share = s.exp()
        mix = (1 - beta) * share + beta * t.exp()
        pull = (1 - beta) * (s - mix.log())
        want = share * (pull - (share * pull).sum(-1, keepdim=True))
    np.testing.assert_allclose(found, want, atol=1e-10)


@pytest.mark.parametrize("how", [top(0.0), top(0.3), top(1.0), top(0.5, tail="renormalise")])
def test_A15_the_gradient_of_kept_tokens_is_that_of_finite_differences(how: Distillation) -> None:
    teacher = torch.log_softmax(random_logits(4), -1)
    ids = teacher.topk(3).indices

    def loss(logits: Tensor) -> Tensor:
        student = torch.log_softmax(logits, -1)
        made = inputs_of(
            student[:, 0],
            teacher[:, 0],
            top_logp=student.gather(-1, ids),
            top_teacher=teacher.gather(-1, ids),
        )
        return token_losses(made, how).sum()

    assert torch.autograd.gradcheck(loss, (random_logits(5).requires_grad_(),))


def test_A15_the_gate_has_no_gradient_of_its_own() -> None:
    logp = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-0.2, -2.4, -1.0], dtype=torch.float64, requires_grad=True)
    token_losses(inputs_of(logp, teacher), GATE).sum().backward()
    gate = torch.sigmoid(5.0 * (teacher - logp)).detach()
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad, -gate, atol=1e-12)
    assert teacher.grad is None


def test_A15_a_teacher_never_has_a_gradient() -> None:
    logp = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-0.2], dtype=torch.float64, requires_grad=True)
    tops = torch.tensor([[-0.2, -3.0]], dtype=torch.float64, requires_grad=True)
    own = torch.tensor([[-0.5, -2.0]], dtype=torch.float64, requires_grad=True)
    for how in (SAMPLED, GATE, top()):
        made = inputs_of(logp, teacher, top_logp=own, top_teacher=tops)
        distil_loss(made, how, {"distil": 1.0})[0].backward()
    assert teacher.grad is None
    assert tops.grad is None


def test_the_sampled_form_has_the_gradient_of_the_reverse_divergence_on_average() -> None:
    logits = random_logits(6, rows=1).requires_grad_()
    teacher = torch.log_softmax(random_logits(7, rows=1), -1)
    student = torch.log_softmax(logits, -1)
    losses = token_losses(inputs_of(student[0], teacher[0]), SAMPLED)
    sampled = gradient((student[0].exp().detach() * losses).sum(), logits)
    student = torch.log_softmax(logits, -1)
    exact = gradient(divergence(student, teacher, 1.0).sum(), logits)
    np.testing.assert_allclose(sampled, exact, atol=1e-10)


# --- what they reduce to --------------------------------------------------------------------------


def test_A13_the_divergence_in_the_middle_is_symmetric() -> None:
    one, other = (torch.log_softmax(random_logits(seed), -1) for seed in (8, 9))
    np.testing.assert_allclose(divergence(one, other, 0.5), divergence(other, one, 0.5))
    np.testing.assert_allclose(divergence(one, one, 0.5), 0.0, atol=1e-12)
    for beta in (0.0, 0.2, 0.5, 1.0):
        np.testing.assert_allclose(
            divergence(one, other, beta), divergence(other, one, 1 - beta), atol=1e-12
        )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
def test_A13_keeping_the_whole_vocabulary_is_the_full_divergence(beta: float, tail: str) -> None:
    one, other = (torch.log_softmax(random_logits(seed), -1) for seed in (10, 11))
    order = other.argsort(-1, descending=True)
    kept = [close(rows.gather(-1, order), tail) for rows in (one, other)]
    np.testing.assert_allclose(
        divergence(kept[0], kept[1], beta), divergence(one, other, beta), atol=1e-6
    )


def test_a_token_that_one_side_rules_out_costs_no_nan() -> None:
    one, other = log((0.5, 0.5, 0.0)), log((1.0, 0.0, 0.0))
    assert float(divergence(one, other, 0.5)) == pytest.approx(
        0.5 * math.log(1 / 0.75) + 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2.0))
    )
    assert torch.isfinite(divergence(one, one, 0.0)).all()


# --- counts, caps and junk ------------------------------------------------------------------------


def random_inputs(seed: int = 12, size: int = 8) -> DistilInputs:
    generator = torch.Generator().manual_seed(seed)
    student = torch.log_softmax(torch.randn(size, 6, generator=generator), -1)
    teacher = torch.log_softmax(torch.randn(size, 6, generator=generator), -1)
    return DistilInputs(
        logp=student[:, 0],
        teacher=teacher[:, 0],
        old_logp=student[:, 0] - 0.3,
        weight=torch.ones(size),
        top_logp=student[:, :3],
        top_teacher=teacher[:, :3],
    )


def cut(made: DistilInputs, part: slice | Tensor) -> DistilInputs:
    return DistilInputs(
        *(getattr(made, name)[part] for name in ("logp", "teacher", "old_logp", "weight")),
        top_logp=None if made.top_logp is None else made.top_logp[part],
        top_teacher=None if made.top_teacher is None else made.top_teacher[part],
    )


ALL_FORMS = [SAMPLED, GATE, top(), replace(top(), ratio_cap=1.1), replace(SAMPLED, ratio_cap=2.0)]


@pytest.mark.parametrize("how", ALL_FORMS)
def test_A11_the_parts_of_a_step_add_up_to_the_whole(how: Distillation) -> None:
    made, counts = random_inputs(), {"distil": 8.0}
    whole, metrics = distil_loss(made, how, counts)
    parts = [distil_loss(cut(made, slice(*ends)), how, counts) for ends in ((0, 3), (3, 4), (4, 8))]
    assert float(sum(part[0] for part in parts)) == pytest.approx(float(whole), abs=1e-6)
    merged = mean_metrics(merge_metrics([part[1] for part in parts]))
    assert merged == pytest.approx(mean_metrics(metrics), abs=1e-6)


@pytest.mark.parametrize("how", ALL_FORMS)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 9e9])
def test_A9_tokens_without_a_teacher_have_no_influence_at_all(
    how: Distillation, junk: float
) -> None:
    made = random_inputs()
    out = torch.arange(8) % 3 == 0
    weight = torch.where(out, 0.0, made.weight)
    assert made.top_logp is not None
    assert made.top_teacher is not None
    dirty = DistilInputs(
        logp=torch.where(out, junk, made.logp).requires_grad_(),
        teacher=torch.where(out, junk, made.teacher),
        old_logp=torch.where(out, junk, made.old_logp),
        weight=weight,
        top_logp=torch.where(out[:, None], junk, made.top_logp).requires_grad_(),
        top_teacher=torch.where(out[:, None], junk, made.top_teacher),
    )
    loss, metrics = distil_loss(dirty, how, {"distil": 5.0})
    clean, want = distil_loss(cut(made, ~out), how, {"distil": 5.0})
    assert float(loss.detach()) == pytest.approx(float(clean), abs=1e-6)
    assert mean_metrics(metrics) == pytest.approx(mean_metrics(want), abs=1e-6)
    loss.backward()
    for leaf in (dirty.logp, dirty.top_logp):
        if leaf is not None and leaf.grad is not None:
            assert torch.isfinite(leaf.grad).all()
            assert not leaf.grad[out].any()


@pytest.mark.parametrize("how", ALL_FORMS)
def test_A18_without_any_teacher_the_term_is_exactly_zero(how: Distillation) -> None:
    made = random_inputs()
    loss, metrics = distil_loss(replace(made, weight=torch.zeros(8)), how, {"distil": 0.0})
    assert float(loss) == 0.0
    assert mean_metrics(metrics) == {}


def test_the_ratio_is_capped_counted_and_without_gradient() -> None:
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    made = inputs_of(
        logp, torch.tensor([-2.0, -2.0]), old_logp=torch.tensor([-3.0, -1.0], dtype=torch.float64)
    )
    loss, metrics = distil_loss(made, replace(SAMPLED, ratio_cap=2.0), {"distil": 2.0})
    loss.backward()
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad, [2.0 * 1.0 / 2, 1.0 * 1.0 / 2])
    assert mean_metrics(metrics)["actor/distil_capped"] == 0.5


def test_the_coefficient_and_the_weights_scale_the_term() -> None:
    made = random_inputs()
    one = distil_loss(made, top(), {"distil": 8.0})[0]
    half = distil_loss(replace(made, weight=made.weight / 2), top(), {"distil": 8.0})[0]
    double = distil_loss(made, top(coefficient=2.0), {"distil": 8.0})[0]
    assert float(half) == pytest.approx(float(one) / 2)
    assert float(double) == pytest.approx(float(one) * 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "none"},
        {"tail": "none"},
        {"beta": 1.5},
        {"coefficient": -1.0},
        {"ratio_cap": -1.0},
        {"slope": -1.0},
        {"form": "top"},
        {"top_k": 5},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Distillation(REFERENCE, **wrong)


def test_the_top_form_without_its_tokens_is_an_error_of_the_program() -> None:
    with pytest.raises(ValueError, match="likeliest"):
        token_losses(inputs_of(torch.zeros(1), torch.zeros(1)), top())


def test_a_chain_distils_in_one_way_at_most() -> None:
    sdar = build_credit("sdar", transform=True)
    assert distillation_of(build_credit("grpo")) is None
    chain = chain_of([("grpo", build_credit("grpo")), ("sdar", sdar)])
    found = distillation_of(chain)
    assert found is not None
    assert found.form == "gate"
    with pytest.raises(UserError, match="keep one"):
        distillation_of(chain_of([("opsd", build_credit("opsd")), ("sdar", sdar)]))


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
