"""LoRA adapters: adding, choosing, copying, and their state as owned float32 arrays.

A state maps PEFT's own names (``base_model.model....lora_A.weight``, no adapter name inside) to
arrays, so that it can be saved, sent and loaded by anything that reads PEFT checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model

from delta_belief_rl.models.low_rank import LoraLinear
from delta_belief_rl.types import UserError

AdapterArrays = dict[str, NDArray[np.float32]]

_WRAPPER_PARTS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and compilation add to parameter names."""


def add_lora(
    model: Any,
    rank: int,
    alpha: float,
    target_modules: str | Sequence[str] = "all-linear",
    name: str = "default",
    exclude: Sequence[str] = (),
    trainable: bool = True,
    seed: int = 0,
) -> Any:
    """Put a LoRA adapter on a model.

    The first adapter becomes the active one; further ones (a frozen ``"ema"``, for example) are
    added beside it and the active one stays.

    Args:
        model: A causal model, or one that already has adapters.
        rank: Of the update.
        alpha: The update is scaled by ``alpha / rank``.
        target_modules: ``"all-linear"`` (every linear layer but the output head) or module name
            endings.
        name: The adapter's name.
        exclude: Module name endings to leave out.
        trainable: False freezes the adapter.
        seed: Of the random half of the initial weights; the update itself starts at zero.

    Returns:
        The model with the adapter (a ``PeftModel``).

    Raises:
        UserError: Embeddings or the head are targeted, no module matches, or the name is taken.
    """
    names = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    head = [part for part in names if part.split(".")[-1] in ("lm_head", "embed_tokens")]
    if head:
        raise UserError(
            f"LoRA on {head[0]!r} is not supported, because log-probabilities from an engine would "
            'miss it: remove it from target_modules or use "all-linear".'
        )
    if isinstance(model, PeftModel) and name in model.peft_config:
        raise UserError(f"The model already has an adapter named {name!r}: choose another name.")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=target_modules if isinstance(target_modules, str) else names,
        exclude_modules=list(exclude) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if isinstance(model, PeftModel):
                model.add_adapter(name, config)
            else:
                model = get_peft_model(model, config, adapter_name=name)
        except ValueError as error:
            raise UserError(
                f"No LoRA adapter {name!r} could be placed on target_modules={target_modules!r}: "
                "name modules that this model has."
            ) from error
    for parameter in adapter_parameters(model, name).values():
        parameter.requires_grad_(trainable)
    return model


def adapter_names(model: Any) -> tuple[str, ...]:
    """Names of the model's adapters, in the order in which they were added."""
    return tuple(model.peft_config) if isinstance(model, PeftModel) else ()


@contextmanager
def use_adapter(model: Any, name: str | None) -> Iterator[None]:
    """Run the block with one adapter, or with none (``None``: the frozen base model).

    Which parameters are trainable is the same after the block as before it.

    Raises:
        UserError: There is no such adapter.
    """
    names = adapter_names(model)
    if name is not None and name not in names:
        raise UserError(
            f"The model has no adapter {name!r} (it has: {', '.join(names) or 'none'}): "
            "add it to the model's adapters or name another belief model."
        )
    if not names or name == model.active_adapter:
        yield
        return
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = model.active_adapter
    try:
        if name is None:
            with model.disable_adapter():
                yield
        else:
            model.set_adapter(name, inference_mode=True)
            yield
    finally:
        if name is not None:
            model.set_adapter(before)
        # PEFT marks the adapter it switches on as trainable.
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)


@contextmanager
def switch_adapter(model: Any, name: str) -> Iterator[None]:
    """Run the block with one adapter on; which parameters are trainable never changes.

    A backward pass through what the block computed must lie inside the block: with gradient
    checkpointing it computes the forward again.

    Raises:
        UserError: There is no such adapter.
    """
    adapter_parameters(model, name)
    before = model.active_adapter
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def switch(to: str) -> None:
        model.set_adapter(to)
        # At once, not only behind the block: a sharded model notes the flags in its first forward.
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)

    switch(name)
    try:
        yield
    finally:
        switch(before)


