"""``delta-belief check-env``: run a configuration's environment through its contract."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import names
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.base import Env, JudgeReply, JudgeRequest
from delta_belief_rl.envs.check import (
    DEFAULT_ACTIONS,
    OPTIONAL_HOOKS,
    EnvContractError,
    available_hooks,
    check_env,
    is_replayable,
)
from delta_belief_rl.envs.plugins import MISTAKES, SPLITS, check_plugins, describe
from delta_belief_rl.types import Task, UserError

EXACT_JUDGES = ("rules", "world")
"""Judges (``judge_rollout.name``) that answer here; for a model alternating answers stand in."""

REPLAYED = "the same actions and replies lead to the same state"
NOT_REPLAYED = "games say that they cannot be played again"

Ask = Callable[[JudgeRequest], JudgeReply]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of the tasks of one split.

    Attributes:
        tasks: All of them.
        checked: Ids of those that were played.
        hooks: Optional hooks of their games.
        replayable: What these say by the hook of that name.
    """

    split: str
    tasks: int
    checked: tuple[str, ...]
    hooks: frozenset[str]
    replayable: frozenset[bool]


class Breach(Exception):
    """The environment breaks its contract; the message is one sentence."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings and groups")
    parser.add_argument("--config", default="base", metavar="NAME", help="name or YAML file")
    parser.add_argument(
        "--tasks", type=int, default=4, metavar="N", help="tasks to play of each split (default: 4)"
    )


def _run(args: argparse.Namespace) -> Result:
    if args.tasks < 1:
        raise UserError(f"--tasks must be at least 1, not {args.tasks}.")
    cfg, warnings = load_config(args.overrides, args.config)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for sentence in names(cfg):
        raise UserError(sentence)
    check_plugins(cfg)
    try:
        findings = examine(cfg, args.tasks)
    except Breach as breach:
        value = {"passed": False, "breach": str(breach)}
        return Result(value, str(breach), status=1)
    judged = cfg.judge_rollout.name if _is_exact(cfg) else "alternating yes and no"
    hooks = [name for name in OPTIONAL_HOOKS if any(name in one.hooks for one in findings)]
    said = frozenset[bool]().union(*(one.replayable for one in findings))
    value = {
        "passed": True,
        "environment": cfg.multi_turn.env,
        "splits": {one.split: {"tasks": one.tasks, "checked": one.checked} for one in findings},
        "judge": judged,
        "hooks": hooks,
        "replayable": all(said) if said else None,
    }
    lines = [f"{cfg.multi_turn.env} keeps the contract of an environment."]
    lines += [
        f"  {one.split:<6} {len(one.checked)} of {one.tasks} tasks: {', '.join(one.checked)}"
        for one in findings
    ]
    lines += [f"  judge  {judged}", f"  hooks  {', '.join(hooks) or 'none'}"]
    if said:
        lines.append(f"  replay {REPLAYED if all(said) else NOT_REPLAYED}")
    return Result(value, "\n".join(lines))


def examine(cfg: RunConfig, count: int) -> list[Finding]:
    """Check the first tasks of each split; what was seen of each.

    Args:
        cfg: The configuration.
        count: Tasks of each split.

    Raises:
        UserError: There is no task, or the options do not fit.
        Breach: At the first breach of the contract.
    """
    with _whole():
        ask = _asker(cfg)
        findings = [_examine_split(cfg, split, count, ask) for split in SPLITS]
    if not any(finding.tasks for finding in findings):
        raise UserError(f"{cfg.multi_turn.env} has no task that could be played.")
    return findings


def _examine_split(cfg: RunConfig, split: str, count: int, ask: Ask | None) -> Finding:
    """What was played and seen of a split."""
    # Here, so that --help loads no torch.
    from delta_belief_rl.trainer.environments import env_factory
    from delta_belief_rl.trainer.tasks import split_tasks

    tasks, turns = split_tasks(cfg, split), cfg.multi_turn.max_turns
    make = env_factory(cfg, turns.train if split == "train" else turns.val)
    hooks, said = set[str](), set[bool]()
    for task in tasks[:count]:
        with _whole(f"{task.id}: "):
            game = _checked(make, task, ask)
            replayable = is_replayable(game)
        hooks |= available_hooks(game)
        said |= set() if replayable is None else {replayable}
    played = tuple(task.id for task in tasks[:count])
    return Finding(split, len(tasks), played, frozenset(hooks), frozenset(said))


def _checked(make: Callable[[Task], Env], task: Task, ask: Ask | None) -> Env:
    """A game of one task, which keeps the contract."""
    guesses = (f"Is it {task.secret}?", task.secret) if task.secret else ()
    check_env(lambda: make(task), (*DEFAULT_ACTIONS, *guesses), ask)
    return make(task)


@contextmanager
def _whole(place: str = "") -> Iterator[None]:
    """Code of an environment, whose failure is a breach."""
    try:
        yield
    except EnvContractError as error:
        raise Breach(f"{place}{error}") from error
    except UserError:
        raise
    except MISTAKES as error:
        raise Breach(f"{place}the environment failed with {describe(error)}.") from error


def _is_exact(cfg: RunConfig) -> bool:
    return cfg.judge_rollout.name in EXACT_JUDGES


def _asker(cfg: RunConfig) -> Ask | None:
    """How the configured judge is asked; None for a model."""
    if not _is_exact(cfg):
        return None
    from delta_belief_rl.judge.build import build_judge
    from delta_belief_rl.judge.packaged import NoJudge
    from delta_belief_rl.trainer.judge_settings import judge_settings

    judge = build_judge(judge_settings(cfg, 1))

    def ask(request: JudgeRequest) -> JudgeReply:
        replies: Sequence[JudgeReply] = judge.answer([request])
        if isinstance(judge, NoJudge):
            raise EnvContractError(
                f"an action needs a judge, and none is there: {replies[0].reason}"
            )
        if len(replies) != 1:
            raise EnvContractError(f"the judge gave {len(replies)} replies to one request.")
        return replies[0]

    return ask


VERB = Verb(
    name="check-env",
    help="Run an environment, one of your own included, through its contract.",
    example="delta-belief check-env plugins=[docs/examples/guess_the_number.py] "
    "multi_turn.env=guess_the_number judge=rules",
    add_arguments=_add_arguments,
    run=_run,
)
