"""Log-probability and entropy of rows on a GPU, in one look at their logits.

In plain PyTorch the logits of a row, hundreds of thousands of numbers, are read and written some
thirty times on their way to two numbers and back. Here a product writes them once, one kernel reads
them once, and in the backward pass another turns them into their gradient.

Legend: ``n`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

_FORWARD_BLOCK, _BACKWARD_BLOCK = 4096, 2048
"""Logits that a program works on at one time."""


def fused_scores(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of all rows at once; their logits exist in float32 while a pass runs.

    Args:
        rows: ``[n, hidden]``, half precision, on a GPU.
        weight: ``[V, hidden]`` of the output layer, like ``rows``.
        targets: ``[n]`` int64.
        temperature: Logits are divided by it.

    Returns:
        Log-probability of the target and entropy, ``[n]`` float32, in nats. The backward pass
        computes the logits again.
    """
    return _RowScores.apply(rows, weight, targets, temperature)  # type: ignore[no-any-return]


class _RowScores(torch.autograd.Function):
    """See ``fused_scores``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        logp, entropy, log_norm = (logits.new_empty(len(rows)) for _ in range(3))
        _statistics[(len(rows),)](  # type: ignore[index]
            logits,
            targets,
            logp,
            entropy,
            log_norm,
            logits.shape[1],
            1.0 / temperature,
            BLOCK=_FORWARD_BLOCK,
            num_warps=8,
        )
        ctx.save_for_backward(rows, weight, targets, entropy, log_norm)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logp: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows, weight, targets, entropy, log_norm = ctx.saved_tensors
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        grad = torch.empty_like(logits, dtype=weight.dtype)
        columns = logits.shape[1]
        blocks = triton.cdiv(columns, _BACKWARD_BLOCK)
        _gradient[(len(rows), blocks)](  # type: ignore[index]
            logits,
            targets,
            entropy,
            log_norm,
            grad_logp.contiguous(),
            grad_entropy.contiguous(),
            grad,
            columns,
            1.0 / ctx.temperature,
            BLOCK=_BACKWARD_BLOCK,
        )
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        return (
            grad @ weight if needs_rows else None,
            grad.t() @ rows if needs_weight else None,
            None,
            None,
        )


@triton.jit
def _statistics(
    logits, targets, logp, entropy, log_norm, columns, inverse_temperature, BLOCK: tl.constexpr
):
    """One row a program: a running maximum, and sums relative to it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    peak = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(logits + at, mask=inside, other=float("-inf")) * inverse_temperature
        highest = tl.maximum(peak, tl.max(x, 0))
        share = tl.exp(x - highest)
        shrink = tl.exp(peak - highest)
        total = total * shrink + tl.sum(share, 0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, share * x, 0.0), 0)
        peak = highest
    norm = peak + tl.log(total)
    chosen = tl.load(logits + tl.load(targets + row)) * inverse_temperature
    tl.store(logp + row, chosen - norm)
    tl.store(log_norm + row, norm)
    tl.store(entropy + row, norm - weighted / total)


@triton.jit
def _gradient(
    logits,
    targets,
    entropy,
    log_norm,
    grad_logp,
    grad_entropy,
    grad,
    columns,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    """Of the loss by a block of a row's logits: ``g (1[target] - p) - h p (log p + entropy)``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    place = row * columns + at
    x = tl.load(logits + place, mask=inside, other=float("-inf")) * inverse_temperature
    log_share = x - tl.load(log_norm + row)
    g = tl.load(grad_logp + row)
    pull = g + tl.load(grad_entropy + row) * (log_share + tl.load(entropy + row))
    slope = tl.where(at == tl.load(targets + row), g, 0.0) - tl.exp(log_share) * pull
    tl.store(grad + place, (slope * inverse_temperature).to(grad.dtype.element_ty), mask=inside)
