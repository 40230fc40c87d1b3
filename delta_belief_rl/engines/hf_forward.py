"""Forward passes of a Hugging Face causal language model over a key-value store of slots.

Shapes: ``B`` rows, ``q`` new tokens of a row, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from delta_belief_rl.models.attention import SlotCache, slot_batch


def next_logits(
    model: Any,
    cache: SlotCache,
    ids: Tensor,
    positions: Tensor,
    rows: slice | Tensor,
    *,
    kv_len: int,
    valid: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Run new tokens of some slots; logits ``[B, V]`` after one token of each row.

    Args:
        ids: ``[B, q]``, padded on the right.
        positions: ``[B, q]``, the cell of each token.
        rows: The slots; a slice reads the store in place.
        kv_len: Cells that attention reads, at least the largest valid position + 1.
        valid: ``[B, q]``, false at padding; None when there is none.
        last: ``[B]``, the column after which logits are wanted; None means column 0.
    """
    slots = slot_batch(cache, rows, positions, valid, kv_len=kv_len)
    if last is None:
        last = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
    with _head_sees(model, last):
        out = model(input_ids=ids, position_ids=positions, slots=slots, use_cache=False).logits
    return out[:, 0]


def score_ids(model: Any, ids: Sequence[int]) -> NDArray[np.float64]:
    """Log-probs in nats at temperature 1 of each token given those before it; 0.0 at position 0.

    The pass goes through a store of one slot, as generation does.
    """
    if len(ids) < 2:
        return np.zeros(len(ids))
    cache = SlotCache.for_model(model, 1, len(ids))
    tokens = torch.tensor([list(ids)], device=cache.device)
    positions = torch.arange(len(ids), device=cache.device)[None]
    slots = slot_batch(cache, slice(0, 1), positions, kv_len=len(ids))
    logits = model(input_ids=tokens, position_ids=positions, slots=slots, use_cache=False).logits[
        0, :-1
    ]
    logp = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], logp.double().cpu().numpy()])


@contextmanager
def _head_sees(model: Any, last: Tensor) -> Iterator[None]:
    """Within the context the output layer sees one hidden state per row: logits ``[B, 1, V]``.

    A hook on the layer leaves everything around it (scaling, soft caps) to the model's own forward.
    """

    def select(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return (hidden[rows, last][:, None], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
