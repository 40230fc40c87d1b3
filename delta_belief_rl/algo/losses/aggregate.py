"""From a value per token to one number, with denominators that do not depend on the layout.

Tensors are flat: ``values``, ``weight``, ``rows`` and ``turns`` have shape ``[T]``; there is no
padding. ``rows`` names the game of a token, ``turns`` its turn; the numbers need only be distinct
within a call, and a game (a turn) must lie in one call whole. A token with ``weight`` 0 does not
exist here.

==========================  =====================================================================
mode                        loss of the whole batch
==========================  =====================================================================
``token-mean``              sum over tokens / ``tokens``
``turn-mean``               sum over turns of the turn's token mean / ``turns``
``seq-mean-token-sum``      sum over tokens / ``rows``
``seq-mean-token-mean``     sum over rows of the row's token mean / ``rows``
``seq-mean-token-sum-norm`` sum over tokens / (``rows`` * ``length``)
==========================  =====================================================================

The last mode is that of Dr.GRPO (arXiv 2503.20783). The names on the right are *global* counts of
the whole optimizer step, counted before it is cut into micro-batches and ranks, so the sum of the
parts is the loss of the whole. ``rows`` and ``turns`` count only those with a token. ``length`` is
a constant, the token budget of a game.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor

from delta_belief_rl.types import UserError

AGGREGATION_NAMES = (
    "token-mean",
    "turn-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Each metric as (sum, count); means are taken once, at the very end."""


def count_units(
    weight: Tensor, rows: Tensor, turns: Tensor | None = None, length: float = 1.0
) -> dict[str, float]:
    """The denominators of a whole optimizer step: ``tokens``, ``rows``, ``turns``, ``length``.

    Args:
        weight: ``[T]``.
        rows: ``[T]``.
        turns: ``[T]``, distinct over the whole batch; without it ``turns`` is 0.
        length: Token budget of a game.
    """
    keep = weight > 0
    return {
        "tokens": float(keep.sum()),
        "rows": float(number_units(rows[keep])[0]),
        "turns": 0.0 if turns is None else float(number_units(turns[keep])[0]),
        "length": float(length),
    }


def number_units(unit: Tensor) -> tuple[int, Tensor]:
    """How many distinct units there are, and each token's unit as ``0 .. count - 1``, ``[T]``."""
    names, index = cast(
        "tuple[Tensor, Tensor]",
        torch.unique(unit, return_inverse=True),  # pyright: ignore[reportUnknownMemberType]
    )
    return names.numel(), index


def unit_sizes(unit: Tensor, keep: Tensor) -> Tensor:
    """Number of kept tokens in each token's own unit, ``[T] -> [T]``."""
    count, index = number_units(unit)
    size = torch.zeros(count, device=unit.device)
    return size.index_add(0, index, keep.to(size.dtype))[index]


def unit_mean(values: Tensor, unit: Tensor, keep: Tensor) -> Tensor:
    """Mean of the kept values in each token's own unit, ``[T] -> [T]``; 0 in an empty unit."""
    count, index = number_units(unit)
    total = torch.zeros(count, device=unit.device, dtype=values.dtype)
    total = total.index_add(0, index, torch.where(keep, values, 0.0))
    return total[index] / unit_sizes(unit, keep).clamp(min=1).to(values.dtype)


def aggregate(
    values: Tensor,
    weight: Tensor,
    rows: Tensor,
    mode: str,
    denominators: Mapping[str, float],
    turns: Tensor | None = None,
) -> Tensor:
    """This call's share of the batch's loss, a scalar; 0 where nothing is left to train.

    Args:
        values: Loss of each token, ``[T]``; anything, even NaN, where ``weight`` is 0.
        weight: ``[T]``; multiplies the value. A token counts once however small its weight.
        rows: ``[T]``.
        mode: One of the head's table.
        denominators: From ``count_units`` over the whole optimizer step.
        turns: ``[T]``, for ``turn-mean``.

    Raises:
        UserError: Unknown mode.
        ValueError: ``turn-mean`` without ``turns``.
    """
    if mode not in AGGREGATION_NAMES:
        raise UserError(f"loss_agg_mode is {mode!r}; use one of {', '.join(AGGREGATION_NAMES)}.")
    keep = weight > 0
    # Multiplying junk by zero would keep a NaN, in the value and in the gradient.
    weighted = torch.where(keep, values, 0.0) * torch.where(keep, weight, 0.0)
    if mode == "turn-mean":
        if turns is None:
            raise ValueError("turn-mean needs the turn of each token")
        weighted = weighted / unit_sizes(turns, keep).clamp(min=1).to(weighted.dtype)
    if mode == "seq-mean-token-mean":
        weighted = weighted / unit_sizes(rows, keep).clamp(min=1).to(weighted.dtype)
    name = {"token-mean": "tokens", "turn-mean": "turns"}.get(mode, "rows")
    denominator = denominators[name]
    if mode == "seq-mean-token-sum-norm":
        denominator *= denominators["length"]
    return weighted.sum() / max(denominator, 1.0)


def pair(values: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) of the kept values, detached, in float64 where the device has it."""
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    return torch.where(keep, values.detach(), 0.0).to(wide).sum(), keep.to(wide).sum()


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Add the pairs of many micro-batches or ranks."""
    merged: Metrics = {}
    for part in parts:
        for name, (total, count) in part.items():
            old = merged.get(name)
            merged[name] = (total, count) if old is None else (old[0] + total, old[1] + count)
    return merged


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """The final means; a metric without any count is left out rather than shown as 0."""
    return {name: float(s) / float(n) for name, (s, n) in metrics.items() if float(n) > 0}
