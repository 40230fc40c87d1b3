"""``delta-belief report``: the page of a run, made anew from the files in its folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.eval.report import render
from delta_belief_rl.types import UserError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's folder")


def _run(args: argparse.Namespace) -> Result:
    if not args.run_dir.is_dir():
        raise UserError(f"There is no folder {args.run_dir}: name a run's folder.")
    page = str(render(args.run_dir))
    return Result(value={"report": page}, text=page)


VERB = Verb(
    name="report",
    help="Make report.html of a run's folder anew; also of a run that is going on.",
    example="delta-belief report outputs/quickstart/delta_belief",
    add_arguments=_add_arguments,
    run=_run,
)
