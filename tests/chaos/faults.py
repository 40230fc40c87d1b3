"""The faults of a run under chaos: what each does, and how long the run took to get over it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer.checkpoint import MANIFEST
from tests.chaos.running import NotKept, Running, last_step, saved_step, wait_until
from tests.processes import born, descendants
from tests.runs import ROOT

SECOND_START_SECONDS = 180.0
"""A second start of a run that goes on must have been refused by then."""
UP_SECONDS = 240.0
"""A start must have its workers up by then."""


@dataclass(frozen=True, slots=True)
class Wound:
    """What a fault did.

    Attributes:
        may_lose: Finished steps that the fault takes by its nature: those of files that it damaged.
        stopped: A process that stands still, to be woken or ended afterwards.
    """

    may_lose: int = 0
    stopped: int | None = None


Fault = Callable[[Running, random.Random], Wound | None]
"""Injects itself; None where there was nothing to hit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table at the end.

    Attributes:
        step: Last step with a record when it happened; -1 before the first.
        seconds: From the fault to the end of a step that began after it, or to that of the run.
        steps_lost: Saved steps that were trained again.
        games_lost: Games that a run which mended itself played again.
    """

    kind: str
    round: int
    step: int
    seconds: float
    steps_lost: int
    games_lost: int


def _signal_driver(number: signal.Signals) -> Fault:
    def fault(run: Running, rng: random.Random) -> Wound | None:
        return Wound() if run.send(run.driver(), number) else None

    return fault


def _kill_all(run: Running, rng: random.Random) -> Wound | None:
    driver = run.driver()
    if driver is None:
        return None
    for pid in [driver, *descendants(driver)]:
        run.send(pid, signal.SIGKILL)
    return Wound()


def _signal_worker(role: str, number: signal.Signals) -> Fault:
    def fault(run: Running, rng: random.Random) -> Wound | None:
        index = rng.randrange(8)
        wait_until(lambda: run.worker(role, index), UP_SECONDS, run.keeper.tend)
        pid = run.worker(role, index)
        if not run.send(pid, number):
            return None
        return Wound(stopped=pid if number is signal.SIGSTOP else None)

    return fault


def _kill_helper(name: str) -> Fault:
    def fault(run: Running, rng: random.Random) -> Wound | None:
        wait_until(lambda: run.helper(name), UP_SECONDS, run.keeper.tend)
        return Wound() if run.send(run.helper(name), signal.SIGKILL) else None

    return fault


def _damage(what: str) -> Fault:
    """Damage the checkpoint saved last, then kill the driver so that somebody has to read it."""

    def fault(run: Running, rng: random.Random) -> Wound | None:
        saved = checkpoint.list_valid(run.out / "checkpoints")
        driver = run.driver()
        # An earlier one must be there; without any, the run would rightly begin anew.
        if len(saved) < 2 or driver is None:
            return None
        run.send(driver, signal.SIGSTOP)
        latest = checkpoint.list_valid(run.out / "checkpoints")
        target = latest[-1].path / (MANIFEST if what == "manifest" else sorted(latest[-1].files)[0])
        if what == "removed":
            target.unlink()
        else:
            cut_short(target, rng)
        run.send(driver, signal.SIGKILL)
        return Wound(may_lose=latest[-1].step - latest[-2].step)

    return fault


def cut_short(path: Path, rng: random.Random) -> None:
    """Keep a part of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def _start_again(run: Running, rng: random.Random) -> Wound | None:
    """Start the run a second time while it goes on: the second one must be refused."""
    keeper = run.keeper
    # While nobody plays the run a second start is a first one.
    if run.driver() is None or not run.has_begun():
        return None
    done = subprocess.Popen(
        [sys.executable, "train.py", *keeper.command],
        cwd=ROOT,
        env=keeper.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, said = done.communicate(timeout=SECOND_START_SECONDS)
    except subprocess.TimeoutExpired:
        for pid in [done.pid, *descendants(done.pid)]:
            run.send(pid, signal.SIGKILL)
        done.communicate()
        raise NotKept("a second start of a run that goes on was not refused") from None
    complete = done.returncode == 0 and "is complete" in said
    if done.returncode != ExitStatus.BAD_INPUT and not complete:
        raise NotKept(f"a second start ended with {done.returncode}: {said[-2000:]}")
    return Wound()


FAULTS: dict[str, Fault] = {
    "driver killed": _signal_driver(signal.SIGKILL),
    "driver asked to end": _signal_driver(signal.SIGTERM),
    "everything killed": _kill_all,
    "rank killed": _signal_worker("rank", signal.SIGKILL),
    "rank hangs": _signal_worker("rank", signal.SIGSTOP),
    "engine killed": _signal_worker("engine", signal.SIGKILL),
    "engine hangs": _signal_worker("engine", signal.SIGSTOP),
    "judge killed": _signal_worker("judge", signal.SIGKILL),
    "judge hangs": _signal_worker("judge", signal.SIGSTOP),
    "raylet killed": _kill_helper("raylet"),
    "Ray head killed": _kill_helper("gcs_server"),
    "checkpoint cut short": _damage("file"),
    "checkpoint file removed": _damage("removed"),
    "manifest cut short": _damage("manifest"),
    "started twice": _start_again,
}


def inject(
    kind: str, number: int, run: Running, rng: random.Random, limit: float
) -> Outcome | None:
    """One fault, and the wait until the run is over it.

    Args:
        kind: A name of ``FAULTS``.
        number: Of the round.
        run: The run.
        rng: For what the fault leaves open.
        limit: Seconds until the next step must be finished.

    Raises:
        NotKept: The run hangs, gives up, or loses a step that was saved.
    """
    step, saved, told = last_step(run.out), saved_step(run.out), len(run.events())
    began = time.monotonic()
    wound = FAULTS[kind](run, rng)
    if wound is None:
        return None
    # The step at hand may end without what was hit; the one after it cannot.
    over = wait_until(lambda: run.keeper.tend() or last_step(run.out) >= step + 2, limit)
    seconds = time.monotonic() - began
    if wound.stopped is not None and born(wound.stopped):
        run.send(wound.stopped, signal.SIGCONT)
    if not over:
        raise NotKept(f"{kind} at step {step}: no step was finished within {limit:g} s")
    since = run.events()[told:]
    goes_on = [event for event in since if event["kind"] in ("start", "recovered")]
    lost = max([0, *(saved - event["step"] for event in goes_on)])
    if lost > wound.may_lose:
        raise NotKept(f"{kind} at step {step}: {lost} saved steps were lost")
    games = sum(event.get("games_lost", 0) for event in since if event["kind"] == "recovered")
    return Outcome(kind, number, step, round(seconds, 1), lost, games)
