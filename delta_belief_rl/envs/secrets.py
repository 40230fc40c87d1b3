"""Secrets of 20 Questions: lists of words, and what makes a word a bad secret.

A good secret is found by guessing it. Under the published win rule a *generic* word, one that
questions about other secrets contain anyway ("is it an *animal*?", "is it bigger than a *box*?"),
is won by accident, and a secret of several words is never found at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from delta_belief_rl.config.paths import TASKS
from delta_belief_rl.envs.answers import exact_match, normalise
from delta_belief_rl.envs.parquet import SOURCES
from delta_belief_rl.envs.problems import MEND_ROW, Problem, ProblemKind
from delta_belief_rl.envs.prompts import PROMPTS
from delta_belief_rl.envs.worlds.tasks import SOURCE
from delta_belief_rl.types import Task, UserError

WORDS = TASKS / "twenty_questions"
"""Folder of the packaged word lists: a split's words, aliases, generic words."""

_IRREGULAR = {
    **{"children": "child", "feet": "foot", "geese": "goose", "lice": "louse", "men": "man"},
    **{"mice": "mouse", "oxen": "ox", "people": "person", "teeth": "tooth", "women": "woman"},
}


@lru_cache(maxsize=20_000)
def noun_forms(word: str) -> frozenset[str]:
    """The word and every singular that it may be the plural of; spaces and hyphens are left out.

    Two words are the same noun when their forms meet.

    Example:
        >>> sorted(noun_forms("Knives"))
        ['knif', 'knife', 'knive', 'knives']
    """
    name = re.sub(r"[\s-]+", "", normalise(word))
    forms = {name, _IRREGULAR.get(name, name)}
    if name.endswith("s") and not name.endswith(("ss", "us", "is")) and len(name) > 3:
        forms.add(name[:-1])
        if name.endswith("es"):
            forms.add(name[:-2])
        if name.endswith("ies"):
            forms.add(f"{name[:-3]}y")
        if name.endswith("ves"):
            forms |= {f"{name[:-3]}f", f"{name[:-3]}fe"}
    return frozenset(forms)


@lru_cache(maxsize=1)
def generic_words() -> frozenset[str]:
    """Words that questions about other secrets contain by accident."""
    return frozenset((WORDS / "generic.txt").read_text(encoding="utf-8").split())


def is_generic(word: str) -> bool:
    """Whether the word, or its singular, is a generic one."""
    return not noun_forms(word).isdisjoint(generic_words())


def can_be_mentioned(word: str) -> bool:
    """Whether the published rule ``exact`` finds the word in the plainest question about it."""
    return exact_match(f"Is it {word}?", word)


def overlap(first: Iterable[str], second: Iterable[str]) -> tuple[str, ...]:
    """Secrets of the second set that are also in the first, in normal form and order."""
    known = {normalise(secret) for secret in first}
    return tuple(sorted({normalise(secret) for secret in second} & known))


def read_words(path: Path, *, allow_generic: bool = False) -> list[str]:
    """A list of secrets, one a line.

    Raises:
        UserError: No such file, no word in it, or a line that is empty, repeats an earlier noun or
            is a generic word (named by its number, from 1).
    """
    words: list[str] = []
    first: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        word = line.strip()
        if not normalise(word):
            raise UserError(f"Line {number} of {path} is empty: remove it or write a secret there.")
        forms = noun_forms(word)
        earlier = [first[form] for form in sorted(forms) if form in first]
        if earlier:
            raise UserError(
                f"Line {number} of {path} repeats line {earlier[0]} ({word!r}): remove one of them."
            )
        if not allow_generic and is_generic(word):
            raise UserError(
                f"Line {number} of {path} is the generic word {word!r}, which is won by accident: "
                "remove it, or allow such words with --allow-generic."
            )
        first.update(dict.fromkeys(forms, number))
        words.append(word)
    if not words:
        raise UserError(f"{path} holds no word: write one secret on each line.")
    return words


def read_aliases(path: Path) -> dict[str, tuple[str, ...]]:
    """Further names of secrets, from lines of the form ``couch: sofa, settee``.

    Raises:
        UserError: No such file, or a line of another form (named by its number, from 1).
    """
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(_lines(path), start=1):
        word, colon, rest = line.partition(":")
        names = tuple(name.strip() for name in rest.split(","))
        if not colon or not word.strip() or not all(names):
            raise UserError(
                f"Line {number} of {path} is not of the form 'couch: sofa, settee': correct it."
            )
        if word.strip() in found:
            raise UserError(
                f"Line {number} of {path} gives names for {word.strip()!r} again: put them on one "
                "line."
            )
        found[word.strip()] = names
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"The file {path} cannot be read: correct the path.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"The file {path} is not UTF-8 text: save it as UTF-8.") from error


def make_tasks(
    words: Iterable[str],
    split: str,
    prompt: str = "direct",
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Task]:
    """One 20 Questions task for each word, in their order.

    Args:
        words: The secrets.
        split: ``train``, ``val`` or ``test``.
        prompt: A name in ``PROMPTS``.
        aliases: Secret to its further names; secrets that are not among the words are passed over.

    Raises:
        UserError: A further name is a secret of its own.
    """
    words = list(words)
    names = {word: also for word, also in (aliases or {}).items() if word in words}
    for word, also in names.items():
        for name in also:
            if name in words:
                raise UserError(
                    f"{name!r} is a further name of {word!r} and a secret of its own: keep one."
                )
    return [
        Task(
            id=f"{split}_{number}",
            source=SOURCE,
            secret=word,
            messages=PROMPTS[prompt],
            split=split,
            aliases=names.get(word, ()),
        )
        for number, word in enumerate(words)
    ]


def check_tasks(tasks: Mapping[int, Task]) -> Iterator[Problem]:
    """Problems of whole rows: ids, sources, and for 20 Questions the secrets.

    Args:
        tasks: Row number to task.
    """
    ids: dict[str, int] = {}
    secrets: dict[str, int] = {}
    for number, task in tasks.items():
        earlier = ids.setdefault(task.id, number)
        if earlier != number:
            what = f"has the id {task.id!r} of row {earlier}"
            yield Problem(ProblemKind.REPEATED_ID, what, "give every row its own id", number)
        if task.source not in SOURCES:
            what = f"has the data_source {task.source!r}, which no environment plays"
            cure = f"write one of {', '.join(SOURCES)}, or play it with a plug-in"
            yield Problem(ProblemKind.UNKNOWN_SOURCE, what, cure, number)
        forms = noun_forms(task.secret)
        same = [secrets[form] for form in sorted(forms) if form in secrets]
        if same:
            what = f"has the secret {task.secret!r} of row {same[0]}"
            yield Problem(ProblemKind.REPEATED_SECRET, what, "keep one of them", number)
        secrets |= {form: number for form in forms if form not in secrets}
        if task.source == SOURCE:
            yield from _check_word(number, task.secret)


def _check_word(number: int, secret: str) -> Iterator[Problem]:
    if is_generic(secret):
        what = f"has the generic secret {secret!r}, which questions contain by accident"
        yield Problem(ProblemKind.GENERIC_SECRET, what, MEND_ROW, number)
    if not can_be_mentioned(secret):
        what = f"has the secret {secret!r}, which the rule 'exact' never finds in a question"
        cure = "use a single word without digits, or set multi_turn.win_rule=strict"
        yield Problem(ProblemKind.UNFINDABLE_SECRET, what, cure, number)
