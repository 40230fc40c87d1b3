"""A critic's head: one linear map from a hidden state to a number.

The value of a token is that of the state in which it is sampled, so it is read from the hidden
state that predicts the token: the one at the position before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from delta_belief_rl.types import UserError


class ValueHead(nn.Module):
    """``w . h + b`` in float32. It starts at zero, so every value is 0 before the first update.

    Args:
        hidden: Width of a hidden state.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` of any number format to ``[n]`` float32."""
        return rows.float() @ self.weight + self.bias

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The weights in owned memory."""
        return {
            name: parameter.detach().to("cpu", torch.float32).numpy().copy()
            for name, parameter in self.named_parameters()
        }

    def load_arrays(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Take over what ``arrays`` gave.

        Raises:
            UserError: The head of another model is given.
        """
        own = dict(self.named_parameters())
        given = {name: np.shape(value) for name, value in arrays.items()}
        if given != {name: tuple(parameter.shape) for name, parameter in own.items()}:
            raise UserError(
                "The checkpoint's critic belongs to another model: resume with the "
                "actor_rollout_ref.model.path that it was saved with, or start a new run."
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(torch.from_numpy(np.array(arrays[name], dtype=np.float32)))
