"""The tasks of a run: of the embedded world, of a plug-in, or of files as published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from delta_belief_rl.config.paths import find_file
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_turns import ENVIRONMENTS
from delta_belief_rl.envs.parquet import SOURCES, read_parquet, sample
from delta_belief_rl.envs.plugins import SPLITS, find_plugin, plugin_tasks
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.envs.worlds.tasks import world_tasks
from delta_belief_rl.judge.scripts import has_script
from delta_belief_rl.trainer.services import TaskSets
from delta_belief_rl.types import Message, Task, UserError

MODELS = ("hf", "vllm", "api")
"""Judges (``judge_rollout.name``) that are language models."""


def load_tasks(cfg: RunConfig) -> TaskSets:
    """All tasks that the configuration names.

    Raises:
        UserError: A file or world is missing or malformed, holds tasks of another environment, or
            a set that is needed is empty.
    """
    data, trainer = cfg.data, cfg.trainer
    splits = SPLITS if trainer.final_test or data.world is not None else SPLITS[:2]
    made = find_plugin(cfg)
    maker = cfg.multi_turn.env if made is not None and made.tasks is not None else ""
    train, val, test = (split_tasks(cfg, split) if split in splits else () for split in SPLITS)
    train, val = sample(train, data.sample_count.train), sample(val, data.sample_count.val)
    if not train and not trainer.val_only:
        cure = f"{maker} makes none" if maker else "set data.world or data.train_files"
        raise UserError(f"There is no training task: {cure}.")
    if not val and (trainer.val_only or trainer.val_before_train or trainer.test_freq > 0):
        cure = f"{maker} makes none, so set" if maker else "set data.val_files, or"
        raise UserError(
            f"There is no validation task: {cure} trainer.val_before_train=false and "
            "trainer.test_freq=-1."
        )
    if not test and trainer.final_test:
        cure = f"{maker} makes none, so set" if maker else "set data.test_files, or"
        raise UserError(f"There is no test task: {cure} trainer.final_test=false.")
    for name, tasks in (("training", train), ("validation", val), ("test", test)):
        _check_ids(name, tasks)
        _check_secrets(cfg, name, tasks)
        _check_script(cfg, tasks)
    return TaskSets(train, val, test)


def split_tasks(cfg: RunConfig, split: str) -> tuple[Task, ...]:
    """Every task that the configuration has for a split; may be empty.

    Args:
        cfg: The configuration.
        split: One of ``SPLITS``.

    Raises:
        UserError: See ``load_tasks``.
    """
    data = cfg.data
    if data.world is not None:
        world = load_world(data.world)
        prompt = (Message("user", data.world_prompt),) if data.world_prompt else None
        return tuple(world_tasks(world, split, prompt)) if split in world.splits else ()
    made = plugin_tasks(cfg, split)
    if made is not None:
        return made
    if split == "train":
        return _training_tasks(cfg)
    return _read(cfg, data.val_files if split == "val" else data.test_files, split)


def _check_secrets(cfg: RunConfig, name: str, tasks: Sequence[Task]) -> None:
    turns = cfg.multi_turn
    if not (turns.logprob_reward.enabled or turns.logprob_sampling.enabled):
        return
    for task in tasks:
        if not task.secret:
            raise UserError(
                f"The {name} task {task.id!r} has no secret that a belief could be of: set "
                "multi_turn.logprob_reward.enabled=false and "
                "multi_turn.logprob_sampling.enabled=false."
            )


def _check_script(cfg: RunConfig, tasks: Sequence[Task]) -> None:
    """A language model must know what it is asked about tasks of a plug-in."""
    judge = cfg.judge_rollout.name
    if cfg.multi_turn.env in ENVIRONMENTS or judge not in MODELS:
        return
    for source in dict.fromkeys(task.source for task in tasks):
        if not has_script(source):
            raise UserError(
                f"judge_rollout.name={judge} is a language model, which is not told how to judge "
                f"tasks with the source {source!r} of {cfg.multi_turn.env}: set judge=rules."
            )


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
        return _read(cfg, cfg.data.train_files, "train")
    there = [path for path in cfg.data.train_files if find_file(path).is_file()]
    tasks = (task for path in there for task in _read_file(cfg, path))
    return tuple(replace(task, split="train") for task in tasks if _plays(cfg, task))


def _read(cfg: RunConfig, paths: Sequence[str], split: str) -> tuple[Task, ...]:
    """The tasks of some files, of the split that the configuration reads them for."""
    tasks: list[Task] = []
    for path in paths:
        found = _read_file(cfg, path)
        for task in found:
            _check_source(cfg, path, task)
        tasks += [replace(task, split=split) for task in found]
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
