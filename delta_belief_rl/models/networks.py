"""What small networks beside a model have in common: their weights by name, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from delta_belief_rl.types import UserError


class Networks(nn.Module):
    """A network, or several, whose weights go into a checkpoint as float32.

    Attributes:
        MISFIT: What is said of weights that belong to another one.
    """

    MISFIT: ClassVar[str]

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The weights in owned memory."""
        return {
            name: parameter.detach().to("cpu", torch.float32).numpy().copy()
            for name, parameter in self.named_parameters()
        }

    def load_arrays(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Take over what ``arrays`` gave.

        Raises:
            UserError: Names or shapes are others, as those of another model are.
        """
        own = dict(self.named_parameters())
        given = {name: np.shape(value) for name, value in arrays.items()}
        if given != {name: tuple(parameter.shape) for name, parameter in own.items()}:
            raise UserError(self.MISFIT)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(torch.from_numpy(np.array(arrays[name], dtype=np.float32)))
