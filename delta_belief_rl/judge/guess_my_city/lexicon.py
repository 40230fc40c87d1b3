"""Words that the rule judge of Guess My City understands; they stand in a packaged file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

from delta_belief_rl.envs.guess_my_city.data import load_atlas, name_key, read_file
from delta_belief_rl.types import UserError

SECTIONS = (
    *("topics", "fields", "general", "refused", "aliases", "seas", "sea_parts", "ranges"),
    *("stop", "same", "everywhere"),
)


@dataclass(frozen=True)
class Lexicon:
    """What the file holds; its head explains the sections."""

    topics: Mapping[str, re.Pattern[str]]
    fields: Mapping[str, re.Pattern[str]]
    general: re.Pattern[str]
    refused: re.Pattern[str]
    aliases: Mapping[str, Mapping[str, Any]]
    seas: tuple[str, ...]
    sea_parts: Mapping[str, str]
    ranges: tuple[str, ...]
    stop: frozenset[str]
    same: Mapping[str, tuple[str, ...]]
    everywhere: frozenset[str]

    @cached_property
    def regions(self) -> Mapping[str, tuple[str, ...]]:
        """Key of a part of a continent, or of what belongs to it, to its names in the data."""
        every = {part for country in load_atlas().countries.values() for part in country.regions}
        named = {name_key(region): (region,) for region in every}
        return {**named, **{key: tuple(names) for key, names in self.aliases["regions"].items()}}


@lru_cache(maxsize=1)
def load_lexicon() -> Lexicon:
    """The packaged words.

    Raises:
        UserError: The file is missing or wrong.
    """
    read = read_file("lexicon")
    for section in SECTIONS:
        if section not in read:
            raise UserError(f"The file guess_my_city_lexicon.yaml has no {section!r}: restore it.")
    try:
        return Lexicon(
            topics={name: _pattern(words) for name, words in read["topics"].items()},
            fields={name: _pattern(words) for name, words in read["fields"].items()},
            general=_pattern(read["general"]),
            refused=re.compile("|".join(read["refused"])),
            aliases=cast("Mapping[str, Mapping[str, Any]]", read["aliases"]),
            seas=tuple(read["seas"]),
            sea_parts=dict(read["sea_parts"]),
            ranges=tuple(read["ranges"]),
            stop=frozenset(read["stop"].split()),
            same={word: tuple(others) for word, others in read["same"].items()},
            everywhere=frozenset(read["everywhere"]),
        )
    except (AttributeError, TypeError, re.error) as error:
        raise UserError(
            f"The file guess_my_city_lexicon.yaml is wrong ({error}): restore it."
        ) from error


def _pattern(words: list[str]) -> re.Pattern[str]:
    """Finds any of some words; "*" stands for the rest of one."""
    parts = (re.escape(word).replace(r"\*", r"\w*").replace(r"\ ", " ") for word in words)
    return re.compile(rf"\b(?:{'|'.join(parts)})\b")
