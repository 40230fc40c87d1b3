"""Policy losses: token PPO with dual clip, GSPO, turn ratio, CISPO, REINFORCE.

With ``x = clamp(logp - old, +-20)`` and ``clip`` to ``[1 - clip_ratio_low, 1 + clip_ratio_high]``:

``ppo``
    ``L = max(-A e^x, -A clip(e^x))``; where ``A < 0``, ``L = min(L, -A c)``.
``gspo``, ``turn_ratio``
    ``s`` = exp of the mean of ``x`` over the game's (the turn's) tokens, at most ``e^20``;
    ``L = max(-A s, -A clip(s))``. The gradient of ``s`` goes through each token's own ``logp``
    only, so advantages may differ from token to token.
``cispo``
    ``L = -stop(clip(e^x)) A logp``.
``reinforce``
    ``L = -A logp``: nothing is clipped or weighed, which is right for tokens of the policy itself.
    While ``x = 0`` its gradient is that of the losses above.

Mismatch between the engine that sampled and the model that trains is handled before, token by
token, with ``m = old - rollout``: a token without a finite ``rollout`` is dropped; a token whose
``|m|`` exceeds ``log(token_reject_ratio)``, or whose game's mean ``m`` exceeds
``log(sequence_reject_ratio)`` in size, is dropped; the others get the factor ``min(e^m,
tis_imp_ratio_cap)``. Dropped tokens stay in the denominators, which are counted before, so the loss
stays a sum over micro-batches. Every rate is a metric.

Source: PPO 1707.06347, dual clip 1912.09729, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585,
turn ratio 2601.04767.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.losses.aggregate import (
    AGGREGATION_NAMES,
    Metrics,
    aggregate,
    number_units,
    pair,
    unit_mean,
)
from delta_belief_rl.types import UserError

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """Knobs, by the reference's names where it has them; 0 or less switches a guard off."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    tis_imp_ratio_cap: float = 2.0
    token_reject_ratio: float = 0.0
    sequence_reject_ratio: float = 1.2

    def __post_init__(self) -> None:
        require_range("clip_ratio_low", self.clip_ratio_low, 0.0, 1.0)
        require_range("clip_ratio_high", self.clip_ratio_high, 0.0)
        require_range("clip_ratio_c", self.clip_ratio_c, 1.0, open_low=True)
        require_choice("loss_agg_mode", self.loss_agg_mode, AGGREGATION_NAMES)
        require_range("tis_imp_ratio_cap", self.tis_imp_ratio_cap)
        for name in ("token_reject_ratio", "sequence_reject_ratio"):
            value: float = getattr(self, name)
            if not math.isfinite(value) or 0 < value <= 1:
                raise UserError(f"{name} is {value}; give a ratio above 1, or 0 to switch it off.")


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Packed tokens of whole games; every tensor is ``[T]``. Values are free where ``weight`` is 0.

    Attributes:
        logp: With gradient.
        old_logp: Of the policy before the update.
        weight: 0 removes a token; otherwise it multiplies the token's loss.
        rows: Game of each token.
        turns: Turn of each token, distinct over the games of the call.
        rollout_logp: As the engine reported them when it sampled.
        old_is_new: There is one update per batch, so the old policy is this one: ``old_logp`` is
            replaced by the detached ``logp`` and the ratio is exactly 1.
    """

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    weight: Tensor
    rows: Tensor
    turns: Tensor | None = None
    rollout_logp: Tensor | None = None
    old_is_new: bool = False


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Cleaned inputs: zero where ``keep`` is false. ``weight`` holds the mismatch factor."""

    logp: Tensor
    log_ratio: Tensor
    advantages: Tensor
    weight: Tensor
    keep: Tensor


