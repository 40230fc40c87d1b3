"""Whitening over the sampled tokens of a batch, for values that turns share.

With one value ``x`` for every sampled token, and mean and unbiased variance over these tokens::

    w = (x - mean) / sqrt(var + 1e-8)

A turn of twelve tokens counts twelve times. Fewer than two tokens, or no spread, give 0.
"""

from __future__ import annotations

import numpy as np

from delta_belief_rl.types import FloatArray, IntArray, TurnTable

EPSILON = 1e-8


def trained_tokens(table: TurnTable) -> IntArray:
    """Tokens of each row that are trained, ``[R]``: none on rows that are not valid."""
    return np.where(table.valid, table.n_tokens, 0)


def whiten(values: FloatArray, tokens: IntArray) -> FloatArray:
    """Whitened values, 0 where there is no token.

    Args:
        values: Any shape.
        tokens: How many tokens have each value, same shape.
    """
    total = float(tokens.sum())
    if total < 2:
        return np.zeros_like(values)
    kept = np.where(tokens > 0, values, 0.0)
    deviation = kept - (kept * tokens).sum() / total
    variance = float((deviation**2 * tokens).sum() / (total - 1))
    # Equal values differ by rounding from their mean; that is no spread.
    if np.sqrt(variance) <= 1e-12 * np.abs(kept).max():
        return np.zeros_like(values)
    return np.where(tokens > 0, deviation / np.sqrt(variance + EPSILON), 0.0)
