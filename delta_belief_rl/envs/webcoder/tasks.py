"""Projects made of our own words: a function of a seed, a split and a number.

A project is a family (counter, list, form, toggle, tabs, cards) with words drawn for it and one
fault. Family, words and fault together decide the split that a project belongs to, so no two splits
share one, with whatever seeds and however many tasks; within a split none comes twice.

Everything that a game needs stands in the task's ``scenario``: what is asked for, the requirements,
the fault and a solution. Stored tasks do not depend on the generator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import Template
from typing import Any, cast

import numpy as np
import yaml

from delta_belief_rl.envs.single_use import digest
from delta_belief_rl.envs.webcoder.project import BEHAVIOUR, PAGE, Project
from delta_belief_rl.envs.webcoder.requirements import (
    KINDS,
    Requirement,
    requirement_from_json,
)
from delta_belief_rl.envs.webcoder.settings import SPLITS
from delta_belief_rl.types import Message, Task, UserError

SOURCE = "webcoder"
DATA = Path(__file__).resolve().parents[1] / "data"
REPAIR = "Find out what is wrong and repair it. All else stays as it is."
KEEP = " All else stays as it is."

FORMAT = """You write a small web application in text files. index.html is plain HTML: close every \
element, no scripts. app.json says what happens, for example:
{"rules": [{"on": "click", "of": "#go", "do": [{"increment": "#n", "by": 1}]},
 {"on": "submit", "of": "#form", "do": [{"set": "#out", "text": "Hello {#who}"}]}]}
