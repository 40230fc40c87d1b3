"""One owner of all tasks, the heartbeat, and the event that every end leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from delta_belief_rl.cluster.supervisor import Supervisor, to_its_end
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.obs.exits import Terminated, exit_on_sigterm, sigterm_asks
from delta_belief_rl.obs.heartbeat import FILE, Heartbeat, Pulse
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.types import UserError


class Broken(RuntimeError):
    """What fails here."""


async def for_ever(left: list[str], name: str) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        left.append(name)


async def fails() -> None:
    await asyncio.sleep(0.01)
    raise Broken("in a task")


# --- tasks ----------------------------------------------------------------------------------------


def test_H2_H6_the_first_failure_cancels_all_others_and_is_what_the_run_ends_by() -> None:
    supervisor, left = Supervisor(), []

    async def work() -> None:
        beside = asyncio.create_task(for_ever(left, "beside"))
        await unwatched_task()
        await for_ever(left, "main")
        await beside

    with pytest.raises(Broken):
        supervisor.play(work)
    assert sorted(left) == ["beside", "main"]


def test_H6_when_the_work_ends_what_runs_beside_ends_too() -> None:
    supervisor, left = Supervisor(), []
    beside: list[asyncio.Task[None]] = []

    async def work() -> None:
        beside.append(asyncio.create_task(for_ever(left, "beside")))
        await asyncio.sleep(0.01)

    supervisor.play(work)
    assert left == ["beside"]


async def unwatched_task() -> None:
    # Nobody keeps it, nobody waits for it.
    asyncio.get_running_loop().create_task(fails())


async def callback() -> None:
    def broken() -> None:
        raise Broken("in a callback")

    asyncio.get_running_loop().call_later(0.01, broken)


async def task_in_a_cycle() -> None:
    task = asyncio.get_running_loop().create_task(fails())
    holder: dict[str, object] = {"task": task}
    holder["self"] = holder
    task.add_done_callback(lambda _: holder.get("self"))


@pytest.mark.parametrize("lose", [unwatched_task, callback])
def test_H2_an_exception_that_nobody_waits_for_ends_a_run_that_would_hang(
    lose: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    left: list[str] = []

    async def work() -> None:
        await lose()
        await for_ever(left, "main")

    with pytest.raises(Broken):
        Supervisor().play(work)
    assert left == ["main"]


def test_H2_an_exception_in_a_cycle_of_references_is_found_before_the_run_counts_as_done() -> None:
    async def work() -> None:
        await task_in_a_cycle()
        await asyncio.sleep(0.05)

    with pytest.raises(Broken):
        Supervisor().play(work)


def test_H2_a_failure_of_the_work_itself_and_of_its_clean_up_ends_by_the_first() -> None:
    supervisor = Supervisor()

    async def work() -> None:
        await unwatched_task()
        try:
            await asyncio.sleep(3600)
        finally:
            raise ValueError("in the clean-up")

    with pytest.raises(Broken):
        supervisor.play(work)


def test_H6_a_failure_may_come_from_another_thread() -> None:
    supervisor = Supervisor()
    thread = threading.Timer(0.05, supervisor.fail, [Broken("elsewhere")])
    thread.start()
    with pytest.raises(Broken):
        supervisor.play(lambda: for_ever([], "main"))
    thread.join()


@pytest.fixture
def _ctrl_c_is_heard() -> Iterator[None]:
    """In the background of a shell it is ignored from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_is_heard")
def test_ctrl_c_is_left_to_asyncio() -> None:
    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    async def work() -> None:
        asyncio.get_running_loop().call_later(0.01, press)
        await asyncio.sleep(3600)

    with pytest.raises(KeyboardInterrupt):
        Supervisor().play(work)


# --- SIGTERM --------------------------------------------------------------------------------------


def test_sigterm_lets_the_work_clean_up_and_a_second_one_does_not_interrupt_it() -> None:
    supervisor, done, before = Supervisor(), [], signal.getsignal(signal.SIGTERM)

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(3600)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            done.append("cleaned up")

    try:
        with pytest.raises(Terminated) as caught:
            supervisor.play(work)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 143
    assert done == ["cleaned up"]


def test_after_the_block_sigterm_is_as_it_was_unless_it_came() -> None:
    before = signal.getsignal(signal.SIGTERM)
    asked: list[int] = []
    try:
        with sigterm_asks(lambda: asked.append(1)):
            pass
        assert signal.getsignal(signal.SIGTERM) is before
        with sigterm_asks(lambda: asked.append(2)):
            os.kill(os.getpid(), signal.SIGTERM)
        # The process ends now, and no further signal may disturb it.
        exit_on_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [2]
    finally:
        signal.signal(signal.SIGTERM, before)


