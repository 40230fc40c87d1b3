"""Floating-point operations of an update, counted from the model and the lengths of its sequences.

A multiply and an add are two operations. With ``T`` tokens of sequences of ``L_i``, ``P`` weights
in the linear layers that a token passes, of which ``P_g`` get a gradient, ``S`` positions at which
the output layer of ``H`` weights runs, and ``A = layers * heads * head_dim``::

    forward  = 2 P T + 2 H S + 4 A sum_i L_i (L_i + 1) / 2        causal attention
    backward = forward (gradients of activations) + 2 P_g T       (gradients of weights)

When every weight is trained this is the well-known ``6 P T`` and the attention. With LoRA the
frozen weights need no gradient of their own, so it is near ``4 P T``: counting 6 would flatter.
What is computed again under gradient checkpointing is not useful work and does not count.

Source: PaLM (arXiv 2204.02311), appendix B, with frozen weights left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from delta_belief_rl.types import IntArray

PEAK_FLOPS: dict[str, float] = {
    "V100": 125e12,
    "A100": 312e12,
    "A800": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
}
"""Operations per second of dense 16-bit matrix products, as their makers state them."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the count needs to know of a model.

    Attributes:
        weights: ``P``, of all linear layers but the output layer, the active adapter's included.
        trained: ``P_g``.
        head: ``H``, weights of the output layer.
        head_trained: The output layer gets a gradient.
        attention: ``A``.
    """

    weights: int
    trained: int
    head: int
    head_trained: bool
    attention: int

    @classmethod
    def of(cls, model: Any) -> ModelSize:
        """Count a causal model, with or without adapters, before it is sharded."""
        head = model.get_output_embeddings()
        idle = _idle_adapters(model)
        weights = trained = 0
        for name, module in model.named_modules():
            is_idle = any(f".{adapter}" in name for adapter in idle) and ".lora_" in name
            if not isinstance(module, torch.nn.Linear) or module is head or is_idle:
                continue
            weights += module.weight.numel()
            trained += module.weight.numel() if module.weight.requires_grad else 0
        config = model.config
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(
            weights=weights,
            trained=trained,
            head=head.weight.numel(),
            head_trained=bool(head.weight.requires_grad),
            attention=config.num_hidden_layers * width,
        )


def update_flops(size: ModelSize, lengths: IntArray, scored: int) -> float:
    """Operations of one forward and backward over packed sequences.

    Args:
        size: The model.
        lengths: Tokens of each sequence, ``[N]``.
        scored: Positions at which the output layer runs.
    """
    tokens = float(lengths.sum())
    pairs = float((lengths.astype(np.float64) * (lengths + 1)).sum()) / 2
    forward = 2 * size.weights * tokens + 2 * size.head * scored + 4 * size.attention * pairs
    head = 2 * size.head * scored if size.head_trained else 0
    return 2 * forward + 2 * size.trained * tokens + head


def peak_flops(device_name: str) -> float | None:
    """Stated peak of a device, by the name that its driver gives; None where none is known.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB"), peak_flops("cpu")
        (312000000000000.0, None)
    """
    found = [name for name in PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)]
    return PEAK_FLOPS[max(found, key=len)] if found else None


def _idle_adapters(model: Any) -> tuple[str, ...]:
    """Names of adapters that no token passes."""
    config = getattr(model, "peft_config", None)
    return tuple(name for name in config if name != model.active_adapter) if config else ()
