"""The house of an errand, its state, and what each command does to it.

Everything is a fact: where the agent is, where each thing is, and what is true of things and
fixtures (``clean mug``, ``open drawer``, ``on stove``). A command needs some facts and changes
others; :class:`Change` names both, so that the dependency of one action on another can be read off.

What was seen is part of the state: things are hidden in containers and in other rooms, and a state
in which a drawer was looked into is another one than that in which it was not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from delta_belief_rl.envs.errands.reading import Command
from delta_belief_rl.envs.errands.vocabulary import CONTAINER, vocabulary

HANDS, GONE = "hands", "gone"
"""Where a thing is that is carried, and one that was used up."""
FLOOR = "floor"
"""``floor kitchen`` is where a thing is that was dropped there."""
MOST_CARRIED = 2
GOALS = ("clean", "warm", "on", "brewed", "watered", "stamped", "posted", "unlocked")
"""Facts that an errand may ask for besides where a thing is."""
AGENT = "agent"
"""The variable of a footprint that says where the agent is."""


@dataclass(frozen=True)
class House:
    """What never changes in a game.

    Attributes:
        rooms: Its rooms.
        doors: Pairs of rooms with a door between them.
        fixtures: What stands in the rooms.
        items: The things of the house.
        begin: Where each of ``items`` is at first: a fixture.
        locked: Containers that are locked at first.
        start: The room in which the agent begins.
    """

    rooms: tuple[str, ...]
    doors: tuple[tuple[str, str], ...]
    fixtures: tuple[str, ...]
    items: tuple[str, ...]
    begin: tuple[str, ...]
    locked: tuple[str, ...]
    start: str

    @cached_property
    def neighbours(self) -> Mapping[str, tuple[str, ...]]:
        """Rooms behind the doors of each room, in the order of ``rooms``."""
        pairs = {*self.doors, *((b, a) for a, b in self.doors)}
        return {room: tuple(r for r in self.rooms if (room, r) in pairs) for room in self.rooms}

    @cached_property
    def inside(self) -> Mapping[str, tuple[str, ...]]:
        """Fixtures of each room."""
        room_of = vocabulary().room_of
        return {r: tuple(f for f in self.fixtures if room_of[f] == r) for r in self.rooms}

    @cached_property
    def number(self) -> Mapping[str, int]:
        """Place of each thing in ``items``."""
        return {item: index for index, item in enumerate(self.items)}

    @property
    def layout(self) -> str:
        """Name of the house without its things: rooms, doors and fixtures."""
        doors = sorted("-".join(sorted(pair)) for pair in self.doors)
        return " ".join((*sorted(self.rooms), *doors, *sorted(self.fixtures)))

    def to_json(self) -> dict[str, object]:
        """Its fields, for ``from_json``."""
        return {
            "rooms": list(self.rooms),
            "doors": [list(pair) for pair in self.doors],
            "fixtures": list(self.fixtures),
            "things": dict(zip(self.items, self.begin, strict=True)),
            "locked": list(self.locked),
            "start": self.start,
        }


def house_from_json(text: str) -> tuple[House, tuple[str, ...]]:
    """A house and the goals of an errand in it, from the scenario of a task.

    Raises:
        KeyError: A part is missing.
        TypeError: A part is of another type.
        ValueError: It is no JSON, or names what no house has.
    """
    raw = json.loads(text)
    known = vocabulary()
    house = House(
        rooms=tuple(raw["rooms"]),
        doors=tuple((a, b) for a, b in raw["doors"]),
        fixtures=tuple(raw["fixtures"]),
        items=tuple(raw["things"]),
        begin=tuple(raw["things"].values()),
        locked=tuple(raw["locked"]),
        start=raw["start"],
    )
    wrong = [name for name in house.rooms if name not in known.rooms]
    wrong += [name for name in house.fixtures if known.room_of.get(name) not in house.rooms]
    wrong += [name for name in house.items if name not in known.items]
    wrong += [place for place in house.begin if place not in house.fixtures]
    wrong += [name for name in house.locked if name not in house.fixtures]
    wrong += [name for pair in house.doors for name in pair if name not in house.rooms]
    wrong += [] if house.start in house.rooms else [house.start]
    if wrong:
        raise ValueError(f"no house has {wrong[0]!r} there")
    goals = tuple(str(goal) for goal in raw["goals"])
    if not goals:
        raise ValueError("there is no goal")
    for goal in goals:
        _check_goal(house, goal)
    return house, goals


def _check_goal(house: House, goal: str) -> None:
    kind, *names = goal.split()
    there = {*house.items, *house.fixtures}
    if kind == "at":
        good = len(names) == 2 and names[0] in house.items and names[1] in house.fixtures
    else:
        good = kind in GOALS and len(names) == 1 and names[0] in there
    if not good:
        raise ValueError(f"{goal!r} is no goal in this house")


@dataclass(frozen=True, slots=True)
class State:
    """Everything that changes in a house.

    Attributes:
        where: Place of each of ``House.items``: a fixture, ``hands``, ``gone`` or a floor.
        facts: What is true now and was not at first, e.g. ``open drawer``.
        seen: Things that were seen, rooms that were entered, containers that were opened.
    """

    room: str
    where: tuple[str, ...]
    facts: frozenset[str]
    seen: frozenset[str]


@dataclass(frozen=True, slots=True)
class Change:
    """What a command did.

    Attributes:
        state: The state after it; the same object where nothing changed.
        text: What the agent reads.
        reads: Variables that it needed, or that stood in its way.
        writes: Variables that it changed.
        blocked: Why nothing happened; empty where something did, or where the command only looks.
    """

    state: State
    text: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    blocked: str = ""


def first_state(house: House) -> State:
    """The state of a house before the first command."""
    state = State(house.start, house.begin, frozenset(), frozenset((house.start,)))
    return _after_looking(house, state)


def holds(house: House, state: State, goal: str) -> bool:
    """Whether a goal is reached: ``at THING PLACE``, or a fact."""
    if goal.startswith("at "):
        _, item, place = goal.split()
        return state.where[house.number[item]] == place
    return goal in state.facts


def carried(house: House, state: State) -> tuple[str, ...]:
    """Things in the agent's hands."""
    return tuple(i for i, at in zip(house.items, state.where, strict=True) if at == HANDS)


