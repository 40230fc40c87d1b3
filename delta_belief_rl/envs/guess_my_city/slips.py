"""The words that give a city of Guess My City away when a judge lets them slip."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from delta_belief_rl.envs.guess_my_city.data import JOINED, city_of, load_atlas, name_key
from delta_belief_rl.envs.guess_my_city.reading import WORD_NAMES, place_of
from delta_belief_rl.types import Task

_DERIVED = r"(?:n|an|ian|er|ese|ite|i)s?"
"""Endings that make a word for a city's people of its name."""


@dataclass(frozen=True, slots=True)
class SecretWords:
    """What must not be in a judge's text, as keys (``name_key``).

    Attributes:
        anywhere: In any case.
        capital: Names of at most three letters, and those that are words ("Nice"): with a capital
            letter, or in a text that has none at all.
        short_forms: As they stand, in capitals ("US").
        derived: Finds what is made of a name; None where no name allows it.
    """

    anywhere: frozenset[str]
    capital: frozenset[str]
    short_forms: frozenset[str]
    derived: re.Pattern[str] | None

    def holds(self, key: str, span: str, lower: bool) -> bool:
        """Whether a piece of a text is one of the words.

        Args:
            key: Of the piece.
            span: The piece itself.
            lower: The whole text is in small letters.
        """
        if key in self.anywhere or span.replace(".", "") in self.short_forms:
            return True
        if key in self.capital and (lower or not span[:1].islower()):
            return True
        return self.derived is not None and self.derived.fullmatch(key) is not None


def joins(key: str) -> bool:
    """Whether a piece of a text is a part of the world whose name contains a country's."""
    return JOINED.fullmatch(key) is not None


@lru_cache(maxsize=1 << 12)
def secret_words(secret: str, aliases: tuple[str, ...]) -> SecretWords:
    """The words of a task's secret, also of a city that the data lack."""
    place, atlas = place_of(Task("", "", secret, (), aliases=aliases)), load_atlas()
    land = atlas.country_keys.get(name_key(secret.rpartition(",")[2]), "")
    country, city = atlas.countries.get(land), city_of(secret)
    written = {part.strip() for part in re.split(r"[,()]", secret)} | {*aliases}
    if country:
        written |= {*country.names, *country.adjectives}
    if city:
        written |= {*city.names, *city.states}
    plain = {name.replace(".", "") for name in written}
    short = {name for name in plain if len(name) <= 3 and name.isascii() and name.isupper()}
    short |= {word for word in (city.hidden if city else ()) if word.isupper()}
    every = {name_key(name) for name in plain - short} | place.names | place.lands
    every |= {word for word in (city.hidden if city else ()) if not word.isupper()}
    every -= {name_key(name) for name in short} | {""}
    capital = {key for key in every if len(key) <= 3 or key in WORD_NAMES}
    stems = sorted(key for key in place.names - WORD_NAMES if len(key) > 3 and " " not in key)
    ends = rf"(?:{'|'.join(map(re.escape, stems))}){_DERIVED}"
    return SecretWords(
        anywhere=frozenset(every - capital),
        capital=frozenset(capital),
        short_forms=frozenset(short),
        derived=re.compile(ends) if stems else None,
    )
