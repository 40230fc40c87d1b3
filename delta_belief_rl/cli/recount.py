"""``delta-belief recount``: win rates and intervals from stored games."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.eval.recount import recount, table


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, help="folder with start/ and one sub-folder per method"
    )


def _run(args: argparse.Namespace) -> Result:
    results = recount(args.folder)
    return Result(value=[asdict(result) for result in results], text=table(results))


VERB = Verb(
    name="recount",
    help="Count win rates anew from stored games, with intervals over secrets.",
    example="delta-belief recount validation/quickstart",
    add_arguments=_add_arguments,
    run=_run,
)
