"""Losses that pull the policy towards a teacher: the same or another model behind a better context.

With ``l`` the policy's log-prob of a played token, ``l^T`` the teacher's, ``S`` and ``T`` their
whole distributions at that place, and ``stop`` for no gradient, the loss of a token is:

``sampled``
    ``stop(l - l^T) * l``: the policy gradient with ``stop(l^T - l)`` as advantage, whose mean over
    the policy's own tokens is the gradient of KL(S || T).
``top``
    ``beta * KL(T || m) + (1 - beta) * KL(S || m)`` with ``m = (1 - beta) * S + beta * T``; at 0 it
    is KL(T || S), at 1 KL(S || T). ``S`` and ``T`` are over the teacher's likeliest tokens and,
    with ``tail="bucket"``, one more token that holds the rest of each.
``gate``
    ``stop(sigmoid(slope * (l^T - l))) * (l^T - l)``.

A token is multiplied by ``stop(min(exp(l - old), ratio_cap))`` where there is a cap. The term is
``coefficient`` times the mean over the tokens that have a teacher, counted over the whole optimizer
step (``denominators["distil"]``), so neither micro-batches nor ranks change it.

Legend: ``T`` tokens, ``k`` kept tokens of the vocabulary.

Source: OPSD (arXiv 2601.18734), SDPO (2601.20802), SDAR (2605.15155).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_belief_rl.algo.credit.distilling import Distillation
from delta_belief_rl.algo.losses.aggregate import Metrics, pair

LOG_RATIO_BOUND = 20.0
LEAST = -1e4
"""Stands for the log of 0: far below any real one, and finite, so that 0 * log(0) is 0."""


@dataclass(frozen=True, slots=True)
class DistilInputs:
    """Packed tokens; values are free where ``weight`` is 0.

    Attributes:
        logp: ``[T]`` of the played tokens, with gradient.
        teacher: ``[T]``, the same behind the teacher's context.
        old_logp: ``[T]``, of the policy before the update.
        weight: ``[T]``, 0 for tokens without a teacher.
        top_logp: ``[T, k]`` with gradient, the policy's log-probs of the teacher's likeliest
            tokens; for the form ``top`` alone.
        top_teacher: ``[T, k]``, the teacher's.
    """

    logp: Tensor
    teacher: Tensor
    old_logp: Tensor
    weight: Tensor
    top_logp: Tensor | None = None
    top_teacher: Tensor | None = None


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence of rows of log-probs, ``[T, k] -> [T]``.

    Each row must be normalised; -inf is a token of probability 0.
    """
    s, t = student.clamp(min=LEAST), teacher.clamp(min=LEAST)
    if beta <= 0:
        return _kl(t, s)
    if beta >= 1:
        return _kl(s, t)
    mix = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    return beta * _kl(t, mix) + (1 - beta) * _kl(s, mix)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)


def close(logp: Tensor, tail: str) -> Tensor:
    """Log-probs of some tokens as a whole distribution, ``[T, k] -> [T, k or k + 1]``.

    Args:
        logp: Of distinct tokens, whose probabilities add up to at most 1.
        tail: ``bucket`` or ``renormalise``.
    """
    total = torch.logsumexp(logp, dim=-1, keepdim=True)
    if tail == "renormalise":
        return logp - total
    # Rounding may put the sum at 1; the rest is then as small as it can be told.
    room = total.clamp(max=-torch.finfo(logp.dtype).eps)
    return torch.cat([logp, torch.log(-torch.expm1(room))], dim=-1)


def token_losses(inputs: DistilInputs, how: Distillation) -> Tensor:
    """The loss of each token without coefficient and ratio, ``[T]``.

    Raises:
        ValueError: The form ``top`` without the log-probs it needs.
    """
    teacher = inputs.teacher.detach()
    if how.form == "sampled":
        return (inputs.logp.detach() - teacher) * inputs.logp
    if how.form == "gate":
        gap = teacher - inputs.logp
        return torch.sigmoid(how.slope * gap).detach() * gap
    if inputs.top_logp is None or inputs.top_teacher is None:
        raise ValueError("the divergence of distributions needs the teacher's likeliest tokens")
    student = close(inputs.top_logp, how.tail)
    return divergence(student, close(inputs.top_teacher.detach(), how.tail), how.beta)


def distil_loss(
    inputs: DistilInputs, how: Distillation, denominators: Mapping[str, float]
) -> tuple[Tensor, Metrics]:
    """This call's share of the term, its coefficient included, and its metrics.

    Tokens of weight 0 have no part in it, whatever they hold. Without any token the term is 0.

    Args:
        inputs: Tokens of whole or cut games.
        how: The form.
        denominators: ``distil`` counts the tokens of the optimizer step that have a teacher.
    """
    keep = inputs.weight > 0
    clean = DistilInputs(
        *(_only(keep, x) for x in (inputs.logp, inputs.teacher, inputs.old_logp, inputs.weight)),
        top_logp=None if inputs.top_logp is None else _only(keep, inputs.top_logp, LEAST),
        top_teacher=None if inputs.top_teacher is None else _only(keep, inputs.top_teacher, LEAST),
    )
    losses = token_losses(clean, how)
    metrics: Metrics = {
        "actor/distil_loss": pair(losses, keep),
        "actor/distil_gap": pair(clean.teacher - clean.logp, keep),
    }
    if how.ratio_cap > 0:
        change = (clean.logp - clean.old_logp).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = change.exp()
        metrics["actor/distil_capped"] = pair((ratio > how.ratio_cap).to(ratio.dtype), keep)
        losses = losses * ratio.clamp(max=how.ratio_cap)
    weighted = torch.where(keep, losses, 0.0) * clean.weight
    return how.coefficient * weighted.sum() / max(denominators["distil"], 1.0), metrics


def _only(keep: Tensor, values: Tensor, fill: float = 0.0) -> Tensor:
    """The kept values; a clean stand-in elsewhere, so that junk reaches neither value nor gradient.

    Rows of a distribution get one token with all of the probability.
    """
    if values.ndim == 1:
        return torch.where(keep, values, fill)
    stand_in = torch.full_like(values, fill)
    stand_in[:, 0] = -1.0
    return torch.where(keep[:, None], values, stand_in)
