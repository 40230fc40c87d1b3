"""``delta-belief plan``: what a configuration would run, without torch."""

from __future__ import annotations

import argparse
import sys

from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.config.convert import to_plain
from delta_belief_rl.config.versions import version_lines


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings and groups")
    parser.add_argument("--versions", action="store_true", help="also show the libraries' versions")
    parser.add_argument("--config", default="base", metavar="NAME", help="name or YAML file")


def _run(args: argparse.Namespace) -> Result:
    config, plan, warnings = prepare(args.overrides, args.config)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    versions = list(version_lines(config)) if args.versions else []
    text = plan.render()
    if versions:
        text = "\n".join([text, "", "Versions", *(f"  {line}" for line in versions)])
    return Result(
        value={**to_plain(plan), "warnings": warnings, "versions": versions},
        text=text,
        status=1 if plan.problems else 0,
    )


VERB = Verb(
    name="plan",
    help="Show what a configuration would run: places, batches, steps, memory.",
    example="delta-belief plan experiment=quickstart trainer.total_training_steps=5",
    add_arguments=_add_arguments,
    run=_run,
)
