"""The slow adapter: how it follows the trained one, and how far it is behind.

In one update every matrix of the slow adapter moves by ``slow <- beta * slow + (1 - beta) * fast``.
The metrics are of all A matrices (``A``), or all B matrices (``B``), taken as one vector; norms are
Euclidean, ``slow`` is the slow adapter after the update and ``old`` before it:

=============================  =================================================================
``ema/beta``                   share of itself that the slow adapter kept
``ema/changed_layers_ratio``   share of the adapted modules in which some element of it moved
``ema/{A,B}_rel_l2``           ``|fast - slow| / |fast|``, how far it is behind
``ema/{A,B}_cos``              cosine of the angle between fast and slow; 1 when they are equal
``ema/{A,B}_linf``             largest ``|fast - slow|`` of an element
``ema/E{A,B}_rel_l2``          ``|slow - old| / |slow|``, how far it moved in this update
=============================  =================================================================

A ratio whose denominator is 0 is 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from delta_belief_rl.models.adapters import adapter_parameters, update_ema

_KINDS = ("A", "B")


def update_slow(
    model: Any, source: str, target: str, beta: float, *, ranks: int = 1
) -> dict[str, float]:
    """Move the adapter ``target`` towards ``source``; returns the metrics of the module's head.

    With several ranks, each holding its shards, this is a collective and every rank gets the same
    numbers.
    """
    before = {key: value.clone() for key, value in _shards(model, target).items()}
    update_ema(model, source, target, beta)
    slow, fast = _shards(model, target), _shards(model, source)
    device = next(iter(slow.values())).device
    layers = {name: i for i, name in enumerate(dict.fromkeys(map(_module, slow)))}
    sums = torch.zeros(len(_KINDS), 5, device=device)
    # The largest gaps of A and B, then one flag for each adapted module.
    peaks = torch.zeros(len(_KINDS) + len(layers), device=device)
    for key, value in slow.items():
        kind, layer = int(".lora_B" in key), len(_KINDS) + layers[_module(key)]
        new, ahead, old = (part.float() for part in (value, fast[key], before[key]))
        gap, moved = ahead - new, new - old
        squares = (gap.square(), ahead.square(), new.square(), ahead * new, moved.square())
        sums[kind] += torch.stack([part.sum() for part in squares])
        if value.numel():  # a rank may hold no row of a small matrix
            peaks[kind] = torch.maximum(peaks[kind], gap.abs().max())
            peaks[layer] = torch.maximum(peaks[layer], moved.ne(0).any().float())
    if ranks > 1:
        dist.all_reduce(sums)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    changed = peaks[len(_KINDS) :].mean()
    out = {"ema/beta": beta, "ema/changed_layers_ratio": float(changed)}
    for kind, row, peak in zip(_KINDS, sums.tolist(), peaks.tolist(), strict=False):
        out |= _figures(kind, row, peak)
    return out


def _figures(kind: str, sums: list[float], peak: float) -> dict[str, float]:
    gap, fast, slow, product, moved = sums
    norms = math.sqrt(fast * slow)
    cosine = 1.0 if gap == 0 else min(product / norms, 1.0) if norms else 0.0
    return {
        f"ema/{kind}_rel_l2": _ratio(gap, fast),
        f"ema/{kind}_cos": cosine,
        f"ema/{kind}_linf": peak,
        f"ema/E{kind}_rel_l2": _ratio(moved, slow),
    }


def _ratio(above: float, below: float) -> float:
    return math.sqrt(above / below) if below else 0.0


def _module(key: str) -> str:
    return key.partition(".lora_")[0]


def _shards(model: Any, name: str) -> dict[str, torch.Tensor]:
    """This rank's part of an adapter's parameters, without a copy."""
    parts = {key: value.detach() for key, value in adapter_parameters(model, name).items()}
    return {key: getattr(value, "to_local", lambda v=value: v)() for key, value in parts.items()}
