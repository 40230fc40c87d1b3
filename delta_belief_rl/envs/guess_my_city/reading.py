"""What code alone reads out of an action of Guess My City: guesses, lists, and the two win rules.

*Strict* is our rule: the action guesses one city, and it is the right one. The country may follow
the name, and has to be right where it does; the country alone is no guess, and a question that only
mentions the city ("Is it near Paris?") is none either.

*Exact* is a check of the published experiments: one word of "City, Country" is one word of the
action. It confirms a judge's win, also for the country alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from delta_belief_rl.envs.answers import normalise, strip_fillers
from delta_belief_rl.envs.guess_my_city.data import City, city_of, load_atlas, name_key
from delta_belief_rl.types import Task

METHODS = ("exact", "multiple_bets", "multiple_questions")
"""The published rules (``multi_turn.verify_judge.methods``)."""

_THING = (
    r"(?:it|this|that|the answer|"
    r"(?:the|your|this|that|my|our)(?: (?:hidden|secret|home|mystery|target|other player's))*"
    r" (?:city|town|hometown|home|place|location|answer|metropolis))"
)
_HEDGE = (
    r"(?:(?:probably|perhaps|maybe|possibly|actually|definitely|certainly|likely|really|indeed|"
    r"simply|just|in fact|by any chance|then|called|named|known as|the city of|the city|"
    r"the capital|beautiful|that|be|now)\b[ ,:]*)"
)
_OPENERS = tuple(
    re.compile(rf"(?:{opener})[ ,:\-]*{_HEDGE}*")
    for opener in (
        rf"(?:is|could|can|might|may|would|must|isn't|was|will)(?: be)? {_THING}\b(?: be\b)?",
        rf"{_THING}(?:'s| is| (?:must|could|might|may|should|would|has to) be)\b",
        r"(?:i|we)(?:'m|'d|'ll| am| would| will| want to| can)?(?: like to| going to)?"
        r"(?: now| confidently| really| strongly| make the| make a| take a| make my)*"
        r" (?:think|guess|guessing|believe|say|suspect|bet|name|answer|submit)\b(?: of)?(?: that)?",
        r"(?:my|the)(?: \w+){0,2} (?:guess|answer|bet)(?: is| would be| will be|:)",
        r"(?:final |my )?(?:guess|answer) ?:",
        r"(?:are|do) you (?:from|live in|living in|come from|based in|thinking of|referring to)\b",
        r"are we (?:talking about|in|speaking of)\b",
        r"(?:did|were) you (?:grow up in|born in|raised in|born and raised in)\b",
        r"(?:is|are) (?:we|you) (?:talking about|thinking of|in)\b",
        r"how about\b|what about\b|let me guess\b",
    )
)
_CLOSERS = re.compile(
    r"[\s,]+(?:right|correct|yes|am i right|is that (?:right|correct|it)|isn't it|please|"
    r"by any chance|perhaps|maybe|then|i think|i guess|i believe|my friend|final answer)$"
)
_BETWEEN = re.compile(
    r"^(?:in|the|of|capital|city|country|located|which is|state|province|region|and)\b ?"
)
_STOPS = re.compile(r"(?<=[.!?;\n])\s*|\n+")
_INITIALS = re.compile(r"\b([A-Za-z])\.(?=[A-Za-z]\b|\s|,|\?|$)")
_ABBREVIATED = re.compile(r"\b(St|Ste|Mt|Ft)\.\s", re.IGNORECASE)
WORD_NAMES = frozenset({"nice", "cork", "male", "split", "bath", "reading", "mobile", "orange"})
"""Names that are English words as well: a guess in small letters and without a country is none."""
_NO_NAME = re.compile(
    r"^(?:an?|the|in|on|at|near|by|close|known|famous|located|situated|part|one|home|very|more|less|"
    r"larger|bigger|smaller|not|any|there|within|around|between|considered|mostly|mainly|over|of)\b"
)
_KIND = re.compile(
    r"(?:europe|asia|africa|america|oceania|scandinavia|mediterrane|atlantic|pacific|baltic|"
    r"caribbean|latin|arab|slav|nordic|christ|catholic|orthodox|protestant|muslim|islam|buddh|"
    r"hindu|jew|unesco|eu|nato|olympic|english|north|south|east|west|central)\w*\b"
)
"""Beginnings of what is written with a capital letter and is no city."""
_LIST = re.compile(r"\b(?:or|versus|vs|either|neither|nor)\b|/|;|\||\u3001|\u060c", re.IGNORECASE)


_COMPARES = re.compile(
    r"\b(?:than|between|near|far|close|closer|nearer|from|like)\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Place:
    """Names under which the secret counts as named, as keys (``name_key``)."""

    names: frozenset[str]
    lands: frozenset[str]
    """Countries and states that may follow the name."""


@dataclass(frozen=True, slots=True)
class CityReading:
    """What code finds out about an action.

    Attributes:
        exact: One word of the secret is in the action.
        bets: The whole word "or" stands in it.
        questions: Its question marks.
        guess: Key of the name that it guesses; empty for no guess.
        is_list: It names several cities, or offers alternatives to a guess.
        strict: It guesses the secret alone.
    """

    exact: bool
    bets: bool
    questions: int
    guess: str
    is_list: bool
    strict: bool


@lru_cache(maxsize=1 << 16)
def read_action(action: str, task_secret: str, aliases: tuple[str, ...]) -> CityReading:
    """Read an action; a group's games ask the same things all the time."""
    parts = list(sentences(action))
    named = [guessed_name(part) for part in parts]
    guesses = [name for name in named if name]
    place = _place(task_secret, aliases)
    right = [_names_place(part, place) for part in parts]
    named_cities = mentions(action)
    secret = city_of(task_secret)
    others = [city for city in named_cities if city != secret and not _is_part(city, place)]
    compares = _COMPARES.search(action) is not None
    alternatives = bool(_LIST.search(action) and (guesses or (named_cities and not compares)))
    several = len(named_cities) > 1 and not compares
    is_list = len(guesses) > 1 or alternatives or several
    alone = sum(right) == 1 and len(guesses) <= 1 and not others and not alternatives
    bare = any(len(part.split()) < 3 for part, hit in zip(parts, right, strict=True) if not hit)
    return CityReading(
        exact=exact_word(action, task_secret),
        bets=re.search(r"\bor\b", action.lower()) is not None,
        questions=action.count("?"),
        guess=guesses[0] if guesses else "",
        is_list=is_list,
        strict=alone and not bare and action.count("?") <= 1,
    )


