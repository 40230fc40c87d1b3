"""Players of errands: one who searches and plans, a mediocre one, and a random one.

They know what the agent knows and no more: the errand, and what was seen. Every random choice
comes from the generator that is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from delta_belief_rl.envs.errands.planning import effective, needed_items, plan, unexplored
from delta_belief_rl.envs.errands.reading import Command
from delta_belief_rl.envs.errands.world import (
    MOST_CARRIED,
    Change,
    House,
    State,
    carried,
    first_state,
    holds,
    step,
    visible,
)


@dataclass
class Walk:
    """An errand as it is run: the bare world, without text.

    Attributes:
        house: It.
        goals: What must hold at the end.
        max_turns: Commands after which it is over.
    """

    house: House
    goals: Sequence[str]
    max_turns: int
    state: State = field(init=False)
    turns: int = 0

    def __post_init__(self) -> None:
        self.state = first_state(self.house)

    @property
    def won(self) -> bool:
        """Whether all goals hold."""
        return all(holds(self.house, self.state, goal) for goal in self.goals)

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.won or self.turns >= self.max_turns

    def take(self, command: Command) -> Change:
        """Carry out a command."""
        change = step(self.house, self.state, command)
        self.state, self.turns = change.state, self.turns + 1
        return change


class Player(Protocol):
    """One player of one errand."""

    def next_command(self, walk: Walk) -> Command | None:
        """The next command; None where the player knows none."""
        ...


class Explorer:
    """Searches the nearest place that was not looked into, takes along what matters, and follows a
    shortest plan as soon as everything that the errand takes was seen.
    """

    def __init__(self) -> None:
        self._plan: deque[Command] = deque()

    def next_command(self, walk: Walk) -> Command | None:
        """See the class."""
        return self.towards(walk, walk.goals)

    def towards(self, walk: Walk, goals: Sequence[str]) -> Command | None:
        """The next command for some goals; None where all hold or nothing is left to search."""
        house, state = walk.house, walk.state
        if not self._plan:
            known = tuple(state.seen)
            steps = plan(house, state, goals, known)
            if steps is None:
                # What is in a locked place is seen when it was unlocked.
                first = [goal for goal in goals if goal.startswith("unlocked ")]
                steps = plan(house, state, first, known) if first else None
            self._plan.extend(steps or ())
        if self._plan:
            return self._plan.popleft()
        return self._along(house, state, goals) or nearest_search(house, state)

    def forget(self) -> None:
        """Drop the plan: something else was done than it says."""
        self._plan.clear()

    def _along(self, house: House, state: State, goals: Sequence[str]) -> Command | None:
        """A thing that matters and lies here, where a hand is free."""
        if len(carried(house, state)) >= MOST_CARRIED:
            return None
        wanted = needed_items(house, goals)
        here = [item for item in visible(house, state) if item in wanted]
        if not here or f"at {here[0]} {state.where[house.number[here[0]]]}" in goals:
            return None
        return Command("take", here[0])


def nearest_search(house: House, state: State) -> Command | None:
    """Towards the nearest place to search: a shut container here, else a room with one, or a room
    that was not entered; None where there is none.
    """
    shut = unexplored(house, state)
    if shut:
        return Command("open", shut[0])
    ways: dict[str, str] = {room: room for room in house.neighbours[state.room]}
    queue = deque(ways)
    while queue:
        room = queue.popleft()
        known = room in state.seen
        if not known or unexplored_in(house, state, room):
            return Command("go", ways[room])
        for other in house.neighbours[room]:
            if other not in ways and other != state.room:
                ways[other] = ways[room]
                queue.append(other)
    return None


def unexplored_in(house: House, state: State, room: str) -> tuple[str, ...]:
    """Shut containers, never looked into, of a room that was entered."""
    return unexplored(house, State(room, state.where, state.facts, state.seen))


class Mediocre:
    """The teacher of the warm-up: an explorer who wanders, opens the wrong place and forgets.

    With probability ``wander`` a command is any one that changes something. At the beginning each
    goal that is no place (``clean mug``) is forgotten with probability ``forgetful``, and comes to
    mind when all others are reached.
    """

    def __init__(
        self, rng: np.random.Generator, wander: float = 0.3, forgetful: float = 0.3
    ) -> None:
        self._rng = rng
        self._wander = wander
        self._forgetful = forgetful
        self._explorer = Explorer()
        self._forgotten: frozenset[str] | None = None
        self._expected: State | None = None

    def next_command(self, walk: Walk) -> Command:
        """See the class."""
        chances = self.chances(walk)
        commands = tuple(chances)
        return commands[int(self._rng.choice(len(commands), p=list(chances.values())))]

    def chances(self, walk: Walk) -> dict[Command, float]:
        """Probability of each command that may come next; call once before each turn."""
        if self._forgotten is None:
            states = [goal for goal in walk.goals if not goal.startswith("at ")]
            drawn = self._rng.random(len(states)) < self._forgetful
            pairs = zip(states, drawn, strict=True)
            self._forgotten = frozenset(goal for goal, lost in pairs if lost)
        if walk.state != self._expected:
            self._explorer.forget()
        found = effective(walk.house, walk.state)
        best = self._best(walk)
        share = 1.0 / len(found) if best is None else self._wander / len(found)
        chances = dict.fromkeys(found, share)
        if best is not None:
            chances[best] = chances.get(best, 0.0) + 1.0 - self._wander
            self._expected = step(walk.house, walk.state, best).state
        return chances

    def _best(self, walk: Walk) -> Command | None:
        goals = [goal for goal in walk.goals if goal not in (self._forgotten or ())]
        if all(holds(walk.house, walk.state, goal) for goal in goals):
            self._forgotten, goals = frozenset(), list(walk.goals)
        return self._explorer.towards(walk, goals)


class Random:
    """Any command that changes something."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def next_command(self, walk: Walk) -> Command:
        """See the class."""
        return random_command(walk, self._rng)


def random_command(walk: Walk, rng: np.random.Generator) -> Command:
    """One of the commands that change something; there is always a door."""
    found = effective(walk.house, walk.state)
    return found[int(rng.integers(len(found)))]


def run_errand(
    player: Player, house: House, goals: Sequence[str], max_turns: int
) -> tuple[Walk, tuple[Command, ...]]:
    """Let a player run an errand; it stops early where the player knows no command."""
    walk = Walk(house, goals, max_turns)
    commands: list[Command] = []
    while not walk.done:
        command = player.next_command(walk)
        if command is None:
            break
        walk.take(command)
        commands.append(command)
    return walk, tuple(commands)


PLAYERS: dict[str, Callable[[np.random.Generator], Player]] = {
    "explorer": lambda rng: Explorer(),
    "mediocre": Mediocre,
    "random": Random,
}
"""By name."""
