"""The users of the package: their personas, their tasks, and what a good answer looks like."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.user_personalization.text import plain
from delta_belief_rl.types import Message, Task, UserError

SOURCE = "user_personalization"
"""``Task.source`` of these tasks, and the environment's name."""

FILES = Path(__file__).parents[1] / "data"
TOPICS_FILE = FILES / "user_personalization.yaml"
SPLITS = ("train", "val", "test")
MIN_NEEDS, MAX_NEEDS = 4, 7

AT_MOST = "<="
"""Begins a demand on an amount: ``<=30 minute``."""
LEAVE_OUT = "!"
"""Begins a demand to name something in order to leave it out."""
WEAK = "~"
"""Begins a phrase of a topic that counts little."""

_PROFILE_KEYS = frozenset(("id", "task", "about", "secret", "split", "needs", "more"))
_NEED_KEYS = frozenset(("say", "must", "never", "ask"))
_SAYS = "The person says: "
_LIMIT = re.compile(r"<=\d+(?:\.\d+)? \w+")
_SAYS_NOTHING = frozenset(
    (
        *("about", "does", "each", "every", "from", "have", "here", "into", "like", "more", "most"),
        *("must", "need", "only", "same", "some", "than", "that", "them", "there", "they", "this"),
        *("want", "what", "when", "who", "will", "with", "your"),
    )
)
_LEAST_LETTERS = 4
"""Shorter words say nothing of a fact, unless they are numbers."""


@dataclass(frozen=True, slots=True)
class Need:
    """A fact that matters for the task.

    Attributes:
        topic: What a question must be about to be answered with it.
        say: The user's own words.
        must: An answer that respects the fact has one phrase of each group.
        never: Phrases that break it.
        ask: Phrases of questions about this fact, beside those of the topic.
    """

    topic: str
    say: str
    must: tuple[tuple[str, ...], ...]
    never: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """One user with one task.

    Attributes:
        domain: Field of life; users of one domain differ in what they need.
        task: The request, as the user makes it.
        about: An answer to the task contains one of these phrases.
        secret: One sentence that names the decisive facts.
        more: Topic to facts of no weight for the task.

    Example:
        >>> profile = profiles()[0]
        >>> profile.id, profile.needs[0].topic
        ('dinners_student', 'diet')
    """

    id: str
    domain: str
    task: str
    about: tuple[str, ...]
    secret: str
    split: str
    needs: tuple[Need, ...]
    more: Mapping[str, str]

    def scenario(self) -> str:
        """The whole persona as the judge reads it."""
        return "\n".join(
            [
                "What matters for the task:",
                *(f"- {need.topic}: {need.say}" for need in self.needs),
                "What else is true of the user:",
                *(f"- {topic}: {say}" for topic, say in self.more.items()),
            ]
        )


@dataclass(frozen=True, slots=True)
class Library:
    """Everything that is packaged.

    Attributes:
        topics: Topic to phrases of questions about it.
        profiles: In the order of the files.
    """

    topics: Mapping[str, tuple[str, ...]]
    profiles: tuple[Profile, ...]


def opening(task: str, max_turns: int) -> tuple[Message, ...]:
    """The message that opens every game: the rules and the user's request."""
    return (
        Message(
            "user",
            "You help a person whom you do not know yet, and what is best depends on who they are. "
            "Before you answer, find out what matters: ask about diet, money, time, health, tools, "
            "experience, taste or whatever the request calls for. Ask one short question in each "
            "message; the person tells one thing at a time.\n"
            "\n"
            f"You have {max_turns} messages in all. As soon as you know enough, send one that "
            'begins with "Answer:" and holds your full answer, fitted to all that you were told. '
            f"Message {max_turns} is taken as your answer in any case. The person rates it from 1 "
            "to 10.\n"
            "\n"
            f"{_SAYS}{task}",
        ),
    )


def request_of(task: Task) -> str:
    """What the user of a task asks for: the end of the opening, or all of a foreign one."""
    return task.messages[-1].content.rpartition(_SAYS)[2] if task.messages else ""