def visible(house: House, state: State) -> tuple[str, ...]:
    """Things that lie open in the agent's room."""
    places = {f for f in house.inside[state.room] if is_open(f, state)}
    places.add(f"{FLOOR} {state.room}")
    return tuple(i for i, at in zip(house.items, state.where, strict=True) if at in places)


def is_open(fixture: str, state: State) -> bool:
    """Whether what is there can be seen and reached."""
    return vocabulary().kind_of[fixture] != CONTAINER or f"open {fixture}" in state.facts


def step(house: House, state: State, command: Command) -> Change:
    """Carry out a command."""
    return _Hand(house, state).do(command)


def describe(house: House, state: State) -> str:
    """What the agent sees in its room."""
    parts = [_fixture_text(house, state, fixture) for fixture in house.inside[state.room]]
    dropped = _things(house, state, f"{FLOOR} {state.room}")
    parts += [f"floor ({dropped})"] if dropped else []
    doors = ", ".join(house.neighbours[state.room])
    return f"You are in the {state.room}. Here: {', '.join(parts)}. Doors: {doors}."


def item_text(house: House, state: State, item: str) -> str:
    """A thing with what can be seen of it, e.g. ``dirty mug``."""
    known, facts = vocabulary().items[item], state.facts
    word = ""
    if known.washed_at:
        word = "clean" if f"clean {item}" in facts else "dirty"
    elif known.heats and f"warm {item}" in facts:
        word = "warm"
    elif known.fills:
        word = "full" if f"full {item}" in facts else "empty"
    elif known.heats:
        word = "cold"
    elif f"stamped {item}" in facts:
        word = "stamped"
    elif f"brewed {item}" in facts:
        word = "brewed"
    return f"{word} {item}".strip()


