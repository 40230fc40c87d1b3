"""Transitions between states that a frozen model has read, and a buffer of the latest of them.

``H`` is the number of numbers in a hidden state. Transitions lie in host memory in the number
format of the model, which loses nothing of what it said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from delta_belief_rl.types import UserError

CHUNK = 4096
"""Transitions that travel between ranks at one time."""
NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Transitions:
    """``n`` steps ``(s, a, r, s', done)``.

    Attributes:
        features: ``[n, 3, H]``: before the action, at its last token, and before the next action;
            the last one is free where ``done``.
        rewards: ``[n]`` float64.
        done: ``[n]`` float64, 1 where nothing follows.
        keys: ``[n, 2]`` float64, numbers of game and turn; they name a transition of one step.
    """

    features: torch.Tensor
    rewards: torch.Tensor
    done: torch.Tensor
    keys: torch.Tensor

    def __len__(self) -> int:
        return len(self.rewards)

    def at(self, index: torch.Tensor) -> Transitions:
        """Some of them, in the order of ``index``."""
        return Transitions(
            self.features[index], self.rewards[index], self.done[index], self.keys[index]
        )

    def ordered(self) -> Transitions:
        """By game and turn, each once."""
        keys = self.keys.numpy()
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        new = np.ones(len(order), dtype=np.bool_)
        new[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
        return self.at(torch.from_numpy(order[new]))


def nothing(hidden: int, dtype: torch.dtype = torch.float32) -> Transitions:
    """No transition, in a number format."""
    empty = torch.zeros(0, dtype=torch.float64)
    return Transitions(torch.zeros(0, 3, hidden, dtype=dtype), empty, empty, empty.reshape(0, 2))


def joined(parts: Sequence[Transitions]) -> Transitions:
    """One after the other, in the number format of the last one that holds any."""
    held = [part for part in parts if len(part)] or parts
    dtype = held[-1].features.dtype
    return Transitions(
        torch.cat([part.features.to(dtype) for part in parts]),
        torch.cat([part.rewards for part in parts]),
        torch.cat([part.done for part in parts]),
        torch.cat([part.keys for part in parts]),
    )


def of_all_ranks(own: Transitions, device: torch.device, world_size: int) -> Transitions:
    """The transitions of all ranks, the same on each of them; collectives.

    Args:
        own: Of this rank, maybe none.
        device: Through which the ranks speak.
        world_size: How many there are.
    """
    if world_size == 1:
        return own
    count = torch.tensor(len(own), device=device)
    counts = [torch.zeros_like(count) for _ in range(world_size)]
    dist.all_gather(counts, count)
    sizes = [int(size) for size in counts]
    parts: list[Transitions] = []
    for start in range(0, max(sizes), CHUNK):
        rows = own.at(torch.arange(start, max(start, min(start + CHUNK, len(own)))))
        left = [min(max(size - start, 0), CHUNK) for size in sizes]
        parts += _exchanged(rows, left, device)
    return joined([own.at(torch.arange(0)), *parts])


def _exchanged(rows: Transitions, sizes: Sequence[int], device: torch.device) -> list[Transitions]:
    """The rows of every rank, as many as ``sizes`` says of each."""
    numbers = torch.cat([rows.keys, rows.rewards[:, None], rows.done[:, None]], dim=1)
    # As bytes, which every backend sends whatever the number format.
    features = rows.features.contiguous().view(torch.uint8)
    found = [gathered(value, max(sizes), len(sizes), device) for value in (numbers, features)]
    return [
        Transitions(
            sent[:size].view(rows.features.dtype), told[:size, 2], told[:size, 3], told[:size, :2]
        )
        for told, sent, size in zip(*found, sizes, strict=True)
    ]


def gathered(
    rows: torch.Tensor, most: int, world_size: int, device: torch.device
) -> list[torch.Tensor]:
    """``rows`` of every rank, filled up to ``most``, in host memory; a collective."""
    full = torch.zeros(most, *rows.shape[1:], dtype=rows.dtype, device=device)
    full[: len(rows)] = rows.to(device)
    out = [torch.zeros_like(full) for _ in range(world_size)]
    dist.all_gather(out, full)
    return [part.cpu() for part in out]


class Replay:
    """The latest transitions.

    Args:
        capacity: How many are kept.
        hidden: ``H``.
    """

    def __init__(self, capacity: int, hidden: int) -> None:
        self.capacity, self.kept = capacity, nothing(hidden)

    def __len__(self) -> int:
        return len(self.kept)

    def add(self, new: Transitions) -> None:
        """Keep these as well, and forget the oldest where there are too many."""
        self._keep(joined([self.kept, new]))

    def draw(self, count: int, rng: np.random.Generator) -> Transitions:
        """So many at random, with repetition."""
        return drawn(self.kept, count, rng)

    def state(self) -> dict[str, Any]:
        """What is kept, as arrays in owned memory."""
        features = self.kept.features
        name = next(name for name, dtype in NAMES.items() if dtype == features.dtype)
        if features.dtype == torch.bfloat16:
            features = features.view(torch.int16)
        return {
            "dtype": name,
            "features": features.numpy().copy(),
            "rewards": self.kept.rewards.numpy().copy(),
            "done": self.kept.done.numpy().copy(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` gave; the latest where it is more than ``capacity``.

        Raises:
            UserError: It is of a model of another size.
        """
        features = torch.from_numpy(np.array(state["features"]))
        if features.shape[1:] != self.kept.features.shape[1:]:
            raise UserError(
                "The checkpoint's replay buffer is of another model: resume with the "
                "actor_rollout_ref.model.path that it was saved with, or start a new run."
            )
        if state["dtype"] == "bfloat16":
            features = features.view(torch.bfloat16)
        rewards = torch.from_numpy(np.array(state["rewards"]))
        done = torch.from_numpy(np.array(state["done"]))
        # The keys of other steps are not looked at again.
        keys = torch.zeros(len(rewards), 2, dtype=torch.float64)
        self._keep(Transitions(features, rewards, done, keys))

    def _keep(self, rows: Transitions) -> None:
        first = max(len(rows) - self.capacity, 0)
        self.kept = rows.at(torch.arange(first, len(rows))) if first else rows


def drawn(rows: Transitions, count: int, rng: np.random.Generator) -> Transitions:
    """``count`` of the rows at random, with repetition."""
    return rows.at(torch.from_numpy(rng.integers(0, len(rows), count)))
