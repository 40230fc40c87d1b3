"""What a detective's text asks for: one clue, an accusation, or nothing that can be answered.

A text is cut into clauses. A clause that opens with a verb of acting is a command; questions to
somebody are commands, too; what stands around them is thinking aloud and is not read. Two commands
in one text are too many, and so are two things joined by "and", "or" or a comma.

An accusation is read apart from that, by ``murder_mystery.accusations``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from delta_belief_rl.envs.murder_mystery.accusations import (
    EVERYONE,
    MANY_PEOPLE,
    Accusation,
    read_accusation,
)
from delta_belief_rl.envs.murder_mystery.clauses import (
    ALIBI_WORDS,
    ASK_VERBS,
    ASKS_LOOK,
    BETWEEN,
    CHECK_VERBS,
    GO_VERBS,
    JOINERS,
    LOOK_VERBS,
    PRONOUNS,
    TEST_VERBS,
    VERBS,
    Clause,
    Mention,
    clauses,
    joined,
    mark,
    with_people,
)
from delta_belief_rl.envs.murder_mystery.data import TEST_KINDS, Case, Person
from delta_belief_rl.envs.murder_mystery.words import Phrase, phrase, tokens, word_set

Kind = Literal["clue", "nothing", "accuse", "nobody", "several", "untold", "solution", "vague"]
"""``clue``: asks for a clue of the case. ``nothing``: is understood, but nothing is there.
``accuse``: accuses. ``nobody``: accuses somebody whom the case does not know. ``several``: more
than one action. ``untold``: an action without the thing or person that it is about. ``solution``:
asks to be told who did it. ``vague``: anything else."""

MAX_CHARACTERS = 2000
"""A longer text is not read."""

_ALIBI = re.compile(
    r"\balibi\b|\bwhereabout\b|\bwhere(?: exactly)? (?:(?:was|were|had) (?:you|she|he|they|#\d+)\b|"
    r"(?:#\d+|you|she|he|they) (?:was|were|had been)\b)"
    r"|\bwhat (?:(?:was|were) )?(?:you|she|he|they|#\d+) (?:(?:was|were) )?(?:doing|up to)\b"
    r"|\b(?:her|his|their|your|own) movement\b|\bwhat (?:(?:did|do) )?(?:you|she|he|they|#\d+) "
    r"(?:do|did|were doing)\b(?! (?:with|to|for|about|know))"
)
_TALK_VERBS = frozenset(["interview", "question", "talk", "speak", "interrogate", "summon", "call"])
"""With these a word that means nobody of the case is somebody who is not there."""
_PLAIN_TALK = word_set(
    "ask interview question talk speak interrogate to with the a about what happened happen and "
    "know see saw heard hear anything you she he they did do does had have has if is was were "
    "whether tell me call summon confront press quiz grill general case murder night evening "
    "day that this his her their of statement story side event everything all please suspect "
    "witness separately privately again first next then alone further more let us i will would "
    "like want it on in account unusual suspicious strange anyone someone else notice noticed time "
    "last relationship victim deceased dead man woman say thought how well feel felt"
)
_ASKS_SOLUTION = re.compile(
    r"\bwho (?:is|was|are|did|killed|murdered|done|committed|could)\b|\bsolution\b|"
    r"\bgoal reached\b|"
    r"\b(?:reveal|name|identify|tell me|give me|know|disclose)\b.*\b(?:culprit|killer|murderer|"
    r"answer|truth|secret)\b|\bculprit\b|\bmurderer\b|\bkiller\b|\bhint\b|\bwhodunit\b"
)
_KINDS = {kind: tuple(phrase(text) for text in texts) for kind, texts in TEST_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read out of a text.

    Attributes:
        key: The clue asked for, for ``clue`` only.
        about: Name of the person or thing that an action without a result was about.
        talks: The action without a result was a question to the person.
        accusation: For ``accuse`` and ``nobody`` only.
    """

    kind: Kind
    key: str = ""
    about: str = ""
    talks: bool = False
    accusation: Accusation | None = None

    @property
    def accused(self) -> tuple[str, ...]:
        """Names of the accused; empty for any other action."""
        return self.accusation.accused if self.accusation else ()

    @property
    def several(self) -> bool:
        """Whether more than one person is accused."""
        return len(self.accused) > 1 or EVERYONE in self.accused


