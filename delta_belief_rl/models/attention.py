"""The attention implementation ``"delta_belief"`` of every model we load.

It is registered with transformers' attention interface, so any model that uses that interface can
run it. The mode is chosen by what is passed to ``model(...)``:

* ``packed=PackedInput``: ``input_ids`` and ``position_ids`` are one packed row ``[1, T]``. A ragged
  pack is attended to as it lies (``models.varlen``); else queries, keys and values are spread to
  ``[S, H, L, D]`` for attention only, so that no other layer computes on padding.
* ``slots=SlotBatch``: inference with a key-value store of fixed slots, one slot per running game.
* neither: plain scaled-dot-product attention, so that generic callers keep working.

Legend: ``H`` query heads, ``G`` key-value heads, ``D`` head width, ``q`` new tokens of a row, ``S``
    segments
of a pack, ``L`` longest segment, ``T`` packed tokens, ``B`` rows of a slot batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from delta_belief_rl.models.packed import PackedInput
from delta_belief_rl.models.varlen import attend
from delta_belief_rl.types import UserError

ATTENTION_NAME = "delta_belief"


class SlotCache:
    """Keys and values of running games, one slot each.

    ``keys`` and ``values`` have the shape ``[layers, slots, G, max_len + 1, D]``. The last cell of
    a slot is a
    waste cell: padding tokens write there, which keeps every write free of data-dependent shapes.
        Only
    the first ``max_len`` cells hold a game.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_len = max_len
        self.num_slots = num_slots
        # Zeros, not empty memory: a cell that a mask hides is still multiplied by a weight of zero,
        # and zero times an uninitialised NaN is NaN.
        shape = (num_layers, num_slots, kv_heads, max_len + 1, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @classmethod
    def for_model(cls, model: torch.nn.Module, num_slots: int, max_len: int) -> SlotCache:
        """A cache with the layer count, heads, dtype and device of ``model``."""
        config: Any = model.config
        heads = config.num_attention_heads
        parameter = next(model.parameters())
        return cls(
            num_layers=config.num_hidden_layers,
            num_slots=num_slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            max_len=max_len,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=parameter.dtype,
            device=parameter.device,
        )

    @property
    def device(self) -> torch.device:
        """Where the store lies."""
        return self.keys.device


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """New tokens of some slots; build it with ``slot_batch``.

    Attributes:
        rows: Slots of the batch rows. A slice reads the store in place; a tensor copies what it
            reads.
        write_rows: ``[B, 1]`` slot of each row.
        write_cells: ``[B, q]`` cell of each token; the waste cell for padding.
        kv_len: Attention reads the first ``kv_len`` cells.
        mask: ``[B, 1, q, kv_len]`` bool, or None when every query sees all of them.
    """

    cache: SlotCache
    rows: slice | torch.Tensor
    write_rows: torch.Tensor
    write_cells: torch.Tensor
    kv_len: int
    mask: torch.Tensor | None


def slot_batch(
    cache: SlotCache,
    rows: slice | torch.Tensor,
    positions: torch.Tensor,
    valid: torch.Tensor | None = None,
    kv_len: int | None = None,
) -> SlotBatch:
    """Describe where new tokens are written and what they see.

    A token at position ``p`` is written to cell ``p`` of its slot and sees the cells ``0 .. p``.
    The caller has filled the cells before the row's first new token in earlier calls.

    Args:
        cache: The store.
        rows: Slots, as a slice of a contiguous range (no copies) or a ``LongTensor [B]``.
        positions: ``[B, q]``; entries of padding are ignored.
        valid: ``[B, q]`` bool, false at padding; None when there is none.
        kv_len: Number of cells to read, at least the largest valid position + 1. Give it to avoid a
            device synchronisation.

    Raises:
        UserError: A position lies beyond the store.
    """
    device = cache.device
    positions = positions.to(device)
    if valid is not None:
        valid = valid.to(device)
        # The clamp keeps padding's own (unused) attention row inside the store.
        positions = torch.where(valid, positions, 0)
    if kv_len is None:
        kv_len = int(positions.max()) + 1
    if kv_len > cache.max_len:
        raise UserError(
            f"A game needs {kv_len} tokens but a slot holds {cache.max_len}: raise the engine's "
            "context length or lower the turn and prompt limits."
        )
    index = (
        torch.arange(cache.num_slots, device=device)[rows]
        if isinstance(rows, slice)
        else rows.to(device)
    )
    if len(index) != positions.shape[0]:
        raise ValueError(f"{len(index)} slots for {positions.shape[0]} rows of positions")
    cells = positions if valid is None else torch.where(valid, positions, cache.max_len)
    return SlotBatch(
        cache=cache,
        rows=rows if isinstance(rows, slice) else index,
        write_rows=index[:, None],
        write_cells=cells,
        kv_len=kv_len,
        mask=(torch.arange(kv_len, device=device) <= positions[:, :, None])[:, None],
    )


def delta_belief_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedInput | None = None,
    slots: SlotBatch | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the mode that the call names; see the module's head.

    Args:
        module: The model's attention layer (``layer_idx``).
        query: ``[1, H, T, D]`` packed, or ``[B, H, q, D]``.
        key: Like ``query`` with ``G`` heads.
        value: Like ``key``.
        attention_mask: Used in plain mode only.
        scaling: Factor on the scores.
        dropout: Probability of dropping a weight.
        packed: Selects packed mode.
        slots: Selects cache mode.
        sliding_window: The layer's window, where it has one.
        kwargs: Whatever else the model hands over.

    Returns:
        ``[1, T, H, D]`` or ``[B, q, H, D]``, and None in place of weights.

    Raises:
        UserError: The layer needs something this implementation lacks.
    """
    if packed is None and slots is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    _refuse_unsupported(packed, slots, sliding_window, kwargs)
    if packed is not None:
        out = _packed(query, key, value, packed, scaling, dropout)
    else:
        assert slots is not None
        out = _cached(int(module.layer_idx), query, key, value, slots, scaling)  # type: ignore[arg-type]
    return out, None


def _refuse_unsupported(
    packed: PackedInput | None, slots: SlotBatch | None, window: int | None, kwargs: dict[str, Any]
) -> None:
    longest = packed.longest if packed is not None else slots.kv_len if slots is not None else 0
    if window is not None and longest > window:
        raise UserError(
            f"This model's layers look back {window} tokens only, and a sequence has {longest}: "
            "use a model without sliding-window attention or shorter games."
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(
                f"This model's attention needs {name!r}, which the packed and cached modes lack: "
                "use a model with plain scaled-dot-product attention (Qwen3, Llama, ...)."
            )


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedInput,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """``[1, H, T, D] -> [1, T, H, D]``."""
    if packed.ragged is not None:
        assert not dropout
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(query, key, value, packed.ragged, scaling)[None]
    query, key, value = (_spread(x, packed) for x in (query, key, value))
    trunk = packed.trunk
    # Padding lies behind a trunk's last token, so that no real token sees it.
    out = F.scaled_dot_product_attention(
        query[:, :, :trunk],
        key[:, :, :trunk],
        value[:, :, :trunk],
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    if packed.mask is not None:
        branches = _branches(query[:, :, trunk:], key, value, packed.mask, scaling, dropout)
        out = torch.cat((out, branches), dim=2)
    flat = out.transpose(1, 2).reshape(-1, *out.shape[1::2])
    return (flat if packed.full else flat.index_select(0, packed.scatter))[None]


def _branches(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """``[S, H, q, D] -> [S, H, q, D]`` of the tokens of branches, over all cells of a row."""
    attend_to = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    repeats = query.shape[1] // key.shape[1]
    # No fused kernel takes a mask and grouped heads together.
    if not query.is_cuda:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return attend_to(query, key, value, attn_mask=mask)
    # The heads that share a key head go behind one another as queries: no key is copied.
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    out = attend_to(grouped, key, value, attn_mask=mask.repeat(1, 1, repeats, 1))
    return out.reshape(query.shape)


def _spread(states: torch.Tensor, packed: PackedInput) -> torch.Tensor:
    """``[1, H, T, D] -> [S, H, L, D]``; padding repeats the first token, unseen by real queries."""
    rows = states[0].transpose(0, 1)
    if not packed.full:
        rows = rows.index_select(0, packed.gather.flatten())
    return rows.reshape(*packed.gather.shape, *rows.shape[1:]).transpose(1, 2)


def _cached(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: SlotBatch,
    scaling: float | None,
) -> torch.Tensor:
    """``[B, H, q, D] -> [B, q, H, D]``."""
    cache = slots.cache
    keys, values = cache.keys[layer], cache.values[layer]
    # The index pair is split by the head axis, so the indexed view is [B, q, G, D].
    keys[slots.write_rows, :, slots.write_cells] = key.transpose(1, 2).to(keys.dtype)
    values[slots.write_rows, :, slots.write_cells] = value.transpose(1, 2).to(values.dtype)
    keys = keys[:, :, : slots.kv_len][slots.rows].to(query.dtype)
    values = values[:, :, : slots.kv_len][slots.rows].to(query.dtype)
    batch, heads, length, width = query.shape
    groups = keys.shape[1]
    if length == 1:
        # One new token: the heads that share a key head become the query axis, and nothing is
        # repeated.
        query = query.reshape(batch, groups, heads // groups, width)
    elif heads != groups:
        keys = keys.repeat_interleave(heads // groups, dim=1)
        values = values.repeat_interleave(heads // groups, dim=1)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=slots.mask, scale=scaling)
    return out.reshape(batch, heads, length, width).transpose(1, 2)


def delta_belief_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """No mask for packed and cached calls, which bring their own; else the usual one.

    Without padding, cache or window the causal kernel needs no mask either. Packing that generic
    callers express by position ids alone is not recognised: packed calls pass ``packed=``.
    """
    window = kwargs.get("local_size")
    windowed = window is not None and kv_length > window
    if attention_mask is None and q_length == kv_length and not windowed:
        return None
    return sdpa_mask(
        batch_size, q_length, kv_length, q_offset, attention_mask=attention_mask, **kwargs
    )


AttentionInterface.register(ATTENTION_NAME, delta_belief_attention)
AttentionMaskInterface.register(ATTENTION_NAME, delta_belief_mask)
