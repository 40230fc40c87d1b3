"""Cities of Guess My City: what is true of each of them, and the tasks that they make.

The content stands in ``data/guess_my_city_*.yaml``: countries and languages, the cities of four
parts of the world, and the splits. ``load_atlas`` turns it into frozen objects; whatever is wrong
with a file stops there with one sentence. No fact of a city contains a name that would give the
city away, which ``reveals`` decides and loading checks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import yaml

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.types import Message, Task, UserError

SOURCE = "guess_my_city"
"""The ``data_source`` of a row of the published file, and the environment's name."""

DATA_DIR = Path(__file__).parents[1] / "data"
PARTS = ("europe", "asia", "africa_oceania", "americas")
SPLITS = ("train", "val", "test")
TEXTS = ("sights", "food", "work", "culture", "sport", "study", "past", "people")
"""Fields that hold noun phrases."""
NATURE = ("sea", "river", "lake", "mountains")
CLIMATES = (
    "tropical_rainforest",
    "tropical_monsoon",
    "tropical_savanna",
    "desert",
    "mild_desert",
    "semi_arid",
    "cold_semi_arid",
    "mediterranean",
    "humid_subtropical",
    "oceanic",
    "continental",
    "highland",
    "subpolar",
)
CITY_TAGS = frozenset(
    (
        *("capital", "former_capital", "regional_capital", "port", "beach", "metro", "island"),
        *("desert", "volcano", "heritage", "left"),
    )
)
COUNTRY_TAGS = frozenset(("eu", "nato", "monarchy", "landlocked", "island", "left"))
OPENING = (
    Message(
        "user",
        "We play Guess My City. I have a home city in mind, and you have 20 turns to find out "
        "which one it is.\n"
        "\n"
        "Ask one question in each turn. Open questions are welcome: about geography, climate, "
        "landmarks, food, language, culture, history or the economy. For example: What is the "
        "climate like? Is the city by the sea? What do people there like to eat? Do not ask for "
        "the name of the city or of its country.\n"
        "\n"
        "Let every answer guide the next question. As soon as you are confident, name one city "
        "with its country, for example: Is it Lisbon, Portugal? A guess takes a turn as well.",
    ),
)
"""How our own games open: no system message, as in the published file."""

_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "\u0131": "i"}
)
JOINED = re.compile(r"\b(?:north(?:ern)?|south(?:ern)?|central|latin) american?s?\b")
"""Parts of the world that contain the name of a country."""


@dataclass(frozen=True, slots=True)
class Country:
    """What is true of a country; the head of its file explains the fields."""

    name: str
    names: tuple[str, ...]
    adjectives: tuple[str, ...]
    continents: tuple[str, ...]
    regions: tuple[str, ...]
    languages: tuple[str, ...]
    currency: str
    religions: tuple[str, ...]
    neighbours: tuple[str, ...]
    colony: tuple[str, ...]
    tags: frozenset[str]
    flag: tuple[str, ...]
    millions: float
    utc: float


@dataclass(frozen=True, slots=True)
class City:
    """What is true of a city; the head of the file on Europe explains the fields.

    Attributes:
        names: All names, ``name`` first.
        latitude, longitude: Degrees, north and east positive.
        elevation: Metres above the sea.
        millions: People of the urban area, in millions.
        rank: By size in its country; 0 where it is not among the first ten.
        nature: ``NATURE`` to a name; absent where there is none.
        snow: ``yes``, ``rarely``, ``no``, or empty where the climate says it.
        facts: ``TEXTS`` to noun phrases.
        hidden: Words that would give the city away.
    """

    name: str
    names: tuple[str, ...]
    country: Country
    states: tuple[str, ...]
    continents: tuple[str, ...]
    latitude: float
    longitude: float
    elevation: int
    millions: float
    rank: int
    tags: frozenset[str]
    nature: Mapping[str, str]
    climate: str
    snow: str
    languages: tuple[str, ...]
    currency: str
    religions: tuple[str, ...]
    utc: float
    colony: tuple[str, ...]
    facts: Mapping[str, tuple[str, ...]]
    olympics: str
    hidden: frozenset[str]

    @property
    def secret(self) -> str:
        """The golden answer, in the published form ``"City, Country"``."""
        return f"{self.name}, {self.country.name}"


