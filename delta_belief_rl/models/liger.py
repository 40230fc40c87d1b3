"""Liger's fused kernels for the layers between the matrix products: norms, SwiGLU and rotation.

They replace the forwards of one loaded model, except for the rotation, which transformers keeps in
a function of the architecture's module: that is replaced for the process, and hands everything that
is not on a GPU to the original.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""``config.model_type`` of the models whose layers these kernels compute exactly."""


def apply_liger(model: Any) -> str | None:
    """Use Liger kernels in a model on a GPU.

    Args:
        model: A loaded causal model, before or after adapters are added.

    Returns:
        None, or a sentence that says why the model is as it was.
    """
    kind = model.config.model_type
    if find_spec("liger_kernel") is None:
        return "Liger kernels are off: the package liger-kernel is not installed."
    activation = getattr(model.config, "hidden_act", None)
    if kind not in ARCHITECTURES or activation not in ("silu", "swish"):
        return (
            f"Liger kernels are off: they are not known to fit a model of type {kind!r} "
            f"(known: {', '.join(ARCHITECTURES)})."
        )
    from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
        liger_rms_norm,
        liger_rope,
        liger_swiglu,
    )

    def norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        # Never in place: the gradient that arrives may still be somebody else's.
        return liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, 0.0, "llama", in_place=False
        )

    def feed_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x)))

    for module in model.modules():
        name = type(module).__name__.lower()
        if name == f"{kind}rmsnorm":
            module.forward = MethodType(norm, module)
        elif name == f"{kind}mlp":
            module.forward = MethodType(feed_forward, module)
    _replace_rotation(kind, liger_rope)
    return None


def _replace_rotation(kind: str, fused: Callable[..., Any]) -> None:
    module: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    plain = module.apply_rotary_pos_emb
    if getattr(plain, "fused", False):
        return

    def rotate(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """The rotation of queries and keys, ``[B, H, q, D]`` and ``[B, G, q, D]``."""
        if q.is_cuda and not rest and not options:
            return fused(q, k, cos, sin)
        return plain(q, k, cos, sin, *rest, **options)

    rotate.fused = True  # type: ignore[attr-defined]
    module.apply_rotary_pos_emb = rotate
