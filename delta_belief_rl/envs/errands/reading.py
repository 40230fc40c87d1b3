"""Reads an agent's text as one command, leniently.

Case, articles, politeness and further words do not matter, many verbs mean the same, and a thing
may go by another name: "I walk to the living room." is ``go lounge``. A text is cut into clauses;
the first that reads as a command counts and the others are passed over, so naming many commands
does not try them all. A negated clause is none. Nothing here knows the house.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from delta_belief_rl.envs.errands.vocabulary import CONTAINER, Vocabulary, vocabulary

ALONE = ("look", "hands")
"""Verbs without an object."""

_CLAUSE = re.compile(r"[.!?;:,\n]|\band\b|\bthen\b")
_WORD = re.compile(r"[a-z][a-z'-]*")
_FILLERS = frozenset(
    (
        *("a", "an", "the", "i", "i'll", "i'd", "i'm", "we", "let", "let's", "lets", "me", "us"),
        *("my", "now", "next", "first", "please", "will", "would", "like", "want", "to", "should"),
        *("must", "need", "try", "going", "am", "ok", "okay", "so", "just"),
    )
)
_SWITCHING = {"on": "turn on", "off": "turn off"}
_PARTICLES = {"turn": _SWITCHING, "switch": _SWITCHING}
_ON_TO = frozenset(("on", "onto", "in", "into", "at", "to", "inside"))
_MOST_CLAUSES = 40


@dataclass(frozen=True, slots=True)
class Command:
    """One command, in the one form that all ways of saying it share.

    Attributes:
        verb: A key of the vocabulary's ``verbs``.
        thing: A name of the vocabulary; empty for ``look`` and ``hands``.
        place: Where ``put`` puts the thing; empty for other verbs.
    """

    verb: str
    thing: str = ""
    place: str = ""

    def __str__(self) -> str:
        """Its canonical text.

        Example:
            >>> str(Command("put", "mug", "drawer"))
            'put mug in drawer'
        """
        if not self.place:
            return f"{self.verb} {self.thing}".strip()
        kind = vocabulary().kind_of.get(self.place)
        return f"put {self.thing} {'in' if kind == CONTAINER else 'on'} {self.place}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text says.

    Attributes:
        command: None where the text was not understood.
        several: Further clauses read as commands, too.
    """

    command: Command | None
    several: bool = False


@lru_cache(maxsize=1 << 14)
def read(text: str) -> Reading:
    """Read a text.

    Example:
        >>> str(read("I put the clean cup down on the couch.").command)
        'put mug on sofa'
    """
    clauses = _CLAUSE.split(text.lower())[:_MOST_CLAUSES]
    found = [command for clause in clauses if (command := _clause(clause)) is not None]
    return Reading(found[0] if found else None, len(set(found)) > 1)


def _clause(clause: str) -> Command | None:
    known = vocabulary()
    words = _WORD.findall(clause)
    while words and words[0] in _FILLERS:
        words = words[1:]
    verb, rest = _verb(words, known)
    if not verb or any(word in ("not", "never", "don't", "without") for word in rest):
        return None
    if verb in ALONE:
        return Command(verb) if not rest or verb == "look" else None
    nouns = _nouns(rest, known)
    if not nouns:
        return None
    return _command(verb, rest, nouns, known)


def _command(
    verb: str, rest: Sequence[str], nouns: Sequence[str], known: Vocabulary
) -> Command | None:
    """The command of a verb and the names that follow it."""
    first, last = nouns[0], nouns[-1]
    if verb == "go":
        # "Go back from the study to the hall" ends where it leads to.
        rooms = [noun for noun in nouns if noun in known.rooms]
        return Command("go", rooms[-1]) if rooms else None
    if verb == "put" and len(nouns) > 1 and known.items.get(last) and _is_mail(last, known):
        verb, first = "stamp", last
    if verb == "stamp" or (verb == "put" and first == "stamp"):
        mail = [noun for noun in nouns if _is_mail(noun, known)]
        first = mail[0] if mail and verb == "stamp" else first
    if verb == "put":
        places = [noun for noun in nouns[1:] if noun in known.kind_of]
        if places and places[0] == "mailbox" and _is_mail(first, known):
            return Command("post", first)
        return Command("put", first, places[0]) if places else Command("drop", first)
    if verb == "drop" and len(nouns) > 1 and _ON_TO & set(rest):
        return _command("put", rest, nouns, known)
    return Command(verb, first)


def _is_mail(noun: str, known: Vocabulary) -> bool:
    return noun in known.items and known.items[noun].kind == "mail"


def _verb(words: Sequence[str], known: Vocabulary) -> tuple[str, list[str]]:
    """The verb at the beginning and the words behind it; an empty verb where there is none."""
    for length in (2, 1):
        verb = known.verbs.get(tuple(words[:length]))
        if verb is not None and len(words) >= length:
            return verb, list(words[length:])
    # "Turn the lamp on."
    if words and words[0] in _PARTICLES:
        for particle, verb in _PARTICLES[words[0]].items():
            if particle in words[1:]:
                return verb, [word for word in words[1:] if word != particle]
    return "", []


def _nouns(words: Sequence[str], known: Vocabulary) -> list[str]:
    """Names in the order in which they are said; longer ones first."""
    found: list[str] = []
    at = 0
    while at < len(words):
        for length in (2, 1):
            name = known.nouns.get(tuple(words[at : at + length]))
            if name is not None and at + length <= len(words):
                found.append(name)
                at += length
                break
        else:
            at += 1
    return found
