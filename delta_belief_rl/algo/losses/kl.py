"""Estimates of the divergence from a reference policy, and the loss term made of them.

With ``d = ref - logp`` of a sampled token, clamped to +-20:

==================== ======================= ==========================================
name                 value                   gradient in ``logp``
==================== ======================= ==========================================
``k1``, ``kl``       ``logp - ref``          1; its mean is 0, so as a loss it does nothing
``abs``              ``|logp - ref|``        sign
``k2``, ``mse``      ``(logp - ref)^2 / 2``  ``logp - ref``
``k3``, ``low_var_kl`` ``exp(d) - d - 1``, clamped to +-10   ``1 - exp(d)``
==================== ======================= ==========================================

Source: J. Schulman, "Approximating KL Divergence"; the clamps are those of veRL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from delta_belief_rl.algo.losses.aggregate import Metrics, aggregate, pair
from delta_belief_rl.types import UserError

LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0


def k1(logp: Tensor, ref: Tensor) -> Tensor:
    """``logp - ref``, per token."""
    return logp - ref


def absolute(logp: Tensor, ref: Tensor) -> Tensor:
    """``|logp - ref|``, per token."""
    return (logp - ref).abs()


def k2(logp: Tensor, ref: Tensor) -> Tensor:
    """``(logp - ref)^2 / 2``, per token."""
    return 0.5 * (logp - ref).square()


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """``exp(ref - logp) - (ref - logp) - 1`` with both clamps, per token; never negative."""
    d = (ref - logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (d.exp() - d - 1.0).clamp(-K3_BOUND, K3_BOUND)


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
}


def kl_penalty(logp: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Divergence of each token, ``[T]``; the reference never gets a gradient.

    Raises:
        UserError: Unknown kind.
    """
    if kind not in KL:
        raise UserError(f"kl_loss_type is {kind!r}; use one of {', '.join(KL)}.")
    return KL[kind](logp, ref.detach())


def kl_loss(
    logp: Tensor,
    ref: Tensor,
    weight: Tensor,
    rows: Tensor,
    kind: str,
    mode: str,
    denominators: Mapping[str, float],
    turns: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """The aggregated divergence, without its coefficient, and ``actor/kl_loss`` as a token mean.

    Tokens of weight 0 or with a non-finite reference have no part in it. All tensors are ``[T]``.
    """
    keep = (weight > 0) & torch.isfinite(ref)
    # A clean stand-in before the formula, so that junk reaches neither value nor gradient.
    values = kl_penalty(torch.where(keep, logp, 0.0), torch.where(keep, ref, 0.0), kind)
    kept = torch.where(keep, weight, 0.0)
    loss = aggregate(values, kept, rows, mode, denominators, turns)
    return loss, {"actor/kl_loss": pair(values, keep)}
