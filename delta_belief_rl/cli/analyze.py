"""``delta-belief analyze``: what files of stored games say, checked and compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.eval.analyze import DRAWS, FileAnalysis, analyze_files, training_secrets
from delta_belief_rl.eval.analyze_plots import write_plots
from delta_belief_rl.eval.analyze_text import to_json, to_text
from delta_belief_rl.types import UserError

_LISTED = 50
"""Damaged lines of a file that are named on stderr; ``--json`` has all."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="files of games, .jsonl or .jsonl.gz, of this project or of the published schema",
    )
    parser.add_argument(
        "--train",
        type=Path,
        metavar="FILE",
        help="parquet file of the training secrets: rates on those and on the others",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw SVG pictures into a folder")
    parser.add_argument("--per-secret", action="store_true", help="also list every secret")
    parser.add_argument("--draws", type=int, default=DRAWS, help="bootstrap samples")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")


def _run(args: argparse.Namespace) -> Result:
    if args.draws < 1:
        raise UserError(f"Intervals need at least one draw, not --draws {args.draws}.")
    if args.seed < 0:
        raise UserError(f"The seed cannot be negative, as in --seed {args.seed}.")
    train = frozenset[str]() if args.train is None else training_secrets(args.train)
    files = analyze_files(args.files, train_secrets=train, draws=args.draws, seed=args.seed)
    _list_damage(files)
    if args.plots is not None:
        for path in write_plots(files, args.plots):
            print(f"wrote {path}", file=sys.stderr)
    return Result(
        value=[to_json(file, per_secret=args.per_secret) for file in files],
        text=to_text(files, per_secret=args.per_secret),
    )


def _list_damage(files: Sequence[FileAnalysis]) -> None:
    for file in files:
        damaged = file.stored.damaged
        for line in damaged[:_LISTED]:
            print(f"{file.stored.path}, line {line.number} skipped: {line.reason}", file=sys.stderr)
        if len(damaged) > _LISTED:
            rest = len(damaged) - _LISTED
            print(f"{file.stored.path}: {rest} more lines skipped", file=sys.stderr)


VERB = Verb(
    name="analyze",
    help="Count, check and compare files of stored games: wins by both rules, questions, beliefs.",
    example="delta-belief analyze validation/quickstart/*/seed1-val.jsonl.gz --plots plots",
    add_arguments=_add_arguments,
    run=_run,
)
