"""Shortest plans for an errand, found breadth-first over what is known.

A plan only does what the goals ask for: it fetches the things that matter, does to them what has
to be done and puts them where they belong. Things that were not seen do not exist for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from delta_belief_rl.envs.errands.reading import Command
from delta_belief_rl.envs.errands.vocabulary import CONTAINER, vocabulary
from delta_belief_rl.envs.errands.world import (
    MOST_CARRIED,
    House,
    State,
    carried,
    holds,
    is_open,
    step,
    visible,
)

_TOOLS = {"brewed": "kettle", "watered": "can", "stamped": "stamp", "unlocked": "key"}
"""What a goal takes besides the thing that it is about."""


def needed_items(house: House, goals: Sequence[str]) -> tuple[str, ...]:
    """Things without which the goals cannot be reached, in the order of the house."""
    names: set[str] = set()
    for goal in goals:
        kind, subject, *_ = goal.split()
        names.add(subject)
        names.add(_TOOLS.get(kind, ""))
    return tuple(item for item in house.items if item in names)


def plan(
    house: House, state: State, goals: Sequence[str], known: Sequence[str]
) -> tuple[Command, ...] | None:
    """A shortest plan that reaches all goals.

    Args:
        known: Things whose place may be used.

    Returns:
        The commands, empty where all goals hold; None where the known things do not suffice.
    """
    if any(item not in known for item in needed_items(house, goals)):
        return None
    items = needed_items(house, goals)
    first = (state.room, state.where, state.facts)
    paths: dict[object, tuple[object, Command] | None] = {first: None}
    queue = deque([(first, state)])
    while queue:
        key, here = queue.popleft()
        if all(holds(house, here, goal) for goal in goals):
            return _path(paths, key)
        for command in _useful(house, here, goals, items):
            after = step(house, here, command).state
            other = (after.room, after.where, after.facts)
            if other not in paths:
                paths[other] = (key, command)
                queue.append((other, after))
    return None


def _path(paths: dict[object, tuple[object, Command] | None], key: object) -> tuple[Command, ...]:
    commands: list[Command] = []
    while (entry := paths[key]) is not None:
        key, command = entry
        commands.append(command)
    return tuple(reversed(commands))


def _useful(
    house: House, state: State, goals: Sequence[str], items: Sequence[str]
) -> Iterator[Command]:
    """Commands that a shortest plan may contain."""
    held = carried(house, state)
    yield from _deeds(house, state, goals, held)
    where = {item: state.where[house.number[item]] for item in items}
    ends = {tuple(goal.split()[1:]) for goal in goals if goal.startswith("at ")}
    targets = {place for _, place in ends} | set(where.values())
    for fixture in house.inside[state.room]:
        if fixture in targets and not is_open(fixture, state):
            locked = fixture in house.locked and f"unlocked {fixture}" not in state.facts
            if not locked:
                yield Command("open", fixture)
            elif "key" in held:
                yield Command("unlock", fixture)
    for item in held:
        for other, place in ends:
            if other == item and place in house.inside[state.room] and is_open(place, state):
                yield Command("put", item, place)
    if len(held) < MOST_CARRIED:
        for item in visible(house, state):
            if item in where and not _settled(state, item, where[item], goals):
                yield Command("take", item)
    else:
        # No errand takes more things than there are hands.
        yield from (Command("drop", item) for item in held if item not in where)
    yield from (Command("go", room) for room in house.neighbours[state.room])


def _settled(state: State, item: str, place: str, goals: Sequence[str]) -> bool:
    """Whether a thing is where it belongs, and as it is to be."""
    own = [goal for goal in goals if goal.split()[1] == item]
    facts = [goal for goal in own if not goal.startswith("at ")]
    return f"at {item} {place}" in own and all(fact in state.facts for fact in facts)


def _deeds(
    house: House, state: State, goals: Sequence[str], held: Sequence[str]
) -> Iterator[Command]:
    """What can be done here for a goal that does not hold yet."""
    known, here = vocabulary(), house.inside[state.room]
    for goal in goals:
        kind, name = goal.split()[:2]
        if kind == "at" or goal in state.facts:
            continue
        if kind == "clean" and name in held and known.items[name].washed_at in here:
            yield Command("wash", name)
        elif kind == "warm" and "stove" in here:
            yield from _heating(state, name, held)
        elif kind == "on" and name in here:
            yield Command("turn on", name)
        elif kind == "brewed":
            yield from _brewing(state, name, held, here)
        elif kind == "watered":
            yield from _watering(state, name, held, here)
        elif kind == "unlocked" and name in here and "key" in held:
            yield Command("unlock", name)
        elif kind == "stamped" and name in held and "stamp" in held:
            yield Command("stamp", name)
        elif kind == "posted" and name in held and "mailbox" in here:
            yield Command("post", name)


def _heating(state: State, name: str, held: Sequence[str]) -> Iterator[Command]:
    if "on stove" not in state.facts:
        yield Command("turn on", "stove")
    elif name in held:
        yield Command("heat", name)


def _brewing(
    state: State, name: str, held: Sequence[str], here: Sequence[str]
) -> Iterator[Command]:
    if "kettle" in held and "full kettle" not in state.facts and "sink" in here:
        yield Command("fill", "kettle")
    if "stove" in here and "warm kettle" not in state.facts and "full kettle" in state.facts:
        yield from _heating(state, "kettle", held)
    if name in held and "kettle" in held and "warm kettle" in state.facts:
        yield Command("brew", name)


def _watering(
    state: State, name: str, held: Sequence[str], here: Sequence[str]
) -> Iterator[Command]:
    if "can" in held and "full can" not in state.facts and "sink" in here:
        yield Command("fill", "can")
    if "can" in held and "full can" in state.facts and name in here:
        yield Command("water", name)


def effective(house: House, state: State) -> tuple[Command, ...]:
    """Every command that changes the state, in a fixed order."""
    known, here, held = vocabulary(), house.inside[state.room], carried(house, state)
    found = [Command("go", room) for room in house.neighbours[state.room]]
    for fixture in here:
        if known.kind_of[fixture] == CONTAINER:
            found += [Command(verb, fixture) for verb in ("open", "close", "unlock")]
        if fixture in known.switches:
            found += [Command(verb, fixture) for verb in ("turn on", "turn off")]
        if fixture == "plant":
            found.append(Command("water", fixture))
        if known.holds(fixture):
            found += [Command("put", item, fixture) for item in held]
    found += [Command("take", item) for item in visible(house, state)]
    for item in held:
        verbs = ("drop", "wash", "fill", "heat", "brew", "stamp", "post")
        found += [Command(verb, item) for verb in verbs]
    return tuple(c for c in found if step(house, state, c).state is not state)


def unexplored(house: House, state: State) -> tuple[str, ...]:
    """Containers of the agent's room that are shut and were never looked into."""
    return tuple(
        fixture
        for fixture in house.inside[state.room]
        if not is_open(fixture, state)
        and fixture not in state.seen
        and (fixture not in house.locked or f"unlocked {fixture}" in state.facts)
    )
