"""What happens to reward channels between their making and credit, in one order.

A price on length adds a channel, a process reward fades one of those that are there, and only then
are games compared, filtered and credited; returns are put on one scale last, because filters look
at them as they were paid.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from delta_belief_rl.algo.shapers.decay import Decay
from delta_belief_rl.algo.shapers.length import CHANNEL as OVERLONG
from delta_belief_rl.algo.shapers.length import LengthPrice
from delta_belief_rl.algo.shapers.normalise import NormaliseSettings, normalised_rewards
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class Prices:
    """What of it is on.

    Attributes:
        length: Charges long games.
        decay: Fades ``faded`` with the updates.
        faded: Name of a channel; empty where none fades.
        normalise: How returns are put on one scale.
    """

    length: LengthPrice | None = None
    decay: Decay | None = None
    faded: str = ""
    normalise: NormaliseSettings = field(default_factory=NormaliseSettings)

    def change(self, table: TurnTable) -> TurnTable:
        """The table with what games are paid; reads ``table.update``.

        Raises:
            UserError: The channel that fades is not there.
        """
        rewards = table.rewards
        if self.length is not None:
            rewards = {**rewards, OVERLONG: self.length.channel(table)}
        table = replace(table, rewards=rewards)
        if self.decay is not None:
            faded = self.decay.faded(table, self.faded, table.update)
            table = replace(table, rewards=faded)
        return table

    def scale(self, table: TurnTable) -> TurnTable:
        """The table with its returns on one scale."""
        if self.normalise.method == "identity":
            return table
        return replace(table, rewards=normalised_rewards(table, self.normalise))
