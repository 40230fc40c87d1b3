"""Attention over sequences of any lengths that lie side by side, without padding.

The kernel is flash-attn's where that package is installed, else the one that PyTorch brings
(``torch.nn.attention.varlen``). Both work on GPUs and in half precision only; elsewhere the packed
row is spread over padded rows (``models.attention``).

Packs with branches are spread, too: a branch has a few tokens, and these kernels would compute a
whole tile of queries for each.

Legend: ``T`` tokens of all sequences, ``H`` query heads, ``G`` key-value heads, ``D`` head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from delta_belief_rl.models.packed import Ragged

HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
"""Widest head of the kernels."""

Kernel = Callable[..., torch.Tensor]
"""``(query, key, value, starts, longest, scale) -> out``, see ``attend``."""


@cache
def kernel() -> Kernel | None:
    """The kernel of this installation; None where there is none."""
    if find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return partial(_flash_attn, flash_attn_varlen_func)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    # Older releases share key heads without being asked to.
    return partial(_torch, varlen_attn, {"enable_gqa": True} if "enable_gqa" in known else {})


def runs_ragged(model: Any) -> bool:
    """Whether a model's packed attention can go without padding, by its device and dtype."""
    weight = model.get_input_embeddings().weight
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        weight.device.type == "cuda"
        and weight.dtype in HALF
        and width <= WIDEST_HEAD
        and not getattr(config, "attention_dropout", 0.0)
        and kernel() is not None
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ragged: Ragged,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention inside each sequence of a packed row.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, G, D]``.
        value: ``[T, G, D]``.
        ragged: The sequences.
        scale: Factor on the scores; by default one over the root of ``D``.

    Returns:
        ``[T, H, D]``.
    """
    run = kernel()
    assert run is not None
    return run(query, key, value, ragged.starts, ragged.longest, scale)


def _flash_attn(
    call: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    bounds = (starts, starts, longest, longest)
    return call(query, key, value, *bounds, softmax_scale=scale, causal=True)


def _torch(
    call: Any,
    options: dict[str, bool],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    bounds = (starts, starts, longest, longest)
    return call(query, key, value, *bounds, scale=scale, window_size=(-1, 0), **options)