Deeds are set and append (with "text"; {#who} is the value of the input #who; append adds an item \
to a list), increment (with "by"), toggle (with "class"; the class hidden hides), show and hide.
A block writes a whole file:
```index.html
<h1>Hello</h1>
```
A block that begins with edit replaces a piece that is there once:
```edit index.html
Hello
=====
Good day
```
On a line of its own, show index.html shows a file, delete notes.txt deletes one, and done ends \
the task. There are {number} tasks, with {turns} messages each at most.

"""
"""Opens the games of a model that does not know the format."""

_SPLIT_OF = ("train", "train", "train", "train", "val", "test")


@dataclass(frozen=True, slots=True)
class Job:
    """One task of a project.

    Attributes:
        kind: One of ``KINDS``.
        text: What the agent is told.
        solution: Files that meet all that is required.
        fault: What is broken before it begins; empty where nothing is.
    """

    kind: str
    text: str
    solution: Project
    fault: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A project: its tasks in order, and all requirements."""

    family: str
    jobs: tuple[Job, ...]
    requirements: tuple[Requirement, ...]

    def required(self, kind: str) -> tuple[Requirement, ...]:
        """The requirements of a task."""
        return tuple(one for one in self.requirements if one.holds_in(kind))


def blueprint_from_json(text: str) -> Blueprint:
    """A project from the scenario of a task.

    Raises:
        KeyError: A part is missing.
        TypeError: A part is of another type.
        ValueError: A part is none that it may be.
    """
    data = cast(dict[str, Any], json.loads(text))
    jobs = tuple(
        Job(str(job["kind"]), str(job["text"]), dict(job["solution"]), dict(job["fault"]))
        for job in data["jobs"]
    )
    requirements = tuple(requirement_from_json(one) for one in data["requirements"])
    kinds = tuple(job.kind for job in jobs)
    if not jobs or kinds != KINDS[: len(kinds)]:
        raise ValueError(f"its tasks are {', '.join(kinds) or 'none'}")
    made = Blueprint(str(data["family"]), jobs, requirements)
    if not all(made.required(kind) for kind in kinds):
        raise ValueError("a task requires nothing")
    return made


@lru_cache(maxsize=16)
def make_tasks(
    split: str,
    count: int,
    seed: int,
    kinds: tuple[str, ...] = KINDS,
    turns_per_task: int = 2,
    explain: bool = True,
) -> tuple[Task, ...]:
    """The first tasks of a split.

    Args:
        split: One of ``SPLITS``.
        count: How many; a smaller number gives the first ones of a larger number.
        seed: Of all tasks.
        kinds: The tasks of a game.
        turns_per_task: What the opening says about it.
        explain: Whether the opening explains the format.

    Raises:
        UserError: The words do not suffice for as many.
    """
    seen: set[str] = set()
    made: list[Task] = []
    for number in range(count):
        drawn = _draw(split, number, seed, seen)
        opening = begin(kinds[0], 0, len(kinds), _told(drawn, kinds[0]))
        if explain:
            numbers = {"{number}": str(len(kinds)), "{turns}": str(turns_per_task)}
            text = FORMAT
            for name, value in numbers.items():
                text = text.replace(name, value)
            opening = text + opening
        made.append(
            Task(
                id=f"{split}_{number}",
                source=SOURCE,
                secret=fault_text(drawn.fault) if "repair" in kinds else "",
                messages=(Message("user", opening),),
                split=split,
                scenario=json.dumps(_scenario(drawn, kinds), ensure_ascii=False),
            )
        )
    return tuple(made)


def begin(kind: str, index: int, number: int, text: str) -> str:
    """How a task is told to the agent."""
    return f"Task {index + 1} of {number} ({kind}): {text}"


def fault_text(fault: Mapping[str, str]) -> str:
    """A fault in words: what the repair has to find."""
    return {
        "lost_rule": "the rules of {of} are gone",
        "wrong_step": "the rules of {of} add one too many",
        "lost_end": "the last </{tag}> is missing",
        "old_text": "the text {old} is out of date",
    }[fault["kind"]].format(**fault)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A family with its words."""

    family: str
    words: Mapping[str, str]
    fault: Mapping[str, str]


def families() -> Mapping[str, Mapping[str, Any]]:
    """The families of ``webcoder_families.yaml``, by name."""
    return _read("webcoder_families")["families"]


@lru_cache(maxsize=4)
def _read(name: str) -> Mapping[str, Any]:
    # Every scalar is text: YAML would read the key "on" as a truth value.
    return yaml.load((DATA / f"{name}.yaml").read_text(encoding="utf-8"), yaml.BaseLoader)


def _draw(split: str, number: int, seed: int, seen: set[str]) -> _Drawn:
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    names = tuple(families())
    # In turn, so that any number of tasks has all families and all faults in equal shares.
    name = names[number % len(names)]
    faults = families()[name]["faults"]
    which = number // len(names) % len(faults)
    for _ in range(1000):
        words = _words(families()[name]["draw"], rng)
        key = f"{name}|{which}|{sorted(words.items())}"
        if split_of(key) == split and key not in seen:
            seen.add(key)
            return _Drawn(name, words, _filled(faults[which], words))
    raise UserError(
        f"multi_turn.env_kwargs.tasks.{split} is too large: there are not so many projects."
    )


def split_of(key: str) -> str:
    """The split that a project belongs to."""
    return _SPLIT_OF[int(digest(key), 16) % len(_SPLIT_OF)]


def _words(draw: Mapping[str, str], rng: np.random.Generator) -> dict[str, str]:
    """A word for each name; no two names get the same entry of a pool."""
    pools = _read("webcoder")["pools"]
    words: dict[str, str] = {}
    used: dict[str, set[int]] = {}
    for name, pool in draw.items():
        taken = used.setdefault(pool, set())
        free = [index for index in range(len(pools[pool])) if index not in taken]
        index = free[int(rng.integers(len(free)))]
        taken.add(index)
        entry = pools[pool][index]
        words.update({name: entry} if isinstance(entry, str) else entry)
    return {name: Template(word).substitute(words) for name, word in words.items()}


def _filled(given: Any, words: Mapping[str, str]) -> Any:
    """Data with words in place of their names."""
    if isinstance(given, str):
        return Template(given).substitute(words)
    if isinstance(given, Mapping):
        pairs = cast(Mapping[str, Any], given).items()
        return {key: _filled(value, words) for key, value in pairs}
    if isinstance(given, Sequence):
        return [_filled(value, words) for value in cast(Sequence[Any], given)]
    return given


def _told(drawn: _Drawn, kind: str) -> str:
    if kind == "repair":
        return f"{drawn.fault['says']} {REPAIR}"
    text = str(_filled(families()[drawn.family]["tasks"][kind], drawn.words))
    return text + (KEEP if kind == "modify" else "")


def _solution(drawn: _Drawn, kind: str) -> dict[str, str]:
    family = families()[drawn.family]
    kind = "modify" if kind == "repair" else kind
    files = {PAGE: str(_filled(family["page"][kind], drawn.words))}
    if kind in family["rules"]:
        rules = _filled(family["rules"][kind], drawn.words)
        for rule in rules:
            for deed in rule["do"]:
                if "by" in deed:
                    deed["by"] = int(deed["by"])
        lines = ",\n".join(f" {json.dumps(rule, ensure_ascii=False)}" for rule in rules)
        files[BEHAVIOUR] = f'{{"rules": [\n{lines}\n]}}\n'
    return files


def _scenario(drawn: _Drawn, kinds: Sequence[str]) -> dict[str, object]:
    jobs = [
        {
            "kind": kind,
            "text": _told(drawn, kind),
            "solution": _solution(drawn, kind),
            "fault": dict(drawn.fault) if kind == "repair" else {},
        }
        for kind in kinds
    ]
    given: list[dict[str, Any]] = _filled(families()[drawn.family]["requirements"], drawn.words)
    requirements: list[dict[str, object]] = [
        {
            **one,
            "weight": float(one["weight"]),
            "steps": [_whole(step) for step in one["steps"]],
        }
        for one in given
    ]
    return {"family": drawn.family, "jobs": jobs, "requirements": requirements}


def _whole(step: object) -> object:
    """A step as a mapping; a bare predicate is one without events."""
    return {"holds": cast(object, step)} if isinstance(step, list) else step
