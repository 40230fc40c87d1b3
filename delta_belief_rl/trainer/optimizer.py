"""AdamW over the trainable parameters, and the learning-rate schedule.

The rate is a pure function of the training step, so nothing of a schedule has to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule.

    Attributes:
        warmup_steps: Training steps of linear warm-up.
        schedule: ``constant`` or ``cosine`` after the warm-up.
        min_ratio: Floor of the cosine as a share of ``lr``.
        total_steps: Training steps of the whole run.
        offload: Keep the averages of AdamW in CPU memory while they are not used.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: str = "constant"
    min_ratio: float = 0.0
    total_steps: int = 1
    offload: bool = False


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Rate of training step ``step`` (the first is 1).

    Example:
        >>> learning_rate(OptimizerSettings(lr=1.0, warmup_steps=4), step=1)
        0.25
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    span = max(settings.total_steps - settings.warmup_steps, 1)
    done = min((step - settings.warmup_steps) / span, 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * (settings.min_ratio + (1.0 - settings.min_ratio) * cosine)


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings
) -> torch.optim.AdamW:
    """AdamW over the parameters that require gradients."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(
        trainable, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
    )


@contextmanager
def at_hand(optimizer: torch.optim.Optimizer, offload: bool) -> Iterator[None]:
    """Have the optimizer's averages beside its parameters for the length of the block.

    Args:
        optimizer: Sharded or not.
        offload: They are in CPU memory before and after the block; otherwise nothing is moved.
    """
    if offload:
        move_state(optimizer, None)
    try:
        yield
    finally:
        if offload:
            move_state(optimizer, torch.device("cpu"))


def move_state(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    """Move the averages to a device; None moves each to its parameter's. Counters stay."""
    for parameter, slots in optimizer.state.items():
        for name, value in slots.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                slots[name] = value.to(parameter.device if device is None else device)


def saved_optimizer(
    optimizer: torch.optim.Optimizer, offload: bool, world_size: int
) -> dict[str, Any]:
    """Its state, whole, for a checkpoint; a collective where there are several ranks."""
    with at_hand(optimizer, offload):
        state = optimizer.state_dict()
        if world_size > 1:
            from delta_belief_rl.trainer.sharding import gather_optimizer_state

            state = gather_optimizer_state(state)
    return state


def restore_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], offload: bool, world_size: int
) -> None:
    """Continue from ``saved_optimizer``, on any number of ranks."""
    if world_size > 1:
        from delta_belief_rl.trainer.sharding import scatter_optimizer_state

        state = scatter_optimizer_state(state, optimizer)
    with at_hand(optimizer, offload):
        optimizer.load_state_dict(state)


def update_figures(norms: Sequence[float], rate: float) -> dict[str, tuple[float, float]]:
    """What a policy's optimizer did in a training step, as (sum, count) by metric.

    Args:
        norms: Of the gradient before each of its steps; one that is not finite was skipped.
        rate: The learning rate.
    """
    finite = [norm for norm in norms if math.isfinite(norm)]
    return {
        "actor/grad_norm": (float(sum(finite)), float(len(finite))),
        "actor/lr": (rate, 1.0),
        "actor/optimizer_steps": (float(len(norms)), 1.0),
        "actor/skipped_updates": (float(len(norms) - len(finite)), 1.0),
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def count_of_all_ranks(count: float, device: torch.device, world_size: int) -> float:
    """The sum of the ranks' counts; a collective where there are several ranks."""
    if world_size == 1:
        return count
    total = torch.tensor(count, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], world_size: int) -> None:
    """Give every rank the sum of all ranks' gradients, of parameters that each rank holds whole.

    A rank without a gradient has zeros. A collective where there are several ranks.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if world_size > 1:
            dist.all_reduce(parameter.grad)


def gradient_norm(optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Clip the global gradient norm in place and return it as it was before clipping.

    Works for plain and for sharded (DTensor) parameters, and for both in one optimizer; a
    collective where some are sharded, so every rank must call it. A norm that is not finite leaves
    the gradients as they are.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = [p for p in parameters if hasattr(p, "full_tensor")]
    plain = [p for p in parameters if not hasattr(p, "full_tensor")]
    norms: list[torch.Tensor] = []
    for part in (sharded, plain):
        gradients = [p.grad for p in part if p.grad is not None]
        if not part:
            continue
        norm = torch.nn.utils.get_total_norm(gradients)
        # Shards hold partial norms; clipping needs the whole one.
        full = getattr(norm, "full_tensor", None)
        norms.append(norm if full is None else full())
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    size = float(norm)
    if math.isfinite(size):
        for part in (sharded, plain):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return size
