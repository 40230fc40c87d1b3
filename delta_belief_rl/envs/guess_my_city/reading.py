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
        r" (?:think|guess|guessing|believe|say|suspect|bet|name|answer|submit|go with|going with)\b"
        r"(?: of)?(?: that)?",
        r"(?:my|the)(?: \w+){0,2} (?:guess|answer|bet)(?: is| would be| will be|:)",
        r"(?:(?:my|final|best) )*(?:guess|answer|bet) ?[:\-\u2013\u2014]",
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
_ENDINGS = re.compile(
    r"[\s,]+(?:is (?:my|the|our)(?: \w+)? (?:guess|answer|bet|pick|choice)|it is|it must be)$"
)
"""Behind the name: "Hamburg is my guess", "Hamburg it is"."""
_CONCLUDES = re.compile(
    r"^.*(?:[:\-\u2013\u2014]\s*(?=(?:so |then )?my\b)|,\s*)(?:so |then |thus |therefore |hence )?"
    r"(?=(?:my|our)(?: \w+)? (?:guess|answer|bet)(?: is| would be)\b|"
    r"i (?:think|guess|believe|say)\b|(?:is|could|might|must|would) it\b|"
    r"(?:it|the city|the answer)(?:'s| is| must be)\b)"
)
"""Reasons before a guess in one sentence: "Given the harbour, my guess is Hamburg"."""
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
_SAYS = frozenset(
    (
        *("is", "are", "was", "were", "be", "been", "has", "have", "had", "lies", "lie", "sits"),
        *("it", "its", "there", "they", "you", "your", "i", "im", "we", "my", "that", "this"),
        *("these", "those", "what", "who", "with", "for", "not", "no", "yes", "does"),
        *("did", "so", "because", "since", "given", "but", "if", "seems", "sounds", "looks"),
        *("think", "thought", "know", "would", "could", "should", "must", "may", "might"),
    )
)
"""Words that no name holds: a sentence with one of them says something."""
_POLITE = frozenset(
    (
        *("thanks", "thank", "you", "great", "good", "ok", "okay", "fine", "sure", "cool", "wow"),
        *("interesting", "perfect", "excellent", "hmm", "hm", "ah", "oh", "well", "aha"),
        *("alright", "hello", "hi", "got", "it", "i", "see", "understood", "yes", "no", "very"),
        *("much", "so", "nice", "right"),
    )
)
"""Words of a remark that is neither a name nor a statement."""
MAX_NAME_CHARACTERS = 60
"""Longer than a name with its country."""
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
    alone = sum(right) == 1 and len(guesses) <= 1 and not others and not alternatives
    bare = [bool(name) or _is_bare(part) for part, name in zip(parts, named, strict=True)]
    is_list = sum(bare) > 1 or alternatives or several
    at = _guess_at(parts, named)
    alone = alone and right[at] and not any(bare[:at] + bare[at + 1 :])
    return CityReading(
        exact=exact_word(action, task_secret),
        bets=re.search(r"\bor\b", action.lower()) is not None,
        questions=action.count("?"),
        guess=guesses[0] if guesses else "",
        is_list=is_list,
        strict=alone and action.count("?") <= 1,
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
    if not key or len(key) > MAX_NAME_CHARACTERS or key in WORD_NAMES:
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


@lru_cache(maxsize=1 << 14)
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
    if len(key) > MAX_NAME_CHARACTERS:
        return False
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


def names_elsewhere(action: str, place: Place) -> bool:
    """Whether a sentence gives the place's name to another country, as "Paris, Texas" does."""
    lands = _all_lands() - place.lands
    keys = [_city_name(_rest(part)[0]) for part in sentences(action)]
    return any(
        key.startswith(f"{name} ") and _only_lands(key[len(name) + 1 :], lands)
        for key in keys
        for name in place.names
    )


def _guess_at(parts: list[str], named: list[str]) -> int:
    """The number of the one sentence that may win.

    It is chosen without a look at the secret, so that of a list at most one entry counts: the last
    sentence that guesses a city, else the last that might, those with an opening first.
    """
    open_names, names = list[int](), list[int]()
    for number, part in enumerate(parts):
        rest, opened = _rest(part)
        if _might_name(rest):
            names.append(number)
            if opened:
                open_names.append(number)
    guessed = [number for number, name in enumerate(named) if name]
    return max(guessed or open_names or names, default=len(parts) - 1)


def _might_name(text: str) -> bool:
    """Whether a text may be a name, with or without its country."""
    key = _city_name(text).replace("which is ", "")
    return bool(key) and not _NO_NAME.match(key) and not set(key.split()) & _SAYS


def _is_bare(sentence: str) -> bool:
    """Whether a sentence is hardly more than a name, or a name with a country."""
    if set(name_key(sentence).split()) <= _POLITE:
        return False
    if len(sentence.split()) < 3:
        return True
    rest, opened = _rest(sentence)
    key = _city_name(rest)
    if not _might_name(rest) or len(key) > MAX_NAME_CHARACTERS or _is_kind(key):
        return False
    told = name_key(strip_fillers(normalise(sentence)))
    closed = not opened and told != name_key(rest)
    if len(key.split()) < 3 and (closed or re.search(r"\b(?:guess|bet|answer)\b", told)):
        # "Surat it is", "my guess is Surat".
        return True
    cuts = (_cut(key, size) for size in range(1, min(6, len(key.split()))))
    return any(_only_lands(tail, _all_lands()) for _, tail in cuts) and not _is_land(key)


def _is_part(city: City, place: Place) -> bool:
    """Whether a name of the place contains one of the city, as "Santiago de Cuba" does."""
    keys = [name_key(name) for name in city.names]
    return any(f" {key} " in f" {name} " for key in keys for name in place.names)


def _rest(sentence: str) -> tuple[str, bool]:
    """What is left of a sentence behind the opening of a guess, and whether it has one."""
    text = _CONCLUDES.sub("", strip_fillers(normalise(sentence)))
    opened = False
    for _ in range(3):
        match = next((found for opener in _OPENERS if (found := opener.match(text))), None)
        if match is None:
            break
        text, opened = text[match.end() :], True
    text = _ENDINGS.sub("", text)
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
    return _only_lands(key, _all_lands())


@lru_cache(maxsize=1)
def _all_lands() -> frozenset[str]:
    atlas = load_atlas()
    return frozenset(atlas.country_keys.keys() | atlas.state_keys.keys())


def _only_lands(text: str, lands: frozenset[str]) -> bool:
    """Whether a text consists of countries and states, each once, and the words between them."""
    found = set[str]()
    while text:
        land = max(
            (name for name in lands if text == name or text.startswith(f"{name} ")),
            key=len,
            default="",
        )
        if land in found:
            return False
        if land:
            text = text[len(land) :].strip()
            found.add(land)
        elif match := _BETWEEN.match(text):
            text = text[match.end() :].strip()
        else:
            return False
    return bool(found)


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
