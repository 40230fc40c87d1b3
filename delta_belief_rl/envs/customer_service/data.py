"""The packaged scenarios of Customer Service: what they hold, how they are checked, their splits.

The form of the files is described at the head of ``data/customer_service_lexicon.yaml``.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml

from delta_belief_rl.envs.customer_service.text import Phrases
from delta_belief_rl.types import Message, Task, UserError

SOURCE = "customer_service"
"""``Task.source`` of every scenario."""

DATA = Path(__file__).parents[1] / "data"
LEXICON = DATA / "customer_service_lexicon.yaml"
FILES = tuple(
    DATA / f"customer_service_{name}.yaml" for name in ("home", "electronics", "connected")
)

SPLITS = ("train", "val", "test")
_SPLIT_OF_PLACE = ("train", "train", "train", "val", "test")
"""By a scenario's place under its product, so that every product occurs in every split."""

_TEXTS = ("complaint", "cause", "fix")
_PHRASES = ("part", "fault", "remedy")
_KEYS = (*_TEXTS, *_PHRASES, "forbid", "needed", "facts", "fails")
_OPTIONAL = ("forbid",)

INSTRUCTION = (
    "You work at the support desk of a company, and a customer writes to you because something "
    "does not work. Find out what is wrong and tell the customer how to mend it.\n"
    "\n"
    "- Ask for the details that tell the possible causes apart. Take nothing for granted.\n"
    "- Ask one question at a time, or suggest one thing to do, and let each answer guide your next "
    "question.\n"
    "- The customer is no expert: use plain words and short sentences.\n"
    "- Do not waste the customer's time. As soon as you are sure, name the one cause and say how "
    "to mend it in the same message.\n"
    "- If the customer names a product, you are its maker's support: do not refer the customer to "
    "anybody else.\n"
    "\n"
    "The customer writes: {complaint}\n"
    "\n"
    "Write your first question to the customer."
)
"""The message that opens every game."""


@dataclass(frozen=True, slots=True, eq=False)
class Rubric:
    """By which phrases a message is found to name the cause and to give the fix.

    Attributes:
        part: What is concerned. It names the cause together with a ``fault``, and gives the fix
            together with a ``remedy``.
        forbid: What no right answer contains.
    """

    part: Phrases
    fault: Phrases
    remedy: Phrases
    forbid: Phrases


