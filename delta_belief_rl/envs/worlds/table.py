"""The embedded world: a table of things, yes/no properties, and the truth of each pair.

A world is one YAML file: properties with the phrasings of their question, categories that pass
facts on, things with their exceptions, and the train / val / test split of the things.
`load_world` turns it into a frozen `World`; whatever is wrong with the file stops there, with
one sentence that names the file, the cause and the cure.

Shapes: N = things, P = properties; `values` is bool [N, P], rows and columns in file order.

Example:
    >>> world = load_world("everyday")
    >>> world.value("penguin", "flies")
    False
"""

import difflib
import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray

from delta_belief_rl.types import UserError

DATA_DIR = Path(__file__).parent / "data"
SPLITS = ("train", "val", "test")

_SECTIONS = ("name", "properties", "categories", "things", "splits")
_WORDS = re.compile(r"[^\W_]+(?:['-][^\W_]+)*(?: [^\W_]+(?:['-][^\W_]+)*)*")
_KEY = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_IRREGULAR_PLURALS = {"feet": "foot", "teeth": "tooth", "mice": "mouse", "children": "child"}


class WorldError(UserError):
    """A world file, or a question to a world, that cannot be used as it stands."""


@dataclass(frozen=True)
class Property:
    """A yes/no property and the ways to ask for it; `phrasings[0]` is the canonical one."""

    key: str
    phrasings: tuple[str, ...]


@dataclass(frozen=True)
class Thing:
    """A thing that can be the secret; `aliases` are other names that also win the game."""

    name: str
    category: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class World:
    """Things, properties and which of them hold; read-only.

    Attributes:
        name: the name the file gives itself.
        properties: [P], in file order.
        things: [N], in file order.
        values: bool [N, P], not writable; `values[n, p]` says whether property p holds for n.
        splits: names of the things of "train", "val" and "test"; together they are all things.
    """

    name: str
    properties: tuple[Property, ...]
    things: tuple[Thing, ...]
    values: NDArray[np.bool_]
    splits: Mapping[str, tuple[str, ...]]

    def index(self, thing_name: str) -> int:
        """Row of a thing in `values`; raises WorldError when the world has no such thing."""
        return self._look_up(self._rows, thing_name, "thing")

    def property_index(self, key: str) -> int:
        """Column of a property in `values`; raises WorldError when there is no such key."""
        return self._look_up(self._columns, key, "property")

    def value(self, thing: str, property_key: str) -> bool:
        """Whether the property holds for the thing; raises WorldError on an unknown name."""
        return bool(self.values[self.index(thing), self.property_index(property_key)])

    def split(self, name: str) -> tuple[str, ...]:
        """Thing names of "train", "val" or "test"; raises WorldError on another name."""
        if name not in self.splits:
            raise WorldError(f"world '{self.name}' has no split '{name}'; use train, val or test.")
        return self.splits[name]

    @cached_property
    def checksum(self) -> str:
        """SHA-256 (64 hex digits) of the content, independent of layout and comments."""
        content = [
            self.name,
            [[entry.key, entry.phrasings] for entry in self.properties],
            [
                [thing.name, thing.category, thing.aliases, "".join("01"[bit] for bit in row)]
                for thing, row in zip(self.things, self.values.astype(int).tolist(), strict=True)
            ],
            [[name, self.splits[name]] for name in SPLITS],
        ]
        return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {thing.name: row for row, thing in enumerate(self.things)}

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {entry.key: column for column, entry in enumerate(self.properties)}

    def _look_up(self, table: Mapping[str, int], name: str, kind: str) -> int:
        if name in table:
            return table[name]
        cure = _nearest(name, table, f"take one of its {len(table)} names")
        raise WorldError(f"world '{self.name}' has no {kind} '{name}'; {cure}.")


