"""The value loss of a critic, clipped around the values before the update.

With ``v`` the critic's value now, ``V`` the one before the update and ``G`` its target::

    L = 1/2 max((v - G)^2, (clip(v, V - c, V + c) - G)^2)

summed over the trained values and divided by their number in the whole optimizer step, on all
ranks, so that the loss is the same however the step is cut. The larger of the two terms is taken:
a value that has left the clip without need is held back, one on the wrong side is not.

Source: PPO's public code, as veRL has it. Confidence: exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_belief_rl.algo.losses.aggregate import Metrics, pair


def trained_values(targets: Tensor, weight: Tensor) -> Tensor:
    """Where a value is trained: it has a target, and its token is part of the batch. ``[T]``."""
    return torch.isfinite(targets) & (weight > 0)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    weight: Tensor,
    clip_range: float,
    count: float,
) -> tuple[Tensor, Metrics]:
    """This call's share of the value loss, a scalar, and its metrics; all tensors are ``[T]``.

    Args:
        values: With gradient.
        old_values: Before the update.
        targets: NaN where a value is not trained.
        weight: 0 removes a token; no other number weighs anything here.
        clip_range: ``c``.
        count: Trained values of the whole optimizer step.
    """
    keep = trained_values(targets, weight)
    # Clean stand-ins before the formula, so that junk reaches neither value nor gradient.
    value = torch.where(keep, values, 0.0)
    old, target = torch.where(keep, old_values, 0.0), torch.where(keep, targets, 0.0)
    held = torch.maximum(torch.minimum(value, old + clip_range), old - clip_range)
    plain, clipped = (value - target).square(), (held - target).square()
    each = 0.5 * torch.maximum(plain, clipped)
    loss = torch.where(keep, each, 0.0).sum() / max(count, 1.0)
    return loss, {
        "critic/vf_loss": pair(each, keep),
        "critic/vf_clipfrac": pair((clipped > plain).float(), keep),
    }