@lru_cache(maxsize=1 << 15)
def read_action(case: Case, text: str) -> Reading:
    """What a text asks for.

    Example:
        >>> from delta_belief_rl.envs.murder_mystery.data import load_cases
        >>> case = load_cases()[0]
        >>> read_action(case, "Why is the sky blue?").kind
        'vague'
    """
    if len(text) > MAX_CHARACTERS:
        return Reading("vague")
    accusation = read_accusation(case, text)
    if accusation is not None:
        return Reading("accuse" if accusation.accused else "nobody", accusation=accusation)
    parts = list(clauses(case, tokens(text)))
    commands = [reading for part in parts if (reading := _command(case, part, parts))]
    found = _without_greetings([one for one in commands if one.kind != "untold"])
    if any(one.kind == "several" for one in found) or len({(r.key, r.about) for r in found}) > 1:
        return Reading("several")
    if found:
        return found[0]
    if _ASKS_SOLUTION.search(" ".join(tokens(text))):
        return Reading("solution")
    if commands:
        return commands[0]
    return _bare(case, parts)


def _without_greetings(found: list[Reading]) -> list[Reading]:
    """Leave out "interview A" where the text asks A something, and looking at what it tests."""
    asked = {one.key.partition("/")[0] for one in found if "/" in one.key}
    asked |= {one.about for one in found if one.talks}
    return [one for one in found if one.key not in asked]


# --- commands ---------------------------------------------------------------------------------


def _command(case: Case, clause: Clause, all_clauses: Sequence[Clause]) -> Reading | None:
    """What a clause commands; None where it commands nothing."""
    text = with_people(case, clause)
    people = [m for m in clause.mentions if m.sort == "person"]
    if not people and PRONOUNS & set(clause.words) and clause.verb in ASK_VERBS | CHECK_VERBS:
        people = _meant(clause, all_clauses)
    if clause.verb in GO_VERBS and len([c for c in all_clauses if c.verb]) > 1:
        return None
    alibi = bool(set(clause.words) & ALIBI_WORDS)
    if clause.verb in CHECK_VERBS and alibi and people:
        return _check(clause, people)
    things = [m for m in clause.mentions if m.sort == "look"]
    if clause.verb == "tell" and things and not people:
        return _look_or_test(case, clause)
    talks = clause.verb in ASK_VERBS and (bool(people) or clause.verb not in LOOK_VERBS)
    addressed = bool(people) and (
        (clause.ends == "?" and bool({"you", "your"} & set(clause.words)))
        or (people[0].start == 0 and _comma_behind(clause.words, people[0]))
    )
    if talks or (not clause.verb and addressed):
        return _interview(case, clause, people, text)
    if clause.verb:
        return _look_or_test(case, clause)
    if clause.ends == "?" and len(things) == 1 and clause.words[0] in ASKS_LOOK and not people:
        return _look_or_test(case, clause)
    return None


def _meant(clause: Clause, all_clauses: Sequence[Clause]) -> list[Mention]:
    """Who "her" or "him" is: the person named last before the clause."""
    before = all_clauses[: all_clauses.index(clause)]
    named = [m for other in before for m in other.mentions if m.sort == "person"]
    at = next(at for at, word in enumerate(clause.words) if word in PRONOUNS)
    return [replace(named[-1], start=at, end=at + 1)] if named else []


def _comma_behind(words: Phrase, mention: Mention) -> bool:
    return words[mention.end : mention.end + 1] in ((",",), (":",))


def _check(clause: Clause, people: Sequence[Mention]) -> Reading:
    if any(joined(clause.words, a, b) for a, b in pairwise(people)):
        return Reading("several")
    return Reading("clue", f"{people[0].name}/check")


def _interview(case: Case, clause: Clause, people: Sequence[Mention], text: str) -> Reading | None:
    if MANY_PEOPLE.search(text) and not people:
        return Reading("several")
    if not people:
        strange = clause.verb in _TALK_VERBS and set(clause.words) - _PLAIN_TALK - BETWEEN
        return Reading("nothing" if strange else "untold")
    if len(people) > 1 and people[1].name != people[0].name and joined(clause.words, *people[:2]):
        return Reading("several")
    person = case.person(people[0].name)
    rest = (*clause.words[: people[0].start], "|", *clause.words[people[0].end :])
    alone = all(mention.name == person.name for mention in people)
    if alone and _ALIBI.search(text.replace(mark(case, person.name), "|", 1)):
        return Reading("clue", f"{person.name}/alibi")
    topics = _topics(person, rest)
    if len(topics) > 1 and _topics_joined(rest, person, topics):
        return Reading("several")
    if topics:
        return Reading("clue", topics[0])
    # Of the victim, everybody says in general what they have to say.
    victim = {at for m in clause.mentions if m.sort == "victim" for at in range(m.start, m.end)}
    person_at = range(people[0].start, people[0].end)
    left = [w for at, w in enumerate(clause.words) if at not in victim and at not in person_at]
    if all(word in _PLAIN_TALK or word == "," for word in left):
        return Reading("clue", person.name)
    return Reading("nothing", about=person.name, talks=True)


