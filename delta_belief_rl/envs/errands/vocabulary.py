"""What the houses of the errands are made of: ``data/errands.yaml`` as frozen objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[1] / "data" / "errands.yaml"
SURFACE, CONTAINER, DEVICE = "surface", "container", "device"


@dataclass(frozen=True, slots=True)
class Item:
    """A thing that can be carried.

    Attributes:
        kind: Its class, which says for what roles of errands it can be taken.
        washed_at: The device that cleans it; empty where it is never dirty.
        fills: It can hold water.
        heats: It can be heated.
    """

    name: str
    kind: str
    washed_at: str = ""
    fills: bool = False
    heats: bool = False


@dataclass(frozen=True, slots=True)
class ErrandKind:
    """One kind of errand; see the head of the file.

    Attributes:
        name: Unique.
        text: The errand with roles in ``<>``.
        goals: Facts that hold at the end, with roles in ``<>``.
        needs: Fixtures that the house must have.
        tools: Things that the errand takes besides its roles.
        inside: Role that begins in the locked container; empty where none does.
    """

    name: str
    text: str
    goals: tuple[str, ...]
    needs: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything that can stand in a house, and the words for it.

    Attributes:
        rooms: Room to its fixtures, in the order in which they are named.
        kind_of: Fixture to ``surface``, ``container`` or ``device``.
        room_of: Fixture to the room that it stands in, in every house that has it.
        always: Rooms of every house.
        switches: Fixtures that are turned on and off.
        locked: Containers that can be locked.
        verbs: Words of a command's verb, as they are said, to the verb.
        nouns: Names and their synonyms, as they are said, to the name.
    """

    rooms: Mapping[str, tuple[str, ...]]
    kind_of: Mapping[str, str]
    room_of: Mapping[str, str]
    always: tuple[str, ...]
    switches: frozenset[str]
    locked: frozenset[str]
    items: Mapping[str, Item]
    errands: Mapping[str, ErrandKind]
    verbs: Mapping[tuple[str, ...], str]
    nouns: Mapping[tuple[str, ...], str]

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Things of a class, in the order of the file."""
        return tuple(item.name for item in self.items.values() if item.kind == kind)

    def holds(self, fixture: str) -> bool:
        """Whether things can be put there."""
        return self.kind_of[fixture] in (SURFACE, CONTAINER)

    def where(self, fixture: str) -> str:
        """The place in words.

        Example:
            >>> vocabulary().where("drawer")
            'in the drawer'
        """
        return f"{'in' if self.kind_of[fixture] == CONTAINER else 'on'} the {fixture}"


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """The vocabulary of this package."""
    raw: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    rooms = {
        room: tuple(name for names in kinds.values() for name in names)
        for room, kinds in raw["rooms"].items()
    }
    kind_of = {
        name: kind for kinds in raw["rooms"].values() for kind, names in kinds.items()
        for name in names
    }  # fmt: skip
    items = {
        name: Item(
            name,
            entry["class"],
            entry.get("wash", ""),
            bool(entry.get("fill", False)),
            bool(entry.get("heat", False)),
        )
        for name, entry in raw["items"].items()
    }
    names = (*rooms, *kind_of, *items)
    nouns = {(name,): name for name in names}
    nouns |= {tuple(said.split()): name for said, name in raw["synonyms"].items()}
    return Vocabulary(
        rooms=rooms,
        kind_of=kind_of,
        room_of={name: room for room, names in rooms.items() for name in names},
        always=tuple(raw["always"]),
        switches=frozenset(raw["switches"]),
        locked=frozenset(raw["locked"]),
        items=items,
        errands={name: _errand(name, entry) for name, entry in raw["errands"].items()},
        verbs={tuple(said.split()): verb for verb, all_ in raw["verbs"].items() for said in all_},
        nouns=nouns,
    )


def _errand(name: str, entry: Mapping[str, Any]) -> ErrandKind:
    return ErrandKind(
        name,
        entry["text"],
        tuple(entry["goals"]),
        tuple(entry.get("needs", ())),
        tuple(entry.get("tools", ())),
        entry.get("inside", ""),
    )