def load_world(path_or_name: str | Path) -> World:
    """Load a packaged world by its bare name ("everyday") or a world file by its path.

    Raises:
        WorldError: for the first defect found; the message names the file, the cause, the cure.
    """
    path = _locate(path_or_name)
    try:
        found = path.stat()
    except OSError as error:
        raise _defect(path, f"cannot be read ({error.strerror})", "check the path") from error
    return _loaded(path, (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=4)
def _loaded(path: Path, _version: tuple[int, ...]) -> World:
    """The world of a file; a version that was read before is not read again."""
    document = _read(path)
    name = document["name"]
    if not isinstance(name, str) or not name:
        raise _defect(path, "'name' is not a text", "give the world a short name")
    properties = _properties(path, document["properties"])
    keys = [entry.key for entry in properties]
    categories = _categories(path, document["categories"], keys)
    things, facts = _things(path, document["things"], categories, keys)
    _check_no_phrasing_names_a_thing(path, properties, things)
    values = np.array([[key in held for key in keys] for held in facts], dtype=np.bool_)
    values.setflags(write=False)
    _check_told_apart(path, things, values)
    splits = _splits(path, document["splits"], [thing.name for thing in things])
    return World(name, properties, things, values, splits)


def _defect(path: Path, cause: str, cure: str) -> WorldError:
    return WorldError(f"{path}: {cause}; {cure}.")


def _nearest(name: object, known: Iterable[str], otherwise: str) -> str:
    """The cure for an unknown name: the most similar known one, if there is any."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean '{close[0]}'" if close else otherwise


def _locate(path_or_name: str | Path) -> Path:
    if isinstance(path_or_name, Path) or not re.fullmatch(r"[\w-]+", path_or_name):
        return Path(path_or_name)
    path = DATA_DIR / f"{path_or_name}.yaml"
    if not path.is_file():
        packaged = ", ".join(sorted(found.stem for found in DATA_DIR.glob("*.yaml")))
        cure = f"take one of ({packaged}) or give the path of a .yaml file"
        raise _defect(path, f"no packaged world is called '{path_or_name}'", cure)
    return path


class _Loader(yaml.BaseLoader):
    """Reads every scalar as text (so `yes:` stays a word) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise WorldError(f"'{key}' is given twice, again on line {line}; keep one of them.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read(path: Path) -> dict[str, object]:
    """The five sections of the file, not yet checked themselves."""
    try:
        document: object = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise _defect(path, f"cannot be read ({error.strerror})", "check the path") from error
    except UnicodeDecodeError as error:
        raise _defect(path, "is not UTF-8 text", "save it as UTF-8") from error
    except WorldError as error:
        raise WorldError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark is not None else ""
        raise _defect(path, f"is not valid YAML{where}", "correct the syntax") from error
    sections = _mapping(path, document, "the file")
    _check_keys(path, sections, _SECTIONS, "the file")
    for section in _SECTIONS:
        if section not in sections:
            raise _defect(path, f"the section '{section}' is missing", "add it")
    return sections


def _mapping(path: Path, value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _defect(path, f"{where} is not a mapping", "write it as 'key: value' entries")
    return cast("dict[str, object]", value)


def _texts(path: Path, value: object, where: str) -> tuple[str, ...]:
    """The strings of a list; a text, a mapping or an empty item in its place is refused."""
    items = cast("list[object]", value) if isinstance(value, list) else None
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise _defect(path, f"{where} is not a list of texts", "write it as [one, two]")
    return tuple(cast("list[str]", items))


def _check_keys(path: Path, entry: Iterable[str], allowed: Iterable[str], where: str) -> None:
    for key in entry:
        if key not in allowed:
            raise _defect(
                path, f"unknown key '{key}' in {where}", _nearest(key, allowed, "remove it")
            )


def _properties(path: Path, section: object) -> tuple[Property, ...]:
    properties: list[Property] = []
    owners: dict[str, str] = {}
    for key, value in _mapping(path, section, "'properties'").items():
        where = f"property '{key}'"
        if not _KEY.fullmatch(key):
            raise _defect(path, f"{where} is not snake_case", "rename it like has_wheels")
        entry = _mapping(path, value, where)
        _check_keys(path, entry, ("ask",), where)
        phrasings = _texts(path, entry.get("ask", []), f"'ask' of {where}")
        if not phrasings:
            raise _defect(path, f"{where} has no phrasing", "list at least one under 'ask'")
        for phrasing in phrasings:
            _check_phrasing(path, phrasing, where)
            if phrasing in owners:
                cause = (
                    f"the phrasing '{phrasing}' of {where} already asks for '{owners[phrasing]}'"
                )
                raise _defect(path, cause, "keep it in one place")
            owners[phrasing] = key
        properties.append(Property(key, phrasings))
    return tuple(properties)


def _check_phrasing(path: Path, phrasing: str, where: str) -> None:
    which = f"the phrasing '{phrasing}' of {where}"
    if "," in phrasing or {"or", "and"} & set(phrasing.lower().split()):
        cause = f"{which} has 'or', 'and' or a comma and reads like a list of candidates"
        raise _defect(path, cause, "ask for one thing")
    if phrasing != phrasing.lower() or not _WORDS.fullmatch(phrasing):
        cure = "leave out capitals, punctuation and double spaces"
        raise _defect(path, f"{which} is not plain lower-case words", cure)


def _check_no_phrasing_names_a_thing(
    path: Path, properties: tuple[Property, ...], things: tuple[Thing, ...]
) -> None:
    """Refuse a phrasing with a thing's name in it: asking it would be a guess at the secret."""
    names = {
        name: [_base_forms(word) for word in name.split()]
        for thing in things
        for name in (thing.name, *thing.aliases)
    }
    for entry in properties:
        for phrasing in entry.phrasings:
            words = [_base_forms(word) for word in phrasing.split()]
            for name, target in names.items():
                starts = range(len(words) - len(target) + 1)
                if any(all(map(_meet, words[at:], target)) for at in starts):
                    cause = f"the phrasing '{phrasing}' of property '{entry.key}' contains '{name}'"
                    raise _defect(path, cause, "reword it or rename the thing")


def _base_forms(word: str) -> frozenset[str]:
    """The word and whatever it may be the plural of, so that 'trees' meets 'tree'."""
    forms = {word, _IRREGULAR_PLURALS.get(word, word)}
    for ending, singulars in (("ies", ("y",)), ("ves", ("f", "fe")), ("es", ("",)), ("s", ("",))):
        if word.endswith(ending):
            forms.update(word.removesuffix(ending) + singular for singular in singulars)
    return frozenset(forms)


def _meet(left: frozenset[str], right: frozenset[str]) -> bool:
    return not left.isdisjoint(right)


def _categories(path: Path, section: object, keys: list[str]) -> dict[str, frozenset[str]]:
    """For each category the properties that hold for it, those of its parents included."""
    entries: dict[str, dict[str, object]] = {}
    for name, value in _mapping(path, section, "'categories'").items():
        entries[name] = _mapping(path, value, f"category '{name}'")
        _check_keys(path, entries[name], ("parent", "yes", "no"), f"category '{name}'")
    resolved: dict[str, frozenset[str]] = {}
    for name in entries:
        held: frozenset[str] = frozenset()
        for ancestor in reversed(_lineage(path, entries, name)):
            held = _apply(path, entries[ancestor], held, keys, f"category '{ancestor}'")
        resolved[name] = held
    return resolved


def _lineage(path: Path, entries: Mapping[str, dict[str, object]], name: str) -> list[str]:
    """The category, its parent, and so on up to the root."""
    line = [name]
    while "parent" in entries[line[-1]]:
        parent = entries[line[-1]]["parent"]
        if not isinstance(parent, str) or parent not in entries:
            cure = _nearest(parent, entries, "define it under 'categories'")
            raise _defect(path, f"category '{line[-1]}' has the unknown parent '{parent}'", cure)
        if parent in line:
            circle = " -> ".join([*line[line.index(parent) :], parent])
            raise _defect(path, f"categories form a circle ({circle})", "remove one parent")
        line.append(parent)
    return line


def _apply(
    path: Path, entry: Mapping[str, object], held: frozenset[str], keys: list[str], where: str
) -> frozenset[str]:
    """The properties that hold after an entry's 'yes' and 'no' lists overrule `held`."""
    yes, no = (_texts(path, entry.get(side, []), f"'{side}' of {where}") for side in ("yes", "no"))
    for key in (*yes, *no):
        if key not in keys:
            cure = _nearest(key, keys, "define it under 'properties'")
            raise _defect(path, f"{where} lists the unknown property '{key}'", cure)
        if key in yes and key in no:
            raise _defect(path, f"{where} says yes and no to '{key}'", "keep one of them")
    return (held | set(yes)) - set(no)


def _things(
    path: Path, section: object, categories: Mapping[str, frozenset[str]], keys: list[str]
) -> tuple[tuple[Thing, ...], list[frozenset[str]]]:
    """The things and, for each, the set of properties that hold."""
    things: list[Thing] = []
    facts: list[frozenset[str]] = []
    for name, value in _mapping(path, section, "'things'").items():
        where = f"thing '{name}'"
        entry = _mapping(path, value, where)
        _check_keys(path, entry, ("in", "yes", "no", "aliases"), where)
        category = entry.get("in", "")
        if not isinstance(category, str) or category not in categories:
            cure = _nearest(category, categories, "name a defined category under 'in'")
            raise _defect(path, f"{where} has the unknown category '{category}'", cure)
        aliases = _texts(path, entry.get("aliases", []), f"'aliases' of {where}")
        things.append(Thing(name, category, aliases))
        facts.append(_apply(path, entry, categories[category], keys, where))
    _check_names(path, things)
    return tuple(things), facts


def _check_names(path: Path, things: list[Thing]) -> None:
    owners = {thing.name: thing.name for thing in things}
    for thing in things:
        for name in (thing.name, *thing.aliases):
            if name != name.lower() or not _WORDS.fullmatch(name):
                raise _defect(path, f"the name '{name}' is not lower-case words", "rewrite it so")
        for alias in thing.aliases:
            if alias in owners:
                cause = f"the alias '{alias}' of '{thing.name}' already names '{owners[alias]}'"
                raise _defect(path, cause, "keep it in one place")
            owners[alias] = thing.name


def _check_told_apart(path: Path, things: tuple[Thing, ...], values: NDArray[np.bool_]) -> None:
    first_with: dict[bytes, str] = {}
    for thing, row in zip(things, values, strict=True):
        twin = first_with.setdefault(row.tobytes(), thing.name)
        if twin != thing.name:
            cause = f"no property tells '{twin}' from '{thing.name}'"
            raise _defect(path, cause, "add an exception to one of them, or a property")


def _splits(path: Path, section: object, names: list[str]) -> Mapping[str, tuple[str, ...]]:
    """Train, val and test in table order; train is what the other two leave."""
    entry = _mapping(path, section, "'splits'")
    _check_keys(path, entry, ("val", "test"), "'splits' (train is what val and test leave)")
    owner: dict[str, str] = {}
    for split in ("val", "test"):
        for name in _texts(path, entry.get(split, []), f"split '{split}'"):
            if name not in names:
                cure = _nearest(name, names, "remove it")
                raise _defect(path, f"split '{split}' lists the unknown thing '{name}'", cure)
            if name in owner:
                cause = f"'{name}' is listed in the splits '{owner[name]}' and '{split}'"
                raise _defect(path, cause, "keep it in one place")
            owner[name] = split
    if len(owner) == len(names):
        raise _defect(
            path, "val and test leave no thing to train on", "shorten them, or add things"
        )
    return {s: tuple(name for name in names if owner.get(name, "train") == s) for s in SPLITS}
