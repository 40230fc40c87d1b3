"""FSDP2 for the policy, and its optimizer state in a form without any number of ranks in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard_model(model: Any, device_type: str) -> Any:
    """Shard every decoder layer and then the rest over all ranks.

    A layer's frozen base in half precision and its float32 adapters are one group: FSDP asks for
    one number format of the *trained* parameters only and gathers mixed ones as bytes, so that a
    layer costs one collective. No format is changed on the way: adapters are rounded where they
    are multiplied, and their gradients are added up over the ranks in float32, as on one rank.

    Args:
        model: A causal model with or without adapters, the same weights on every rank.
        device_type: ``cpu`` or ``cuda``.

    Returns:
        The same model; its parameters are DTensors from now on.
    """
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    # The output head is used after the forward (``models.logprobs``), so the rest stays gathered.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def gather_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Full tensors in place of shards; a collective."""
    return _map(
        state, lambda value: value.full_tensor().cpu() if isinstance(value, DTensor) else value
    )


def scatter_optimizer_state(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Shards in place of full tensors, laid out as the optimizer's parameters; a collective."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = dict(state)
    sharded["state"] = {
        index: {name: _like(value, parameters[int(index)]) for name, value in slots.items()}
        for index, slots in state["state"].items()
    }
    return sharded


def _like(value: Any, parameter: torch.Tensor) -> Any:
    plain = not isinstance(value, torch.Tensor) or value.ndim == 0
    if plain or not isinstance(parameter, DTensor):
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    return change(value)
