"""The tasks of a run, from the embedded world or from parquet files of the reference's schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from delta_belief_rl.config.paths import find_file
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.envs.worlds.tasks import world_tasks
from delta_belief_rl.trainer.services import TaskSets
from delta_belief_rl.types import Message, Task, UserError

FILE_SHUFFLE_SEED = 42
"""The published code shuffles each file with this seed before ``data.sample_count`` applies."""


def load_tasks(cfg: RunConfig) -> TaskSets:
    """All tasks that the configuration names.

    Raises:
        UserError: A file or world is missing or malformed, or a set that is needed is empty.
    """
    data, trainer = cfg.data, cfg.trainer
    if data.world is not None:
        world = load_world(data.world)
        prompt = (Message("user", data.world_prompt),) if data.world_prompt else None
        sets = [
            tuple(world_tasks(world, split, prompt)) if split in world.splits else ()
            for split in SPLITS
        ]
    else:
        train_files = data.train_files
        if trainer.val_only:
            # An evaluation only compares with the training secrets, where they are at hand.
            train_files = tuple(path for path in train_files if find_file(path).is_file())
        files = (train_files, data.val_files, data.test_files if trainer.final_test else ())
        keys = data.prompt_key, data.system_key
        sets = [
            tuple(task for path in paths for task in read_parquet(path, *keys)) for paths in files
        ]
    train, val, test = sets
    train, val = _sample(train, data.sample_count.train), _sample(val, data.sample_count.val)
    if not train and not trainer.val_only:
        raise UserError("There is no training task: set data.world or data.train_files.")
    if not val and (trainer.val_only or trainer.val_before_train or trainer.test_freq > 0):
        raise UserError(
            "There is no validation task: set data.val_files, or trainer.val_before_train=false "
            "and trainer.test_freq=-1."
        )
    if not test and trainer.final_test:
        raise UserError("There is no test task: set data.test_files, or trainer.final_test=false.")
    for name, tasks in (("training", train), ("validation", val), ("test", test)):
        _check_ids(name, tasks)
    return TaskSets(train, val, test)


SPLITS = ("train", "val", "test")


def _sample(tasks: Sequence[Task], count: int) -> tuple[Task, ...]:
    if count < 0:
        return tuple(tasks)
    order = np.random.default_rng(FILE_SHUFFLE_SEED).permutation(len(tasks))
    return tuple(tasks[index] for index in order[:count])


def _check_ids(name: str, tasks: Sequence[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise UserError(
                f"The id {task.id!r} occurs twice in the {name} data: give every row its own id."
            )
        seen.add(task.id)


def read_parquet(path: str, prompt_key: str, system_key: str | None) -> list[Task]:
    """Tasks of one parquet file in the reference's schema.

    Args:
        path: The file.
        prompt_key: Column with the list of first messages.
        system_key: Column with the system message, or None.

    Raises:
        UserError: No such file, not parquet, a missing column, or a row of the wrong shape (named
            by its number).
    """
    file = find_file(path)
    if not file.is_file():
        raise UserError(
            f"The data file {path!r} does not exist: set data.train_files and data.val_files, or "
            "data.world."
        )
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"The data file {path!r} is not a readable parquet file: make or copy it again."
        ) from error
    needed = ["data_source", "id", "golden_answers", prompt_key]
    needed += [system_key] if system_key else []
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise UserError(
            f"The data file {path!r} has no column {missing[0]!r} (it has "
            f"{', '.join(table.column_names)}): name the right one or make the file again."
        )
    return [
        _task(path, number, row, prompt_key, system_key)
        for number, row in enumerate(table.to_pylist())
    ]


def _task(
    path: str, number: int, row: dict[str, Any], prompt_key: str, system_key: str | None
) -> Task:
    def wrong(what: str) -> UserError:
        return UserError(f"Row {number} of {path!r} {what}: correct the row or leave it out.")

    secret = row["golden_answers"]
    if not isinstance(secret, str) or not secret.strip():
        raise wrong("has no golden answer")
    if not isinstance(row["id"], str) or not isinstance(row["data_source"], str):
        raise wrong("has an id or a data_source that is not text")
    raw = [row[system_key]] if system_key else []
    prompt = row[prompt_key]
    if not isinstance(prompt, list) or not prompt:
        raise wrong(f"has no messages in {prompt_key!r}")
    messages: list[Message] = []
    for item in [*raw, *prompt]:
        entries: dict[str, Any] = item if isinstance(item, dict) else {}
        role, content = entries.get("role"), entries.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise wrong("has a message without role and content")
        messages.append(Message(role, content))
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    return Task(
        id=row["id"],
        source=row["data_source"],
        secret=secret,
        messages=tuple(messages),
        split=str(extra.get("split", "train")),
        scenario=extra.get("scenario"),
    )
