"""Distillation: worked examples, closed-form gradients, the teacher's tokens, and the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
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
from delta_belief_rl.trainer.distil import (
    distillation_of,
)
from delta_belief_rl.types import UserError

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