def tasks(split: str, max_turns: int = 5) -> list[Task]:
    """The tasks of a split, in the order of the files.

    Args:
        split: ``train``, ``val`` or ``test``; no user is in two of them.
        max_turns: Messages that the opening promises; the environment's own setting decides.

    Raises:
        UserError: There is no such split.
    """
    if split not in SPLITS:
        raise UserError(f"There is no split {split!r} of {SOURCE}: use {', '.join(SPLITS)}.")
    return [
        Task(
            id=profile.id,
            source=SOURCE,
            secret=profile.secret,
            messages=opening(profile.task, max_turns),
            split=split,
            scenario=profile.scenario(),
        )
        for profile in profiles()
        if profile.split == split
    ]


def profiles() -> tuple[Profile, ...]:
    """All packaged users."""
    return library().profiles


@lru_cache(maxsize=1)
def library() -> Library:
    """The packaged files, read once."""
    return read_library(TOPICS_FILE, sorted(FILES.glob("user_personalization_*.yaml")))


def read_library(topics_file: Path, files: list[Path]) -> Library:
    """Read topics and users from files; the head of the packaged topics file explains the form.

    Raises:
        UserError: A file cannot be read or an entry is not of the form, named in one sentence.
    """
    reader = _Reader(topics_file, {}, {})
    shared = reader.mapping(_load(topics_file), "the file")
    groups, topics = (
        {
            name: reader.phrases(value, f"{name!r} of {part!r}")
            for name, value in reader.mapping(shared.get(part), repr(part)).items()
        }
        for part in ("groups", "topics")
    )
    found = [
        profile for file in files for profile in _Reader(file, topics, groups).profiles(_load(file))
    ]
    _check_unique(found)
    return Library(topics, tuple(found))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the entries of one file; every method names the place of what it cannot use."""

    file: Path
    topics: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, tuple[str, ...]]

    def profiles(self, document: object) -> Iterator[Profile]:
        """The users of a file, with the domain that they stand under."""
        for domain, entries in self.mapping(document, "the file").items():
            if not isinstance(entries, list):
                raise self.mistake(repr(domain), "is no list of users", "write one")
            for entry in cast(list[object], entries):
                yield self.profile(self.mapping(entry, f"an entry of {domain!r}"), domain)

    def profile(self, entry: Mapping[str, Any], domain: str) -> Profile:
        """One user."""
        name = f"the user {entry.get('id')!r}"
        self.check_keys(entry, _PROFILE_KEYS, _PROFILE_KEYS - {"split"}, name)
        split = self.text(entry.get("split", "train"), f"the split of {name}")
        if split not in SPLITS:
            raise self.mistake(name, f"has the split {split!r}", f"use {', '.join(SPLITS)}")
        needs = tuple(
            self.need(topic, value, f"{topic!r} of {name}")
            for topic, value in self.mapping(entry["needs"], f"the needs of {name}").items()
        )
        if not MIN_NEEDS <= len(needs) <= MAX_NEEDS:
            cure = f"write {MIN_NEEDS} to {MAX_NEEDS}"
            raise self.mistake(name, f"has {len(needs)} needs", cure)
        more = {
            topic: self.text(say, f"{topic!r} of {name}")
            for topic, say in self.mapping(entry["more"], f"'more' of {name}").items()
        }
        self.check_secret(entry, needs, more, name)
        told = [*(need.topic for need in needs), *more]
        for topic in told:
            if topic not in self.topics:
                raise self.mistake(name, f"has the unknown topic {topic!r}", "describe the topic")
            if told.count(topic) > 1:
                raise self.mistake(name, f"has the topic {topic!r} twice", "keep one of them")
        return Profile(
            id=self.text(entry["id"], name),
            domain=domain,
            task=self.text(entry["task"], f"the task of {name}"),
            about=self.phrases(entry["about"], f"'about' of {name}"),
            secret=f"You are {self.text(entry['secret'], f'the secret of {name}')}.",
            split=split,
            needs=needs,
            more=more,
        )

    def check_secret(
        self, entry: Mapping[str, Any], needs: Iterable[Need], more: Mapping[str, str], name: str
    ) -> None:
        """Refuse a secret that tells a fact of no weight.

        The belief is measured on it, so a question for such a fact would be paid.
        """
        secret = _words(self.text(entry["secret"], f"the secret of {name}"))
        decisive = _words(" ".join([str(entry["task"]), *(need.say for need in needs)]))
        for topic, say in more.items():
            for word in sorted((_words(say) & secret) - decisive):
                what = f"has {word!r} of the fact {topic!r}, which has no weight, in the secret"
                raise self.mistake(name, what, "leave it out, or move the fact to 'needs'")

    def need(self, topic: str, value: object, where: str) -> Need:
        """One decisive fact."""
        entry = self.mapping(value, where)
        self.check_keys(entry, _NEED_KEYS, frozenset(("say", "must")), where)
        if not isinstance(entry["must"], list) or not entry["must"]:
            raise self.mistake(where, "has no list 'must'", "write groups of phrases")
        must = tuple(
            self.phrases(group, f"'must' in {where}") for group in cast(list[object], entry["must"])
        )
        for phrase in (phrase for group in must for phrase in group):
            if phrase.startswith(AT_MOST) and not _LIMIT.fullmatch(phrase):
                raise self.mistake(where, f"has the limit {phrase!r}", "write <=30 minute")
        return Need(
            topic=topic,
            say=self.text(entry["say"], f"'say' in {where}"),
            must=must,
            never=self.phrases(entry["never"], f"'never' in {where}") if "never" in entry else (),
            ask=self.phrases(entry["ask"], f"'ask' in {where}") if "ask" in entry else (),
        )

    def phrases(self, value: object, where: str) -> tuple[str, ...]:
        """Phrases of a list, or of a text with ``|`` between; a group's name stands for its own."""
        parts = value.split("|") if isinstance(value, str) else value
        if not isinstance(parts, list) or not parts:
            raise self.mistake(where, "holds no phrases", "write them with '|' between")
        found: list[str] = []
        for part in cast(list[object], parts):
            phrase = self.text(part, where)
            if phrase.startswith("@") and phrase[1:] not in self.groups:
                raise self.mistake(where, f"names the unknown group {phrase!r}", "correct it")
            found += self.groups[phrase[1:]] if phrase.startswith("@") else [phrase]
        return tuple(dict.fromkeys(found))

    def text(self, value: object, where: str) -> str:
        """A text that says something; a number is one."""
        if not isinstance(value, str | int) or not normalise(str(value).lstrip("!~@<=")):
            raise self.mistake(where, "is no text", "write one")
        return str(value).strip()

    def mapping(self, value: object, where: str) -> Mapping[str, Any]:
        """A mapping with names as keys that is not empty."""
        if not isinstance(value, dict) or not value:
            raise self.mistake(where, "is no mapping", "write lines of the form 'name: value'")
        return {str(key): item for key, item in cast(dict[object, Any], value).items()}

    def check_keys(
        self,
        entry: Mapping[str, Any],
        known: frozenset[str],
        required: frozenset[str],
        where: str,
    ) -> None:
        """Refuse keys that are missing or unknown."""
        for key in sorted(required - entry.keys()):
            raise self.mistake(where, f"lacks {key!r}", "write it")
        for key in sorted(entry.keys() - known):
            raise self.mistake(where, f"has the unknown key {key!r}", "remove or correct it")

    def mistake(self, where: str, what: str, cure: str) -> UserError:
        """One sentence about the file."""
        return UserError(f"In {self.file} {where} {what}: {cure}.")


def _words(text: str) -> frozenset[str]:
    """Words of a text, in plain form, that tell something of a person."""
    words = plain(text).split()
    return frozenset(
        word
        for word in words
        if (len(word) >= _LEAST_LETTERS or word.isdigit()) and word not in _SAYS_NOTHING
    )


def _check_unique(found: list[Profile]) -> None:
    """Ids and secrets of two users differ: the judge knows a user by the secret."""
    seen: set[str] = set()
    for profile in found:
        names = {f"id {profile.id}", f"secret {normalise(profile.secret)}"}
        if seen & names:
            raise UserError(
                f"Two users have the id or the secret of {profile.id!r}: change one of them."
            )
        seen |= names


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise UserError(f"{key!r} is given twice, again on line {line}: keep one of them.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _load(file: Path) -> object:
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The file {file} cannot be read as text: restore it.") from error
    except UserError as error:
        raise UserError(f"In {file} {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"The file {file} is not valid YAML{where}: correct the syntax.") from error
