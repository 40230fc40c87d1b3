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

_CHUNK_ELEMENTS = 1 << 25
"""Rows are cut so that no float32 copy of logits holds more elements than this (128 MiB)."""


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
    batch = torch.arange(ids.shape[0], device=ids.device)
    if last is None:
        last = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
    with _head_sees(model, batch[:, None], last[:, None]):
        out = model(input_ids=ids, position_ids=positions, slots=slots, use_cache=False).logits
    return out[:, 0]


def tail_logps(
    model: Any,
    cache: SlotCache,
    suffixes: Sequence[Sequence[int]],
    starts: Sequence[int],
    lengths: Sequence[int],
    rows: Tensor,
) -> list[NDArray[np.float64]]:
    """Log-probs in nats, temperature 1, of the last tokens of some slots' texts.

    One right-padded forward; logits exist at the scored positions only.

    Args:
        suffixes: Tokens of each text that its slot does not hold yet.
        starts: Position of each suffix's first token; the slot holds all before it.
        lengths: Tokens of each tail. It lies in the suffix with one token to spare, which predicts
            the tail's first.
        rows: ``[B]`` slots.

    Returns:
        ``[lengths[i]]`` for each text.
    """
    device = cache.device
    widths = np.array([len(suffix) for suffix in suffixes])
    columns = np.arange(widths.max())
    valid = columns[None] < widths[:, None]
    ids = np.zeros(valid.shape, dtype=np.int64)
    ids[valid] = np.concatenate([np.asarray(suffix, dtype=np.int64) for suffix in suffixes])
    positions = np.array(starts)[:, None] + columns[None]
    row = np.repeat(np.arange(len(suffixes)), lengths)
    column = np.concatenate(
        [np.arange(width - n, width) for width, n in zip(widths, lengths, strict=True)]
    )
    slots = slot_batch(
        cache,
        rows,
        torch.from_numpy(positions).to(device),
        None if valid.all() else torch.from_numpy(valid).to(device),
        kv_len=int((widths + np.array(starts)).max()),
    )
    picked = (torch.from_numpy(row)[None], torch.from_numpy(column - 1)[None])
    with _head_sees(model, *(index.to(device) for index in picked)):
        logits = model(
            input_ids=torch.from_numpy(ids).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            slots=slots,
            use_cache=False,
        ).logits[0]
    targets = torch.from_numpy(ids[row, column]).to(device)
    size = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    parts = zip(logits.split(size), targets.split(size), strict=True)
    logp = torch.cat(
        [
            torch.log_softmax(part.float(), dim=-1).gather(-1, wanted[:, None])[:, 0]
            for part, wanted in parts
        ]
    )
    return np.split(logp.double().cpu().numpy(), np.cumsum(lengths)[:-1])


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
def _head_sees(model: Any, rows: Tensor, columns: Tensor) -> Iterator[None]:
    """Within the context the output layer sees some hidden states only: logits ``[b, n, V]``.

    A hook on the layer leaves everything around it (scaling, soft caps) to the model's own forward.

    Args:
        rows: ``[b, n]``, batch rows of the states.
        columns: ``[b, n]``, their columns.
    """

    def select(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][rows, columns], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
