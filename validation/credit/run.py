"""Make the runs of a study and its record, for as long as there is time.

    python -m validation.credit.run --study everyday --cores 32 --minutes 10 --out studies
    python -m validation.credit.run --study errands --cores 32 --minutes 10 --out studies

The runs are those of ``delta-belief compare``, one on each core, in ``<out>/<study>``. At the end
of the minutes those in progress are asked to save and end, and ``<out>/<study>.json`` has what is
done. The same command again goes on. Method after method is run with all seeds, those of the first
list of ``study.py`` before the others; runs that failed are tried once again behind them. With
``--have`` an earlier record is gone on with where its runs are not on this machine: methods that it
has every seed of are not run, and its runs stand in the new record.

Exit status: 0 when every run is done, 1 when some are missing or have failed, 2 for bad arguments
and where the comparison ended with a refusal, which leaves a record of what was done before it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from delta_belief_rl.cli import leash
from delta_belief_rl.cli.compare_plan import Study as Comparing
from delta_belief_rl.cli.compare_plan import make_study
from delta_belief_rl.cli.parser import OneLineParser
from delta_belief_rl.types import UserError
from validation.credit import records
from validation.credit.study import BASELINE, FIRST, SEEDS, STUDIES, Study
from validation.gpu import host

CLOSING = 90.0
"""Seconds at the end in which runs save and end, and the record is written."""
_ENDING = 80.0
"""Of these, for the comparison, which gives its runs a minute."""
_TRIES = 2
"""Of a run that fails, within one call."""
_POLL_SECONDS = 0.5
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of this program.

    Attributes:
        methods: To be run here, in this order.
        have: Record of runs that are not on this machine; None without one.
    """

    study: Study
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    cores: int
    minutes: float
    out: Path
    have: records.Record | None = None

    @property
    def folder(self) -> Path:
        """Of the runs."""
        return self.out / self.study.name

    @property
    def record(self) -> Path:
        """File of the record."""
        return self.out / f"{self.study.name}.json"

    def command(self) -> list[str]:
        """The comparison that makes the runs."""
        return [
            *(sys.executable, "-m", "delta_belief_rl.cli.main", "compare"),
            *("--methods", ",".join(self.methods), "--seeds", ",".join(map(str, self.seeds))),
            *("--steps", str(self.steps), "--jobs", str(self.cores), "--out", str(self.folder)),
            *self.study.words,
        ]


