"""``delta-belief audit``: how far a judge can be relied on, from stored games or by asking it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.eval.agreement import DRAWS
from delta_belief_rl.eval.audit_text import (
    games_json,
    games_text,
    judge_json,
    judge_text,
    too_high,
    too_low,
)
from delta_belief_rl.eval.judge_audit import audit_files
from delta_belief_rl.types import UserError

_SHOWN = 5
"""Broken bounds that are named on stderr; ``--json`` has all."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("games", "judge"),
        help="games: the replies in stored games; judge: the replies of a configured judge",
    )
    parser.add_argument(
        "items",
        nargs="+",
        metavar="FILE|OVERRIDE",
        help="files of games (.jsonl, .jsonl.gz), or settings of the judge, as for train.py",
    )
    judge = parser.add_argument_group("for audit judge")
    judge.add_argument(
        "--against", nargs="+", metavar="OVERRIDE", help="settings of a second judge to compare"
    )
    judge.add_argument(
        "--games",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="take the questions from stored games, where no truth is known",
    )
    judge.add_argument("--questions", type=int, default=200, help="different questions")
    judge.add_argument("--rounds", type=int, default=3, help="times that each is asked")
    judge.add_argument("--batch", type=int, default=8, help="questions of one call")
    judge.add_argument("--price", type=float, help="of 1,000 tokens, in any currency")
    parser.add_argument(
        "--min-agreement", type=float, help="exit with 1 where an agreement is below, 0 to 1"
    )
    parser.add_argument(
        "--max-error-rate", type=float, help="exit with 1 where the judge fails more often, 0 to 1"
    )
    parser.add_argument("--draws", type=int, default=DRAWS, help="bootstrap samples")
    parser.add_argument("--seed", type=int, default=0, help="of questions and bootstrap")


def _run(args: argparse.Namespace) -> Result:
    _check(args)
    result, failed = _audit_games(args) if args.what == "games" else _audit_judge(args)
    for sentence in failed[:_SHOWN]:
        print(sentence, file=sys.stderr)
    if len(failed) > _SHOWN:
        print(f"{len(failed) - _SHOWN} more", file=sys.stderr)
    return result


def _check(args: argparse.Namespace) -> None:
    for name, value, lowest in (
        ("--draws", args.draws, 1),
        ("--seed", args.seed, 0),
        ("--questions", args.questions, 1),
        ("--rounds", args.rounds, 1),
        ("--batch", args.batch, 1),
        ("--price", args.price, 0),
    ):
        if value is not None and not value >= lowest:
            raise UserError(f"{name} must be at least {lowest}, not {value}.")
    for name, bound in (
        ("--min-agreement", args.min_agreement),
        ("--max-error-rate", args.max_error_rate),
    ):
        if bound is not None and not 0 <= bound <= 1:
            raise UserError(f"{name} is a share between 0 and 1, not {bound}.")
    if args.what == "games" and (args.against or args.games):
        raise UserError("--against and --games belong to audit judge; name all files together.")


def _audit_games(args: argparse.Namespace) -> tuple[Result, list[str]]:
    audit = audit_files([Path(item) for item in args.items], draws=args.draws, seed=args.seed)
    for file in audit.files:
        if file.damaged:
            print(f"{file.label}: {file.damaged} damaged lines were skipped", file=sys.stderr)
    failed = too_low(audit.rates(), args.min_agreement)
    failed += too_high(audit.error_rates(), args.max_error_rate)
    return Result(games_json(audit, failed), games_text(audit), int(bool(failed))), failed


def _audit_judge(args: argparse.Namespace) -> tuple[Result, list[str]]:
    from delta_belief_rl.cli.audit_judge import TrialSettings, try_judges

    overrides: list[Sequence[str]] = [args.items]
    if args.against:
        overrides.append(args.against)
    trial = try_judges(
        overrides,
        TrialSettings(
            games=tuple(args.games or ()),
            questions=args.questions,
            rounds=args.rounds,
            batch=args.batch,
            price=args.price,
            draws=args.draws,
            seed=args.seed,
        ),
    )
    failed = too_low(trial.rates(), args.min_agreement)
    failed += too_high(trial.error_rates(), args.max_error_rate)
    value = judge_json(trial.reports, trial.both, failed)
    value["made"] = {name: dict(made) for name, made in trial.made.items()}
    return Result(value, judge_text(trial.reports, trial.both), int(bool(failed))), failed


VERB = Verb(
    name="audit",
    help="Measure a judge: contradictions, agreement, errors, time and cost.",
    example="delta-belief audit judge env=everyday judge=world --questions 76 --rounds 2",
    add_arguments=_add_arguments,
    run=_run,
)