def _topics(person: Person, words: Phrase) -> list[str]:
    """Keys of the topics that a text asks for, the longest phrase first."""
    found: dict[str, tuple[int, int]] = {}
    for key, phrases in person.topics.items():
        spots = [(-len(p), at) for p in phrases if (at := _find(words, p)) >= 0]
        if spots:
            found[key] = min(spots)
    return sorted(found, key=lambda key: found[key])


def _topics_joined(words: Phrase, person: Person, keys: Sequence[str]) -> bool:
    spots: list[tuple[int, int]] = []
    for key in keys[:2]:
        wanted = max((p for p in person.topics[key] if _find(words, p) >= 0), key=len)
        at = _find(words, wanted)
        spots.append((at, at + len(wanted)))
    (_, end), (start, _) = sorted(spots)
    between = words[end:start]
    return bool(set(between) & JOINERS) and set(between) <= BETWEEN


def _find(words: Phrase, wanted: Phrase) -> int:
    size = len(wanted)
    return next((at for at in range(len(words) - size + 1) if words[at : at + size] == wanted), -1)


def _look_or_test(case: Case, clause: Clause) -> Reading:
    looks = [mention for mention in clause.mentions if mention.sort == "look"]
    if any(joined(clause.words, a, b) and a.name != b.name for a, b in pairwise(looks)):
        return Reading("several")
    bodies = [m for m in clause.mentions if m.sort == "victim"]
    if not looks and bodies and "body" in case.clues and not _beyond(clause, bodies[0]):
        looks = [Mention(bodies[0].start, bodies[0].end, "body", "look")]
    kinds = _test_kinds(clause, looks)
    if not looks and clause.verb == "look" and "around" in clause.words:
        return Reading("clue", case.looks[0].name)
    if not looks and kinds == ["autopsy"] and "body" in case.clues:
        return _clue(case, "body/autopsy", "body")
    if not looks:
        people = [mention for mention in clause.mentions if mention.sort == "person"]
        known = set(clause.words) - VERBS - BETWEEN - {"for", "it", "them", "around", "thing"}
        if people:
            return Reading("nothing", about=people[0].name)
        return Reading("nothing") if known and not kinds else Reading("untold")
    name = looks[0].name
    if name == "body":
        kinds = ["autopsy" if kind == "lab" else kind for kind in kinds]
    for kind in kinds:
        if f"{name}/{kind}" in case.clues:
            return Reading("clue", f"{name}/{kind}")
    asked = [kind for kind in kinds if not (kind == "lab" and "analyse" in clause.words)]
    if asked and clause.verb in TEST_VERBS - LOOK_VERBS:
        return Reading("nothing", about=name)
    return Reading("clue", name)


def _beyond(clause: Clause, victim: Mention) -> bool:
    """Whether a thing of the victim is meant that the case does not know."""
    behind = clause.words[victim.end : victim.end + 1]
    return bool(behind) and behind[0] not in BETWEEN and behind[0][0].isalpha()


def _test_kinds(clause: Clause, looks: Sequence[Mention]) -> list[str]:
    """Kinds of tests that a clause asks for, in order."""
    hidden = {at for look in looks for at in range(look.start, look.end)}
    words = tuple("|" if at in hidden else word for at, word in enumerate(clause.words))
    spots = {
        kind: min((at for wanted in phrases if (at := _find(words, wanted)) >= 0), default=-1)
        for kind, phrases in _KINDS.items()
    }
    return sorted((kind for kind, at in spots.items() if at >= 0), key=lambda kind: spots[kind])


def _clue(case: Case, key: str, about: str) -> Reading:
    return Reading("clue", key) if key in case.clues else Reading("nothing", about=about)


def _bare(case: Case, clauses: Sequence[Clause]) -> Reading:
    """A text that is nothing but a name: "The desk.", "the decanter, prints"."""
    if len(clauses) > 2 or sum(len(clause.words) for clause in clauses) > 8:
        return Reading("vague")
    for clause in clauses:
        named = {at for m in clause.mentions for at in range(m.start, m.end)}
        rest = {word for at, word in enumerate(clause.words) if at not in named}
        kinds = {word for phrases in _KINDS.values() for wanted in phrases for word in wanted}
        if not clause.mentions or not rest <= BETWEEN | kinds | {"alibi", "again"}:
            continue
        people = [m for m in clause.mentions if m.sort == "person"]
        if len({m.name for m in clause.mentions}) > 1:
            return Reading("several")
        if people:
            end = "/alibi" if "alibi" in rest else ""
            return Reading("clue", people[0].name + end)
        return _look_or_test(case, clause)
    return Reading("vague")
