"""``delta-belief doctor``: whether a configuration gives numbers that can be trusted."""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.config.paths import find_model
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.types import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from delta_belief_rl.trainer.doctor_engine import Check

_STATES = {True: "ok", False: "FAILED", None: "left out"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings and groups")
    parser.add_argument("--config", default="base", metavar="NAME", help="name or YAML file")
    parser.add_argument(
        "--games", type=int, default=4, metavar="N", help="conversations to sample (default: 4)"
    )
    parser.add_argument(
        "--turns", type=int, default=4, metavar="N", help="turns of each (default: 4)"
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="GROUP",
        help="leave a group of checks out, e.g. judge; may be given again",
    )


def _run(args: argparse.Namespace) -> Result:
    cfg, plan, warnings = prepare(args.overrides, args.config)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for sentence in unavailable(cfg):
        raise UserError(sentence)
    # Here, so that --help and a wrong setting load no torch.
    from delta_belief_rl.trainer.doctor import examine
    from delta_belief_rl.trainer.doctor_engine import DoctorSettings

    settings = DoctorSettings(args.games, args.turns, tuple(args.skip))
    with _told_apart():
        checks = examine(_located(cfg), plan.device, plan.threads, settings)
    failed = [check.name for check in checks if check.passed is False]
    value = {"passed": not failed, "checks": [_plain(check) for check in checks]}
    return Result(value=value, text=table(checks), status=1 if failed else 0)


@contextmanager
def _told_apart() -> Iterator[None]:
    """Send to standard error what engines, their processes and libraries write to standard output.

    The result alone goes there.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _plain(check: Check) -> Mapping[str, object]:
    """A check for JSON, which has no number that is none."""
    value = check.value
    return asdict(check) | {"value": None if value is None or math.isnan(value) else value}


def _located(cfg: RunConfig) -> RunConfig:
    """The configuration with models that can be loaded from here."""
    from delta_belief_rl.models.packaged import materialise

    def found(path: str) -> str:
        return materialise(find_model(path)) if path else path

    ref, judge = cfg.actor_rollout_ref, cfg.judge_rollout
    ref = replace(ref, model=replace(ref.model, path=found(ref.model.path)))
    if judge.name in ("hf", "vllm"):
        judge = replace(judge, model=replace(judge.model, path=found(judge.model.path)))
    return replace(cfg, actor_rollout_ref=ref, judge_rollout=judge)


def table(checks: Sequence[Check]) -> str:
    """One line for each check: state, name, number against bound, and what else was seen."""
    rows = [
        (
            _STATES[check.passed],
            check.name,
            "" if check.value is None else f"{check.value:.3g}",
            "" if check.bound is None else f"{check.bound:g}",
            check.unit,
            check.note,
        )
        for check in checks
    ]
    head = ("", "check", "found", "bound", "unit", "")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(5)]
    lines = [_line(row, widths) for row in (head, *rows)]
    failed = sum(check.passed is False for check in checks)
    made = sum(check.passed is not None for check in checks)
    lines.append(f"{made - failed} of {made} checks hold (docs/doctor.md explains each).")
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)]
    return "  ".join(padded).rstrip()


VERB = Verb(
    name="doctor",
    help="Check that engine, trainer, adapter, beliefs and judge agree before a run.",
    example="delta-belief doctor experiment=quickstart",
    add_arguments=_add_arguments,
    run=_run,
)
