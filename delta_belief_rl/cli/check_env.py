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
)
from delta_belief_rl.envs.plugins import MISTAKES, SPLITS, check_plugins, describe
from delta_belief_rl.types import Task, UserError

EXACT_JUDGES = ("rules", "world")
"""Judges (``judge_rollout.name``) that answer here; for a model alternating answers stand in."""

Ask = Callable[[JudgeRequest], JudgeReply]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of the tasks of one split.

    Attributes:
        tasks: All of them.
        checked: Ids of those that were played.
    """

    split: str
    tasks: int
    checked: tuple[str, ...]


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
        findings, hooks = examine(cfg, args.tasks)
    except Breach as breach:
        value = {"passed": False, "breach": str(breach)}
        return Result(value, str(breach), status=1)
    judged = cfg.judge_rollout.name if _is_exact(cfg) else "alternating yes and no"
    value = {
        "passed": True,
        "environment": cfg.multi_turn.env,
        "splits": {one.split: {"tasks": one.tasks, "checked": one.checked} for one in findings},
        "judge": judged,
        "hooks": hooks,
    }
    lines = [f"{cfg.multi_turn.env} keeps the contract of an environment."]
    lines += [
        f"  {one.split:<6} {len(one.checked)} of {one.tasks} tasks: {', '.join(one.checked)}"
        for one in findings
    ]
    lines += [f"  judge  {judged}", f"  hooks  {', '.join(hooks) or 'none'}"]
    return Result(value, "\n".join(lines))


def examine(cfg: RunConfig, count: int) -> tuple[list[Finding], list[str]]:
    """Check the first tasks of each split; what was played, and the optional hooks.

    Args:
        cfg: The configuration.
        count: Tasks of each split.

    Raises:
        UserError: There is no task, or the options do not fit.
        Breach: At the first breach of the contract.
    """
    findings: list[Finding] = []
    hooks = frozenset[str]()
    with _whole():
        ask = _asker(cfg)
        for split in SPLITS:
            finding, found = _examine_split(cfg, split, count, ask)
            findings.append(finding)
            hooks |= found
    if not any(finding.tasks for finding in findings):
        raise UserError(f"{cfg.multi_turn.env} has no task that could be played.")
    return findings, [name for name in OPTIONAL_HOOKS if name in hooks]


def _examine_split(
    cfg: RunConfig, split: str, count: int, ask: Ask | None
) -> tuple[Finding, frozenset[str]]:
    """What was played of a split, and the optional hooks of its games."""
    # Here, so that --help loads no torch.
    from delta_belief_rl.trainer.environments import env_factory
    from delta_belief_rl.trainer.tasks import split_tasks

    tasks, turns = split_tasks(cfg, split), cfg.multi_turn.max_turns
    make = env_factory(cfg, turns.train if split == "train" else turns.val)
    hooks = frozenset[str]()
    for task in tasks[:count]:
        with _whole(f"{task.id}: "):
            hooks |= _check(make, task, ask)
    return Finding(split, len(tasks), tuple(task.id for task in tasks[:count])), hooks


def _check(make: Callable[[Task], Env], task: Task, ask: Ask | None) -> frozenset[str]:
    """The optional hooks of one task's game, which keeps the contract."""
    guesses = (f"Is it {task.secret}?", task.secret) if task.secret else ()
    check_env(lambda: make(task), (*DEFAULT_ACTIONS, *guesses), ask)
    return available_hooks(make(task))


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