@dataclass(frozen=True)
class Atlas:
    """All cities, countries and languages (name to family and script), and the splits."""

    cities: Mapping[str, City]
    countries: Mapping[str, Country]
    languages: Mapping[str, tuple[str, str]]
    splits: Mapping[str, tuple[str, ...]]

    @cached_property
    def city_keys(self) -> Mapping[str, City]:
        """Key of every name of a city to the city."""
        return {name_key(name): city for city in self.cities.values() for name in city.names}

    @cached_property
    def country_keys(self) -> Mapping[str, str]:
        """Key of every name of a country to the country, of those without a city here as well."""
        known = {
            name_key(name): country.name
            for country in self.countries.values()
            for name in country.names
        }
        neighbours = {near for country in self.countries.values() for near in country.neighbours}
        return {name_key(name): name for name in sorted(neighbours)} | known

    @cached_property
    def adjective_keys(self) -> Mapping[str, str]:
        """Key of what belongs to a country ("french") to the country."""
        return {
            name_key(word): country.name
            for country in self.countries.values()
            for word in country.adjectives
        }

    @cached_property
    def state_keys(self) -> Mapping[str, str]:
        """Key of a state or province, short forms left out, to its country."""
        return {
            name_key(state): city.country.name
            for city in self.cities.values()
            for state in city.states
            if len(state) > 3
        }


@lru_cache(maxsize=1 << 15)
def name_key(text: str) -> str:
    """The form in which names are compared.

    Normal form without accents, dots and apostrophes; hyphens, commas and brackets are spaces;
    "st" is "saint".

    Example:
        >>> name_key("Xi'an"), name_key("St. Petersburg"), name_key("São Paulo, Brazil")
        ('xian', 'saint petersburg', 'sao paulo brazil')
    """
    plain = normalise(text)
    if not plain.isascii():
        spread = unicodedata.normalize("NFKD", plain.translate(_LETTERS))
        plain = "".join(mark for mark in spread if not unicodedata.combining(mark))
        plain = unicodedata.normalize("NFKC", plain)
    plain = re.sub(r"['.\u02bb\u02bc\u2018\u2019]", "", plain)
    plain = re.sub(r"[^\w\s]|_", " ", plain)
    return " ".join("saint" if word == "st" else word for word in plain.split())


def reveals(text: str, city: City) -> bool:
    """Whether a text contains a name or an adjective that gives the city or its country away."""
    key = f" {JOINED.sub(' ', name_key(text))} "
    if any(f" {word} " in key for word in city.hidden if not word.isupper()):
        return True
    return any(re.search(rf"\b{word}\b", text) for word in city.hidden if word.isupper())


@lru_cache(maxsize=1)
def load_atlas() -> Atlas:
    """The packaged cities.

    Raises:
        UserError: A file is missing or wrong.
    """
    world = read_file("countries")
    languages = {
        name: (str(pair[0]), str(pair[1])) for name, pair in _section(world, "languages").items()
    }
    countries = {
        name: _country(name, entry, languages)
        for name, entry in _section(world, "countries").items()
    }
    cities: dict[str, City] = {}
    for part in PARTS:
        for name, entry in read_file(part).items():
            if name in cities:
                raise _wrong(part, name, "stands twice")
            cities[name] = _city(part, name, entry, countries, languages)
    _check_names(cities)
    return Atlas(cities, countries, languages, _splits(cities))


def tasks(split: str) -> list[Task]:
    """One task for each city of a split, in the order of the files.

    Raises:
        UserError: For a split that does not exist.
    """
    atlas = load_atlas()
    if split not in atlas.splits:
        raise UserError(f"There is no split {split!r} of cities; use {', '.join(SPLITS)}.")
    found = (atlas.cities[name] for name in atlas.splits[split])
    return [
        Task(
            id=f"{split}_{number}",
            source=SOURCE,
            secret=city.secret,
            messages=OPENING,
            split=split,
            aliases=city.names[1:],
        )
        for number, city in enumerate(found)
    ]


@lru_cache(maxsize=1 << 12)
def city_of(secret: str) -> City | None:
    """The city of a golden answer in any spelling; None for one that is not here."""
    name, _, country = secret.rpartition(",")
    atlas = load_atlas()
    city = atlas.city_keys.get(name_key(re.sub(r"\(.*?\)", "", name)))
    if city is None or atlas.country_keys.get(name_key(country)) != city.country.name:
        return None
    return city


