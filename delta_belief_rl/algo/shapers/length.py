"""A price on tokens near the limit of a response: soft, so that what is cut off is no surprise.

With ``n`` the trained tokens of a response, ``L = max_tokens`` and ``B = buffer_tokens``::

    price = min(-factor * (n - (L - B)) / B, 0)

Nothing is charged up to ``L - B`` tokens, ``factor`` at ``L`` and more beyond. ``unit="game"``
takes all turns of a game as one response and charges its last valid turn; ``unit="turn"`` charges
each turn for its own tokens. Tokens of turns that are not valid are not counted.

Shapes: ``N`` games, ``R`` rows of the turn table.

Source: DAPO (arXiv 2503.14476), as in its public code. Confidence: exact for one response; games
of several turns as one response are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Grain, Stateless, require_choice, require_range
from delta_belief_rl.algo.credit.whitening import trained_tokens
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable, UserError

CHANNEL = "overlong"
UNITS = ("game", "turn")


@dataclass(frozen=True, slots=True)
class LengthPriceSettings:
    """Knobs of ``LengthPrice``; ``factor`` in reward units, the other two in tokens."""

    max_tokens: int
    buffer_tokens: int = 4096
    factor: float = 1.0
    unit: str = "game"

    def __post_init__(self) -> None:
        name = "algorithm.overlong"
        require_range(f"{name}.max_tokens", self.max_tokens, 1)
        require_range(f"{name}.buffer_tokens", self.buffer_tokens, 1)
        require_range(f"{name}.factor", self.factor, 0.0)
        require_choice(f"{name}.unit", self.unit, UNITS)
        if self.buffer_tokens > self.max_tokens:
            raise UserError(
                f"{name}.buffer_tokens is {self.buffer_tokens} but {name}.max_tokens only "
                f"{self.max_tokens}; make the buffer no longer than the limit."
            )


@dataclass(frozen=True, slots=True)
class LengthPrice(Stateless):
    """See the module's head."""

    settings: LengthPriceSettings
    requires: ClassVar[tuple[str, ...]] = ("traj", "turn", "n_tokens", "valid")
    provides: ClassVar[tuple[str, ...]] = (f"reward:{CHANNEL}",)
    grain: ClassVar[Grain] = Grain.TRAJECTORY

    def price(self, tokens: FloatArray) -> FloatArray:
        """What responses of so many tokens are charged; keeps the shape, never positive."""
        knobs = self.settings
        over = tokens - (knobs.max_tokens - knobs.buffer_tokens)
        return -knobs.factor * np.maximum(over, 0.0) / knobs.buffer_tokens

    def channel(self, table: TurnTable) -> FloatArray:
        """The reward channel, ``[R]``, zero on rows that are not valid."""
        tokens = trained_tokens(table).astype(np.float64)
        if self.settings.unit == "turn":
            return np.where(table.valid, self.price(tokens), 0.0)
        total = np.zeros(table.num_games)
        np.add.at(total, table.traj, tokens)
        return np.where(last_valid(table), self.price(total[table.traj]), 0.0)


def last_valid(table: TurnTable) -> BoolArray:
    """The last valid turn of each game that has one, ``[R]``."""
    last = np.full(table.num_games, -1, dtype=np.int64)
    np.maximum.at(last, table.traj[table.valid], table.turn[table.valid])
    return table.valid & (table.turn == last[table.traj])
