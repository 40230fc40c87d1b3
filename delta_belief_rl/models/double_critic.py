"""Small networks on hidden states that are given: critics of actions and of states, a baseline.

A hidden state is brought to mean 0 and deviation 1 over its numbers first, so that one learning
rate suits models of any scale. ``Q`` reads the state and the state behind the action side by side,
``V`` the state alone, and so does the baseline of single tokens, whose state ends inside an action.
Everything is float32. The last layers start at zero, so every value is 0 before the first update;
the layers below differ from critic to critic, so that two of a kind do not stay the same.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from delta_belief_rl.models.networks import Networks

KINDS = 2
"""Critics of each kind."""


class _OfArcher(Networks):
    """Both kinds of network, as the checkpoint knows them."""

    MISFIT: ClassVar[str] = (
        "The checkpoint's critics of archer are of another size: resume with the "
        "actor_rollout_ref.model.path and algorithm.archer.width that it was saved with, "
        "or start a new run."
    )


class DoubleCritic(_OfArcher):
    """``Q_1, Q_2`` and ``V_1, V_2``.

    Args:
        hidden: Numbers of a hidden state.
        width: Of the two layers in between.
        seed: Of the initial weights.
    """

    def __init__(self, hidden: int, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.q = nn.ModuleList(_network(2 * hidden, width) for _ in range(KINDS))
            self.v = nn.ModuleList(_network(hidden, width) for _ in range(KINDS))

    def actions(self, states: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """``Q_j`` of actions, ``[2, n]``.

        Args:
            states: ``[n, hidden]``, before the actions.
            behind: ``[n, hidden]``, at their last tokens.
        """
        rows = torch.cat([_scaled(states), _scaled(behind)], dim=-1)
        return torch.stack([network(rows)[:, 0] for network in self.q])

    def states(self, states: torch.Tensor) -> torch.Tensor:
        """``V_j`` of states ``[n, hidden]``, ``[2, n]``."""
        rows = _scaled(states)
        return torch.stack([network(rows)[:, 0] for network in self.v])

    @torch.no_grad()
    def follow(self, other: DoubleCritic, share: float) -> None:
        """Go a share of the way to the weights of another one."""
        for own, wanted in zip(self.parameters(), other.parameters(), strict=True):
            own.lerp_(wanted, share)


class TokenBaseline(_OfArcher):
    """What to expect of an action of which so far a beginning has been said.

    Args:
        hidden: Numbers of a hidden state.
        width: Of the two layers in between.
        seed: Of the initial weights.
    """

    def __init__(self, hidden: int, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = _network(hidden, width)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        """``b`` of tokens, ``[n]``, from the hidden states before them, ``[n, hidden]``."""
        return self.network(_scaled(before))[:, 0]


def _network(inputs: int, width: int) -> nn.Sequential:
    last = nn.Linear(width, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last
    )


def _scaled(rows: torch.Tensor) -> torch.Tensor:
    """Each row with mean 0 and deviation 1, float32."""
    return nn.functional.layer_norm(rows.float(), rows.shape[-1:])
