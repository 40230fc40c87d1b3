"""Drawing the next token of many requests at once.

Tokens are drawn by inverting the cumulative distribution at a uniform number that each request
brings along, so what a request draws depends on its own seed and its own logits only, never on its
neighbours in the batch.

Shapes: ``R`` rows (one per running request), ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from delta_belief_rl.engines.base import SamplingParams

_CHUNK_ELEMENTS = 1 << 25
"""Rows are cut so that no float64 temporary holds more elements than this (256 MiB)."""


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """``count`` uniform numbers in [0, 1) of the stream named by ``seed``, a 64-bit integer."""
    key = seed & 0xFFFF_FFFF_FFFF_FFFF
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def cuts_distribution(sampling: SamplingParams) -> bool:
    """Whether top-k or top-p removes tokens for these settings."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0)


def _keep(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens survive top-k and then top-p of the renormalised rest. ``[R, V]`` booleans."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    vocab = probs.shape[-1]
    rank = torch.arange(vocab, device=probs.device)
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    ranked = ranked.masked_fill(rank[None] >= limit[:, None], 0.0)
    before = ranked.cumsum(-1) - ranked
    # The first token always stays: nothing comes before it and top_p is positive.
    keep_ranked = (before < top_p[:, None] * ranked.sum(-1, keepdim=True)) & (ranked > 0)
    keep_ranked |= (top_p[:, None] >= 1.0) & (ranked > 0)
    return torch.zeros_like(keep_ranked).scatter(-1, order, keep_ranked)


def _sample_chunk(
    logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, cut: bool
) -> tuple[Tensor, Tensor]:
    greedy = temperature <= 0
    scale = torch.where(greedy, torch.ones_like(temperature), temperature)
    logp = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    probs = logp.exp().double()
    if cut:
        probs = probs * _keep(probs, top_k, top_p)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1]
    # Strictly below the total, so that the search cannot end on a token of probability zero.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below)
    drawn = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


def sample_tokens(
    logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, cut: bool
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]``, any float type.
        uniform: ``[R]`` float64 in [0, 1).
        temperature: ``[R]``; 0 means greedy.
        top_k: ``[R]`` integers; 0 or less means off.
        top_p: ``[R]`` in (0, 1].
        cut: Whether any row uses top-k or top-p; when false the sort is skipped.

    Returns:
        Tokens ``[R]`` int64 and their log-probs ``[R]`` float32 in nats, as ``SamplingParams``
        defines them.
    """
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    parts = [
        _sample_chunk(
            logits[i : i + rows],
            uniform[i : i + rows],
            temperature[i : i + rows],
            top_k[i : i + rows],
            top_p[i : i + rows],
            cut,
        )
        for i in range(0, logits.shape[0], rows)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logp for _, logp in parts])


class SlotTable:
    """What each cache slot's request needs while it runs, as columns on the device.

    Attributes:
        length: ``[S]`` tokens in the cache.
        last: ``[S]`` the token sampled last; not yet in the cache.
        count: ``[S]`` tokens sampled so far for the running request.
        limit: ``[S]`` most tokens to sample.
        stop: ``[S, n]`` stop token ids, padded with -1.
        uniform: ``[S, M]`` random numbers of the request.
        tokens, logps: ``[S, M]`` what was sampled.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        def column(dtype: torch.dtype, *tail: int) -> Tensor:
            return torch.zeros((slots, *tail), dtype=dtype, device=device)

        self.device = device
        self.length = column(torch.int64)
        self.last = column(torch.int64)
        self.count = column(torch.int64)
        self.limit = column(torch.int64)
        self.temperature = column(torch.float32)
        self.top_p = column(torch.float64)
        self.top_k = column(torch.int64)
        self.stop = column(torch.int64, 1)
        self.uniform = column(torch.float64, 1)
        self.tokens = column(torch.int64, 1)
        self.logps = column(torch.float32, 1)

    def assign(
        self, slots: Sequence[int], params: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> None:
        """Start one request in each of ``slots``."""
        n_tokens = max(p.max_tokens for p in params)
        n_stop = max(1, *(len(p.stop_token_ids) for p in params))
        self._widen(n_tokens, n_stop)
        draws = np.zeros((len(params), self.uniform.shape[1]))
        stops = np.full((len(params), self.stop.shape[1]), -1, dtype=np.int64)
        for row, (sampling, seed) in enumerate(zip(params, seeds, strict=True)):
            draws[row, : sampling.max_tokens] = uniforms(seed, sampling.max_tokens)
            stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        index = torch.tensor(list(slots), device=self.device)

        def column(values: list[float], like: Tensor) -> Tensor:
            return torch.tensor(values, dtype=like.dtype, device=self.device)

        self.uniform[index] = torch.from_numpy(draws).to(self.device)
        self.stop[index] = torch.from_numpy(stops).to(self.device)
        self.count[index] = 0
        self.limit[index] = column([p.max_tokens for p in params], self.limit)
        self.temperature[index] = column([p.temperature for p in params], self.temperature)
        self.top_p[index] = column([p.top_p for p in params], self.top_p)
        self.top_k[index] = column([p.top_k for p in params], self.top_k)

    def draw(self, rows: Tensor, logits: Tensor, cut: bool) -> Tensor:
        """Sample one token for each row ``[R]``, store it, and say which rows are done ``[R]``.

        A row whose logits are not finite counts as done; its log-prob is then not finite either.
        """
        count = self.count[rows]
        tokens, logps = sample_tokens(
            logits,
            self.uniform[rows, count],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            cut,
        )
        self.tokens[rows, count] = tokens
        self.logps[rows, count] = logps
        self.last[rows] = tokens
        self.count[rows] = count + 1
        stopped = (tokens[:, None] == self.stop[rows]).any(-1)
        return stopped | (count + 1 >= self.limit[rows]) | ~torch.isfinite(logps)

    def move(self, source: int, target: int) -> None:
        """Copy every column of slot ``source`` to slot ``target``."""
        for name in _COLUMNS:
            column: Tensor = getattr(self, name)
            column[target] = column[source]

    def _widen(self, n_tokens: int, n_stop: int) -> None:
        for name in ("uniform", "tokens", "logps"):
            setattr(self, name, _padded(getattr(self, name), n_tokens, 0))
        self.stop = _padded(self.stop, n_stop, -1)


_COLUMNS = (
    "length", "last", "count", "limit", "temperature", "top_p", "top_k",
    "stop", "uniform", "tokens", "logps",
)  # fmt: skip


def _padded(column: Tensor, width: int, fill: int) -> Tensor:
    """``column`` with at least ``width`` columns."""
    missing = width - column.shape[1]
    if missing <= 0:
        return column
    extra = torch.full((column.shape[0], missing), fill, dtype=column.dtype, device=column.device)
    return torch.cat([column, extra], dim=1)
