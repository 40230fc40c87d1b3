"""Token entropy and the bonus made of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from delta_belief_rl.algo.losses.aggregate import Metrics, aggregate, pair


def token_entropy(logits: Tensor) -> Tensor:
    """``-sum p log p`` in nats of each row of logits, in float32 or wider. ``[T, V] -> [T]``."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    logp = torch.log_softmax(wide, dim=-1)
    # A token ruled out by -inf adds nothing; 0 * -inf would be NaN.
    return -torch.where(logp.isneginf(), 0.0, logp.exp() * logp).sum(dim=-1)


def entropy_loss(
    entropy: Tensor,
    weight: Tensor,
    rows: Tensor,
    mode: str,
    denominators: Mapping[str, float],
    turns: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Minus the aggregated entropy, without its coefficient: added to a loss, it raises entropy.

    All tensors are ``[T]``. The metric ``actor/entropy_loss`` is the token mean of the entropy
    itself.
    """
    keep = weight > 0
    clean = torch.where(keep, entropy, 0.0)
    loss = -aggregate(clean, weight, rows, mode, denominators, turns)
    return loss, {"actor/entropy_loss": pair(clean, keep)}
