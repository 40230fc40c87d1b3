"""A game as it would read with a hint in its opening.

The hint goes to the end of the last opening message, in words, and the opening is rendered anew by
the chat template. Everything behind the opening stands as it was sampled and replied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from delta_belief_rl.belief.branched import View
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message, Trajectory


def hinter(chat: ChatFormat) -> Callable[[Trajectory, str], View]:
    """``(game, hint) -> View`` for a chat format."""

    def hinted(game: Trajectory, hint: str) -> View:
        """The view of a game that has a turn."""
        first = game.turns[0].start
        opening = chat.open_ids(with_hint(game.task.messages, hint))
        positions = np.flatnonzero(game.action_mask()).astype(np.int64)
        return View((*opening, *game.token_ids[first:]), positions + (len(opening) - first))

    return hinted


def with_hint(messages: tuple[Message, ...], hint: str) -> tuple[Message, ...]:
    """Opening messages with a hint at their end."""
    last = messages[-1]
    return (*messages[:-1], replace(last, content=f"{last.content}\n\n{hint}"))