def exact_word(action: str, secret: str) -> bool:
    """The published check: one word of the secret is a word of the action.

    Commas and brackets are dropped, accents stripped, words with hyphens also split.

    Example:
        >>> exact_word("Is the city in France?", "Paris, France")
        True
    """
    return bool(_exact_words(action) & _exact_words(secret))


def place_of(task: Task) -> Place:
    """The names of a task's secret, ``"City (Other Name), Country"``, and of its country."""
    return _place(task.secret, task.aliases)


@lru_cache(maxsize=1 << 12)
def _place(secret: str, aliases: tuple[str, ...]) -> Place:
    atlas = load_atlas()
    name, _, country = secret.rpartition(",")
    if not name:
        name, country = secret, ""
    inner = re.findall(r"\((.*?)\)", name)
    names = {name_key(part) for part in (re.sub(r"\(.*?\)", " ", name), *inner, *aliases)}
    lands = {name_key(country)}
    land = atlas.country_keys.get(name_key(country))
    if land is not None and land in atlas.countries:
        lands |= {name_key(other) for other in atlas.countries[land].names}
    if city := city_of(secret):
        names |= {name_key(other) for other in city.names}
        lands |= {name_key(state) for state in city.states}
    if land == "Philippines":
        # There a city's name is hardly ever used with the word.
        names |= {key.removesuffix(" city") for key in names}
    return Place(frozenset(names - {""}), frozenset(lands - {""}))


def sentences(action: str) -> Iterator[str]:
    """The parts of an action between full stops, question marks and line ends."""
    text = _ABBREVIATED.sub(lambda match: f"{match[1]} ", action)
    text = _INITIALS.sub(r"\1", text)
    for part in _STOPS.split(text):
        if part and normalise(part):
            yield part.strip()


def guessed_name(sentence: str) -> str:
    """Key of what a sentence guesses, the main name of a city of the atlas; empty for no guess.

    With an opening such as "is it" a guess is a name that the atlas knows or that is written in
    capitals; without one only a name, or a name with its country, that the atlas knows.
    """
    rest, opened = _rest(sentence)
    atlas = load_atlas()
    key = _city_name(rest)
    if not key or len(key) > 60 or key in WORD_NAMES:
        return key if key in atlas.city_keys and opened and _is_capital(sentence, key) else ""
    for size in range(min(5, len(key.split())), 0, -1):
        head, tail = _cut(key, size)
        city = atlas.city_keys.get(head)
        # "Paris, Texas" is not the city that the atlas knows.
        if city and (not tail or _only_lands(tail, _place(city.secret, ()).lands)):
            return name_key(city.name)
    unknown = opened and not _NO_NAME.match(rest) and not _is_land(key)
    if unknown and len(key.split()) <= 6 and not _is_kind(key):
        first = key.split()[0]
        # "Is it BIG?" guesses nothing.
        return key if _is_capital(sentence, first) and first.upper() not in sentence else ""
    return ""


