"""Topics of the rule judge of Guess My City: water, heights, islands, deserts and the weather."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from delta_belief_rl.envs.guess_my_city.data import load_atlas, name_key, reveals
from delta_belief_rl.judge.guess_my_city.lexicon import load_lexicon
from delta_belief_rl.judge.guess_my_city.place import numbers
from delta_belief_rl.judge.guess_my_city.question import UNKNOWN, Answer, Question, sentence


@dataclass(frozen=True, slots=True)
class Climate:
    """What a class of climates means for questions about the weather.

    Attributes:
        text: What is said of it.
        marks: Of hot, warm, cold, rainy, dry, humid, seasons, monsoon, tropical, temperate, mild.
        snow: ``yes``, ``rarely`` or ``no``; a city may know better.
    """

    text: str
    marks: frozenset[str]
    snow: str


def _climate(text: str, marks: str, snow: str) -> Climate:
    return Climate(text, frozenset(marks.split()), snow)


CLIMATE_FACTS: Mapping[str, Climate] = {
    "tropical_rainforest": _climate(
        "hot, humid and rainy all year round", "hot warm rainy humid tropical", "no"
    ),
    "tropical_monsoon": _climate(
        "hot all year round, with very heavy rain in one season",
        "hot warm rainy humid tropical monsoon seasons",
        "no",
    ),
    "tropical_savanna": _climate(
        "hot all year round, with a wet and a dry season", "hot warm humid tropical seasons", "no"
    ),
    "desert": _climate("dry and hot, with very little rain", "hot warm dry", "no"),
    "mild_desert": _climate("dry, mild and often foggy, with hardly any rain", "mild dry", "no"),
    "semi_arid": _climate("rather dry, with hot summers", "hot warm dry", "no"),
    "cold_semi_arid": _climate(
        "rather dry, with hot summers and cold winters", "hot cold dry seasons", "yes"
    ),
    "mediterranean": _climate(
        "mild and wet in winter, warm and dry in summer", "warm mild temperate seasons", "no"
    ),
    "humid_subtropical": _climate(
        "hot and humid in summer and mild to cool in winter",
        "hot warm humid rainy seasons temperate",
        "rarely",
    ),
    "oceanic": _climate(
        "mild, cool and often cloudy, with rain in all seasons",
        "mild rainy temperate humid seasons",
        "rarely",
    ),
    "continental": _climate(
        "warm in summer and cold in winter, with four clear seasons",
        "cold seasons temperate",
        "yes",
    ),
    "highland": _climate(
        "mild to cool all year round because of the height", "mild temperate", "no"
    ),
    "subpolar": _climate("cool in summer and cold in winter", "cold rainy", "yes"),
}
NO_LARGE = "No large one that I know of."
_SNOW = {
    "yes": "It snows there in winter.",
    "rarely": "It snows there only now and then.",
    "no": "It hardly ever snows there.",
}
_WEATHER = (
    ("monsoon", r"\bmonsoon"),
    ("tropical", r"\btropical"),
    ("temperate", r"\btemperate|\bmoderate"),
    ("humid", r"\bhumid"),
    ("dry", r"\bdry\b|\barid\b|\bdrought"),
    ("rainy", r"\brain|\bwet\b|\bdrizzl"),
    ("seasons", r"\bfour (?:distinct )?seasons|\bdistinct seasons"),
    ("mild", r"\bmild\b|\bpleasant"),
    ("cold", r"\bcold\b|\bfreez|\bharsh winter|\bchilly|\bbelow zero"),
    ("hot", r"\bhot\b|\bscorching"),
    ("warm", r"\bwarm\b|\bsunny|\bsunshine"),
)
_OPPOSITES: Mapping[str, frozenset[str]] = {
    "rainy": frozenset(("dry",)),
    "humid": frozenset(("dry",)),
    "dry": frozenset(("rainy", "humid")),
}
"""A mark is denied only where an opposite one is known, for marks that have one."""
_CLIMATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "mediterranean climate": ("mediterranean",),
    "oceanic": ("oceanic",),
    "maritime climate": ("oceanic",),
    "continental": ("continental",),
    "subtropical": ("humid_subtropical",),
    "desert climate": ("desert",),
    "semi arid": ("semi_arid", "cold_semi_arid"),
}


def _sea(q: Question) -> str | None:
    sea, tags = q.city.nature.get("sea", ""), q.city.tags
    if q.about_country() and not q.has(r"\bcity\b"):
        return None
    if q.has(r"\bbeach"):
        statement = "It has beaches." if "beach" in tags else "It is not known for beaches."
        if q.closed and "beach" not in tags:
            return statement
        return q.verdict(True, statement) if q.closed else statement
    if (
        q.has(r"\bports?\b|\bharbou?rs?\b|\bseaport")
        and q.closed
        and not q.named(load_lexicon().seas)
    ):
        return q.verdict("port" in tags, f"It is {'' if 'port' in tags else 'not '}a port.")
    statement = f"It lies on {_with_article(sea)}." if sea else "It does not lie on the sea."
    if sea and q.has(r"\b(?:north|south|east|west)\w* (?:coast|shore)"):
        return statement
    key = name_key(sea)
    own = {whole for part, whole in load_lexicon().sea_parts.items() if part in key}
    options = {name: name in key or name in own for name in q.named(load_lexicon().seas)}
    if "arabian gulf" in options:
        options["arabian gulf"] = "persian gulf" in key
    if sea and any(reveals(name, q.city) and not holds for name, holds in options.items()):
        # The data avoid such a name, so that they cannot deny it either.
        return UNKNOWN
    if reply := q.choose(options, statement):
        return reply
    if q.has(r"\binland\b|\blandlocked\b") and q.closed:
        if q.choice:
            return statement
        return q.verdict(not sea, statement)
    if q.has(r"\bwater\b|\bwaterfront\b") and not sea:
        return _water(q)
    return q.verdict(bool(sea), statement) if q.closed and not q.choice else statement


def _water(q: Question) -> str:
    parts = [q.city.nature[kind] for kind in ("river", "lake") if kind in q.city.nature]
    if not parts:
        return q.verdict(False) if q.closed else "It lies on no large body of water."
    return f"It lies on {_with_article(parts[0])}."


def _with_article(name: str) -> str:
    return name if re.match(r"(?:an?|the|one|several|some) ", name) else f"the {name}"


def _river(q: Question) -> str | None:
    return _nature(q, "river", "It lies on no large river.")


def _lake(q: Question) -> str | None:
    return _nature(q, "lake", "It lies on no large lake.")


def _nature(q: Question, kind: str, without: str) -> str | None:
    own = q.city.nature.get(kind, "")
    statement = sentence(_with_article(own)) if own else without
    if q.has(r"\btwo\b|\bbetween\b|\bconfluence\b"):
        return statement
    known = {
        name_key(word)
        for city in load_atlas().cities.values()
        for word in re.findall(r"\b[A-Z][\w'-]{3,}", city.nature.get(kind, ""))
    } - {"river", "lake", "some"}
    words = set(name_key(own).split())
    if reply := q.choose({name: name in words for name in q.named(known)}, statement):
        return reply
    if not q.closed:
        return statement
    return q.verdict(True, statement) if own else NO_LARGE


def _mountains(q: Question) -> str | None:
    own, height = q.city.nature.get("mountains", ""), q.city.elevation
    if q.has(r"\bvolcan"):
        near = "volcano" in q.city.tags
        if q.closed and not near:
            return "Not that I know of."
        return q.verdict(near, "There is a volcano." if near else "I know of no volcano.")
    statement = f"Nearby: {_plural(own)}." if own else "There are no large mountains nearby."
    options = {name: name.rstrip("s") in name_key(own) for name in q.named(load_lexicon().ranges)}
    if q.has(r"\brockies\b"):
        options["rockies"] = "rocky" in name_key(own)
    if reply := q.choose(options, statement):
        return reply
    if q.has(r"\belevation|\baltitude|\bsea level|\bhigh up\b|\bmetres\b|\bmeters\b|\bhow high\b"):
        return _altitude(q, height)
    if q.has(r"\bflat\b"):
        return None if own else q.verdict(True) if q.closed else statement
    if not q.closed:
        return statement
    return q.verdict(True, statement) if own else NO_LARGE


def _plural(name: str) -> str:
    if re.match(r"(?:an?|the|one|several|some|two|central|seven) ", name):
        return name
    return f"the {name}" if re.search(r"(?:s|Range)\b", name) else f"the heights of {name}"


def _altitude(q: Question, height: int) -> str | None:
    rounded = round(height, -1) if abs(height) < 1000 else round(height, -2)
    statement = f"It lies about {rounded} metres above the sea."
    if height < 20:
        statement = "It lies at about the level of the sea."
    if not q.closed:
        return statement
    bounds = [value for value, unit in numbers(q.text) if unit == "height"]
    below = q.has(r"\b(?:below|under|less|lower)\b")
    if bounds:
        return q.verdict(height < bounds[0] if below else height >= bounds[0], statement)
    if q.has(r"\b(?:low|below|at sea level)\b"):
        return q.verdict(height < 50 if not q.has(r"\bbelow\b") else height < 0, statement)
    return q.verdict(height >= 1000, statement)


def _desert(q: Question) -> str | None:
    dry = "desert" in q.city.tags or q.city.climate == "desert"
    return q.verdict(dry, f"It is {'' if dry else 'not '}in a desert.")


def _island(q: Question) -> str | None:
    if q.has(r"\bpeninsula\b|\bislands nearby\b"):
        return None
    if q.about_country() or q.has(r"\barchipelago\b"):
        return q.verdict("island" in q.city.country.tags)
    if "island" not in q.city.tags and "island" in q.city.country.tags:
        return "It lies in an island country."
    return q.verdict("island" in q.city.tags)


def _weather(q: Question) -> str | None:
    climate = CLIMATE_FACTS[q.city.climate]
    snow = q.city.snow or climate.snow
    if q.has(r"\bsnow|\bblizzard"):
        statement = _SNOW[snow]
        if not q.closed or snow == "rarely":
            return statement
        return q.verdict(snow == "yes", statement)
    statement = f"It is {climate.text}."
    if not q.closed:
        return f"{statement} {_SNOW[snow]}" if q.has(r"\bwinter") else statement
    if q.choice or q.has(r"\bhurricane|\btyphoon|\bcyclone|\btornado|\bearthquake"):
        return statement if q.choice else None
    named = q.named(_CLIMATE_NAMES)
    if named:
        return q.verdict(any(q.city.climate in _CLIMATE_NAMES[name] for name in named), statement)
    if q.city.climate == "highland" and q.has(r"\btropical\b"):
        # In the tropics by latitude, but not by temperature.
        return statement
    for mark, pattern in _WEATHER:
        if q.has(pattern):
            return _season(q, climate, mark, statement)
    return None


def _season(q: Question, climate: Climate, mark: str, statement: str) -> str:
    """Heat and cold depend on the part of the year that is asked about."""
    marks = climate.marks
    if mark in ("hot", "warm") and q.has(r"\bsummer"):
        return q.verdict(bool(marks & {"hot", "warm"}) or "cold" in marks, statement)
    if mark in ("cold", "mild") and q.has(r"\bwinter"):
        holds = ("cold" in marks) if mark == "cold" else bool(marks & {"mild", "warm"})
        return q.verdict(holds, statement)
    yearly = q.has(r"\byear|\balways|\ball the time|\bmost of\b|\bgenerally|\busually")
    if mark in ("hot", "warm") and "seasons" in marks and "tropical" not in marks and not yearly:
        # Hot in one season only: yes and no would both mislead.
        return statement
    if mark not in marks and not marks & _OPPOSITES.get(mark, marks):
        return statement
    return q.verdict(mark in marks, statement)


NATURE_TOPICS: Mapping[str, Answer] = {
    "climate": _weather,
    "mountains": _mountains,
    "river": _river,
    "lake": _lake,
    "sea": _sea,
    "desert": _desert,
    "island": _island,
}
"""By the name of their words in the lexicon; tried in this order."""
