"""Tasks of an embedded world: one per secret of a split."""

from __future__ import annotations

from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.types import Message, Task, UserError

SOURCE = "tw_q"
"""The ``data_source`` that 20 Questions tasks carry."""

DEFAULT_PROMPT = (Message("user", "Find the secret thing."),)
"""Short on purpose: every game and every belief pays for its tokens."""


def world_tasks(world: World, split: str, prompt: tuple[Message, ...] | None = None) -> list[Task]:
    """One task for each thing of a split, in the split's order.

    Args:
        world: The table.
        split: A name in ``world.splits``.
        prompt: Opening messages of every game; ``DEFAULT_PROMPT`` when None.

    Raises:
        UserError: For a split that the world does not have.
    """
    if split not in world.splits:
        known = ", ".join(sorted(world.splits))
        raise UserError(f"The world {world.name!r} has no split {split!r}; it has {known}.")
    messages = DEFAULT_PROMPT if prompt is None else prompt
    return [
        Task(
            id=f"{split}_{number}",
            source=SOURCE,
            secret=name,
            messages=messages,
            split=split,
            aliases=tuple(world.things[world.index(name)].aliases),
        )
        for number, name in enumerate(world.splits[split])
    ]