def _things(house: House, state: State, place: str) -> str:
    found = [i for i, at in zip(house.items, state.where, strict=True) if at == place]
    return ", ".join(item_text(house, state, item) for item in found)


def _fixture_text(house: House, state: State, fixture: str) -> str:
    known = vocabulary()
    if fixture in known.switches:
        note = "on" if f"on {fixture}" in state.facts else "off"
    elif fixture == "plant":
        note = "watered" if "watered plant" in state.facts else "dry"
    elif not is_open(fixture, state):
        locked = fixture in house.locked and f"unlocked {fixture}" not in state.facts
        note = "locked" if locked else "closed"
    elif known.holds(fixture):
        note = _things(house, state, fixture)
        note = note or ("empty" if known.kind_of[fixture] == CONTAINER else "")
    else:
        note = ""
    return f"{fixture} ({note})" if note else fixture


def _after_looking(house: House, state: State) -> State:
    """The state in which what lies open here was seen."""
    seen = state.seen | {state.room, *visible(house, state)}
    return state if seen == state.seen else replace(state, seen=seen)


class _Blocked(Exception):
    """A command has no effect; the message says why."""


class _Hand:
    """Carries out one command; collects what it needed."""

    def __init__(self, house: House, state: State) -> None:
        self.house = house
        self.state = state
        self.known = vocabulary()
        self.reads: set[str] = set()

    def do(self, command: Command) -> Change:
        """What becomes of the command."""
        try:
            state, text = _ACTS[command.verb](self, command)
        except _Blocked as reason:
            text = f"Nothing happens: {reason}."
            return Change(self.state, text, frozenset(self.reads), blocked=str(reason))
        writes = _differences(self.house, self.state, state)
        return Change(state, text, frozenset(self.reads), writes)

    def _need(self, variable: str, holds: bool, reason: str) -> None:
        """Note a variable that the command depends on; stop where it is not as needed."""
        self.reads.add(variable)
        if not holds:
            raise _Blocked(reason)

    def _need_fact(self, fact: str, reason: str) -> None:
        self._need(fact, fact in self.state.facts, reason)

    def _need_here(self, fixture: str) -> None:
        here = fixture in self.house.inside[self.state.room]
        self._need(AGENT, here, f"there is no {fixture} here")

    def _need_held(self, item: str) -> None:
        held = item in carried(self.house, self.state)
        self._need(f"at {item}", held, f"you do not hold the {item}")

    def _placed(self, item: str, place: str, facts: frozenset[str] | None = None) -> State:
        where = list(self.state.where)
        where[self.house.number[item]] = place
        return replace(
            self.state,
            where=tuple(where),
            facts=self.state.facts if facts is None else facts,
        )

    def _with(self, *facts: str, without: tuple[str, ...] = ()) -> State:
        return replace(self.state, facts=(self.state.facts - {*without}) | {*facts})

    # --- moving and looking ---

    def go(self, command: Command) -> tuple[State, str]:
        """Through a door."""
        room, house = command.thing, self.house
        self._need(AGENT, room != self.state.room, f"you are in the {room} already")
        self._need(AGENT, room in house.neighbours[self.state.room], f"no door leads to the {room}")
        state = _after_looking(house, replace(self.state, room=room))
        return state, describe(house, state)

    def look(self, command: Command) -> tuple[State, str]:
        """Around the room; nothing changes."""
        self.reads.add(AGENT)
        return self.state, describe(self.house, self.state)

    def hands(self, command: Command) -> tuple[State, str]:
        """What is carried; nothing changes."""
        held = carried(self.house, self.state)
        self.reads.update(f"at {item}" for item in held)
        texts = [item_text(self.house, self.state, item) for item in held]
        return self.state, f"You hold: {', '.join(texts) or 'nothing'}."

    # --- containers and switches ---

    def open(self, command: Command) -> tuple[State, str]:
        """A container; what is in it is seen."""
        name = command.thing
        self._need_here(name)
        self._need(AGENT, self.known.kind_of.get(name) == CONTAINER, f"the {name} does not open")
        fact = f"open {name}"
        self._need(fact, fact not in self.state.facts, f"the {name} is open already")
        if name in self.house.locked:
            self._need_fact(f"unlocked {name}", f"the {name} is locked")
        opened = self._with(fact)
        state = _after_looking(self.house, replace(opened, seen=opened.seen | {name}))
        inside = _things(self.house, state, name)
        return state, f"You open the {name}: {inside or 'it is empty'}."

    def close(self, command: Command) -> tuple[State, str]:
        """A container."""
        name = command.thing
        self._need_here(name)
        self._need_fact(f"open {name}", f"the {name} is not open")
        return self._with(without=(f"open {name}",)), f"You close the {name}."

    def unlock(self, command: Command) -> tuple[State, str]:
        """A container, with the key."""
        name = command.thing
        self._need_here(name)
        fact, can = f"unlocked {name}", name in self.house.locked
        self._need(fact, can and fact not in self.state.facts, f"the {name} is not locked")
        self._need_held("key")
        return self._with(fact), f"The {name} is unlocked."

    def turn_on(self, command: Command) -> tuple[State, str]:
        """A switch."""
        name = command.thing
        self._need_here(name)
        fact = f"on {name}"
        self._need(AGENT, name in self.known.switches, f"the {name} has no switch")
        self._need(fact, fact not in self.state.facts, f"the {name} is on already")
        return self._with(fact), f"The {name} is on."

    def turn_off(self, command: Command) -> tuple[State, str]:
        """A switch."""
        name = command.thing
        self._need_here(name)
        self._need_fact(f"on {name}", f"the {name} is not on")
        return self._with(without=(f"on {name}",)), f"The {name} is off."

    # --- carrying ---

    def take(self, command: Command) -> tuple[State, str]:
        """A thing that lies open here."""
        item, house, state = command.thing, self.house, self.state
        self._need(AGENT, item in self.known.items, f"the {item} cannot be carried")
        held = carried(house, state)
        self._need(f"at {item}", item not in held, f"you hold the {item} already")
        self.reads.add(AGENT)
        self._need(f"seen {item}", item in visible(house, state), f"you see no {item} here")
        place = state.where[house.number[item]]
        if self.known.kind_of.get(place) == CONTAINER:
            self.reads.add(f"open {place}")
        if len(held) >= MOST_CARRIED:
            self.reads.update(f"at {other}" for other in held)
            raise _Blocked("your hands are full")
        return self._placed(item, HANDS), f"You take the {item_text(house, state, item)}."

    def put(self, command: Command) -> tuple[State, str]:
        """A thing onto or into a fixture of the room."""
        item, place = command.thing, command.place
        self._need_held(item)
        self._need_here(place)
        where = self.known.where(place)
        self._need(AGENT, self.known.holds(place), f"nothing can be put {where}")
        if self.known.kind_of[place] == CONTAINER:
            self._need_fact(f"open {place}", f"the {place} is closed")
        return self._placed(item, place), f"You put the {item} {where}."

    def drop(self, command: Command) -> tuple[State, str]:
        """A thing to the floor."""
        self._need_held(command.thing)
        self.reads.add(AGENT)
        place = f"{FLOOR} {self.state.room}"
        return self._placed(command.thing, place), f"You drop the {command.thing}."

    # --- doing something to a thing ---

    def _item(self, name: str) -> None:
        self._need(AGENT, name in self.known.items, f"that cannot be done to the {name}")

    def wash(self, command: Command) -> tuple[State, str]:
        """A thing at its device."""
        item = command.thing
        self._item(item)
        device = self.known.items[item].washed_at
        self._need(AGENT, bool(device), f"the {item} need not be washed")
        self._need_held(item)
        self._need_here(device)
        fact = f"clean {item}"
        self._need(fact, fact not in self.state.facts, f"the {item} is clean already")
        return self._with(fact), f"The {item} is clean now."

    def fill(self, command: Command) -> tuple[State, str]:
        """A thing with water."""
        item = command.thing
        self._item(item)
        self._need(AGENT, self.known.items[item].fills, f"the {item} cannot be filled")
        self._need_held(item)
        self._need_here("sink")
        fact = f"full {item}"
        self._need(fact, fact not in self.state.facts, f"the {item} is full already")
        return self._with(fact), f"The {item} is full now."

    def heat(self, command: Command) -> tuple[State, str]:
        """A thing at the stove."""
        item = command.thing
        self._item(item)
        known = self.known.items[item]
        self._need(AGENT, known.heats, f"the {item} cannot be heated")
        self._need_held(item)
        self._need_here("stove")
        self._need_fact("on stove", "the stove is off")
        if known.fills:
            self._need_fact(f"full {item}", f"the {item} is empty")
        fact = f"warm {item}"
        self._need(fact, fact not in self.state.facts, f"the {item} is warm already")
        return self._with(fact), f"The {item} is warm now."

    def brew(self, command: Command) -> tuple[State, str]:
        """Tea, with warm water from the kettle."""
        item = command.thing
        self._item(item)
        self._need(AGENT, self.known.items[item].kind == "tea", f"the {item} cannot be brewed")
        self._need_held(item)
        fact = f"brewed {item}"
        self._need(fact, fact not in self.state.facts, f"the {item} is brewed already")
        self._need_held("kettle")
        self._need_fact("warm kettle", "there is no warm water in the kettle")
        state = self._with(fact, without=("full kettle", "warm kettle"))
        return state, f"The {item} is brewed now."

    def water(self, command: Command) -> tuple[State, str]:
        """The plant, from the can."""
        name = command.thing
        self._need(AGENT, name == "plant", f"the {name} need not be watered")
        self._need_here(name)
        fact = f"watered {name}"
        self._need(fact, fact not in self.state.facts, f"the {name} is watered already")
        self._need_held("can")
        self._need_fact("full can", "the can is empty")
        return self._with(fact, without=("full can",)), f"The {name} is watered now."

    def stamp(self, command: Command) -> tuple[State, str]:
        """Mail; the stamp is used up."""
        item = command.thing
        self._item(item)
        self._need(AGENT, self.known.items[item].kind == "mail", f"the {item} takes no stamp")
        self._need_held(item)
        fact = f"stamped {item}"
        self._need(fact, fact not in self.state.facts, f"the {item} has a stamp already")
        self._need_held("stamp")
        state = self._placed("stamp", GONE, self.state.facts | {fact})
        return state, f"The {item} is stamped now."

    def post(self, command: Command) -> tuple[State, str]:
        """Stamped mail."""
        item = command.thing
        self._item(item)
        self._need(AGENT, self.known.items[item].kind == "mail", f"the {item} cannot be posted")
        self._need_held(item)
        self._need_here("mailbox")
        self._need_fact(f"stamped {item}", f"the {item} has no stamp")
        state = self._placed(item, GONE, self.state.facts | {f"posted {item}"})
        return state, f"The {item} is posted."


_ACTS: Mapping[str, Callable[[_Hand, Command], tuple[State, str]]] = {
    "go": _Hand.go,
    "open": _Hand.open,
    "close": _Hand.close,
    "unlock": _Hand.unlock,
    "turn on": _Hand.turn_on,
    "turn off": _Hand.turn_off,
    "take": _Hand.take,
    "put": _Hand.put,
    "drop": _Hand.drop,
    "wash": _Hand.wash,
    "fill": _Hand.fill,
    "heat": _Hand.heat,
    "brew": _Hand.brew,
    "water": _Hand.water,
    "stamp": _Hand.stamp,
    "post": _Hand.post,
    "look": _Hand.look,
    "hands": _Hand.hands,
}
"""By verb of the vocabulary."""


def _differences(house: House, before: State, after: State) -> frozenset[str]:
    """Variables that have another value."""
    if after is before:
        return frozenset()
    changed = {
        f"at {item}"
        for item, old, new in zip(house.items, before.where, after.where, strict=True)
        if old != new
    }
    changed |= before.facts ^ after.facts
    changed |= {f"seen {name}" for name in after.seen - before.seen}
    if before.room != after.room:
        changed.add(AGENT)
    return frozenset(changed)
