"""Plays a run under random faults until it is done, and compares it with one that was left alone.

    python -m tests.chaos.run --minutes 30 --seed 7 [--json FILE] [--only 'rank killed']

Plays the straight run once, then the same run again and again while kills, stops, damage and second
starts drawn from the seed hit it, and whoever keeps it starts it again. At the end of each round
metrics, games, weights and tests must be those of the straight run, bit for bit, and no process or
temporary file may be left. Exit status 1 on any difference, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.chaos.faults import FAULTS, Outcome, inject
from tests.chaos.ledger import check_clean, compare
from tests.chaos.running import NotKept, Running, Starter, Watched, last_step, tail, wait_until
from tests.runs import words, write_world

SECRETS, GAMES, BATCH = 12, 4, 4
"""Training secrets, games of each in a step, secrets of a step."""
STRAIGHT_SECONDS = 1800.0
"""Longest that the straight run may take."""
STEP_SECONDS = 300.0
"""A run must be over a fault, a whole start included, by then."""
PATIENCE = (
    "actor_rollout_ref.nccl_timeout=60",
    "judge_rollout.timeout_s=20",
    "trainer.heartbeat_timeout=30",
)
"""Deadlines of the run, short so that what hangs is noticed while one watches."""


@dataclass
class Story:
    """Everything that happened.

    Attributes:
        settings: Of this call.
        straight_seconds: The straight run took, starts and final tests included.
        outcomes: Faults that hit, in order.
        missed: Faults that found nothing to hit, by kind.
        broken: The promise that was broken, or an empty text.
    """

    settings: dict[str, object]
    straight_seconds: float = 0.0
    rounds: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    broken: str = ""

    def table(self) -> str:
        """Faults by kind, as text."""
        line = "{:<26}{:>6}{:>10}{:>8}{:>12}{:>13}".format
        lines = [line("fault", "times", "median s", "most s", "steps lost", "games again")]
        for kind in FAULTS:
            mine = [outcome for outcome in self.outcomes if outcome.kind == kind]
            if mine:
                seconds = [outcome.seconds for outcome in mine]
                steps = sum(outcome.steps_lost for outcome in mine)
                games = sum(outcome.games_lost for outcome in mine)
                middle = f"{statistics.median(seconds):.1f}"
                lines.append(line(kind, len(mine), middle, max(seconds), steps, games))
        slowest = max((outcome.seconds for outcome in self.outcomes), default=0.0)
        return "\n".join([*lines, f"{self.rounds} rounds; longest recovery {slowest} s"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="new rounds begin until then")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=18, help="training steps of a round")
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="faults to draw from")
    parser.add_argument(
        "--keeper",
        choices=("watchdog", "plain"),
        default="watchdog",
        help="who starts the run again: watchdog.sh, or this program",
    )
    parser.add_argument("--json", type=Path, help="write everything that happened to this file")
    parser.add_argument("--keep", type=Path, help="keep the folders of all runs here")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.steps < 2:
        parser.error("--minutes must be positive and --steps at least 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 when a promise was broken."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "keep")}
    story = Story(settings)
    print(", ".join(f"{name} {value}" for name, value in settings.items()), flush=True)
    work = args.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        play(args, story, work)
    except NotKept as error:
        story.broken = str(error)
    finally:
        print(story.table())
        if args.json:
            args.json.write_text(json.dumps(asdict(story), indent=1), encoding="utf-8")
        if args.keep is None and not story.broken:
            shutil.rmtree(work, ignore_errors=True)
    if story.broken:
        print(f"NOT KEPT: {story.broken}\nThe folders are in {work}.", file=sys.stderr)
    return int(bool(story.broken))


def play(args: argparse.Namespace, story: Story, work: Path) -> None:
    """The straight run, then rounds under faults until the time is up."""
    world = write_world(work / "tiny.yaml", (SECRETS, 3, 3))
    limit = time.monotonic() + 60 * args.minutes
    began = time.monotonic()
    straight = work / "straight"
    with running(straight, world, args) as run:
        if not wait_until(run.keeper.tend, STRAIGHT_SECONDS):
            raise NotKept("the straight run does not end")
        check_clean(run)
    story.straight_seconds = round(time.monotonic() - began, 1)
    print(f"straight run: {args.steps} steps in {story.straight_seconds} s", flush=True)
    kinds = deck(args.only or list(FAULTS), random.Random(f"{args.seed}/kinds"))
    while story.rounds == 0 or time.monotonic() < limit:
        out = work / f"round{story.rounds}"
        rng = random.Random(f"{args.seed}/{story.rounds}")
        with running(out, world, args) as run:
            disturb(run, story, kinds, rng, args.steps)
            if not wait_until(run.keeper.tend, STRAIGHT_SECONDS):
                raise NotKept(f"round {story.rounds} does not end")
            compare(straight, out, SECRETS, GAMES)
            check_clean(run)
        story.rounds += 1
        print(f"round {story.rounds}: the same as the straight run", flush=True)


def deck(kinds: Sequence[str], rng: random.Random) -> Iterator[str]:
    """The kinds in random order, each as often as any other."""
    while True:
        yield from rng.sample(list(kinds), len(kinds))


def has_reached(run: Running, step: int) -> bool:
    """Whether the run has a record of a step, or is over."""
    return run.keeper.tend() or last_step(run.out) >= step


def disturb(
    run: Running, story: Story, kinds: Iterator[str], rng: random.Random, steps: int
) -> None:
    """Fault after fault until the run has come to its end."""
    while not run.keeper.tend():
        kind, ahead, share = next(kinds), rng.choice((0, 1, 1, 2)), rng.random()
        target = min(last_step(run.out) + ahead, steps)
        wait_until(partial(has_reached, run, target), STEP_SECONDS)
        # Within a step, or on the way up: configuration, Ray, models.
        time.sleep(share * (8.0 if ahead == 0 else 2.0))
        outcome = None if run.keeper.tend() else inject(kind, story.rounds, run, rng, STEP_SECONDS)
        if outcome is None:
            story.missed.append(kind)
            continue
        story.outcomes.append(outcome)
        print(
            f"round {story.rounds}, step {outcome.step:>3}: {kind}; {outcome.seconds} s, "
            f"{outcome.steps_lost} steps lost, {outcome.games_lost} games again",
            flush=True,
        )


class running:
    """A run that is started, and of which nothing is left afterwards whatever happened."""

    def __init__(self, out: Path, world: Path, args: argparse.Namespace) -> None:
        # Short, because Ray's sockets lie below it.
        self._scratch = Path(tempfile.mkdtemp(prefix="dbc", dir="/tmp"))
        environ = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._scratch)}
        environ.pop("RAY_TMPDIR", None)
        command = words(
            out,
            world,
            f"trainer.total_training_steps={args.steps}",
            f"trainer.test_freq={max(1, args.steps // 3)}",
            f"data.train_batch_size={BATCH}",
            f"multi_turn.train.n={GAMES}",
            "judge_rollout.replicas=2",
            "trainer.max_actor_ckpt_to_keep=4",
            *PATIENCE,
        )
        self._log = log = out.with_suffix(".log")
        keeper = (
            Watched(command, environ, log)
            if args.keeper == "watchdog"
            else Starter(command, environ, out, log)
        )
        self._run = Running(out, self._scratch, keeper)

    def __enter__(self) -> Running:
        return self._run

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._run.end()
        with suppress(OSError):
            shutil.rmtree(self._scratch)
        if kind is NotKept:
            print(tail(self._log), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