@dataclass(frozen=True, slots=True)
class Fact:
    """What the customer says on one topic; ``ask`` is None for a topic that all share."""

    say: str
    ask: Phrases | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """Phrases of a message, and what the customer says to them."""

    words: Phrases
    say: str


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """One customer.

    Attributes:
        needed: Names of the facts without which the cause can only be guessed.
    """

    id: str
    product: str
    complaint: str
    cause: str
    fix: str
    rubric: Rubric
    facts: Mapping[str, Fact]
    needed: tuple[str, ...]
    fails: tuple[Response, ...]
    split: str

    @property
    def answer(self) -> str:
        """The golden answer: cause and fix in one sentence."""
        return f"{self.cause}, and {self.fix}."

    def task(self) -> Task:
        """The scenario as a task."""
        return Task(
            id=self.id,
            source=SOURCE,
            secret=self.answer,
            messages=(Message("user", INSTRUCTION.format(complaint=self.complaint)),),
            split=self.split,
            scenario=self.complaint,
        )


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Words that all scenarios share.

    Attributes:
        topics: What any customer can be asked, with the reply of one who has noticed nothing.
        talk: What is no question about the product.
        remedies: Kinds of advice, with the reply where it does not help.
        parts: Words for pieces.
        faults: Words for what may be wrong with a piece.
        inspect: Verbs that ask to look or to tell, in contrast to advice.
        jargon: What this customer does not understand.
    """

    topics: Mapping[str, Response]
    talk: Mapping[str, Response]
    remedies: Mapping[str, Response]
    parts: Phrases
    faults: Phrases
    inspect: Phrases
    jargon: Phrases


def tasks(split: str) -> list[Task]:
    """The tasks of a split, in the order of the files.

    Raises:
        UserError: For a name that is no split.
    """
    if split not in SPLITS:
        raise UserError(f"The split is {split!r}; the known splits are {', '.join(SPLITS)}.")
    return [scenario.task() for scenario in scenarios().values() if scenario.split == split]


def scenario_of(task: Task) -> Scenario | None:
    """The packaged scenario of a task; None for a task from elsewhere."""
    scenario = scenarios().get(task.id)
    if task.source != SOURCE or scenario is None or scenario.answer != task.secret:
        return None
    return scenario


@lru_cache(maxsize=1)
def scenarios() -> Mapping[str, Scenario]:
    """All packaged scenarios by their id.

    Raises:
        UserError: A file has a mistake; the file and the entry are named.
    """
    return read_scenarios(FILES, lexicon().topics)


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    """The packaged words.

    Raises:
        UserError: The file has a mistake.
    """
    return read_lexicon(LEXICON)


def read_scenarios(files: Iterable[Path], topics: Container[str]) -> dict[str, Scenario]:
    """The scenarios of files.

    Args:
        files: Their names and order decide nothing but the order of the scenarios.
        topics: The topics that facts may be about without phrases of their own.

    Raises:
        UserError: A file has a mistake; the file and the entry are named.
    """
    found: dict[str, Scenario] = {}
    for path in files:
        for product, entries in _mapping(path, _read(path), "the file").items():
            for place, (name, entry) in enumerate(_mapping(path, entries, product).items()):
                id_ = f"{product.replace(' ', '_')}/{name}"
                if id_ in found:
                    raise _defect(path, f"{id_} stands twice", "rename one of them")
                split = _SPLIT_OF_PLACE[place % len(_SPLIT_OF_PLACE)]
                found[id_] = _scenario(
                    path, id_, product, _mapping(path, entry, id_), split, topics
                )
    return found


def read_lexicon(path: Path) -> Lexicon:
    """The words of a file.

    Raises:
        UserError: The file has a mistake; the entry is named.
    """
    whole = _mapping(path, _read(path), "the file")
    lists = ("parts", "faults", "inspect", "jargon")
    _check_keys(path, "the file", whole, ("topics", "talk", "remedies", *lists), ())

    def section(name: str, key: str) -> dict[str, Response]:
        entries = _mapping(path, whole[name], name)
        return {each: _response(path, f"{name}.{each}", entries[each], key) for each in entries}

    parts, faults, inspect, jargon = (_phrases(path, name, whole[name]) for name in lists)
    return Lexicon(
        section("topics", "ask"),
        section("talk", "ask"),
        section("remedies", "words"),
        parts,
        faults,
        inspect,
        jargon,
    )


def _scenario(
    path: Path,
    id_: str,
    product: str,
    entry: Mapping[str, object],
    split: str,
    topics: Container[str],
) -> Scenario:
    _check_keys(path, id_, entry, _KEYS, _OPTIONAL)
    complaint, cause, fix = (_text(path, f"{id_}.{key}", entry[key]) for key in _TEXTS)
    part, fault, remedy = (_phrases(path, f"{id_}.{key}", entry[key]) for key in _PHRASES)
    forbid = _phrases(path, f"{id_}.forbid", entry["forbid"]) if "forbid" in entry else Phrases(())
    facts: dict[str, Fact] = {}
    for name, value in _mapping(path, entry["facts"], f"{id_}.facts").items():
        where = f"{id_}.facts.{name}"
        if isinstance(value, str):
            fact = Fact(_text(path, where, value))
        else:
            own = _response(path, where, value, "ask")
            fact = Fact(own.say, own.words)
        if fact.ask is None and name not in topics:
            cure = "give it as {ask: [phrases], say: text}"
            raise _defect(path, f"{where} is no topic that all scenarios share", cure)
        facts[name] = fact
    needed = _texts(path, f"{id_}.needed", entry["needed"])
    for name in needed:
        if name not in facts:
            raise _defect(path, f"{id_}.needed names {name!r}, which is no fact", "add the fact")
    fails = tuple(
        Response(
            Phrases(words.split("|")),
            _text(path, f"{id_}.fails.{words}", say),
        )
        for words, say in _mapping(path, entry["fails"], f"{id_}.fails").items()
    )
    rubric = Rubric(part, fault, remedy, forbid)
    return Scenario(id_, product, complaint, cause, fix, rubric, facts, tuple(needed), fails, split)


class _Loader(yaml.BaseLoader):
    """Plain texts only, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping, unless one of its keys stands twice."""
        keys = [str(key.value) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                mark = node.start_mark
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", mark
                )
        return super().construct_mapping(node, deep)


def _read(path: Path) -> object:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise _defect(path, "it cannot be read", "correct the path") from error
    except UnicodeDecodeError as error:
        raise _defect(path, "it is not UTF-8", "save it as UTF-8") from error
    except yaml.YAMLError as error:
        cause = " ".join(str(error).split())
        raise _defect(path, f"it is no valid YAML ({cause})", "correct it there") from error


def _defect(path: Path, cause: str, cure: str) -> UserError:
    return UserError(f"{path}: {cause}; {cure}.")


def _mapping(path: Path, value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict) or not value:
        raise _defect(path, f"{where} is no mapping with entries", "write 'name: value' lines")
    return cast("dict[str, object]", value)


def _text(path: Path, where: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _defect(path, f"{where} is no text", "write a sentence")
    return value


def _texts(path: Path, where: str, value: object) -> list[str]:
    if not isinstance(value, list) or not value:
        raise _defect(path, f"{where} is no list with entries", "write [one, two]")
    return [_text(path, where, item) for item in cast("list[object]", value)]


def _phrases(path: Path, where: str, value: object, ordered: bool = False) -> Phrases:
    return Phrases(_texts(path, where, value), ordered)


def _response(path: Path, where: str, value: object, key: str) -> Response:
    """Phrases under a key, ordered where they ask, and the text under ``say``."""
    fields = _mapping(path, value, where)
    _check_keys(path, where, fields, (key, "say"), ())
    words = _phrases(path, where, fields[key], ordered=key == "ask")
    return Response(words, _text(path, where, fields["say"]))


def _check_keys(
    path: Path,
    where: str,
    entry: Mapping[str, object],
    known: tuple[str, ...],
    optional: tuple[str, ...],
) -> None:
    for key in _problem_keys(entry, known, optional):
        what = "is missing" if key in known else "is unknown"
        raise _defect(path, f"{where}: the key {key!r} {what}", f"the keys are {', '.join(known)}")


def _problem_keys(
    entry: Mapping[str, object], known: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[str]:
    yield from (key for key in entry if key not in known)
    yield from (key for key in known if key not in entry and key not in optional)