def mismatch_weight(
    old: Tensor, rollout: Tensor, weight: Tensor, rows: Tensor, settings: PolicyLossSettings
) -> tuple[Tensor, Metrics]:
    """Weights after truncated importance sampling and rejection, ``[T]``, and their rates.

    The game-level rate counts a game once, by giving each of its tokens one share.
    """
    present = weight > 0
    finite = present & torch.isfinite(rollout)
    gap = torch.where(finite, old - rollout, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    nothing = torch.zeros_like(finite)
    token, sequence = nothing, nothing
    if settings.token_reject_ratio > 0:
        token = finite & (gap.abs() > math.log(settings.token_reject_ratio))
    if settings.sequence_reject_ratio > 0:
        game_gap = unit_mean(gap, rows, finite)
        sequence = finite & (game_gap.abs() > math.log(settings.sequence_reject_ratio))
    keep = finite & ~token & ~sequence
    factor = gap.exp()
    capped = nothing
    if settings.tis_imp_ratio_cap > 0:
        capped = keep & (factor > settings.tis_imp_ratio_cap)
        factor = factor.clamp(max=settings.tis_imp_ratio_cap)
    else:
        factor = torch.ones_like(factor)
    metrics: Metrics = {
        "actor/rollout_nonfinite_frac": pair((present & ~finite).float(), present),
        "actor/rollout_logp_gap": pair(gap.abs(), finite),
        "actor/token_reject_frac": pair(token.float(), present),
        "actor/sequence_reject_frac": _game_rate(sequence, rows, present),
        "actor/tis_clip_frac": pair(capped.float(), keep),
        "actor/tis_factor": pair(factor, keep),
    }
    return torch.where(keep, weight * factor, 0.0), metrics


def _game_rate(flag: Tensor, rows: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """(games with a flagged token, games with a token)."""
    total = number_units(rows[present])[0]
    hit = number_units(rows[flag & present])[0]
    where = rows.device
    return torch.tensor(float(hit), device=where), torch.tensor(float(total), device=where)


def _prepare(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[_Prepared, Metrics]:
    """Clean junk away, resolve the old policy, apply the mismatch guards."""
    old = inputs.logp.detach() if inputs.old_is_new else inputs.old_logp.detach()
    weight, metrics = inputs.weight, Metrics()
    if inputs.rollout_logp is not None:
        weight, metrics = mismatch_weight(old, inputs.rollout_logp, weight, inputs.rows, settings)
    keep = weight > 0
    logp = torch.where(keep, inputs.logp, 0.0)
    log_ratio = (logp - torch.where(keep, old, 0.0)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    metrics["actor/ppo_kl"] = pair(-log_ratio, keep)
    advantages = torch.where(keep, inputs.advantages, 0.0)
    return _Prepared(logp, log_ratio, advantages, weight, keep), metrics


def _finish(
    values: Tensor,
    ready: _Prepared,
    metrics: Metrics,
    inputs: PolicyInputs,
    settings: PolicyLossSettings,
    denominators: Mapping[str, float],
) -> tuple[Tensor, Metrics]:
    """Aggregate and add the loss metric, a weighted token mean."""
    mode = settings.loss_agg_mode
    # Rejected tokens stay in their game's and turn's mean, as they do in the global counts.
    present = inputs.weight > 0
    weighted = torch.where(ready.keep, values * ready.weight, 0.0)
    counted = present.to(weighted.dtype)
    loss = aggregate(weighted, counted, inputs.rows, mode, denominators, inputs.turns)
    metrics["actor/pg_loss"] = pair(weighted, present)
    return loss, metrics


def _clipped(
    ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of each token, and where the clipped branch was taken."""
    low, high = 1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(low, high)
    return torch.maximum(plain, clipped), clipped > plain


def ppo_loss(
    inputs: PolicyInputs, settings: PolicyLossSettings, denominators: Mapping[str, float]
) -> tuple[Tensor, Metrics]:
    """Token-level PPO with asymmetric clip and dual clip; see the module's head."""
    ready, metrics = _prepare(inputs, settings)
    values, clipped = _clipped(ready.log_ratio.exp(), ready.advantages, settings)
    ceiling = -ready.advantages * settings.clip_ratio_c
    lower = (ready.advantages < 0) & (values > ceiling)
    values = torch.where(ready.advantages < 0, torch.minimum(values, ceiling), values)
    metrics["actor/pg_clipfrac"] = pair(clipped.float(), ready.keep)
    metrics["actor/pg_clipfrac_lower"] = pair(lower.float(), ready.keep)
    return _finish(values, ready, metrics, inputs, settings, denominators)


def _unit_ratio_loss(
    inputs: PolicyInputs,
    settings: PolicyLossSettings,
    denominators: Mapping[str, float],
    unit: Tensor,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate with one ratio value for each unit of tokens."""
    ready, metrics = _prepare(inputs, settings)
    mean = unit_mean(ready.log_ratio, unit, ready.keep).detach()
    # Value of the unit's ratio, gradient of the token's own log-prob.
    ratio = (mean + ready.logp - ready.logp.detach()).clamp(max=LOG_RATIO_BOUND).exp()
    values, clipped = _clipped(ratio, ready.advantages, settings)
    metrics["actor/pg_clipfrac"] = pair(clipped.float(), ready.keep)
    return _finish(values, ready, metrics, inputs, settings, denominators)


def gspo_loss(
    inputs: PolicyInputs, settings: PolicyLossSettings, denominators: Mapping[str, float]
) -> tuple[Tensor, Metrics]:
    """One length-normalised ratio for each game; usually with ``seq-mean-token-mean``."""
    return _unit_ratio_loss(inputs, settings, denominators, inputs.rows)


def turn_ratio_loss(
    inputs: PolicyInputs, settings: PolicyLossSettings, denominators: Mapping[str, float]
) -> tuple[Tensor, Metrics]:
    """One length-normalised ratio for each turn.

    Raises:
        ValueError: ``inputs.turns`` is missing.
    """
    if inputs.turns is None:
        raise ValueError("turn_ratio needs the turn of each token")
    return _unit_ratio_loss(inputs, settings, denominators, inputs.turns)


def cispo_loss(
    inputs: PolicyInputs, settings: PolicyLossSettings, denominators: Mapping[str, float]
) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted by a clipped, detached token ratio: a clipped token keeps its gradient."""
    ready, metrics = _prepare(inputs, settings)
    ratio = ready.log_ratio.exp().detach()
    kept = ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    metrics["actor/pg_clipfrac"] = pair((ratio != kept).float(), ready.keep)
    values = -kept * ready.advantages * ready.logp
    return _finish(values, ready, metrics, inputs, settings, denominators)


def reinforce_loss(
    inputs: PolicyInputs, settings: PolicyLossSettings, denominators: Mapping[str, float]
) -> tuple[Tensor, Metrics]:
    """The plain policy gradient; with several updates a batch it does not look back at the old."""
    ready, metrics = _prepare(inputs, settings)
    return _finish(-ready.advantages * ready.logp, ready, metrics, inputs, settings, denominators)


PolicyLoss = Callable[
    [PolicyInputs, PolicyLossSettings, Mapping[str, float]], tuple[Tensor, Metrics]
]
