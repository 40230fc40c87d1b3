"""Log-probabilities at chosen positions of a packed row, without the logits of all others.

The model's trunk runs once; the output head and the log-softmax run on the chosen rows only, in
chunks, in float32. With gradients on, each chunk is recomputed in the backward pass, so that no
chunk's logits are kept. On a GPU a kernel of our own reads them (``models.fused_head``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from delta_belief_rl.models.packed import PackedInput
from delta_belief_rl.types import UserError

_NEUTRAL_HEAD = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
}


@dataclass(frozen=True, slots=True)
class TokenScores:
    """``logp`` and, if asked for, ``entropy`` of the whole row; nats, ``[n]`` float32."""

    logp: torch.Tensor
    entropy: torch.Tensor | None = None


def check_output_head(config: Any) -> None:
    """Refuse models whose logits are more than a linear map of the last hidden state.

    Raises:
        UserError: The configuration names a soft cap or a scale on the logits.
    """
    for name, neutral in _NEUTRAL_HEAD.items():
        if getattr(config, name, None) not in neutral:
            raise UserError(
                f"This model changes its logits by {name!r}, which is not supported: "
                "use a model with a plain output head (Qwen3, Llama, ...)."
            )


def hidden_states(model: Any, packed: PackedInput) -> torch.Tensor:
    """Last hidden states of a packed row, after the final norm.

    Args:
        model: A causal model, with or without adapters.
        packed: The row.

    Returns:
        ``[T, hidden]`` in the model's dtype.
    """
    captured: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        captured.append(output[0])

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    handle = base.get_decoder().register_forward_hook(keep)
    try:
        # Through the outer forward, with one row of logits, and not through the decoder alone:
        # wrappers (sharding, adapters) act in the outer forward.
        model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            packed=packed,
            use_cache=False,
            logits_to_keep=1,
        )
    finally:
        handle.remove()
    return captured[-1][0]


def token_logprobs(
    model: Any,
    packed: PackedInput,
    source_positions: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    with_entropy: bool = False,
) -> TokenScores:
    """Log-probabilities of some tokens of a packed row.

    Args:
        model: A causal model.
        packed: The row.
        source_positions: ``[n]`` int64, indices into the packed row whose logits predict the
            targets (``PackedInput.trunk_sources``, ``branch_sources``).
        target_ids: ``[n]`` int64, the predicted tokens.
        temperature: Logits are divided by it; belief is always at 1.
        chunk: Rows of logits that exist at one time.
        with_entropy: Also give the entropy of each row at that temperature.

    Returns:
        Scores, differentiable when gradients are on.

    Raises:
        ValueError: The temperature is not positive, or the lengths differ.
    """
    hidden = hidden_states(model, packed)
    return score_rows(model, hidden, source_positions, target_ids, temperature, chunk, with_entropy)


def score_rows(
    model: Any,
    hidden: torch.Tensor,
    source_positions: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    with_entropy: bool = False,
) -> TokenScores:
    """Like ``token_logprobs``, from hidden states ``[T, hidden]`` that are already there."""
    if temperature <= 0:
        raise ValueError("log-probabilities need a positive temperature")
    if source_positions.shape != target_ids.shape:
        raise ValueError(f"{len(source_positions)} positions for {len(target_ids)} targets")
    head = model.get_output_embeddings()
    sources = source_positions.to(hidden.device)
    targets = target_ids.to(hidden.device)
    score = _chunk_scorer(head, hidden, temperature, with_entropy)
    logps: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for start in range(0, len(sources), chunk):
        rows = hidden.index_select(0, sources[start : start + chunk])
        logp, entropy = score(rows, targets[start : start + chunk])
        logps.append(logp)
        entropies.append(entropy)
    if not logps:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return TokenScores(empty, empty if with_entropy else None)
    return TokenScores(torch.cat(logps), torch.cat(entropies) if with_entropy else None)


_Scorer = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _chunk_scorer(
    head: torch.nn.Module, hidden: torch.Tensor, temperature: float, with_entropy: bool
) -> _Scorer:
    """``(rows [n, hidden], targets [n]) -> (logp [n], entropy [n])`` for one chunk."""
    if _multiplies_half(head, hidden) and find_spec("triton") is not None:
        from delta_belief_rl.models.fused_head import fused_scores

        return lambda rows, targets: fused_scores(rows, head.weight, targets, temperature)  # type: ignore[arg-type]
    score = partial(_score_chunk, head, temperature, with_entropy)
    if torch.is_grad_enabled() and hidden.requires_grad:
        return partial(checkpoint, score, use_reentrant=False)  # type: ignore[return-value]
    return score


def _score_chunk(
    head: torch.nn.Module,
    temperature: float,
    with_entropy: bool,
    rows: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = output_logits(head, rows) / temperature
    log_norm = torch.logsumexp(logits, dim=-1)
    logp = logits.gather(-1, targets[:, None])[:, 0] - log_norm
    if not with_entropy:
        return logp, logp.detach()
    mean = (torch.exp(logits - log_norm[:, None]) * logits).sum(-1)
    return logp, log_norm - mean


def output_logits(head: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Float32 logits ``[n, vocabulary]``.

    On a GPU a half-precision product is accumulated in float32 and *kept* so: rounding a logit of
    20 to bfloat16 costs up to 0.06 nats, as much as many a turn's change of belief.
    """
    if _multiplies_half(head, rows):
        return _Float32Product.apply(rows, head.weight)  # type: ignore[no-any-return]
    return head(rows).float()


def _multiplies_half(head: torch.nn.Module, rows: torch.Tensor) -> bool:
    """Whether the head is a mere product of half-precision matrices on a GPU."""
    return (
        type(head) is torch.nn.Linear
        and head.bias is None
        and rows.is_cuda
        and rows.dtype in (torch.bfloat16, torch.float16)
        and head.weight.dtype == rows.dtype
    )


class _Float32Product(torch.autograd.Function):
    """``rows @ weight.T`` of half-precision inputs with a float32 result."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, weight)
        with torch.autocast(rows.device.type, enabled=False):
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        half = grad.to(weight.dtype)
        grad_rows = half @ weight if ctx.needs_input_grad[0] else None
        grad_weight = half.t() @ rows if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight
