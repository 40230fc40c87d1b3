"""The packaged mysteries: people, places, clues and their consistency.

A file ``data/murder_mystery_*.yaml`` is a list of cases. One case::

    id: sluice_gate
    title: The Sluice Gate
    scene: What the agent reads.
    victim: Harold Finch
    people:
      "Mrs Agnes Pell | the cook":        # name, then other names; the first of them is the role
        says: What she says when nothing in particular is asked.
        alibi: Where she says that she was.
        check: What checking that gives.
        holds: true
        topics:
          "key | spare key": What she says about it.
          "letter": {after: [desk], says: What she says once the desk was examined.}
    looks:                                # the first one is the scene of the crime
      "library": What is seen there.
      "decanter | sherry": {see: What is seen, prints: ..., lab: ..., after: [library]}
    decisive:                             # clue to the phrases that name it in an accusation
      decanter/lab: [foxglove, poisoned sherry]
    need: 2                               # clues that a strict win must name; default 2
    culprit: Agnes Pell
    motive: {text: Why., words: [inheritance]}
    means: {text: How., words: [foxglove]}
    herrings: [umbrella, Tobias Reed/quarrel]
    solution: The whole story, which names the culprit.

A *clue* is one text that an action can bring to light. Its key is ``desk`` (seen), ``desk/prints``
(tested), ``Agnes Pell`` (interviewed), ``Agnes Pell/alibi``, ``Agnes Pell/check`` or ``Agnes
Pell/key`` (asked about a topic). ``after`` names clues that must have been found before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import cast

import yaml

from delta_belief_rl.envs.murder_mystery.words import (
    Phrase,
    contains,
    contains_any,
    phrase,
    speaks_of,
    tokens,
    word_set,
)
from delta_belief_rl.types import Message, Task, UserError

SOURCE = "murder_mystery"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DATA_DIR = Path(__file__).parents[1] / "data"
SPLITS = ("train", "val", "test")
SPLIT_SHARES = (0.6, 0.2)
"""Shares of train and val; the rest is test."""

TEST_KINDS: Mapping[str, tuple[str, ...]] = {
    "prints": ("fingerprint", "finger print", "print", "dust", "dusted"),
    "blood": ("blood", "bloodstain", "luminol"),
    "lab": (
        *("lab", "laboratory", "chemical", "chemistry", "toxicology", "toxicologist", "poison"),
        *("toxin", "drug", "residue", "analyse", "powder residue", "chemist"),
    ),
    "writing": ("handwriting", "hand writing", "writing", "graphologist"),
    "dna": ("dna", "genetic", "saliva"),
    "fibres": ("fibre", "thread", "textile"),
    "bullets": ("ballistic", "bullet", "cartridge", "rifling"),
    "autopsy": ("autopsy", "post mortem", "postmortem", "pathologist", "coroner", "necropsy"),
}
"""Kinds of tests to the phrases that ask for them."""

SCENE_NAMES = ("scene", "crime scene", "murder scene", "scene of the crime", "scene of crime")

TITLES = word_set(
    "mr mrs ms miss dr prof sir lady lord capt cmdr sgt col rev father sister brother madame chef "
    "inspector judge dame"
)

CALLED_BY_TITLE = frozenset(["dr", "prof", "capt", "col", "rev", "sgt", "cmdr", "inspector"])
"""Titles that alone are a name, as in "the captain"."""

_CASE_KEYS = {
    *("id", "title", "scene", "victim", "people", "looks", "decisive", "culprit", "motive"),
    *("means", "herrings", "solution", "need"),
}
_PERSON_KEYS = {"says", "alibi", "check", "holds", "topics"}

INSTRUCTIONS = """\
You are a detective, and this is the case that you have to solve.

Take one action in every turn: examine a place or a thing, have something tested, interview one \
person about one matter, or have somebody's alibi checked. You are told what comes of it. Choose \
each action for what it can still tell you, and waste none. Anyone may be guilty, those who only \
seem to stand at the edge of the case as well, and what people say need not be true. Gather \
evidence before you accuse: an accusation ends the game, right or wrong. When you are sure, accuse \
one person and name the evidence that proves it, the motive and the means."""
"""What every game opens with; the case follows."""

CLOSING = "What is your first action? Write the action and nothing else."


class MysteryError(UserError):
    """A file of mysteries that cannot be used as it stands."""


@dataclass(frozen=True, slots=True)
class Clue:
    """One text that an action brings to light, and the clues that must be found before it."""

    key: str
    text: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who can be interviewed.

    Attributes:
        names: Phrases that mean this person and nobody else of the case.
        topics: Key of a clue to the phrases that ask for it.
        holds: The alibi is true.
    """

    name: str
    role: str
    names: tuple[Phrase, ...]
    topics: Mapping[str, tuple[Phrase, ...]]
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Look:
    """A place or a thing, with the phrases that mean it."""

    name: str
    names: tuple[Phrase, ...]


@dataclass(frozen=True, slots=True)
class Reason:
    """Motive or means: what it was, and the phrases that name it."""

    text: str
    words: tuple[Phrase, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """One mystery.

    Attributes:
        victim_names: Phrases that mean the victim.
        decisive: Key of each decisive clue to the phrases that name it in an accusation.
        need: Decisive clues that an accusation must name to be a strict win.
    """

    id: str
    title: str
    scene: str
    victim: str
    victim_names: tuple[Phrase, ...]
    people: tuple[Person, ...]
    looks: tuple[Look, ...]
    clues: Mapping[str, Clue]
    decisive: Mapping[str, tuple[Phrase, ...]]
    need: int
    culprit: str
    motive: Reason
    means: Reason
    herrings: tuple[str, ...]
    solution: str

    def person(self, name: str) -> Person:
        """The person of a full name.

        Raises:
            KeyError: There is nobody of that name.
        """
        for person in self.people:
            if person.name == name:
                return person
        raise KeyError(name)


@lru_cache(maxsize=1)
def load_cases() -> tuple[Case, ...]:
    """All packaged mysteries, by id.

    Raises:
        MysteryError: For the first thing that is wrong with a file.
    """
    found = [case for path in sorted(DATA_DIR.glob("murder_mystery*.yaml")) for case in read(path)]
    ids = [case.id for case in found]
    for name in ids:
        if ids.count(name) > 1:
            raise MysteryError(f"The mystery {name!r} stands in the files twice: rename one.")
    return tuple(sorted(found, key=lambda case: case.id))


@lru_cache(maxsize=1)
def _by_solution() -> Mapping[str, Case]:
    return {case.solution: case for case in load_cases()}


def case_of(task: Task) -> Case | None:
    """The packaged mystery that a task is made of; None for any other task."""
    return _by_solution().get(task.secret)


def read(path: Path) -> list[Case]:
    """The mysteries of one file, checked.

    Raises:
        MysteryError: For the first thing that is wrong.
    """
    try:
        body: object = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MysteryError(f"The file {path.name} cannot be read ({error}).") from error
    if not isinstance(body, list):
        raise MysteryError(f"The file {path.name} must be a list of mysteries.")
    cases: list[Case] = []
    for number, entry in enumerate(cast("list[object]", body)):
        where = f"Entry {number} of {path.name}"
        fields = _fields(entry, where)
        case = _case(fields, f"{where} ({fields.get('id')})")
        for problem in problems(case):
            raise MysteryError(f"The mystery {case.id!r} of {path.name} {problem}.")
        cases.append(case)
    return cases


def tasks(split: str) -> list[Task]:
    """The tasks of a split.

    Raises:
        UserError: There is no such split.
    """
    if split not in SPLITS:
        raise UserError(f"The split {split!r} does not exist: use {', '.join(SPLITS)}.")
    cases = split_cases(load_cases())[split]
    return [task_of(case, split) for case in cases]


def split_cases(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases by split; the order is a function of the ids alone."""
    order = sorted(cases, key=lambda case: hashlib.blake2b(case.id.encode()).digest())
    train = round(len(order) * SPLIT_SHARES[0])
    val = train + round(len(order) * SPLIT_SHARES[1])
    return {"train": order[:train], "val": order[train:val], "test": order[val:]}


def task_of(case: Case, split: str = "train") -> Task:
    """One case as a task; its secret is the solution."""
    return Task(
        id=f"{split}_{case.id}",
        source=SOURCE,
        secret=case.solution,
        messages=(Message("user", opening(case)),),
        split=split,
    )


def opening(case: Case) -> str:
    """The message that opens a game."""
    people = "\n".join(f"- {person.name}, {person.role}" for person in case.people)
    visible = ", ".join(look.name for look in case.looks if not case.clues[look.name].after)
    return (
        f"{INSTRUCTIONS}\n\n{case.title}\n\n{case.scene}\n\nPeople:\n{people}\n\n"
        f"To begin with you can examine: {visible}.\n\n{CLOSING}"
    )


def reachable(case: Case) -> frozenset[str]:
    """Keys of all clues that some order of actions brings to light."""
    found: set[str] = set()
    while True:
        more = {key for key, clue in case.clues.items() if found.issuperset(clue.after)}
        if more <= found:
            return frozenset(found)
        found |= more


def problems(case: Case) -> list[str]:
    """What is inconsistent about a case, each as a verb phrase."""
    known = case.clues.keys()
    out: list[str] = []
    if not 4 <= len(case.people) <= 6:
        out.append(f"has {len(case.people)} people instead of 4 to 6")
    for clue in case.clues.values():
        out += [f"has {clue.key!r} after {key!r}, which is no clue" for key in clue.after
                if key not in known]  # fmt: skip
    for key in (*case.decisive, *case.herrings):
        if key not in known:
            out.append(f"names the clue {key!r}, which it does not have")
    out += [f"can never show {key!r}" for key in sorted(known - reachable(case)) if not out]
    if set(case.herrings) & case.decisive.keys():
        out.append("calls one clue decisive and a red herring")
    if not 2 <= case.need <= len(case.decisive):
        out.append(f"needs {case.need} of {len(case.decisive)} decisive clues")
    out += _alibi_problems(case) + _name_problems(case)
    # Evidence must not be named by quoting what the game begins with.
    quoted = tokens(opening(case)) if not out else ()
    for key, phrases in case.decisive.items():
        for words in phrases:
            if speaks_of(quoted, [words]):
                out.append(f"has {key!r} named by {' '.join(words)!r}, which every player reads")
    return out


def _alibi_problems(case: Case) -> list[str]:
    out: list[str] = []
    names = [person.name for person in case.people]
    if case.culprit not in names:
        return [f"has the culprit {case.culprit!r}, who is none of its people"]
    for person in case.people:
        if person.holds == (person.name == case.culprit):
            state = "holds" if person.holds else "does not hold"
            out.append(f"has {person.name} with an alibi that {state}")
    if not contains_any(phrase(case.solution), case.person(case.culprit).names):
        out.append("has a solution that does not name the culprit")
    return out


def _name_problems(case: Case) -> list[str]:
    """Phrases that mean two things, or nothing."""
    owners: dict[Phrase, str] = {}
    out: list[str] = []
    named = [(person.name, person.names) for person in case.people]
    named += [(look.name, look.names) for look in case.looks]
    named.append((case.victim, case.victim_names))
    for owner, phrases in named:
        if not phrases:
            out.append(f"has no name for {owner!r} that means nobody else")
        for words in phrases:
            if owners.setdefault(words, owner) != owner:
                out.append(f"means {owners[words]!r} and {owner!r} by {' '.join(words)!r}")
    for person in case.people:
        topics: dict[Phrase, str] = {}
        for key, phrases in person.topics.items():
            for words in phrases:
                if topics.setdefault(words, key) != key:
                    out.append(f"means {topics[words]!r} and {key!r} by {' '.join(words)!r}")
    return out


def _case(body: Mapping[str, object], where: str) -> Case:
    _only(body, _CASE_KEYS, where)
    people_body = _fields(body.get("people"), f"{where}: people")
    victim = _text(body, "victim", where)
    split_names = {name: [part.strip() for part in name.split("|")] for name in people_body}
    everyone = [*(parts[0] for parts in split_names.values()), victim]
    clues: dict[str, Clue] = {}
    people = tuple(
        _person(split_names[raw], _fields(entry, f"{where}: {raw}"), everyone, clues, where)
        for raw, entry in people_body.items()
    )
    victim_names = _own_names(victim, everyone)
    looks = tuple(
        _look(raw, entry, clues, where, victim_names)
        for raw, entry in _fields(body.get("looks"), f"{where}: looks").items()
    )
    people = _with_bare_roles(people, looks, victim_names)
    looks = (_with_scene(looks[0]), *looks[1:]) if looks else looks
    names = {words: person.name for person in people for words in person.names}

    def key(raw: str) -> str:
        head, slash, tail = raw.partition("/")
        return f"{names.get(phrase(head), head)}{slash}{tail}"

    decisive = _fields(body.get("decisive"), f"{where}: decisive")
    culprit = _text(body, "culprit", where)
    need = body.get("need", 2)
    if not isinstance(need, int):
        raise MysteryError(f"{where}: 'need' must be a number.")
    return Case(
        id=_text(body, "id", where),
        title=_text(body, "title", where),
        scene=_text(body, "scene", where),
        victim=victim,
        victim_names=victim_names,
        people=people,
        looks=looks,
        clues={
            name: Clue(name, clue.text, tuple(key(raw) for raw in clue.after))
            for name, clue in clues.items()
        },
        decisive={
            key(raw): _phrases(_texts(words, f"{where}: {raw}")) for raw, words in decisive.items()
        },
        need=need,
        culprit=names.get(phrase(culprit), culprit),
        motive=_reason(body, "motive", where),
        means=_reason(body, "means", where),
        herrings=tuple(key(raw) for raw in _texts(body.get("herrings"), f"{where}: herrings")),
        solution=_text(body, "solution", where),
    )


def _person(
    parts: Sequence[str],
    body: Mapping[str, object],
    everyone: Sequence[str],
    clues: dict[str, Clue],
    where: str,
) -> Person:
    """Read one person and add what can be learnt from them to ``clues``."""
    name, *others = parts
    where = f"{where}: {name}"
    _only(body, _PERSON_KEYS, where)
    if not others:
        raise MysteryError(f"{where}: a role must follow the name, as in 'Agnes Pell | the cook'.")
    holds = body.get("holds")
    if not isinstance(holds, bool):
        raise MysteryError(f"{where}: 'holds' must be true or false.")
    clues[name] = Clue(name, _text(body, "says", where))
    for what in ("alibi", "check"):
        clues[f"{name}/{what}"] = Clue(f"{name}/{what}", _text(body, what, where))
    topics: dict[str, tuple[Phrase, ...]] = {}
    for raw, entry in _fields(body.get("topics", {}), f"{where}: topics").items():
        spellings = [part.strip() for part in raw.split("|")]
        key = f"{name}/{spellings[0]}"
        text, after = entry, ()
        if isinstance(entry, dict):
            fields = _fields(cast(object, entry), f"{where}: {raw}")
            _only(fields, {"after", "says"}, f"{where}: {raw}")
            text, after = _text(fields, "says", where), _after(fields, where)
        if not isinstance(text, str):
            raise MysteryError(f"{where}: the topic {raw!r} must have a text.")
        clues[key] = Clue(key, text.strip(), after)
        # A topic that is a person is asked for by every name of that person.
        phrases = [*_phrases(spellings)]
        for other in everyone:
            own = _own_names(other, everyone)
            phrases += own if other != name and set(own) & set(phrases) else ()
        topics[key] = tuple(dict.fromkeys(phrases))
    names = (*_own_names(name, everyone), *_phrases(others))
    return Person(name, others[0], tuple(dict.fromkeys(names)), topics, holds)


