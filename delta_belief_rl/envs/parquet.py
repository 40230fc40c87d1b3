"""Task files: parquet in the published schema, read with care and written whole.

A row of the schema::

    {data_source: "tw_q", id: "train_17", golden_answers: "<secret>",
     system_prompt: {content: "...", role: "system"}, prompt: [{content: "...", role: "user"}],
     ability: "reasoning",
     reward_model: {ground_truth: {target: ["<secret>"]}, style: "rule"},
     extra_info: {index: 17, split: "train"}}

``system_prompt`` is a column only where the games have a system message, and
``extra_info.scenario`` only where the judge sees more than the secret. Further names of a secret
follow it in ``target``, which leaves the schema as published.

A damaged row is named by its number and never changes another one. ``read_parquet`` refuses a file
with any problem, ``inspect_parquet`` lists them all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from delta_belief_rl.config.paths import find_file
from delta_belief_rl.envs.problems import MEND_ROW, Problem, ProblemKind
from delta_belief_rl.types import Message, Task, UserError

# pyarrow has no type information.
_pa: Any = import_module("pyarrow")
_pq: Any = import_module("pyarrow.parquet")

SOURCES: Mapping[str, str] = {
    "tw_q": "twenty_questions",
    "guess_my_city": "guess_my_city",
    "murder_mystery": "murder_mystery",
    "customer_service": "customer_service",
    "user_personalization": "user_personalization",
}
"""``data_source`` of a row to the environment (``multi_turn.env``) that plays it."""

FILE_SHUFFLE_SEED = 42
"""The published code shuffles tasks with this seed before ``data.sample_count`` applies."""

PROMPT_KEY = "prompt"
SYSTEM_KEY = "system_prompt"

_REMAKE = "make or copy it again"
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class TaskFile:
    """What a file holds.

    Attributes:
        num_rows: All rows, damaged ones included; 0 where the file cannot be read.
        tasks: Row number to task, for every row that is whole.
        published_schema: The columns and types are exactly those of the published files.
    """

    path: str
    num_rows: int
    tasks: Mapping[int, Task]
    problems: tuple[Problem, ...]
    published_schema: bool = False


def published_schema(*, system: bool, scenario: bool) -> Any:
    """The Arrow schema of the published files, fields in their order.

    Args:
        system: With the column of system messages.
        scenario: With a scenario for the judge.
    """
    text = _pa.string()
    message = _pa.struct([("content", text), ("role", text)])
    truth = _pa.struct([("target", _list_of(text))])
    extra = [("index", _pa.int64()), ("scenario", text), ("split", text)]
    return _pa.schema(
        [
            ("data_source", text),
            ("id", text),
            ("golden_answers", text),
            *([(SYSTEM_KEY, message)] if system else []),
            (PROMPT_KEY, _list_of(message)),
            ("ability", text),
            ("reward_model", _pa.struct([("ground_truth", truth), ("style", text)])),
            ("extra_info", _pa.struct(extra if scenario else [extra[0], extra[2]])),
        ]
    )


def _list_of(kind: Any) -> Any:
    return _pa.list_(_pa.field("element", kind))


def write_parquet(path: str | os.PathLike[str], tasks: Sequence[Task]) -> None:
    """Write tasks in the published schema; the file appears whole or not at all.

    The bytes are a function of the tasks and of the pyarrow version, which parquet records.

    Raises:
        UserError: There is no task, only some have a system message, or one has no other message.
    """
    if not tasks:
        raise UserError(f"There is no task to write to {os.fspath(path)!r}: give at least one.")
    system = _opens_with_system(tasks[0])
    for task in tasks:
        if _opens_with_system(task) != system:
            raise UserError(
                f"The task {task.id!r} differs from {tasks[0].id!r} in having a system message: "
                "write tasks with and without one to separate files."
            )
        if len(task.messages) <= system:
            raise UserError(
                f"The task {task.id!r} has no first message: give it one that is not the system's."
            )
    scenario = any(task.scenario is not None for task in tasks)
    schema = published_schema(system=system, scenario=scenario)
    rows = [_row(number, task) for number, task in enumerate(tasks)]
    table = _pa.Table.from_pylist(rows, schema=schema)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            _pq.write_table(table, file, compression="snappy", write_page_checksum=True)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).chmod(0o644)
        os.replace(beside, target)
    finally:
        Path(beside).unlink(missing_ok=True)


def _opens_with_system(task: Task) -> bool:
    return bool(task.messages) and task.messages[0].role == "system"


def _row(number: int, task: Task) -> dict[str, Any]:
    messages = [message.as_dict() for message in task.messages]
    if system := messages[0] if _opens_with_system(task) else None:
        messages = messages[1:]
    return {
        "data_source": task.source,
        "id": task.id,
        "golden_answers": task.secret,
        SYSTEM_KEY: system,
        PROMPT_KEY: messages,
        "ability": "reasoning",
        "reward_model": {
            "ground_truth": {"target": [task.secret, *task.aliases]},
            "style": "rule",
        },
        "extra_info": {"index": number, "scenario": task.scenario, "split": task.split},
    }


def read_parquet(
    path: str, prompt_key: str = PROMPT_KEY, system_key: str | None = SYSTEM_KEY
) -> list[Task]:
    """The tasks of a file without a problem.

    Args:
        path: The file, as ``config.paths.find_file`` reads it.
        prompt_key: Column with the list of first messages.
        system_key: Column with the system message, or None.

    Raises:
        UserError: No such file, or the first problem of it, in one sentence.
    """
    found = inspect_parquet(path, prompt_key, system_key)
    for problem in found.problems:
        raise UserError(problem.sentence(path))
    return list(found.tasks.values())


def inspect_parquet(
    path: str, prompt_key: str = PROMPT_KEY, system_key: str | None = SYSTEM_KEY
) -> TaskFile:
    """Everything that a file holds, and everything that is wrong with it.

    Raises:
        UserError: No such file.
    """
    table = _read_table(path)
    if isinstance(table, Problem):
        return TaskFile(path, 0, {}, (table,))
    schema = table.schema
    system = SYSTEM_KEY in schema.names
    scenario = "extra_info" in schema.names and _has_field(schema.field("extra_info"), "scenario")
    as_published = bool(schema.equals(published_schema(system=system, scenario=scenario)))
    problems = list(_column_problems(schema, prompt_key, system_key))
    tasks: dict[int, Task] = {}
    if not problems:
        for number in range(table.num_rows):
            task = _task(table, number, prompt_key, system_key)
            if isinstance(task, Problem):
                problems.append(task)
            else:
                tasks[number] = task
    return TaskFile(path, int(table.num_rows), tasks, tuple(problems), as_published)


def has_system_column(path: str) -> bool:
    """Whether the rows of a readable file carry a system message; false for any other file."""
    table = _read_table(path)
    return not isinstance(table, Problem) and SYSTEM_KEY in table.schema.names


def read_secrets(path: str) -> list[str]:
    """The secrets of a file in its order; rows without one, and unreadable files, give none.

    For a quick comparison of files before ``read_parquet`` looks at every row.

    Raises:
        UserError: No such file.
    """
    table = _read_table(path, ["golden_answers"])
    if isinstance(table, Problem) or not _is_text(table.schema.field(0).type):
        return []
    found = [_cell(table, "golden_answers", number) for number in range(table.num_rows)]
    return [secret for secret in found if isinstance(secret, str)]


def sample(items: Sequence[_Item], count: int) -> tuple[_Item, ...]:
    """The first ``count`` items of a fixed shuffle; all, in their own order, when negative."""
    if count < 0:
        return tuple(items)
    order: list[int] = np.random.default_rng(FILE_SHUFFLE_SEED).permutation(len(items)).tolist()
    return tuple(items[index] for index in order[:count])


def _read_table(path: str, columns: list[str] | None = None) -> Any:
    """The Arrow table, or a ``Problem`` where the bytes are no parquet file."""
    file = find_file(path)
    if not file.is_file():
        raise UserError(
            f"The data file {path!r} does not exist: set data.train_files and data.val_files, or "
            "data.world."
        )
    try:
        # A handle of its own: pyarrow takes the folders of a path for partitions of a data set.
        with file.open("rb") as handle:
            table = _pq.read_table(handle, columns=columns, page_checksum_verification=True)
            if columns is not None and table.num_columns != len(columns):
                raise _pa.ArrowInvalid("a column is missing")
            return table
    except (_pa.ArrowException, OSError):
        return Problem(ProblemKind.UNREADABLE, "is not a readable parquet file", _REMAKE)


def _column_problems(schema: Any, prompt_key: str, system_key: str | None) -> Iterator[Problem]:
    wanted: dict[str, tuple[str, Any]] = {
        "data_source": ("string", _is_text),
        "id": ("string", _is_text),
        "golden_answers": ("string", _is_text),
        prompt_key: ("list<struct<content: string, role: string>>", _is_messages),
    }
    if system_key:
        wanted[system_key] = ("struct<content: string, role: string>", _is_message)
    for name, (kind, fits) in wanted.items():
        if name not in schema.names:
            has = ", ".join(schema.names)
            what = f"has no column {name!r} (it has {has})"
            cure = "name the right one or make the file again"
            yield Problem(ProblemKind.MISSING_COLUMN, what, cure)
        elif not fits(schema.field(name).type):
            what = f"has {schema.field(name).type} in the column {name!r}, not {kind}"
            yield Problem(ProblemKind.WRONG_TYPE, what, "make the file again")


def _is_text(kind: Any) -> bool:
    if _pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(_pa.types.is_string(kind) or _pa.types.is_large_string(kind))


def _is_message(kind: Any) -> bool:
    if not _pa.types.is_struct(kind):
        return False
    names = {kind.field(index).name: kind.field(index).type for index in range(kind.num_fields)}
    return all(name in names and _is_text(names[name]) for name in ("content", "role"))


def _is_messages(kind: Any) -> bool:
    is_list = _pa.types.is_list(kind) or _pa.types.is_large_list(kind)
    return bool(is_list) and _is_message(kind.value_type)


def _has_field(field: Any, name: str) -> bool:
    return bool(_pa.types.is_struct(field.type)) and field.type.get_field_index(name) >= 0


def _cell(table: Any, name: str, number: int) -> object:
    """A value as plain Python; ``Problem`` where it is no UTF-8, None where there is no column."""
    if name not in table.schema.names:
        return None
    try:
        return table.column(name)[number].as_py()
    except UnicodeDecodeError:
        what = f"has text in {name!r} that is not UTF-8"
        return Problem(ProblemKind.BAD_TEXT, what, MEND_ROW, number)


def _task(table: Any, number: int, prompt_key: str, system_key: str | None) -> Task | Problem:
    names = ["data_source", "id", "golden_answers", prompt_key, "extra_info", "reward_model"]
    names += [system_key] if system_key else []
    row = {name: _cell(table, name, number) for name in names}
    for value in row.values():
        if isinstance(value, Problem):
            return value

    def wrong(kind: ProblemKind, what: str) -> Problem:
        return Problem(kind, what, MEND_ROW, number)

    source, name, secret = row["data_source"], row["id"], row["golden_answers"]
    if not isinstance(secret, str) or not secret.strip():
        return wrong(ProblemKind.NO_SECRET, "has no golden answer")
    if not isinstance(name, str) or not isinstance(source, str):
        return wrong(ProblemKind.NO_NAME, "has an id or a data_source that is not text")
    prompt = row[prompt_key]
    if not isinstance(prompt, list) or not prompt:
        return wrong(ProblemKind.BAD_PROMPT, f"has no messages in {prompt_key!r}")
    raw = [*([row[system_key]] if system_key else []), *cast("list[object]", prompt)]
    messages = tuple(_messages(raw))
    if len(messages) < len(raw):
        return wrong(ProblemKind.BAD_PROMPT, "has a message without role and content")
    extra = _fields(row["extra_info"])
    scenario = extra.get("scenario")
    return Task(
        id=name,
        source=source,
        secret=secret,
        messages=messages,
        split=str(extra.get("split") or "train"),
        aliases=_aliases(row["reward_model"], secret),
        scenario=scenario if isinstance(scenario, str) else None,
    )


def _messages(raw: Iterable[object]) -> Iterator[Message]:
    """The items that are messages."""
    for item in raw:
        fields = _fields(item)
        role, content = fields.get("role"), fields.get("content")
        if isinstance(role, str) and isinstance(content, str):
            yield Message(role, content)


def _aliases(reward_model: object, secret: str) -> tuple[str, ...]:
    """What follows the secret in ``reward_model.ground_truth.target``."""
    targets = _fields(_fields(reward_model).get("ground_truth")).get("target")
    if not isinstance(targets, list) or not targets:
        return ()
    first, *others = cast("list[object]", targets)
    return tuple(name for name in others if isinstance(name, str)) if first == secret else ()


def _fields(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else {}