def mentions(action: str) -> tuple[City, ...]:
    """Cities of the atlas whose name stands anywhere in an action."""
    atlas = load_atlas()
    words = name_key(action).split()
    found: dict[str, City] = {}
    at = 0
    while at < len(words):
        for size in range(min(5, len(words) - at), 0, -1):
            key = " ".join(words[at : at + size])
            city = atlas.city_keys.get(key)
            plain = size == 1 and (len(key) <= 4 or key in WORD_NAMES)
            if city and not (plain and not _is_capital(action, key)):
                # "Singapore" or "Mexico City, Mexico" names one thing.
                found[city.name] = city
                at += size
                break
        else:
            at += 1
    return tuple(found.values())


def _names_place(sentence: str, place: Place) -> bool:
    """Whether a sentence guesses the place, alone."""
    rest, opened = _rest(sentence)
    key = _city_name(rest)
    for name in place.names:
        if key != name and not key.startswith(f"{name} "):
            continue
        tail = key[len(name) :].strip()
        landed = bool(tail) and _only_lands(tail, place.lands)
        if tail and not landed:
            continue
        if name in WORD_NAMES and not landed and not (opened and _is_capital(sentence, name)):
            continue
        return True
    return False


def _is_part(city: City, place: Place) -> bool:
    """Whether a name of the place contains one of the city, as "Santiago de Cuba" does."""
    keys = [name_key(name) for name in city.names]
    return any(f" {key} " in f" {name} " for key in keys for name in place.names)


def _rest(sentence: str) -> tuple[str, bool]:
    """What is left of a sentence behind the opening of a guess, and whether it has one."""
    text = strip_fillers(normalise(sentence))
    opened = False
    for _ in range(3):
        match = next((found for opener in _OPENERS if (found := opener.match(text))), None)
        if match is None:
            break
        text, opened = text[match.end() :], True
    while (match := _CLOSERS.search(text)) and match.start() > 0:
        text = text[: match.start()]
    return text.strip(" '\"*_`.,:;!?()"), opened


def _city_name(text: str) -> str:
    """The key of a name without "the city of" before it or "city" behind it."""
    atlas = load_atlas()
    key = name_key(text)
    key = re.sub(r"^(?:the )?(?:capital )?city of (?=\w)", "", key)
    if key not in atlas.city_keys and key.endswith(" city") and key[:-5] in atlas.city_keys:
        return key[:-5]
    return key


def _cut(key: str, size: int) -> tuple[str, str]:
    words = key.split()
    return " ".join(words[:size]), " ".join(words[size:])


def _is_land(key: str) -> bool:
    atlas = load_atlas()
    return _only_lands(key, frozenset(atlas.country_keys.keys() | atlas.state_keys.keys()))


def _only_lands(text: str, lands: frozenset[str]) -> bool:
    """Whether a text consists of countries and states and the words between them."""
    found = False
    while text:
        land = max(
            (name for name in lands if text == name or text.startswith(f"{name} ")),
            key=len,
            default="",
        )
        if land:
            text, found = text[len(land) :].strip(), True
        elif match := _BETWEEN.match(text):
            text = text[match.end() :].strip()
        else:
            return False
    return found


def _is_kind(key: str) -> bool:
    """Whether a text says what the city is like: "Mediterranean", "Spanish-speaking"."""
    return key.split()[0] in _kinds() or _KIND.match(key) is not None


@lru_cache(maxsize=1)
def _kinds() -> frozenset[str]:
    atlas = load_atlas()
    parts = {part for country in atlas.countries.values() for part in country.regions}
    words = {word for part in parts for word in name_key(part).split()}
    return frozenset(words | {name_key(name) for name in atlas.languages}).union(
        atlas.adjective_keys
    )


def _is_capital(text: str, key: str) -> bool:
    """Whether a word with this key stands in the text with a capital letter, or has no case."""
    words = re.split(r"[\s,;:()?!\"/]+", text)
    return any(
        name_key(word).startswith(key.split()[0]) and not word.strip("'*_.")[:1].islower()
        for word in words
        if word
    )


@lru_cache(maxsize=1 << 14)
def _exact_words(text: str) -> frozenset[str]:
    spread = unicodedata.normalize("NFKD", text.lower())
    plain = "".join(mark for mark in spread if not unicodedata.combining(mark))
    words = re.sub(r"[^\w\s-]", " ", plain).split()
    return frozenset(words) | {part for word in words for part in word.split("-") if part}
