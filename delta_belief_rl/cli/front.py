"""The shared front of every command that needs a configuration: compose, validate, plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import Overlap, gather_facts
from delta_belief_rl.config.paths import find_file
from delta_belief_rl.config.plan import Plan, make_plan
from delta_belief_rl.config.rules import check
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.plugins import SPLITS, check_plugins, plugin_tasks
from delta_belief_rl.envs.worlds.table import WorldError, load_world
from delta_belief_rl.trainer.own_credit import own_credit
from delta_belief_rl.types import UserError


def prepare(
    overrides: Sequence[str], config_name: str = "base"
) -> tuple[RunConfig, Plan, list[str]]:
    """``(configuration, plan, warnings)`` of a command line; imports no torch.

    Raises:
        UserError: The configuration cannot be composed or cannot work.
    """
    config, warnings = load_config(overrides, config_name)
    check(config)
    check_plugins(config)
    own_credit(config)
    facts = gather_facts(config, count_world, find_overlaps, count_tasks)
    return config, make_plan(config, facts), warnings


def count_world(name: str) -> Mapping[str, int]:
    """Secrets per split of a world by name or path.

    Raises:
        UserError: No such world, or a broken file.
    """
    try:
        world = load_world(name)
    except WorldError as error:
        raise UserError(str(error)) from error
    return {split: len(names) for split, names in world.splits.items()}


def count_tasks(config: RunConfig) -> Mapping[str, int] | None:
    """Tasks per split that the environment of a plug-in makes; None where it makes none.

    Raises:
        UserError: Its options do not fit.
    """
    trainer = config.trainer
    wanted = {"train": not trainer.val_only, "val": True, "test": trainer.final_test}
    made = {split: plugin_tasks(config, split) for split in SPLITS if wanted[split]}
    return {split: len(tasks) for split, tasks in made.items() if tasks is not None} or None


def find_overlaps(config: RunConfig) -> tuple[Overlap, ...]:
    """Secrets that two sets of the run's tasks share; pairs that share none are left out.

    A file that is missing is passed over. The final test's secrets count where it is played.
    """
    # Here, so that a plan of an embedded world does not load pyarrow.
    from delta_belief_rl.envs.parquet import read_secrets, sample
    from delta_belief_rl.envs.secrets import overlap

    data, tests = config.data, config.trainer.final_test
    sets = (
        ("training", "train", data.train_files, data.sample_count.train),
        ("validation", "val", data.val_files, data.sample_count.val),
        ("test", "test", data.test_files if tests else (), -1),
    )
    secrets: list[tuple[str, tuple[str, ...]]] = []
    for name, split, paths, count in sets:
        there = [path for path in paths if find_file(path).is_file()]
        every = [secret for path in there for secret in read_secrets(path)]
        if split != "test" or tests:
            every += [task.secret for task in plugin_tasks(config, split) or ()]
        secrets.append((name, tuple(secret for secret in sample(every, count) if secret)))
    found = [
        Overlap(first, second, overlap(known, given), len(set(given)))
        for (first, known), (second, given) in combinations(secrets, 2)
    ]
    return tuple(pair for pair in found if pair.shared)
