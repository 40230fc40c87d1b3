"""``delta-belief plan``: what a configuration would run, without torch."""

from __future__ import annotations

import argparse
import sys

from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.config.convert import to_plain


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings and groups")
    parser.add_argument("--config", default="base", metavar="NAME", help="name or YAML file")


def _run(args: argparse.Namespace) -> Result:
    _, plan, warnings = prepare(args.overrides, args.config)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return Result(
        value={**to_plain(plan), "warnings": warnings},
        text=plan.render(),
        status=1 if plan.problems else 0,
    )


VERB = Verb(
    name="plan",
    help="Show what a configuration would run: places, batches, steps, memory.",
    example="delta-belief plan experiment=quickstart trainer.total_training_steps=5",
    add_arguments=_add_arguments,
    run=_run,
)