def adapter_state(model: Any, name: str = "default") -> AdapterArrays:
    """The adapter's weights as owned float32 arrays, never a view of the live parameters.

    Raises:
        UserError: There is no such adapter.
    """
    return {key: _to_numpy(value) for key, value in adapter_parameters(model, name).items()}


def load_adapter_state(model: Any, name: str, state: Mapping[str, NDArray[np.float32]]) -> None:
    """Overwrite an adapter's weights.

    Args:
        model: A model with the adapter ``name``.
        name: The adapter.
        state: Exactly the arrays of ``adapter_state``.

    Raises:
        UserError: No name matches, some names differ (they are listed), or a shape differs. Nothing
            has been written then.
    """
    parameters = adapter_parameters(model, name)
    missing = sorted(parameters.keys() - state.keys())
    extra = sorted(state.keys() - parameters.keys())
    if len(missing) == len(parameters):
        raise UserError(
            f"The adapter weights match none of the {len(parameters)} modules of adapter {name!r} "
            f"(model has {_some(missing[:1])}; given {_some(extra[:1])}): "
            "load them into the model they were trained on."
        )
    if missing or extra:
        raise UserError(
            f"The adapter weights differ from adapter {name!r}: missing {_some(missing)}; "
            f"unknown {_some(extra)}: use the same target_modules on both sides."
        )
    for key, parameter in parameters.items():
        if tuple(parameter.shape) != state[key].shape:
            raise UserError(
                f"The adapter weight {key!r} has shape {state[key].shape}, the model needs "
                f"{tuple(parameter.shape)}: use the same rank and base model on both sides."
            )
    with torch.no_grad():
        for key, parameter in parameters.items():
            _assign(parameter, torch.from_numpy(np.array(state[key], dtype=np.float32)))


def copy_adapter(model: Any, source: str, target: str) -> None:
    """Make adapter ``target`` equal to ``source``."""
    update_ema(model, source, target, beta=0.0)


def update_ema(model: Any, source: str, target: str, beta: float) -> None:
    """``target <- beta * target + (1 - beta) * source``, on each matrix separately."""
    sources, targets = adapter_parameters(model, source), adapter_parameters(model, target)
    if sources.keys() != targets.keys():
        raise UserError(
            f"Adapters {source!r} and {target!r} sit on different modules: configure both alike."
        )
    with torch.no_grad():
        for key, parameter in targets.items():
            parameter.mul_(beta).add_(sources[key].to(parameter.dtype), alpha=1.0 - beta)


def state_checksum(state: Mapping[str, NDArray[np.float32]]) -> str:
    """SHA-256 over names, shapes and float32 bytes; independent of the mapping's order."""
    digest = hashlib.sha256()
    for key in sorted(state):
        array = np.ascontiguousarray(state[key], dtype=np.float32)
        digest.update(f"{key}:{array.shape};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def adapter_parameters(model: Any, name: str) -> dict[str, torch.nn.Parameter]:
    """The adapter's live parameters under PEFT's state-dict names.

    Raises:
        UserError: There is no such adapter.
    """
    if name not in adapter_names(model):
        names = ", ".join(adapter_names(model)) or "none"
        raise UserError(f"The model has no adapter {name!r} (it has: {names}): add it first.")
    out: dict[str, torch.nn.Parameter] = {}
    for full, parameter in model.named_parameters():
        if ".lora_" not in full or f".{name}." not in full:
            continue
        key = full.replace(f".{name}.", ".")
        for part in _WRAPPER_PARTS:
            key = key.replace(part, "")
        out[key] = parameter
    return out


def _to_numpy(value: torch.Tensor) -> NDArray[np.float32]:
    value = value.detach()
    gather = getattr(value, "full_tensor", None)
    if gather is not None:
        value = gather()
    return value.to(device="cpu", dtype=torch.float32).numpy().copy()


def _assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    value = value.to(device=parameter.device, dtype=parameter.dtype)
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
