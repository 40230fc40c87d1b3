"""Phrases in free text: one spelling for many, negations, amounts.

Everything is compared in plain form: lower case, no accents, hyphens as spaces, singulars, number
words as digits, ``$40`` as ``40 dollar``; punctuation stands as words of its own, so that a phrase
never crosses it and a negation ends there.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_UNITS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBERS = {
    **{word: number for number, word in enumerate(_UNITS) if word},
    **{word: number for number, word in enumerate(_TEENS, start=10)},
    **{word: 10 * number for number, word in enumerate(_TENS, start=2)},
}
_SAME = {
    **dict.fromkeys(("min", "mins", "minutes"), "minute"),
    **dict.fromkeys(("h", "hr", "hrs", "hours"), "hour"),
    **dict.fromkeys(("usd", "buck", "bucks", "dollars"), "dollar"),
    **dict.fromkeys(("eur", "euros"), "euro"),
    **dict.fromkeys(("gbp", "quid", "pounds"), "pound"),
    **dict.fromkeys(("kilometre", "kilometer", "kilometres", "kilometers", "kms"), "km"),
    **dict.fromkeys(("grams", "gram", "gramme", "grammes"), "g"),
}
_CURRENCIES = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound"}
_MONEY = re.compile(r"([$\u20ac\u00a3])\s*(\d+(?:,\d{3})*(?:\.\d+)?)")
_MONEY_BEHIND = re.compile(r"(\d)\s*([$\u20ac\u00a3])")
_GLUED = re.compile(
    r"(?<=\d)(?=(?:mins?|minutes?|hrs?|hours?|h|km|kg|g|m|cm|ml|am|pm|eur|usd|kcal)\b)"
)
_TOKEN = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:\.\d+)?|[^\W\d_]+\d*|[.,;:!?()|]|\n")
_APOSTROPHE = re.compile("['\u2018\u2019\u02bc\u00b4`]")
_STEM = "qqq"
"""Stands for the star of a phrase while the phrase is brought to plain form."""
_STOPS = frozenset(".;:!?()|")
_PAIRS = (
    ("half an hour", "30 minute"),
    ("half hour", "30 minute"),
    ("quarter of an hour", "15 minute"),
    ("an hour", "1 hour"),
)

_NOT = frozenset(
    (
        *("no", "not", "without", "never", "non", "nor", "neither", "nobody", "nothing", "none"),
        *("avoid", "avoiding", "avoided", "skip", "skipping", "omit", "omitting", "exclude"),
        *("excluding", "remove", "replace", "replacing", "ban", "forbid", "forbidden", "minus"),
        *("zero", "lack", "unlike", "cannot", "cant", "dont", "doesnt", "isnt", "arent", "wont"),
        *("shouldnt", "neednt", "hate", "hating", "dislike", "allergic", "allergy"),
    )
)
_NOT_TOGETHER = frozenset(
    (("free", "of"), ("free", "from"), ("instead", "of"), ("rather", "than"), ("leave", "out"))
) | frozenset((("leaving", "out"), ("left", "out"), ("stay", "away"), ("keep", "away")))
"""Negations of two words."""
_NOT_AFTER_ALL = frozenset(("only", "forget", "just"))
"""Words that undo the negation in front of them: not only, do not forget."""
_REACH = 6
"""Words over which a negation carries, lists included: no chicken, beef or fish."""
_ENDS = frozenset(("but", "with", "use", "using", "add", "adding", "serve", "then", "plus", "try"))
"""Words behind which a negation no longer holds, like the punctuation in ``_STOPS``."""
_INSTEAD_OF_IT = frozenset(
    (
        *("vegan", "vegetarian", "veggie", "plant", "coconut", "oat", "soy", "soya", "almond"),
        *("cashew", "peanut", "rice", "corn", "chickpea", "lentil", "buckwheat", "free", "mock"),
        "meatless",
    )
)
"""``oat milk`` is no milk, ``gluten-free flour`` no flour."""


@lru_cache(maxsize=4096)
def plain(text: str) -> str:
    """The plain form, words separated by single spaces.

    Example:
        >>> plain("Half-hour meals: $1,200 for six!")
        '30 minute meal : 1200 dollar for 6 !'
    """
    bare = "".join(
        character
        for character in unicodedata.normalize("NFKD", text.casefold())
        if not unicodedata.combining(character) and unicodedata.category(character) != "Cf"
    )
    bare = _APOSTROPHE.sub("", bare).replace("&", " and ")
    bare = _MONEY.sub(lambda match: f"{match[2]} {_CURRENCIES[match[1]]}", bare)
    bare = _MONEY_BEHIND.sub(lambda match: f"{match[1]} {_CURRENCIES[match[2]]}", bare)
    tokens = [_word(token) for token in _TOKEN.findall(_GLUED.sub(" ", bare))]
    joined = f" {' '.join(tokens)} "
    for long, short in _PAIRS:
        joined = joined.replace(f" {long} ", f" {short} ")
    return " ".join(joined.split())


def _word(token: str) -> str:
    """One token of the plain form."""
    if token == "\n":
        return "|"
    if token[0].isdigit():
        return token.replace(",", "")
    if token in _NUMBERS:
        return str(_NUMBERS[token])
    return _SAME.get(token) or _singular(token)


def _singular(word: str) -> str:
    """The word without a plural ending; words of three letters stay."""
    if len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    if word.endswith(("ches", "shes", "xes", "sses", "zes", "oes")):
        return word[:-2]
    return word[:-1]


@lru_cache(maxsize=1 << 14)
def _pattern(phrase: str) -> tuple[str, re.Pattern[str]]:
    """How a phrase begins, up to its first star, and the pattern that finds it."""
    words = plain(phrase.replace("*", _STEM))
    pattern = re.escape(words).replace(_STEM, r"\w*").replace(r"\ ", " ")
    return words.split(_STEM)[0], re.compile(rf"(?<!\S){pattern}(?!\S)")


def places(phrase: str, text: str) -> list[tuple[int, int]]:
    """Where a phrase stands in a text of plain form, as character ranges."""
    beginning, pattern = _pattern(phrase)
    # Nearly every phrase is absent, which the substring tells much faster than the pattern.
    return [match.span() for match in pattern.finditer(text)] if beginning in text else []


def is_negated(text: str, start: int, end: int, reach: int = _REACH) -> bool:
    """Whether the words at a range are named in order to leave them out.

    Args:
        text: In plain form.
        start: First character of the range.
        end: Behind its last character.
        reach: Words in front of the range that are looked at.

    Example:
        >>> text = plain("No onions, garlic or mushrooms.")
        >>> is_negated(text, *places("mushroom", text)[0])
        True
    """
    if text[end:].split(maxsplit=1)[:1] == ["free"]:
        return True
    before = text[:start].split()
    for position in range(len(before) - 1, max(-1, len(before) - 1 - reach), -1):
        word = before[position]
        if word in _STOPS or word in _ENDS:
            return False
        behind = before[position + 1] if position + 1 < len(before) else ""
        if (word in _NOT and behind not in _NOT_AFTER_ALL) or (word, behind) in _NOT_TOGETHER:
            return True
    return False


def names(phrase: str, text: str) -> bool:
    """Whether a text of plain form has the phrase, not right behind a negation."""
    own = not _NOT.isdisjoint(plain(phrase).split())
    return any(own or not is_negated(text, *place, reach=2) for place in places(phrase, text))


def leaves_out(phrase: str, text: str) -> bool:
    """Whether a text of plain form names the phrase in order to leave it out."""
    return any(is_negated(text, *place) for place in places(phrase, text))


def uses(phrase: str, text: str) -> bool:
    """Whether a text of plain form has the phrase itself: not left out, and no substitute of it."""
    return any(
        not is_negated(text, *place) and not _is_substitute(text, place[0])
        for place in places(phrase, text)
    )


def _is_substitute(text: str, start: int) -> bool:
    nearest: list[str] = []
    for word in reversed(text[:start].split()[-3:]):
        if word in _STOPS or word in _ENDS or word in (",", "or", "and"):
            break
        nearest.append(word)
    return not _INSTEAD_OF_IT.isdisjoint(nearest)


@lru_cache(maxsize=256)
def _amount_pattern(unit: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\S)(\d+(?:\.\d+)?) (?:of )?{re.escape(unit)}(?!\S)")


def amounts(unit: str, text: str) -> list[float]:
    """Every amount of a unit that a text of plain form gives.

    Example:
        >>> amounts("minute", plain("25 minutes, or half an hour"))
        [25.0, 30.0]
    """
    return [float(match[1]) for match in _amount_pattern(unit).finditer(text)]