def _look(
    raw: str,
    entry: object,
    clues: dict[str, Clue],
    where: str,
    victim_names: tuple[Phrase, ...],
) -> Look:
    """Read one place or thing and add what can be found there to ``clues``."""
    name, *others = (part.strip() for part in raw.split("|"))
    where = f"{where}: {name}"
    fields = {"see": entry} if isinstance(entry, str) else _fields(entry, where)
    _only(fields, {"see", "after", *TEST_KINDS}, where)
    after = _after(fields, where)
    clues[name] = Clue(name, _text(fields, "see", where), after)
    for kind in TEST_KINDS:
        if kind in fields:
            clues[f"{name}/{kind}"] = Clue(f"{name}/{kind}", _text(fields, kind, where), after)
    names = _phrases((name, *others))
    if name == "body":
        bodies = [(*words, "body") for words in victim_names]
        names = (*names, ("corpse",), ("victim",), *bodies)
    return Look(name, tuple(dict.fromkeys(names)))


def _own_names(name: str, everyone: Iterable[str]) -> tuple[Phrase, ...]:
    """The names by which only this person is called.

    Those are the full name, with and without title, each part of it, and the title with the last
    part; what is also a part of another person's name is left out.
    """
    words = phrase(name)
    bare = words[1:] if words[0] in TITLES else words
    found = [words, bare, (bare[0],), (bare[-1],), (words[0], bare[-1])]
    rest = [phrase(other) for other in everyone if other != name]
    alone = [own for own in found if not any(contains(other, own) for other in rest)]
    return tuple(dict.fromkeys(own for own in alone if not set(own) <= TITLES))


def _with_bare_roles(
    people: tuple[Person, ...], looks: tuple[Look, ...], victim_names: tuple[Phrase, ...]
) -> tuple[Person, ...]:
    """Let "the captain" mean Capt Holm and "the doctor" the family doctor, where nobody and nothing
    else has that word in its name.
    """
    out: list[Person] = []
    for person in people:
        others = [words for other in people if other is not person for words in other.names]
        others += [words for look in looks for words in look.names] + [*victim_names]
        bare = {(words[-1],) for words in person.names}
        bare |= {(words[0],) for words in person.names if words[0] in CALLED_BY_TITLE}
        own = sorted(word for word in bare if not any(contains(other, word) for other in others))
        out.append(replace(person, names=tuple(dict.fromkeys((*person.names, *own)))))
    return tuple(out)


def _with_scene(look: Look) -> Look:
    """The first look of a case is the scene of the crime."""
    return replace(look, names=tuple(dict.fromkeys((*look.names, *_phrases(SCENE_NAMES)))))


def _reason(body: Mapping[str, object], name: str, where: str) -> Reason:
    fields = _fields(body.get(name), f"{where}: {name}")
    _only(fields, {"text", "words"}, f"{where}: {name}")
    words = _texts(fields.get("words"), f"{where}: {name}: words")
    return Reason(_text(fields, "text", where), _phrases(words))


def _after(fields: Mapping[str, object], where: str) -> tuple[str, ...]:
    return tuple(_texts(fields.get("after", []), f"{where}: after"))


def _phrases(texts: Iterable[str]) -> tuple[Phrase, ...]:
    return tuple(phrase(text) for text in texts)


def _texts(value: object, where: str) -> list[str]:
    if not isinstance(value, list):
        raise MysteryError(f"{where} must be a list of texts.")
    items = cast("list[object]", value)
    texts = [item for item in items if isinstance(item, str) and phrase(item)]
    if len(texts) < len(items):
        raise MysteryError(f"{where} holds something that is not a text of words.")
    return texts


def _text(body: Mapping[str, object], name: str, where: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value.strip():
        raise MysteryError(f"{where}: {name!r} must be a text.")
    return " ".join(value.split())


def _fields(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise MysteryError(f"{where} must be a mapping.")
    items = cast("dict[object, object]", value)
    return {str(name): item for name, item in items.items()}


def _only(body: Mapping[str, object], known: set[str], where: str) -> None:
    for name in body:
        if name not in known:
            raise MysteryError(f"{where} has {name!r}; known are {', '.join(sorted(known))}.")
