"""REINFORCE++: discounted returns of single tokens, whitened over the batch.

A turn's reward falls on its last sampled token. With ``n_k`` tokens in turn ``k`` of a game, the
return of its token ``j`` (from 0) is::

    G_{k,j} = gamma^(n_k - 1 - j) * (r_k + c_k)

``parity="ours"``
    ``c_k = gamma * G_{k+1,0}``: the return runs on over the environment's tokens, which take no
    discount, so that the outcome reaches every turn.
``parity="reference"``
    ``c_k = 0``: the return starts anew wherever the loss mask is 0, that is at every reply of the
    environment, so that a turn sees its own reward alone. This is the published rule; its program
    never ran.

The advantage is the whitened return (``credit.whitening``); games of one secret are not compared.
With ``gamma = 1`` all tokens of a turn share one value; otherwise ``Advantage.tokens`` holds them
and ``turns`` their means.

Source: REINFORCE++ (arXiv 2501.03262).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    Advantage,
    Grain,
    Stateless,
    require_choice,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.groups import PARITY_CHOICES, finish, total_reward, used_channels
from delta_belief_rl.algo.credit.whitening import trained_tokens, whiten
from delta_belief_rl.types import FloatArray, IntArray, TurnTable


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusSettings:
    """Knobs of ``ReinforcePlusPlus``; ``gamma`` discounts per token."""

    gamma: float = 1.0
    parity: str = "ours"

    def __post_init__(self) -> None:
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_choice("algorithm.parity", self.parity, PARITY_CHOICES)


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(Stateless):
    """See the module's head."""

    settings: ReinforcePlusPlusSettings = ReinforcePlusPlusSettings()
    requires: ClassVar[tuple[str, ...]] = ("traj", "turn", "n_tokens", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """The batch is the baseline."""
        return False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``, and those of single tokens with a discount.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "reinforce_plus_plus")
        gamma, used, tokens = self.settings.gamma, used_channels(table), trained_tokens(table)
        reward, sizes = table.grid(total_reward(used, table)), table.grid(tokens)
        last = _last_token_returns(reward, sizes, gamma, resets=self.settings.parity != "ours")
        returns = last[table.traj, table.turn]
        if gamma == 1.0:
            return finish(table, whiten(returns, tokens), used)
        row, to_end = _token_rows(table.n_tokens)
        each = whiten(returns[row] * gamma**to_end, table.valid[row].astype(np.int64))
        total = np.bincount(row, weights=each, minlength=table.num_rows)
        mean = total / np.maximum(table.n_tokens, 1)
        return replace(finish(table, mean, used), tokens=each)


def _last_token_returns(
    rewards: FloatArray, sizes: FloatArray, gamma: float, *, resets: bool
) -> FloatArray:
    """Return of each turn's last token, ``[N, K]``; a turn without tokens hands its reward on."""
    out, carry = np.zeros_like(rewards), np.zeros(len(rewards))
    for k in range(rewards.shape[1] - 1, -1, -1):
        out[:, k] = rewards[:, k] + carry
        carry = np.where(resets, 0.0, gamma ** sizes[:, k] * out[:, k])
    return out


def _token_rows(n_tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Row of each sampled token, and how many tokens of its turn follow it; both ``[tokens]``."""
    row = np.repeat(np.arange(len(n_tokens), dtype=np.int64), n_tokens)
    return row, np.cumsum(n_tokens)[row] - 1 - np.arange(len(row), dtype=np.int64)