def _country(name: str, entry: Any, languages: Mapping[str, object]) -> Country:
    try:
        country = Country(
            name=name,
            names=(name, *_words(entry.get("names"))),
            adjectives=_words(entry["adjectives"]),
            continents=_words(entry["continents"]),
            regions=_words(entry["regions"]),
            languages=_words(entry["languages"]),
            currency=str(entry["currency"]),
            religions=_words(entry["religions"]),
            neighbours=_words(entry["neighbours"]),
            colony=_words(entry.get("colony")),
            tags=frozenset(_words(entry.get("tags"))),
            flag=_words(entry["flag"]),
            millions=float(entry["millions"]),
            utc=float(entry["utc"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _wrong("countries", name, f"lacks a field or has a wrong one ({error})") from error
    if unknown := sorted({*country.languages} - languages.keys() | country.tags - COUNTRY_TAGS):
        raise _wrong("countries", name, f"has {unknown[0]!r}, which is not known")
    return country


def _city(
    part: str,
    name: str,
    entry: Any,
    countries: Mapping[str, Country],
    languages: Mapping[str, object],
) -> City:
    try:
        country = countries[entry["in"]]
        latitude, longitude, elevation = entry["at"]
        millions, rank = entry["size"]
        names = (name, *_words(entry.get("names")))
        states = _words(entry.get("state"))
        city = City(
            name=name,
            names=names,
            country=country,
            states=states,
            continents=_words(entry.get("continents")) or country.continents,
            latitude=float(latitude),
            longitude=float(longitude),
            elevation=int(elevation),
            millions=float(millions),
            rank=int(rank),
            tags=frozenset(_words(entry["is"])),
            nature={kind: str(entry[kind]) for kind in NATURE if kind in entry},
            climate=str(entry["climate"]),
            snow=_snow(entry.get("snow")),
            languages=_words(entry.get("languages")) or country.languages,
            currency=str(entry.get("currency", country.currency)),
            religions=_words(entry.get("religions")) or country.religions,
            utc=float(entry.get("utc", country.utc)),
            colony=_words(entry.get("colony")) or country.colony,
            facts={kind: _phrases(entry.get(kind)) for kind in TEXTS},
            olympics=str(entry.get("olympics", "")),
            hidden=_hidden((*names, *country.names, *country.adjectives, *states), entry),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _wrong(part, name, f"lacks a field or has a wrong one ({error})") from error
    _check_city(part, city, languages)
    return city


def _check_city(part: str, city: City, languages: Mapping[str, object]) -> None:
    unknown = sorted({*city.languages} - languages.keys() | city.tags - CITY_TAGS)
    if city.climate not in CLIMATES:
        unknown.append(city.climate)
    if unknown:
        raise _wrong(part, city.name, f"has {unknown[0]!r}, which is not known")
    if abs(city.latitude) > 90 or abs(city.longitude) > 180 or city.millions <= 0:
        raise _wrong(part, city.name, "has a place or a size that cannot be")
    texts = [*city.nature.values(), city.olympics]
    for kind, phrases in city.facts.items():
        if not phrases and kind != "people":
            raise _wrong(part, city.name, f"has nothing for {kind!r}")
        texts += phrases
    for text in texts:
        if reveals(text, city):
            raise _wrong(part, city.name, f"gives itself away in {text!r}")


def _check_names(cities: Mapping[str, City]) -> None:
    owners: dict[str, str] = {}
    for city in cities.values():
        for name in city.names:
            if owners.setdefault(name_key(name), city.name) != city.name:
                raise UserError(
                    f"The name {name!r} belongs to {owners[name_key(name)]} and to {city.name} in "
                    "the data of guess_my_city: remove one of them."
                )


def _splits(cities: Mapping[str, City]) -> dict[str, tuple[str, ...]]:
    listed = {name: _words(entries) for name, entries in read_file("splits").items()}
    held = [name for names in listed.values() for name in names]
    unknown = sorted(set(held) - cities.keys())
    if unknown or len(held) != len(set(held)) or listed.keys() != {"val", "test"}:
        what = (
            f"has no city {unknown[0]!r}" if unknown else "needs two disjoint lists, val and test"
        )
        raise UserError(f"The file guess_my_city_splits.yaml {what}: correct it.")
    return {"train": tuple(name for name in cities if name not in set(held)), **listed}


def _hidden(names: Iterable[str], entry: Any) -> frozenset[str]:
    """Keys of names; a short form in capitals stays as it is, since "us" and "la" are words."""
    shown = (*names, *_words(entry.get("hide")))
    short = {name.replace(".", "") for name in shown}
    capitals = {name for name in short if name.isupper() and len(name) <= 3 and name.isascii()}
    long = {name_key(name) for name in shown if name.replace(".", "") not in capitals}
    return frozenset(capitals | long - {""})


def _snow(value: object) -> str:
    # YAML reads a bare yes or no as a truth value.
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value or "")


def _phrases(text: object) -> tuple[str, ...]:
    return tuple(part for phrase in str(text or "").split(";") if (part := phrase.strip()))


def _words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | None):
        raise TypeError(f"{value!r} is no list")
    return tuple(str(item) for item in cast("list[object]", value or []))


def _section(world: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = world.get(name)
    if not isinstance(section, dict):
        raise UserError(f"The file guess_my_city_countries.yaml has no section {name!r}: add it.")
    return cast("dict[str, Any]", section)


def read_file(part: str) -> dict[str, Any]:
    """The table in one of the packaged files.

    Raises:
        UserError: The file is missing or wrong.
    """
    path = DATA_DIR / f"guess_my_city_{part}.yaml"
    try:
        read = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"The file {path.name} cannot be read ({error}): restore it.") from error
    if not isinstance(read, dict):
        raise UserError(f"The file {path.name} is no table of entries: restore it.")
    return cast("dict[str, Any]", read)


def _wrong(part: str, name: str, what: str) -> UserError:
    return UserError(f"The entry {name!r} of guess_my_city_{part}.yaml {what}: correct it.")
