"""A critic's head: one linear map from a hidden state to a number.

The value of a token is that of the state in which it is sampled, so it is read from the hidden
state that predicts the token: the one at the position before it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from delta_belief_rl.models.networks import Networks


class ValueHead(Networks):
    """``w . h + b`` in float32. It starts at zero, so every value is 0 before the first update.

    Args:
        hidden: Width of a hidden state.
    """

    MISFIT: ClassVar[str] = (
        "The checkpoint's critic belongs to another model: resume with the "
        "actor_rollout_ref.model.path that it was saved with, or start a new run."
    )

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` of any number format to ``[n]`` float32."""
        return rows.float() @ self.weight + self.bias
