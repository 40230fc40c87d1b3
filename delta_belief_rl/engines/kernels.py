"""Which kernels an engine runs, read off the model that it has loaded; imports no engine.

A 4-bit checkpoint whose shapes do not fit the fast kernel is served by a slow one without a word,
so what is in use is printed and compared with what was hoped for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

SLOW_KERNELS = ("AWQLinearMethod", "ExllamaLinearKernel", "ConchLinearKernel", "CPUAWQLinearMethod")
"""Names of kernels for 4-bit weights that are several times slower than Marlin or Machete."""

ATTENTION, LINEAR = "attention", "linear"
Kernels = Mapping[str, Mapping[str, int]]
"""Layers by kernel, for attention and for linear layers."""


def model_kernels(model: Any) -> dict[str, dict[str, int]]:
    """Kernels of a loaded model of vLLM.

    Args:
        model: A module; layers are recognised by ``impl`` (attention) and ``quant_method``.

    Returns:
        Layers by kernel for ``attention`` and ``linear``.
    """
    attention: Counter[str] = Counter()
    linear: Counter[str] = Counter()
    for module in model.modules():
        impl = getattr(module, "impl", None)
        if impl is not None and hasattr(module, "num_heads"):
            attention[type(impl).__name__] += 1
        method = getattr(module, "quant_method", None)
        embeds = hasattr(module, "num_embeddings")
        if method is not None and hasattr(module, "output_size") and not embeds:
            linear[_linear_kernel(module, method)] += 1
    return {ATTENTION: dict(attention), LINEAR: dict(linear)}


def describe_kernels(kernels: Kernels, notes: Sequence[str] = ()) -> str:
    """One line for the log; names a slow kernel as such.

    Example:
        >>> describe_kernels({"attention": {"FlashAttentionImpl": 2}, "linear": {"Plain": 8}})
        'attention FlashAttentionImpl x 2; linear layers Plain x 8'
    """
    parts = [
        f"{title} " + ", ".join(f"{name} x {count}" for name, count in sorted(found.items()))
        for title, found in (
            ("attention", kernels.get(ATTENTION, {})),
            ("linear layers", kernels.get(LINEAR, {})),
        )
        if found
    ]
    slow = sorted(set(kernels.get(LINEAR, {})) & set(SLOW_KERNELS))
    if slow:
        parts.append(
            f"WARNING: {', '.join(slow)} is the slow kernel for 4-bit weights (shapes or a switch "
            "keep the fast one from being used)"
        )
    return "; ".join([*parts, *notes])


def _linear_kernel(module: Any, method: Any) -> str:
    """The innermost object that multiplies: a scheme's kernel, a method's kernel, or the method."""
    for owner in (getattr(module, "scheme", None), method):
        kernel = getattr(owner, "kernel", None)
        if kernel is not None and not isinstance(kernel, str):
            return type(kernel).__name__
    return type(method).__name__
