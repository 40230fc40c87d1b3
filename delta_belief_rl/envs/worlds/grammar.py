"""Parser of the embedded world's questions: a property, a direct guess, a list, or neither.

Understanding is exact. A question is rewritten into canonical forms (see ``phrases``) and looked up
in a table made from the world's own phrasings; there is no fuzzy matching. What is not understood
is ``invalid`` and never answered as another question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.worlds.phrases import loose, plain, rephrasings, spell
from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.types import UserError, Verdict

Kind = Literal["property", "guess", "list", "invalid"]

_GUESS = re.compile(
    r"^(?:is|could|can|might|may) it (?:be )?(?:it )?"
    r"(?:(?:just|simply|maybe|perhaps|possibly|actually|really|in fact|by any chance) )*"
    r"(?P<mark>(?:(?:something |a thing )?(?:called|named|known as) )?"
    r"(?:(?:an?|the|some) )?['\"]? ?)"
    r"(?P<name>.+)$"
)
_SEPARATOR = re.compile(
    r"[,;:/|&?!.]|\b(?:or|and|either|versus|vs|plus)\b|(?<=\w)\s+(?=is it\b)", re.IGNORECASE
)
_OPENING = re.compile(
    r"^(?:.*\b)?(?:is|could|can|might|may) it (?:be )?(?:called |named )?|"
    r"^.*\bit (?:is|could be|might be) "
)
_ARTICLE = re.compile(r"^(?:an?|the|some) ")
_CACHED_TEXTS = 20_000
_NEGATION = re.compile(r"\b(?:not|never|neither|nor|no|without|nothing)\b")


@dataclass(frozen=True, slots=True)
class ParsedQuestion:
    """What a question asks.

    Attributes:
        kind: ``property``: asks for one property. ``guess``: names one thing, directly. ``list``:
            offers several candidates. ``invalid``: anything else.
        property_key: The property asked for, for ``property`` only.
        thing: The canonical name of the thing guessed, for ``guess`` only.
        mentions: Canonical names of all things whose name or alias stands in the text, in order.
        reason: Why the question is a ``list`` or ``invalid``.
    """

    kind: Kind
    property_key: str | None = None
    thing: str | None = None
    mentions: tuple[str, ...] = ()
    reason: str = ""

    @property
    def action_key(self) -> str:
        """Equal for questions that ask the same, in whatever words."""
        if self.kind == "property":
            return f"property:{self.property_key}"
        if self.kind == "guess":
            return f"guess:{self.thing}"
        return self.kind


class Grammar:
    """The phrase tables of one world; built once and shared by all games.

    Raises:
        UserError: Where two properties share a phrasing, two things share a name, or a thing cannot
            be guessed because its name with an article reads as a property's phrasing.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._plain: dict[str, str] = {}
        self._loose: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._read_properties()
        self._read_things()
        self._longest = max(len(name.split()) for name in self._names)
        self._parsed: dict[str, ParsedQuestion] = {}

    def parse(self, text: str) -> ParsedQuestion:
        """Read one question. Any text is accepted; the worst result is ``invalid``."""
        parsed = self._parsed.get(text)
        if parsed is None:
            # Small agents ask the same few hundred questions over and over.
            if len(self._parsed) >= _CACHED_TEXTS:
                self._parsed.clear()
            parsed = self._parsed[text] = self._parse(text)
        return parsed

    def _parse(self, text: str) -> ParsedQuestion:
        question = plain(text)
        mentions = self._mentions(question)
        if not question:
            return ParsedQuestion("invalid", reason="empty")
        found = self._lookup(question)
        if found is None:
            found = self._agreed(rephrasings(question))
        if found is not None:
            kind, value = found
            if kind == "property":
                return ParsedQuestion("property", property_key=value, mentions=mentions)
            return ParsedQuestion("guess", thing=value, mentions=mentions)
        if self._is_list(question, mentions):
            return ParsedQuestion("list", mentions=mentions, reason="several candidates")
        return ParsedQuestion("invalid", mentions=mentions, reason=_reason(question, mentions))

    def thing_of(self, name: str) -> str | None:
        """The canonical name of a thing given by name or alias in any spelling, or None."""
        return self._names.get(_name_key(name))

    def _read_properties(self) -> None:
        unclear: set[str] = set()
        for prop in self.world.properties:
            for phrasing in prop.phrasings:
                key = plain(phrasing)
                if self._plain.setdefault(key, prop.key) != prop.key:
                    raise UserError(
                        f"The phrasing {phrasing!r} of the world {self.world.name!r} stands for "
                        f"both {self._plain[key]!r} and {prop.key!r}: remove it from one of them."
                    )
                wide = loose(key)
                if self._loose.setdefault(wide, prop.key) != prop.key:
                    unclear.add(wide)
        for wide in unclear:
            del self._loose[wide]

    def _read_things(self) -> None:
        for thing in self.world.things:
            for name in (thing.name, *thing.aliases):
                key = _name_key(name)
                if not key or self._names.setdefault(key, thing.name) != thing.name:
                    raise UserError(
                        f"The name {name!r} of {thing.name!r} in the world {self.world.name!r} is "
                        "empty or belongs to another thing too: choose another."
                    )
                forms = (f"is it {article} {key}" for article in ("a", "an", "the"))
                if clash := next((form for form in forms if form in self._plain), None):
                    raise UserError(
                        f"The thing {thing.name!r} of the world {self.world.name!r} cannot be "
                        f"guessed: {clash!r} asks for the property {self._plain[clash]!r}."
                    )

    def _lookup(self, question: str) -> tuple[Literal["property", "guess"], str] | None:
        """Read a direct question; a name with article or quotes precedes a loose form."""
        if key := self._plain.get(question):
            return "property", key
        match = _GUESS.match(question)
        thing = self._names.get(_name_key(match["name"])) if match else None
        if thing and match and match["mark"]:
            return "guess", thing
        if key := self._loose.get(loose(question)):
            return "property", key
        return ("guess", thing) if thing else None

    def _agreed(self, questions: Iterable[str]) -> tuple[Literal["property", "guess"], str] | None:
        """The one reading that all readable questions share; None when they disagree."""
        found = {reading for question in questions if (reading := self._lookup(question))}
        return found.pop() if len(found) == 1 else None

    def _mentions(self, question: str) -> tuple[str, ...]:
        """Things named in the text; the longest of overlapping names counts."""
        words = [
            bare for word in re.split(r"[\s,;:/|&?!.\"()]+", question) if (bare := word.strip("'"))
        ]
        found: dict[str, None] = {}
        at = 0
        while at < len(words):
            for size in range(min(self._longest, len(words) - at), 0, -1):
                thing = self._names.get(" ".join(words[at : at + size]))
                if thing:
                    found[thing] = None
                    at += size
                    break
            else:
                at += 1
        return tuple(found)

    def _is_list(self, question: str, mentions: tuple[str, ...]) -> bool:
        segments = [part.strip() for part in _SEPARATOR.split(question) if part.strip()]
        if len(mentions) > 1 and _OPENING.match(question):
            return True
        if len(segments) < 2:
            return False
        bare = (_ARTICLE.sub("", _OPENING.sub("", segment)) for segment in segments)
        return any(_name_key(segment) in self._names for segment in bare)


def answer(world: World, parsed: ParsedQuestion, secret: str) -> Verdict:
    """What the table says to a parsed question.

    A property is answered yes or no, a direct guess wins or is answered no, everything else is
    invalid.

    Args:
        world: The table.
        parsed: The question.
        secret: Canonical name of the secret thing.
    """
    if parsed.kind == "property" and parsed.property_key is not None:
        return Verdict.YES if world.value(secret, parsed.property_key) else Verdict.NO
    if parsed.kind == "guess":
        return Verdict.WIN if parsed.thing == secret else Verdict.NO
    return Verdict.INVALID


def _name_key(name: str) -> str:
    return spell(" ".join(_ARTICLE.sub("", normalise(name)).replace("-", " ").split()))


def _reason(question: str, mentions: tuple[str, ...]) -> str:
    if _NEGATION.search(question):
        return "negated"
    if len([part for part in re.split(r"[?!.]", question) if part.strip()]) > 1:
        return "several sentences"
    return "names a thing without guessing it" if mentions else "not understood"
