"""Errands in generated houses: a function of a seed, a split and a number.

A house has four or five rooms, some of their fixtures, the things that the errand takes and a few
that it does not. Its layout and the wording of the errand together decide the split that a task
belongs to, so no two splits share a pair of them, with whatever seeds and however many tasks.

A task is kept only if a player who has to search, as ``players.Explorer`` does, finishes it within
``SOLVABLE`` turns; what is drawn in vain is drawn anew from the same random stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from delta_belief_rl.envs.errands.players import Explorer, Walk
from delta_belief_rl.envs.errands.vocabulary import CONTAINER, ErrandKind, Vocabulary, vocabulary
from delta_belief_rl.envs.errands.world import House, describe, first_state, holds
from delta_belief_rl.envs.single_use import digest
from delta_belief_rl.types import Message, Task

SOURCE = "errands"
SPLITS = ("train", "val", "test")
SOLVABLE = 16
"""Turns within which every task is finished by a player who has to search."""
SHORTEST = 3
"""Fewer commands would be no errand."""

COMMANDS = (
    "You are in a house and run an errand. Write one short command in each turn, for example: go "
    "kitchen, open drawer, take mug, put mug on desk, drop mug, wash mug, fill kettle, heat soup, "
    "brew tea, water plant, stamp letter, post letter, unlock chest, turn on stove, turn off "
    "stove, close drawer, look, hands. Doors lead to some rooms only, things may be in closed "
    "places, and you can carry two things.\n\n"
)
"""Opens the games of a model that does not know them."""

_SPLIT_OF = ("train", "train", "train", "train", "val", "test")
_ROLE = re.compile(r"<(\w+)>")


@lru_cache(maxsize=16)
def make_tasks(split: str, count: int, seed: int, explain: bool) -> tuple[Task, ...]:
    """The first tasks of a split.

    Args:
        split: One of ``SPLITS``.
        count: How many; a smaller number gives the first ones of a larger number.
        seed: Of all tasks.
        explain: Whether the opening says what commands there are.
    """
    return tuple(_task(split, number, seed, explain) for number in range(count))


def _task(split: str, number: int, seed: int, explain: bool) -> Task:
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    kinds = tuple(vocabulary().errands.values())
    # In turn, so that any number of tasks has all kinds in equal shares.
    kind = kinds[number % len(kinds)]
    while True:
        house, text, goals, main = _draw(kind, rng)
        if split_of(house, text) == split and _fits(house, goals):
            break
    opening = f"Errand: {text}. {describe(house, first_state(house))}"
    scenario = {"errand": text, "goals": list(goals), **house.to_json()}
    return Task(
        id=f"{split}_{number}",
        source=SOURCE,
        secret=hiding_place(house, main),
        messages=(Message("user", f"{COMMANDS if explain else ''}{opening}"),),
        split=split,
        scenario=json.dumps(scenario),
    )


def split_of(house: House, text: str) -> str:
    """The split that a layout and an errand belong to."""
    return _SPLIT_OF[int(digest(f"{house.layout}|{text}"), 16) % len(_SPLIT_OF)]


def hiding_place(house: House, item: str) -> str:
    """Where a thing is at first, in words, e.g. ``in the drawer in the study``."""
    place = house.begin[house.number[item]]
    return f"{vocabulary().where(place)} in the {vocabulary().room_of[place]}"


def _fits(house: House, goals: Sequence[str]) -> bool:
    """Whether an errand can be run, in neither too few commands nor too many."""
    if any(holds(house, first_state(house), goal) for goal in goals):
        return False
    walk = Walk(house, goals, SOLVABLE)
    player = Explorer()
    while not walk.done:
        command = player.next_command(walk)
        if command is None:
            return False
        walk.take(command)
    return walk.won and walk.turns >= SHORTEST


def _draw(kind: ErrandKind, rng: np.random.Generator) -> tuple[House, str, tuple[str, ...], str]:
    """A house, the text of an errand in it, its goals, and the thing that is to be found."""
    known = vocabulary()
    roles = {
        role: _choice(rng, known.of_kind(role))
        for role in dict.fromkeys(_ROLE.findall(kind.text))
        if role != "where"
    }
    rooms = _rooms(kind, rng, known)
    fixtures = _fixtures(kind, rooms, rng, known)
    locked = tuple(name for name in fixtures if name in known.locked and name in kind.needs)
    free = [name for name in fixtures if known.holds(name) and name not in locked]
    place = _choice(rng, free)
    words = {**roles, "place": place, "where": known.where(place)}
    text, *goals = (_ROLE.sub(lambda found: words[found[1]], t) for t in (kind.text, *kind.goals))
    needed = (*roles.values(), *kind.tools)
    others = [item for item in known.items if item not in needed]
    extra = rng.choice(len(others), size=int(rng.integers(2, 5)), replace=False)
    items = (*needed, *(others[int(index)] for index in extra))
    # Where the thing is that a locked place holds, the errand says itself: the key is to be found.
    main = kind.tools[0] if kind.inside else needed[0]
    begin = [_choice(rng, [name for name in free if name != place]) for _ in items]
    closed = [name for name in free if known.kind_of[name] == CONTAINER and name != place]
    if closed and rng.random() < 0.7:
        begin[items.index(main)] = _choice(rng, closed)
    if kind.inside:
        begin[items.index(roles[kind.inside])] = locked[0]
    order = rng.permutation(len(items))
    house = House(
        rooms=rooms,
        doors=_doors(rooms, rng),
        fixtures=fixtures,
        items=tuple(items[int(index)] for index in order),
        begin=tuple(begin[int(index)] for index in order),
        locked=locked,
        start=_choice(rng, rooms),
    )
    return house, text, tuple(goals), main


def _choice(rng: np.random.Generator, names: Sequence[str]) -> str:
    return names[int(rng.integers(len(names)))]


def _rooms(kind: ErrandKind, rng: np.random.Generator, known: Vocabulary) -> tuple[str, ...]:
    """Those that the errand needs and further ones, in the order of the vocabulary."""
    chosen = {*known.always, *(known.room_of[name] for name in kind.needs)}
    others = [room for room in known.rooms if room not in chosen]
    more = max(int(rng.integers(4, 6)) - len(chosen), 0)
    chosen |= {others[int(i)] for i in rng.choice(len(others), size=more, replace=False)}
    return tuple(room for room in known.rooms if room in chosen)


def _fixtures(
    kind: ErrandKind, rooms: Sequence[str], rng: np.random.Generator, known: Vocabulary
) -> tuple[str, ...]:
    """Those that the errand needs, and of every room a part that can hold something."""
    found: list[str] = []
    for room in rooms:
        names = known.rooms[room]
        holders = [name for name in names if known.holds(name)]
        kept = {name for name in names if name in kind.needs or rng.random() < 0.6}
        kept |= set() if kept & {*holders} else {_choice(rng, holders)}
        found += [name for name in names if name in kept]
    return tuple(found)


def _doors(rooms: Sequence[str], rng: np.random.Generator) -> tuple[tuple[str, str], ...]:
    """A random tree over the rooms, and now and then one door more."""
    order = [rooms[int(index)] for index in rng.permutation(len(rooms))]
    doors = [(order[int(rng.integers(at))], order[at]) for at in range(1, len(order))]
    first, second = (order[int(i)] for i in rng.choice(len(order), size=2, replace=False))
    pairs = {frozenset(pair) for pair in doors}
    if rng.random() < 0.5 and frozenset((first, second)) not in pairs:
        doors.append((first, second))
    return tuple(doors)
