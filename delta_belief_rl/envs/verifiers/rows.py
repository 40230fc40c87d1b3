"""Tasks of the rows of an environment's datasets, and the row of a task."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from delta_belief_rl.envs.verifiers.library import texts
from delta_belief_rl.envs.verifiers.session import Session
from delta_belief_rl.envs.verifiers.settings import VerifiersSettings
from delta_belief_rl.envs.verifiers.source import Source
from delta_belief_rl.types import Message, Task, UserError

SOURCE = "verifiers"
ROLES = ("system", "user", "assistant")
VALIDATION_SHARE = 10
"""One row in so many is for validation where the environment has no dataset for it."""

_ID = re.compile(r"(train|eval)_(\d+)")


def split_tasks(split: str, source: Source, settings: VerifiersSettings) -> list[Task]:
    """The tasks of a split.

    Raises:
        UserError: There are too few rows, or none that a game can be made of, or a game cannot be
            started.
    """
    dataset, chosen = split_rows(split, source, settings)
    rows = source.rows(dataset)
    tasks = [_task(f"{dataset}_{at}", split, rows[at], source, settings) for at in chosen]
    if tasks:
        _check_opening(tasks[0], source, settings)
    return tasks


def split_rows(split: str, source: Source, settings: VerifiersSettings) -> tuple[str, range]:
    """Which rows of which dataset are a split.

    With an ``eval_dataset``, ``train`` is the dataset from its beginning, and ``val`` and then
    ``test`` are the ``eval_dataset`` from its beginning. Without one all three are the dataset:
    ``train``, then ``val``, then ``test``. Where ``tasks`` has no number for it, ``val`` is the
    whole ``eval_dataset`` less ``test``, or else one row in ten; ``test`` is empty; and ``train``
    is what is left.

    Returns:
        ``train`` or ``eval``, and positions in it.

    Raises:
        UserError: There are too few rows.
    """
    rows, others = len(source.rows("train")), len(source.rows("eval"))
    asked, test = settings.tasks, settings.tasks.get("test", 0)
    if others:
        val = asked.get("val", max(others - test, 0))
        train = asked.get("train", rows)
        sizes = {"train": (rows, train), "eval": (others, val + test)}
        places = {"train": (0, train), "val": (0, val), "test": (val, test)}
    else:
        val = asked.get("val", max(rows // VALIDATION_SHARE, 1))
        train = asked.get("train", max(rows - val - test, 0))
        sizes = {"train": (rows, train + val + test)}
        places = {"train": (0, train), "val": (train, val), "test": (train + val, test)}
    for dataset, (there, needed) in sizes.items():
        if needed > there:
            raise UserError(
                f"multi_turn.env_kwargs.tasks needs {needed} rows of the {dataset} dataset of "
                f"{source.name}, which has {there}."
            )
    start, count = places[split]
    dataset = "eval" if others and split != "train" else "train"
    return dataset, range(start, start + count)


def row_of(task: Task, source: Source) -> Mapping[str, Any]:
    """The row that a task was made of.

    Raises:
        UserError: The task is not of this environment.
    """
    match = _ID.fullmatch(task.id)
    rows = source.rows(match[1]) if match else ()
    if match is None or int(match[2]) >= len(rows):
        raise UserError(f"The task {task.id!r} is no row of {source.name}.")
    row = rows[int(match[2])]
    if _messages(row, task.id, source) != task.messages:
        raise UserError(
            f"The task {task.id!r} is another one than row {match[2]} of the {match[1]} dataset of "
            f"{source.name}: its dataset must be the same each time that it is loaded."
        )
    return row


def _task(
    name: str, split: str, row: Mapping[str, Any], source: Source, settings: VerifiersSettings
) -> Task:
    secret = _secret(row, settings.secret, source)
    return Task(name, SOURCE, secret, _messages(row, name, source), split)


def _messages(row: Mapping[str, Any], name: str, source: Source) -> tuple[Message, ...]:
    try:
        said = texts(row.get("prompt"))
    except ValueError as error:
        raise UserError(f"The row {name} of {source.name} cannot be played: {error}.") from error
    strange = sorted({role for role, _ in said} - {*ROLES})
    if strange or not said:
        why = f"its prompt has the role {strange[0]!r}" if strange else "it has no prompt"
        raise UserError(f"The row {name} of {source.name} cannot be played: {why}.")
    return tuple(Message(role, text) for role, text in said)


def _secret(row: Mapping[str, Any], name: str, source: Source) -> str:
    """The secret of a row, which stands in a column or inside of ``info``."""
    if not name:
        return ""
    column, dot, key = name.partition(".")
    value: object = row.get(column)
    if dot:
        inner: object = json.loads(value) if isinstance(value, str) else value
        value = cast("Mapping[str, object]", inner).get(key) if isinstance(inner, Mapping) else None
    if value is None:
        raise UserError(
            f"multi_turn.env_kwargs.secret is {name!r}, which a row of {source.name} lacks; its "
            f"columns are {', '.join(row)}."
        )
    return str(value)


def _check_opening(task: Task, source: Source, settings: VerifiersSettings) -> None:
    """Start a game, which shows what is missing before a run depends on it."""
    session = Session(source, row_of(task, source), settings.max_turns, settings.timeout_s)
    step = session.say(None)
    problem = step.failure or opening_problem(task, step.messages)
    if problem:
        raise UserError(f"A game of {source.name} cannot be started: {problem}.")


def opening_problem(task: Task, messages: tuple[tuple[str, str], ...]) -> str:
    """Why a game's first messages are not those of its task; empty where they are."""
    if messages == tuple((message.role, message.content) for message in task.messages):
        return ""
    return "the environment opens it with other messages than those of the dataset's row"