# --- the heartbeat --------------------------------------------------------------------------------


def test_H11_a_beat_tells_phase_calls_and_oldest_age_while_the_main_thread_waits(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    twice = threading.Event()

    def say(text: str) -> None:
        lines.append(text)
        if len(lines) >= 2:
            twice.set()

    pulse = Pulse("play", 12.0, 3, outstanding=3, oldest_seconds=41.6, detail="games 5/8")
    with Heartbeat(tmp_path, "run", lambda: pulse, say, 0.01):
        assert twice.wait(20)
        found = json.loads((tmp_path / FILE).read_text())
    expected = "heartbeat: play for 12 s after step 3, 3 calls outstanding, oldest 42 s, games 5/8"
    assert lines[0] == expected
    wanted = {"run_id": "run", "status": "running", "phase": "play", "step": 3, "outstanding": 3}
    assert {name: found[name] for name in wanted} == wanted
    assert abs(found["time"] - time.time()) < 60
    assert json.loads((tmp_path / FILE).read_text())["status"] == "ended"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert not [t for t in threading.enumerate() if t.name.startswith("heartbeat")]


def test_H11_a_phase_that_is_shorter_than_the_interval_gives_no_line(tmp_path: Path) -> None:
    lines: list[str] = []
    began = time.monotonic()
    with Heartbeat(tmp_path, "run", lambda: Pulse("save", 0.0), lines.append, 0.01):
        while time.monotonic() - began < 0.2:
            time.sleep(0.01)
    assert lines == []


def test_H11_a_hanging_event_loop_shows(tmp_path: Path) -> None:
    supervisor, seen = Supervisor(), []

    def pulse() -> Pulse:
        seen.append(supervisor.silence())
        return Pulse("score", loop_seconds=seen[-1])

    async def work() -> None:
        await asyncio.sleep(0.3)
        assert max(seen) < 0.25
        time.sleep(0.6)

    with Heartbeat(tmp_path, "run", pulse, print, 0.02):
        supervisor.play(work)
    assert max(seen) > 0.4
    line = Pulse("score", loop_seconds=90.0).line()
    assert line.endswith("the event loop has not answered for 90 s")


def test_H2_a_heartbeat_that_breaks_ends_the_run(tmp_path: Path) -> None:
    supervisor = Supervisor()

    def pulse() -> Pulse:
        if threading.current_thread() is not threading.main_thread():
            raise Broken("in the heartbeat")
        return Pulse("play")

    heart = Heartbeat(tmp_path, "run", pulse, print, 0.02)
    heart.on_failure = supervisor.fail
    with heart, pytest.raises(Broken):
        supervisor.play(lambda: for_ever([], "main"))


# --- the last event -------------------------------------------------------------------------------


def end_of(tmp_path: Path, error: BaseException | None) -> tuple[int | None, list[dict[str, Any]]]:
    """Exit status of a run that ends by an error, None where it is raised; and its events."""

    def play() -> None:
        if error is not None:
            raise error

    status = None
    with suppress(Broken, UserError, RayTaskError):
        status = to_its_end(play, EventLog(tmp_path / "events.jsonl", "run"), lambda: 7)
    return status, read_records(tmp_path / "events.jsonl")


@pytest.mark.parametrize(
    ("error", "status", "end"),
    [
        (None, 0, (0, "done")),
        (EngineFailure("vLLM died"), 1, (1, "engine_failed")),
        (RayTaskError("step", "trace", EngineFailure("died")), 1, (1, "engine_failed")),
        (Terminated(), 143, (143, "terminated")),
        (KeyboardInterrupt(), 130, (130, "interrupted")),
        (UserError("no such model"), None, (2, "bad_input")),
        (RayTaskError("setup", "trace", UserError("no model")), None, (2, "bad_input")),
        (Broken("a defect"), None, (1, "defect")),
        (RayTaskError("setup", "trace", Broken("a defect")), None, (1, "defect")),
    ],
)
def test_every_end_is_the_last_event_with_status_cause_and_step(
    error: BaseException | None,
    status: int | None,
    end: tuple[int, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, events = end_of(tmp_path, error)
    assert found == status
    last = events[-1]
    assert (last["kind"], last["step"]) == ("end", 7)
    assert (last["status"], last["cause"]) == end
    assert last.get("error") == ("Broken" if end[1] == "defect" else None)
    # What is not raised is told here, in one line.
    assert len(capsys.readouterr().err.splitlines()) == (1 if status else 0)


def test_a_record_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **fields: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventLog, "write", full)
    assert end_of(tmp_path, EngineFailure("vLLM died"))[0] == 1
    assert "vLLM died" in capsys.readouterr().err
