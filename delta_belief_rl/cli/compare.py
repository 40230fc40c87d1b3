"""``delta-belief compare``: methods of credit at one budget, over seeds, in one table and plot."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from delta_belief_rl.cli.compare_cells import Cell, Crew, Record, read_record
from delta_belief_rl.cli.compare_plan import (
    Study,
    dry_run,
    list_methods,
    make_study,
    room,
    train_program,
)
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.eval.compare import compare
from delta_belief_rl.eval.compare_plot import comparison_plot
from delta_belief_rl.eval.compare_results import CellResult, kept_cell
from delta_belief_rl.eval.compare_text import Report, to_csv, to_json, to_markdown, to_text
from delta_belief_rl.types import UserError

TABLE, CSV, JSON, PLOT = "compare.md", "compare.csv", "compare.json", "compare.svg"
DEFAULT_OUT = Path("outputs/compare")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings of every run, as for train.py"
    )
    parser.add_argument("--list", action="store_true", help="show the methods and stop")
    parser.add_argument("--methods", metavar="A,B", help="names of methods, see --list")
    parser.add_argument("--seeds", default="1,2,3", metavar="1,2,3", help="of the runs")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps of each run")
    parser.add_argument(
        "--baseline", metavar="NAME", help="compare with this one: grpo, or the first method"
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="runs, table and plot"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time; as many as the machine has room for"
    )
    parser.add_argument(
        "--limit-hours", type=float, default=24.0, metavar="H", help="longest time of one run"
    )
    parser.add_argument(
        "--train", type=Path, metavar="FILE", help="the program of a run, in place of train.py"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the runs and what they cost, and stop"
    )


def _run(args: argparse.Namespace) -> Result:
    if args.list:
        return list_methods(args.overrides)
    _check(args)
    study = make_study(
        args.overrides,
        methods=_names(args.methods),
        seeds=_seeds(args.seeds),
        steps=args.steps,
        baseline=args.baseline,
        out=args.out,
    )
    slots = room(study.plan, args.jobs)
    if args.dry_run:
        return dry_run(study, len(slots))
    program = [sys.executable, str(train_program(args.train))]
    with _alone(args.out):

        def keep(cell: Cell) -> None:
            # Reading all at the end takes long. What cannot be read is told there.
            with suppress(UserError):
                kept_cell(cell.folder, study.budget, cell.result)

        crew = Crew(program, slots, 3600 * args.limit_hours, _say, done=keep)
        told = crew.run(study.cells)
        records = {(cell.method, cell.seed): read_record(cell) for cell in study.cells}
        report = make_report(study, records)
        paths = write_report(report, args.out)
    text = "\n\n".join([to_text(report), "\n".join(str(path) for path in paths)])
    status = 1 if report.failures or report.missing else 0
    return Result(to_json(report), text, 128 + told if told is not None else status)


def make_report(study: Study, records: Mapping[tuple[str, int], Record]) -> Report:
    """Read what the runs that are done have brought.

    A run whose files cannot be used counts as failed, with the reason.
    """
    results: dict[str, dict[int, CellResult]] = {method: {} for method in study.methods}
    failures = {key: record.cause for key, record in records.items() if record.cause}
    for cell in study.cells:
        if not records[cell.method, cell.seed].done:
            continue
        try:
            results[cell.method][cell.seed] = kept_cell(cell.folder, study.budget, cell.result)
        except UserError as error:
            failures[cell.method, cell.seed] = str(error)
    return Report(
        comparison=compare(results, study.baseline, study.budget),
        methods=study.methods,
        seeds=study.seeds,
        labels=study.labels,
        failures=failures,
        facts=study.facts,
        differing=study.differing,
    )


def write_report(report: Report, out: Path) -> list[Path]:
    """Write the table in three forms and the plot; returns the paths.

    Raises:
        UserError: The folder cannot be written.
    """
    plot = comparison_plot(report.comparison)
    bodies = {
        TABLE: to_markdown(report, PLOT if plot else ""),
        CSV: to_csv(report),
        JSON: json.dumps(to_json(report), indent=1, ensure_ascii=False) + "\n",
        PLOT: plot,
    }
    paths: list[Path] = []
    try:
        for name, body in bodies.items():
            path = out / name
            if not body:
                path.unlink(missing_ok=True)
                continue
            beside = out / f".{name}.{os.getpid()}"
            beside.write_text(body, encoding="utf-8")
            os.replace(beside, path)
            paths.append(path)
    except OSError as error:
        raise UserError(
            f"The comparison cannot be written to {out} ({error.strerror}): name another folder "
            "with --out."
        ) from error
    return paths


def _check(args: argparse.Namespace) -> None:
    if not args.methods:
        raise UserError("No method is named: write --methods grpo,gigpo, or see --list.")
    if args.steps is not None and args.steps < 1:
        raise UserError(f"A run has at least one step, not --steps {args.steps}.")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"At least one run goes on at a time, not --jobs {args.jobs}.")
    if not 0 < args.limit_hours <= 24 * 365:
        raise UserError(f"--limit-hours is {args.limit_hours:g}; it must be in (0, 8760].")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"--methods {text} has an empty name or one twice: name each method once.")
    return names


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text} must be different whole numbers from 0 on, such as 1,2,3.")
    return seeds


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the folder of the comparison for the length of the block.

    Raises:
        UserError: Another comparison works in it, or it cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(
            f"{out} cannot be made ({error.strerror}): name another folder with --out."
        ) from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another comparison works in {out}: wait for its end, or name another folder "
                "with --out."
            ) from error
        yield
    finally:
        os.close(folder)


def _say(sentence: str) -> None:
    print(f"compare: {sentence}", file=sys.stderr, flush=True)


VERB = Verb(
    name="compare",
    help="Train several methods with several seeds at one budget; a table, a plot, differences.",
    example="delta-belief compare --methods grpo,gigpo,delta_belief --seeds 1,2,3 --steps 32 "
    "experiment=quickstart",
    add_arguments=_add_arguments,
    run=_run,
)