def play(call: Call, say: Callable[[str], None]) -> bool:
    """Run until everything is done, the time is up or a signal comes.

    Returns:
        False where the comparison ended with a refusal, which it has told.
    """
    ends = time.monotonic() + 60 * call.minutes - CLOSING
    told: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: told.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        for number in range(_TRIES):
            if told or time.monotonic() >= ends:
                break
            again = ", what failed once again" if number else ""
            say(f"{len(call.methods)} methods{again}: {', '.join(call.methods)}")
            status = _compare(call.command(), ends, told)
            if status != 1:
                return status != 2
        return True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _compare(command: Sequence[str], ends: float, told: Sequence[int]) -> int:
    """One comparison, which is asked to end when its time is up; its exit status."""
    environment = os.environ | dict.fromkeys(_THREADS, "1")
    # Should this program be killed, the comparison is told to end.
    tied = [sys.executable, "-I", "-S", leash.__file__, "run", str(os.getpid()), *command]
    # Its own session: Ctrl-C reaches it through here, once.
    child = subprocess.Popen(
        tied, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    while child.poll() is None and time.monotonic() < ends and not told:
        time.sleep(_POLL_SECONDS)
    if child.poll() is None:
        child.terminate()
    try:
        return child.wait(_ENDING)
    except subprocess.TimeoutExpired:
        # Its runs are told to end by its death.
        child.kill()
        return child.wait()


def plan(call: Call) -> Comparing:
    """All runs of the call as one comparison; settings are held against the page's baseline.

    Raises:
        UserError: Settings cannot be compared, or the folder holds other runs.
    """
    made = make_study(
        call.study.words,
        methods=tuple(dict.fromkeys((BASELINE, *call.methods))),
        seeds=call.seeds,
        steps=call.steps,
        baseline=BASELINE,
        out=call.folder,
    )
    cells = tuple(cell for cell in made.cells if cell.method in call.methods)
    return replace(made, methods=call.methods, cells=cells)


def make_record(call: Call, study: Comparing) -> records.Record:
    """The record of everything that is done, on this machine and in the record before.

    Raises:
        UserError: The record before cannot be gone on with.
    """
    body = records.condense(call.study.name, call.steps, call.study.words, study)
    body["baseline"] = BASELINE
    body["machines"] = [machine(call.cores)] if body["cells"] else []
    return body if call.have is None else records.merged(body, call.have)


def machine(jobs: int) -> dict[str, Any]:
    """Date, processor and versions, for the record."""
    found, versions = host.hardware(), host.versions()
    names = ("python", "torch", "transformers", "ray", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": found["cpu"],
        "cores": found["cores"],
        "runs at once": jobs,
        "versions": {name: versions[name] for name in names},
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(
        prog="validation.credit.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--study", choices=list(STUDIES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of everything written")
    parser.add_argument("--cores", type=int, required=True, help="runs at a time, one on each core")
    parser.add_argument("--minutes", type=float, required=True, help="of this call, all in all")
    parser.add_argument("--methods", metavar="A,B", help="of the study (default: all)")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), metavar="1,2,3")
    parser.add_argument("--steps", type=int, help="training steps of a run (default: the study's)")
    parser.add_argument("--have", type=Path, metavar="FILE", help="a record to go on with")
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    return parser.parse_args(argv)


def make_call(args: argparse.Namespace) -> Call:
    """What the command line asks for.

    Raises:
        UserError: A method is not of the study, or a number cannot be.
    """
    study = STUDIES[args.study]
    steps = study.steps if args.steps is None else args.steps
    if args.cores < 1 or steps < 1:
        raise UserError("--cores and --steps must be 1 or more.")
    if 60 * args.minutes <= CLOSING:
        raise UserError(f"--minutes={args.minutes:g} is too short: give {CLOSING / 60 + 1:g}.")
    methods = tuple(args.methods.split(",")) if args.methods else study.methods
    for method in methods:
        if method not in study.methods:
            raise UserError(f"{method!r} is no method of the study: {', '.join(study.methods)}.")
    try:
        seeds = tuple(int(word) for word in args.seeds.split(","))
    except ValueError as error:
        raise UserError(f"--seeds={args.seeds} must be whole numbers such as 1,2,3.") from error
    have = records.load(args.have) if args.have else None
    done = set(records.complete(have)) if have else set[str]()
    first = [method for method in methods if method in FIRST]
    left = tuple(name for name in dict.fromkeys([*first, *methods]) if name not in done)
    out = args.out.resolve()
    return Call(study, left, seeds, steps, args.cores, args.minutes, out, have)


def main(argv: Sequence[str] | None = None) -> int:
    """Make runs and record; see the module's text for the exit status."""
    args = parse(argv)
    try:
        call = make_call(args)
        if args.dry_run:
            print(shlex.join(call.command()))
            return 0
        if not call.methods:
            print(f"{args.have} has every run of {call.study.name}.")
            return 0
        # Composing the settings of all methods takes a while, in which the first runs can go on.
        with ThreadPoolExecutor(max_workers=1) as beside:
            planned = beside.submit(plan, call)
            went = play(call, lambda text: print(f"credit: {text}", file=sys.stderr, flush=True))
            body = make_record(call, planned.result())
        records.write(call.record, body)
    except UserError as error:
        print(f"validation.credit.run: {error}", file=sys.stderr)
        return 2
    wanted = len(body["methods"]) * len(body["seeds"])
    print(f"{call.record}: {len(body['cells'])} of {wanted} runs, {len(body['failures'])} failed")
    if not went:
        print("validation.credit.run: the comparison was refused, see above.", file=sys.stderr)
        return 2
    return int(len(body["cells"]) < wanted)


if __name__ == "__main__":
    sys.exit(main())
