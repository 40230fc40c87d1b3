"""Topics of the rule judge of Guess My City: where the city lies, and how large it is.

A topic is a function that gives the reply, or None for a question that it cannot answer, which then
goes on to the next topic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from delta_belief_rl.envs.guess_my_city.data import City, load_atlas, name_key
from delta_belief_rl.envs.guess_my_city.reading import WORD_NAMES
from delta_belief_rl.judge.guess_my_city.lexicon import load_lexicon
from delta_belief_rl.judge.guess_my_city.question import (
    UNKNOWN,
    Answer,
    Question,
    adjectives_in,
    countries_in,
    joined,
    safe,
)

_BARE_REGIONS = frozenset(
    (
        *("Europe", "Asia", "Africa", "America", "Scandinavia", "Australasia", "Polynesia"),
        *("Melanesia", "Anatolia"),
    )
)
"""Last words of regions that take no article."""
_NEAR_KM = 200
_NUMBER = re.compile(
    r"\b(?P<half>half )?(?P<digits>\d[\d ]*(?: \d+)?|an?|one|two|three|four|five|six|seven|eight|"
    r"nine|ten|twelve|fifteen|twenty|thirty|fifty|hundred|a hundred|one hundred|five hundred)? ?"
    r"(?P<unit>million|millions|thousand|k|m|meters|metres|feet)\b"
)
_RANGE = re.compile(
    r"\b(\d+|one|two|three|four|five|six|seven|eight|nine|ten|twenty) (?:and|to) "
    r"(\d+|one|two|three|four|five|six|seven|eight|nine|ten|twenty|thirty|fifty) "
    r"(million|thousand|meters|metres|feet)\b"
)
"""Of "1 and 3 million" the first number has the unit of the second."""
_NUMERALS: Mapping[str, float] = {
    "a": 1,
    "an": 1,
    "one": 1,
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "fifteen": 15,
    "twenty": 20,
    "thirty": 30,
    "fifty": 50,
    "hundred": 100,
    "a hundred": 100,
    "one hundred": 100,
    "five hundred": 500,
}


def _continent(q: Question) -> str | None:
    known = load_lexicon().aliases["continents"]
    named = {known[key] for key in q.named(_continent_keys(q))}
    statement = _where(q.city, q.city.continents)
    options = {name: name in q.city.continents for name in named}
    if q.has(r"\bamericas?\b") and not named and not q.named(load_lexicon().regions):
        options["Americas"] = any("America" in name for name in q.city.continents)
    if reply := q.choose(options, statement):
        return reply
    asks = q.has(r"\bcontinents?\b") and not q.has(r"\bregion\b|\bpart of\b")
    return statement if asks and not q.closed else None


def _continent_keys(q: Question) -> Iterable[str]:
    """Adjectives count where they say what the city or its country is."""
    about_place = q.has(
        r"\b(?:city|country|capital|nation|town|continent|metropolis)\b|^is it \w+$"
    )
    known = load_lexicon().aliases["continents"]
    return (key for key in known if about_place or not key.endswith("n"))


def _where(city: City, continents: tuple[str, ...]) -> str:
    if len(continents) > 1:
        return f"It lies where {joined(continents)} meet."
    return f"It is in {joined(continents)}."


def _region(q: Question) -> str | None:
    keys, own = load_lexicon().regions, q.city.country.regions
    options = {key: any(region in own for region in keys[key]) for key in q.named(keys)}
    if q.has(r"\bsub saharan\b"):
        options["sub saharan"] = "Africa" in q.city.continents and "North Africa" not in own
    if q.has(r"\beurasia"):
        options["eurasia"] = bool({"Europe", "Asia"} & set(q.city.continents))
    return q.choose(options, _region_statement(q.city))


def _region_statement(city: City) -> str:
    if len(city.continents) > 1:
        return _where(city, city.continents)
    # "Latin America" says less than the continent.
    regions = [name for name in safe(city.country.regions, city) if name != "Latin America"]
    if not regions:
        return _where(city, city.continents)
    article = "" if regions[0].split()[-1] in _BARE_REGIONS else "the "
    return f"It is in {article}{regions[0]}."


def _country(q: Question) -> str | None:
    named = list(countries_in(q))
    if not named and q.has(r"\b(?:city|country|capital|town|nation)\b"):
        named = list(adjectives_in(q))
    if not named or not q.closed:
        return None
    own = q.city.country.name in named
    if q.has(r"\b(?:near|close to|next to|adjacent)\b"):
        return q.verdict(own or bool(set(named) & set(q.city.country.neighbours)))
    if q.negated:
        return UNKNOWN
    if len(named) > 1:
        return "Yes, one of them." if own else "No, none of them."
    return q.verdict(own)


def _state(q: Question) -> str | None:
    keys = load_atlas().state_keys
    named = q.named(key for key in keys if key not in load_atlas().country_keys)
    if not named or not q.closed:
        return None
    own = {name_key(state) for state in q.city.states}
    if set(named) & own:
        return q.verdict(True)
    if own or all(keys[name] != q.city.country.name for name in named):
        return q.verdict(False)
    return UNKNOWN


def _compare(q: Question) -> str | None:
    cities = load_atlas().city_keys
    named = [
        cities[key]
        for key in q.named(key for key in cities if len(key) > 3 and key not in WORD_NAMES)
    ]
    if len(named) != 1 or not q.closed or q.negated:
        return None
    other, city = named[0], q.city
    if q.has(r"\b(?:bigger|larger|more (?:people|populous|populated))\b.* than\b"):
        return q.verdict(city.millions > other.millions)
    if q.has(r"\b(?:smaller|less populous|fewer people)\b.* than\b"):
        return q.verdict(city.millions < other.millions)
    if match := re.search(r"\b(north|south|east|west)\b\w* of\b", q.text):
        return q.verdict(_lies(match[1], city, other))
    if q.has(r"\b(?:near|close to|nearby|next to|around|in the vicinity of)\b"):
        return q.verdict(distance(city, other) < _NEAR_KM)
    if q.has(r"\bsame country\b"):
        return q.verdict(city.country == other.country)
    return None


def _lies(direction: str, city: City, other: City) -> bool:
    if direction in ("north", "south"):
        gap = city.latitude - other.latitude
        return gap > 0 if direction == "north" else gap < 0
    gap = (city.longitude - other.longitude + 180) % 360 - 180
    return gap > 0 if direction == "east" else gap < 0


def distance(city: City, other: City) -> float:
    """Kilometres between two cities along the surface of the Earth."""
    a, b = math.radians(city.latitude), math.radians(other.latitude)
    turn = math.radians(city.longitude - other.longitude)
    cosine = math.sin(a) * math.sin(b) + math.cos(a) * math.cos(b) * math.cos(turn)
    return 6371 * math.acos(min(1.0, max(-1.0, cosine)))


def _globe(q: Question) -> str | None:
    city = q.city
    north, east = city.latitude >= 0, city.longitude >= 0
    if q.has(r"\btime ?zone\b|\butc\b|\bgmt\b|\bwhat time\b"):
        return None if q.closed else f"Its standard time is UTC{_offset(city.utc)}."
    if q.has(r"\btropics?\b"):
        inside = abs(city.latitude) < 23.44
        return q.verdict(inside, f"It lies {'in' if inside else 'outside'} the tropics.")
    if q.has(r"\barctic circle\b"):
        return q.verdict(city.latitude > 66.56)
    if q.has(r"\b(?:near|close to|on|at) the equator\b"):
        return q.verdict(abs(city.latitude) < 10)
    if q.has(r"\blongitude\b|\bmeridian\b|\b(?:eastern|western) hemi"):
        statement = _angle(city.longitude, "ew")
        options = {
            side: east == (side == "eastern")
            for side in ("eastern", "western")
            if q.has(rf"\b{side}\b|\b{side[:4]} of the (?:prime )?meridian")
        }
        return q.choose(options, statement) or (None if q.closed else statement)
    statement = _angle(city.latitude, "ns")
    if q.has(r"\blatitude\b|\bcoordinates\b|\bhow far\b"):
        return None if q.closed else statement
    options = {
        side: north == (side == "northern")
        for side in ("northern", "southern")
        if q.has(rf"\b{side}\b|\b(?:{side[:5]}|above|below)\b.* equator") and _side_fits(q, side)
    }
    statement = f"It is in the {'northern' if north else 'southern'} hemisphere."
    return q.choose(options, statement) or (None if q.closed else statement)


def _side_fits(q: Question, side: str) -> bool:
    """ "Above" and "below" the equator belong to one side each."""
    if q.has(r"\babove\b"):
        return side == "northern"
    return side == "southern" if q.has(r"\bbelow\b") else True


def _angle(degrees: float, kind: Literal["ns", "ew"]) -> str:
    sides = {"ns": ("north", "south"), "ew": ("east", "west")}[kind]
    size = abs(round(degrees))
    unit = "degree" if size == 1 else "degrees"
    return f"It lies at about {size} {unit} {sides[degrees < 0]}."


def _offset(hours: float) -> str:
    whole, minutes = divmod(round(abs(hours) * 60), 60)
    return f"{'-' if hours < 0 else '+'}{whole}" + (f":{minutes:02d}" if minutes else "")


def _capital(q: Question) -> str | None:
    tags = q.city.tags
    if not q.closed:
        return None
    # "Is it a European capital?" asks for two things.
    for answer in (_region, _continent, _country):
        if (reply := answer(q)) and reply != "Yes.":
            return reply
    if q.has(r"\b(?:former|formerly|once|ever|used to be|historic\w*|old|ancient|previous\w*)\b"):
        return q.verdict("former_capital" in tags or "capital" in tags)
    if q.has(r"\b(?:state|regional|provincial|province|region|county|prefecture)\b"):
        return q.verdict("regional_capital" in tags)
    if "capital" in tags:
        return q.verdict(True, "It is the capital.")
    more = ""
    if "regional_capital" in tags:
        more = " It is the capital of a part of its country, though."
    elif "former_capital" in tags:
        more = " It once was, though."
    return "It is not the capital." + more if q.negated else f"No.{more}"


def _rank(q: Question) -> str | None:
    rank = q.city.rank
    if q.has(r"\bworld|\bglobal|\bcontinent|\beurope|\basia|\bafrica|\bamerica"):
        return None
    if q.closed:
        if q.has(r"\bsecond (?:largest|biggest|most)"):
            return q.verdict(rank == 2)
        if q.has(r"\bthird (?:largest|biggest|most)"):
            return q.verdict(rank == 3)
        if q.has(r"\b(?:one of|among|top)\b"):
            return q.verdict(1 <= rank <= 5)
        return q.verdict(rank == 1)
    if rank == 0:
        return "It is not among the ten largest cities of its country."
    return f"By size it is number {rank} in its country."


def _population(q: Question) -> str | None:
    people = q.city.millions
    if q.has(r"\b(?:country|nation)s?\b") and not q.has(r"\bcity\b"):
        return None
    if not q.closed and not q.has(r"\bhow\b|\bpopul|\binhabit|\bresiden|\bnumber\b|\bsize\b"):
        return None
    bounds = [value for value, unit in numbers(q.text) if unit == "people"]
    size = f"About {_people(people)} live in the urban area."
    if not q.closed:
        return size
    if len(bounds) > 1 and q.has(r"\bbetween\b"):
        return q.verdict(min(bounds) <= people <= max(bounds), size)
    if bounds:
        below = q.has(r"\b(?:under|below|less|fewer|smaller|not more|no more)\b")
        return q.verdict(people < bounds[0] if below else people >= bounds[0], size)
    for pattern, holds in (
        (r"\bmegacity\b|\bmega city\b", people >= 10),
        (r"\b(?:small|little|tiny)\b", people < 0.5),
        (r"\bmedium|\bmid\b|\bmidsi", 0.5 <= people < 2),
        (r"\b(?:large|big|major|huge|metropolis|populous|populated|crowded)\b", people >= 1),
    ):
        if q.has(pattern):
            return size if q.choice else q.verdict(holds, size)
    return None


def numbers(text: str) -> list[tuple[float, str]]:
    """Numbers of a text: millions of people, or metres, each with ``people`` or ``height``."""
    found: list[tuple[float, str]] = []
    text = _RANGE.sub(r"\1 \3 and \2 \3", text)
    for match in _NUMBER.finditer(text):
        digits, unit = (match["digits"] or "one").strip(), match["unit"]
        value = _NUMERALS.get(digits) or _digits(digits)
        value = 0.5 if match["half"] else value
        if unit in ("meters", "metres", "m", "feet"):
            found.append((value * (0.3048 if unit == "feet" else 1.0), "height"))
        else:
            found.append((value / 1000 if unit in ("thousand", "k") else value, "people"))
    # "2,500,000" and "500000" have no unit.
    for match in re.finditer(r"\b\d{1,3}(?: \d{3})+\b(?! \w*met)|\b\d{5,}\b", text):
        found.append((float(match[0].replace(" ", "")) / 1e6, "people"))
    return found


def _digits(text: str) -> float:
    parts = text.split()
    if len(parts) == 2 and len(parts[1]) < 3:
        return float(f"{parts[0]}.{parts[1]}")
    return float("".join(parts))


def _people(millions: float) -> str:
    if millions >= 10:
        return f"{round(millions)} million people"
    if millions >= 1:
        return f"{millions:.1f} million people".replace(".0", "")
    return f"{round(millions * 1000, -1):.0f},000 people".replace("0,000,000", "0,000")


PLACE_TOPICS: Mapping[str, Answer] = {
    "compare": _compare,
    "globe": _globe,
    "capital": _capital,
    "rank": _rank,
    "population": _population,
}
"""By the name of their words in the lexicon; tried in this order."""

MAP_TOPICS: tuple[Answer, ...] = (_region, _continent, _state, _country)
"""Tried on every question that is left: what is mentioned decides."""


def location(q: Question) -> str | None:
    """Where the city lies, for an open question about it."""
    if q.closed or not load_lexicon().topics["location"].search(q.text):
        return None
    return _region_statement(q.city)


def lies_elsewhere(q: Question) -> bool:
    """Whether a question says "in" some part of the world in which the city does not lie."""
    return q.has(r"\bin\b") and any(answer(q) == "No." for answer in (_region, _continent))
