"""Divergence estimates and the entropy bonus."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from delta_belief_rl.algo import KL
from delta_belief_rl.algo.losses.aggregate import count_units, mean_metrics
from delta_belief_rl.algo.losses.entropy import entropy_loss, token_entropy
from delta_belief_rl.algo.losses.kl import kl_loss, kl_penalty
from delta_belief_rl.types import UserError

LOGP = torch.tensor([-1.0, -2.0], dtype=torch.float64)
REF = torch.tensor([-1.2, -1.5], dtype=torch.float64)
CLOSED = {
    "k1": [0.2, -0.5],
    "kl": [0.2, -0.5],
    "abs": [0.2, 0.5],
    "k2": [0.02, 0.125],
    "mse": [0.02, 0.125],
    "k3": [0.018731, 0.148721],
    "low_var_kl": [0.018731, 0.148721],
}


@pytest.mark.parametrize("kind", list(KL))
def test_A13_each_divergence_matches_its_closed_form(kind: str) -> None:
    expected = torch.tensor(CLOSED[kind], dtype=torch.float64)
    torch.testing.assert_close(kl_penalty(LOGP, REF, kind), expected, atol=1e-5, rtol=0)


def test_low_var_kl_is_clamped_in_both_places() -> None:
    far = torch.tensor([-500.0, 0.0], dtype=torch.float64)
    ref = torch.tensor([0.0, -500.0], dtype=torch.float64)
    out = kl_penalty(far, ref, "k3")
    torch.testing.assert_close(out, torch.tensor([10.0, 10.0], dtype=torch.float64))


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="kl_loss_type"):
        kl_penalty(LOGP, REF, "k4")


@pytest.mark.parametrize("kind", list(KL))
def test_A15_gradient_of_each_divergence_matches_finite_differences(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(8, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(8, generator=generator, dtype=torch.float64)
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    weight = torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1], dtype=torch.float64)
    counts = count_units(weight, rows)

    def loss(x: Tensor) -> Tensor:
        return kl_loss(x, ref, weight, rows, kind, "seq-mean-token-mean", counts)[0]

    assert torch.autograd.gradcheck(loss, (logp,))
    (gradient,) = torch.autograd.grad(loss(logp), logp)
    assert gradient[2] == 0.0
    assert gradient[weight > 0].abs().min() > 0


@pytest.mark.parametrize("kind", list(KL))
def test_A15_junk_on_masked_tokens_stays_out_and_the_reference_gets_no_gradient(kind: str) -> None:
    logp = torch.tensor([-1.0, float("nan"), -2.0], dtype=torch.float64).requires_grad_()
    ref = torch.tensor([-1.2, float("inf"), -1.5], dtype=torch.float64).requires_grad_()
    weight = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    rows = torch.zeros(3, dtype=torch.int64)
    loss, metrics = kl_loss(logp, ref, weight, rows, kind, "token-mean", count_units(weight, rows))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(sum(CLOSED[kind]) / 2, abs=1e-5)
    assert mean_metrics(metrics)["actor/kl_loss"] == pytest.approx(float(loss.detach()))
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()
    assert ref.grad is None


def test_entropy_of_a_uniform_row_is_the_log_of_its_size() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, -math.inf], [100.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([math.log(3), 0.0])
    torch.testing.assert_close(token_entropy(logits), expected, atol=1e-6, rtol=0)


def test_A15_entropy_gradient_matches_finite_differences_and_raises_the_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    rows = torch.tensor([0, 0, 1, 1])
    counts = count_units(weight, rows)

    def loss(x: Tensor) -> Tensor:
        return entropy_loss(token_entropy(x), weight, rows, "token-mean", counts)[0]

    assert torch.autograd.gradcheck(loss, (logits,))
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    before = token_entropy(logits)[weight > 0].mean()
    after = token_entropy(logits - 0.1 * gradient)[weight > 0].mean()
    assert after > before
    assert not gradient[2].any()
