"""The tasks of a run, from the embedded world or from parquet files of the reference's schema."""

from __future__ import annotations

from collections.abc import Sequence

from delta_belief_rl.config.paths import find_file
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.parquet import SOURCES, read_parquet, sample
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.envs.worlds.tasks import world_tasks
from delta_belief_rl.trainer.services import TaskSets
from delta_belief_rl.types import Message, Task, UserError


def load_tasks(cfg: RunConfig) -> TaskSets:
    """All tasks that the configuration names.

    Raises:
        UserError: A file or world is missing or malformed, holds tasks of another environment, or
            a set that is needed is empty.
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
        test_files = data.test_files if trainer.final_test else ()
        sets = [_training_tasks(cfg), _read(cfg, data.val_files), _read(cfg, test_files)]
    train, val, test = sets
    train, val = sample(train, data.sample_count.train), sample(val, data.sample_count.val)
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


def _check_ids(name: str, tasks: Sequence[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise UserError(
                f"The id {task.id!r} occurs twice in the {name} data: give every row its own id."
            )
        seen.add(task.id)


def _training_tasks(cfg: RunConfig) -> tuple[Task, ...]:
    """An evaluation only compares with them, so they may be absent or another environment's."""
    if not cfg.trainer.val_only:
        return _read(cfg, cfg.data.train_files)
    there = [path for path in cfg.data.train_files if find_file(path).is_file()]
    tasks = (task for path in there for task in _read_file(cfg, path))
    return tuple(task for task in tasks if _plays(cfg, task))


def _read(cfg: RunConfig, paths: Sequence[str]) -> tuple[Task, ...]:
    tasks: list[Task] = []
    for path in paths:
        found = _read_file(cfg, path)
        for task in found:
            _check_source(cfg, path, task)
        tasks += found
    return tuple(tasks)


def _read_file(cfg: RunConfig, path: str) -> list[Task]:
    return read_parquet(path, cfg.data.prompt_key, cfg.data.system_key)


def _plays(cfg: RunConfig, task: Task) -> bool:
    """Whether the environment plays the task; one of a plug-in plays what it likes."""
    env = cfg.multi_turn.env
    return env not in SOURCES.values() or SOURCES.get(task.source) == env


def _check_source(cfg: RunConfig, path: str, task: Task) -> None:
    if _plays(cfg, task):
        return
    played = SOURCES.get(task.source)
    cure = f"set multi_turn.env={played}" if played else "correct its data_source"
    raise UserError(
        f"The data file {path!r} holds a task with the data_source {task.source!r} ({task.id}), "
        f"which multi_turn.env={cfg.multi_turn.env} does not play: {cure}, or name another file."
    )
