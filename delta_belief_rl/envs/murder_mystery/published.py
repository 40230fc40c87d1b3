"""What code can read out of the solution text of a published row.

The published rows hold a solution in prose and nothing else. Most of them say "the (true, hidden)
culprit is NAME" and "key evidence includes A, B and C"; from that come the culprit, the other
names, and words that stand for each piece of evidence. It is a reading of prose: a culprit who is
accused by role and not by name is not recognised, and evidence counts as named by any of its own
words.
"""

from __future__ import annotations

import re
from functools import lru_cache

from delta_belief_rl.envs.murder_mystery.data import TITLES, Case, Person, Reason
from delta_belief_rl.envs.murder_mystery.words import (
    Phrase,
    contains,
    phrase,
    speaks_of,
    tokens,
    word_set,
)
from delta_belief_rl.types import Task

MAX_NEED = 2

_TITLE = (
    r"(?:(?:Mr|Mrs|Ms|Miss|Dr|Prof|Professor|Captain|Sir|Lady|Lord|Father|Sister|Private)\.? )?"
)
_NAME = re.compile(
    rf"(?P<before>\b\w+[,:]? )?(?P<name>{_TITLE}[A-Z][\w\u2019'-]*(?:[ -][A-Z][\w\u2019'-]*)*)"
)
_CULPRIT = re.compile(r"\b(?:culprit|murderer|killer) (?:is|was) (?P<rest>.{3,80})")
_EVIDENCE = re.compile(
    r"\b[Kk]ey (?:pieces of )?(?:evidence|clues?|proof) (?:includes?|is|are|consists? of) "
    r"(?P<items>[^.]+(?:\.[^.]+)*)\."
)
_PLACE_WORDS = word_set("in at the of to from on near inside for during into de outside")
_NO_NAMES = word_set(
    "the a an in on at during after before when while key evidence suspects suspect his her their "
    "he she it they this that you witnesses witness investigate follow however meanwhile with "
    "and but for as by true hidden culprit murderer killer clues"
)
_EMPTY_WORDS = word_set(
    "with that this from into near over under their them they where which while found showing "
    "shows entering entered leaving matching matched containing including proving proof about "
    "after before hidden inside around being been were have having used using only other both "
    "also scene crime murder murderer killer victim killed evidence"
)


@lru_cache(maxsize=4096)
def published_case(task: Task) -> Case:
    """A case without clues, as far as the solution tells.

    The culprit is empty, and can then never be accused, where no name could be read.
    """
    scenario = " ".join(message.content for message in task.messages[-1:])
    start = scenario.rfind("scenario you have is")
    names = _names(f"{task.secret} {scenario[start:] if start >= 0 else ''}")
    match = _CULPRIT.search(task.secret)
    first = _names(match["rest"], first_only=True) if match else []
    culprit = next((name for name in names for one in first if _same(name, one)), "")
    evidence = _evidence(task.secret, names)
    return Case(
        id=task.id,
        title="",
        scene=scenario,
        victim="the victim",
        victim_names=(("victim",),),
        people=tuple(Person(name, "", _own_phrases(name, names), {}) for name in names),
        looks=(),
        clues={},
        decisive=evidence,
        need=min(MAX_NEED, len(evidence)),
        culprit=culprit,
        motive=Reason("", ()),
        means=Reason("", ()),
        herrings=(),
        solution=task.secret,
    )


def mentioned(case: Case, reply: str) -> frozenset[str]:
    """Keys of the evidence that a reply speaks of."""
    words = tokens(reply)
    return frozenset(key for key, own in case.decisive.items() if speaks_of(words, own))


def _names(text: str, first_only: bool = False) -> list[str]:
    """Names of people in a text; parts of a longer name are that name."""
    found: list[str] = []
    for match in _NAME.finditer(text):
        name = re.sub(r"['\u2019]s?$", "", match["name"])
        before = (match["before"] or "").strip(" ,:").lower()
        words = [word for word in name.split() if word.lower() not in _NO_NAMES]
        if not words or before in _PLACE_WORDS:
            continue
        if len(words) == 1 and not first_only and _only_opens(text, match.start(), words[0]):
            continue
        found.append(" ".join(words))
        if first_only:
            break
    longest = sorted(dict.fromkeys(found), key=lambda name: -len(name.split()))
    kept: list[str] = []
    for name in longest:
        if not any(_same(other, name) for other in kept):
            kept.append(name)
    return kept


def _only_opens(text: str, at: int, word: str) -> bool:
    """Whether a word is capital as the first of a sentence alone, as "Examine" and "Now"."""
    opens = not text[:at].rstrip()[-1:].isalnum()
    return opens and not re.search(rf"[\w,] {re.escape(word)}\b", text)


def _same(name: str, part: str) -> bool:
    """Whether a name is a part of another one, its title left out."""
    return contains(phrase(name), _untitled(part))


def _untitled(name: str) -> Phrase:
    words = phrase(name)
    return words[1:] if len(words) > 1 and words[0] in TITLES else words


def _own_phrases(name: str, names: list[str]) -> tuple[Phrase, ...]:
    """The full name and those parts of it that no other name has."""
    words = _untitled(name)
    others = [phrase(other) for other in names if other != name]
    parts = [(word,) for word in words if not any(contains(other, (word,)) for other in others)]
    return tuple(dict.fromkeys((phrase(name), words, *parts)))


def _evidence(solution: str, names: list[str]) -> dict[str, tuple[Phrase, ...]]:
    """Pieces of evidence to the words that only they have."""
    match = _EVIDENCE.search(solution)
    if match is None:
        return {}
    items = [part.strip() for part in re.split(r",\s*(?:and )?|\band\b", match["items"])]
    known = {word for name in names for word in phrase(name)}
    bags = [
        {w for w in phrase(item) if len(w) > 3 and w not in _EMPTY_WORDS and w not in known}
        for item in items
        if item
    ]
    kept = [bag for bag in bags if bag]
    out: dict[str, tuple[Phrase, ...]] = {}
    for number, bag in enumerate(kept):
        others = set[str]().union(*(other for other in kept if other is not bag))
        if own := sorted(bag - others):
            out[f"evidence {number + 1}"] = tuple((word,) for word in own)
    return out
