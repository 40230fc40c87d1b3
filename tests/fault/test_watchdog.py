"""The watchdog over real processes: small programs that end, hang and leave things behind."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from delta_belief_rl.cli.leash import born, members

pytestmark = pytest.mark.fault

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 120.0

# Does what line n of its plan says when it is started for the n-th time. A ``facts`` entry makes
# it a run that says which folder is its own.
CHILD = r"""
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
with (folder / "argv.jsonl").open("a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\n")
number = len((folder / "argv.jsonl").read_text().splitlines())
plan = json.loads((folder / "plan.json").read_text())
todo = plan[min(number, len(plan)) - 1]
run = folder / "run"
run.mkdir(exist_ok=True)

def event(kind, **fields):
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, **fields}) + "\n")

def note(word):
    with (folder / "notes.txt").open("a") as file:
        file.write(word + "\n")

if target := os.environ.get("DBRL_RUN_FACTS") if todo.get("facts") else None:
    events = run / "events.jsonl"
    size = events.stat().st_size if events.exists() else 0
    facts = {"run_dir": str(run), "pid": os.getpid(), "events_bytes": size}
    Path(target).write_text(json.dumps(facts))
    event("start", step=0)
if todo.get("on_usr1"):
    signal.signal(signal.SIGUSR1, lambda *_: note("stacks"))
if todo.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = None
if todo.get("helper"):
    own = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", str(folder)]
    helper = subprocess.Popen(own, start_new_session=todo["helper"] == "session")
    (folder / "helper.pid").write_text(str(helper.pid))
if todo.get("orderly"):
    def leave(*_):
        time.sleep(0.3)
        note("saved, helper " + ("gone" if helper.poll() is not None else "alive"))
        sys.exit(143)
    signal.signal(signal.SIGTERM, leave)
print(todo.get("print", "hello"), flush=True)
for name, text in todo.get("files", {}).items():
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
if "step" in todo:
    event("step", step=todo["step"])
for beat in range(todo.get("beats", 0)):
    (run / "heartbeat.json").write_text(json.dumps({"time": beat}))
    time.sleep(0.1)
(folder / "ready").write_text("")
time.sleep(todo.get("seconds", 0))
if "end" in todo:
    event("end", **todo["end"])
if "signal" in todo:
    os.kill(os.getpid(), todo["signal"])
sys.exit(todo.get("exit", 0))
"""


@dataclass
class Watched:
    """A watchdog over the program above, in a folder of its own."""

    folder: Path
    options: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    said: str = ""

    def start(self, *plan: dict[str, Any], stderr: int = subprocess.PIPE) -> Watched:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "child.py").write_text(CHILD)
        (self.folder / "plan.json").write_text(json.dumps(plan))
        child = [sys.executable, "-I", "-S", str(self.folder / "child.py"), str(self.folder)]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "delta_belief_rl.cli.main", "watchdog"),
                *("--log-dir", str(self.logs), "--backoff", "0.05", "--grace", "5"),
                *self.options,
                "--",
                *(self.command or child),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        return self

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def to_end(self) -> int:
        assert self.process is not None
        _, self.said = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode

    def tell(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ready(self) -> None:
        self.wait_for((self.folder / "ready").exists)

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.logs / "state.json").read_text())

    @property
    def causes(self) -> list[str]:
        return [start["cause"] for start in self.state["starts"]]

    @property
    def arguments(self) -> list[list[str]]:
        lines = _read(self.folder / "argv.jsonl").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def helper(self) -> int:
        return int((self.folder / "helper.pid").read_text())

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for start in self.state["starts"] if (self.logs / "state.json").exists() else []:
            for pid in members(start["pid"]):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    one = Watched(tmp_path / "one")
    yield one
    one.close()


# --- what is started again ------------------------------------------------------------------------


def test_H6_a_run_that_is_done_is_not_started_again(watched: Watched) -> None:
    assert watched.start({"exit": 0}).to_end() == 0
    assert watched.causes == ["done"]
    assert watched.state["ended"] == {"status": 0, "reason": "the run is done"}
    assert (watched.logs / "start-1.log").read_text() == "hello\n"


@pytest.mark.parametrize(
    ("todo", "status", "cause"),
    [
        ({"exit": 2}, 2, "bad input"),
        ({"facts": True, "end": {"status": 3, "cause": "collapsed"}, "exit": 3}, 3, "collapsed"),
        ({"facts": True, "end": {"status": 3, "cause": "collapsed"}, "exit": 0}, 3, "collapsed"),
        ({"exit": 127}, 127, "not startable"),
    ],
)
def test_H6_an_end_that_would_come_again_is_final_and_keeps_its_status(
    watched: Watched, todo: dict[str, Any], status: int, cause: str
) -> None:
    assert watched.start(todo).to_end() == status
    assert watched.causes == [cause]


def test_H6_every_other_end_is_followed_by_a_new_start(watched: Watched) -> None:
    ends: list[dict[str, Any]] = [
        {"exit": 1},
        {"exit": 5},
        {"exit": 6},
        {"signal": int(signal.SIGKILL)},
        {"signal": int(signal.SIGSEGV)},
        {"exit": 143},
    ]
    watched.options = ["--max-restarts", "9", "--backoff", "0.001"]
    assert watched.start(*ends, {"exit": 0}).to_end() == 0
    expected = ["failed", "stalled", "disk full", "killed", "killed", "terminated", "done"]
    assert watched.causes == expected
    assert [start["status"] for start in watched.state["starts"]] == [1, 5, 6, -9, -11, 143, 0]
    assert "SIGSEGV" in watched.said
    logs = sorted(path.name for path in watched.logs.glob("start-*.log"))
    assert logs == [f"start-{n}.log" for n in range(1, 8)]


def test_H6_words_in_a_log_are_no_cause(watched: Watched) -> None:
    words = "mushroom room CUDA out of memory ActorDiedError OOM"
    files = {"config.yaml": "a: {tokens: 1000}\n"}
    todo = {"facts": True, "print": words, "exit": 1, "files": files}
    watched.options = ["--on-oom", "a.tokens=0.8"]
    assert watched.start(todo, {"print": words}).to_end() == 0
    assert watched.causes == ["failed", "done"]
    assert watched.arguments == [[], []]
    assert words in (watched.logs / "start-1.log").read_text()


def test_H6_restarts_without_progress_are_few_and_progress_gives_them_back(
    watched: Watched,
) -> None:
    watched.options = ["--max-restarts", "1"]
    steps = [{"facts": True, "step": step, "exit": 1} for step in (1, 2, 3, 3, 3)]
    assert watched.start(*steps, {"exit": 0}).to_end() == 1
    # Step 3 came at the third start, the fourth is the one restart that it is worth.
    assert [start["step"] for start in watched.state["starts"]] == [1, 2, 3, 3]
    assert "1 restarts within 6 h brought no new step" in watched.said


# --- out of memory --------------------------------------------------------------------------------


def test_H6_an_out_of_memory_lowers_settings_by_what_the_run_had(watched: Watched) -> None:
    end = {"facts": True, "end": {"status": 4, "cause": "out_of_memory"}, "exit": 4}
    plan = [
        {**end, "files": {"config.yaml": f"a: {{tokens: {tokens}, share: {share}}}\n"}}
        for tokens, share in ((1000, 0.5), (800, 0.45), (640, 0.405), (512, 0.3645))
    ]
    watched.options = ["--on-oom", "a.tokens=0.8", "a.share=0.9"]
    assert watched.start(*plan, {"exit": 0}).to_end() == 0
    words = [["a.tokens=800", "a.share=0.45"], ["a.tokens=640", "a.share=0.405"]]
    # Three times, then no more.
    last = ["a.tokens=512", "a.share=0.3645"]
    assert watched.arguments == [[], *words, last, last]
    assert watched.causes == ["out of GPU memory"] * 4 + ["done"]
    assert "next starts have a.tokens=800, a.share=0.45 (lowered 1 of 3 times)" in watched.said


def test_H6_settings_that_the_run_refuses_are_taken_back(watched: Watched) -> None:
    oom = {"facts": True, "exit": 4, "files": {"config.yaml": "a: {tokens: 1000}\n"}}
    watched.options = ["--on-oom", "a.tokens=0.8"]
    assert watched.start(oom, {"exit": 2}, {"exit": 2}).to_end() == 2
    assert watched.arguments == [[], ["a.tokens=800"], []]
    assert watched.causes == ["out of GPU memory", "bad input", "bad input"]


def test_H6_a_command_that_says_no_folder_is_started_as_it_is(watched: Watched) -> None:
    assert watched.start({"exit": 4}, {"exit": 0}).to_end() == 0
    assert watched.arguments == [[], []]
    assert "no setting is lowered" in watched.said


# --- what is left ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["group", "session"])
def test_H3_H4_what_a_run_leaves_behind_is_gone_before_the_next_start(
    watched: Watched, kind: str
) -> None:
    todo = {"helper": kind, "exit": 1}
    assert watched.start(todo, {"exit": 0}).to_end() == 0
    assert born(watched.helper) == ""
    assert watched.causes == ["failed", "done"]


def test_H5_a_neighbour_with_the_same_command_line_stays(watched: Watched) -> None:
    own = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", str(watched.folder)]
    with subprocess.Popen(own) as neighbour:
        try:
            assert watched.start({"helper": "group", "exit": 1}, {"exit": 0}).to_end() == 0
            assert born(watched.helper) == ""
            assert neighbour.poll() is None
        finally:
            neighbour.kill()


def test_H5_children_that_another_program_left_to_the_watchdog_stay(tmp_path: Path) -> None:
    """A shell that becomes the watchdog passes on children that the watchdog knows nothing of."""
    pid = tmp_path / "pid"
    watchdog = [sys.executable, "-m", "delta_belief_rl.cli.main", "watchdog"]
    watchdog += ["--log-dir", str(tmp_path / "logs"), "--", "true"]
    script = f"setsid sleep 600 & echo $! >{pid}; exec {shlex.join(watchdog)}"
    subprocess.run(["bash", "-c", script], cwd=ROOT, check=True, capture_output=False)
    left = int(pid.read_text())
    assert born(left)
    os.kill(left, signal.SIGKILL)


def test_H6_two_watchdogs_side_by_side_mind_their_own(tmp_path: Path) -> None:
    one, two = Watched(tmp_path / "one"), Watched(tmp_path / "two")
    try:
        two.start({"helper": "session", "seconds": 600})
        two.ready()
        assert one.start({"helper": "session", "exit": 1}, {"exit": 0}).to_end() == 0
        assert born(two.helper)
        second = Watched(two.folder, ["--seed", "1"])
        assert second.start({}).to_end() == 2
        assert "choose another folder with --log-dir" in second.said
        assert len(second.said.splitlines()) == 1
        two.tell(signal.SIGTERM)
        assert two.to_end() == 143
        assert born(two.helper) == ""
    finally:
        one.close()
        two.close()


# --- hung -----------------------------------------------------------------------------------------


def test_H11_a_run_without_heartbeat_shows_its_stacks_and_is_started_again(
    watched: Watched,
) -> None:
    hangs = {"facts": True, "helper": "session", "on_usr1": True, "deaf": True}
    watched.options = ["--hung", "0.5", "--grace", "0.3"]
    began = time.monotonic()
    assert watched.start({**hangs, "beats": 4, "seconds": 600}, {"exit": 0}).to_end() == 0
    assert time.monotonic() - began < 15
    assert watched.causes == ["hung", "done"]
    assert (watched.folder / "notes.txt").read_text() == "stacks\n"
    assert watched.state["starts"][0]["status"] == -signal.SIGKILL
    assert born(watched.helper) == ""
    assert "no heartbeat for" in watched.said


def test_H11_a_run_that_never_had_a_heartbeat_or_still_has_one_is_left_alone(
    watched: Watched,
) -> None:
    watched.options = ["--hung", "0.6"]
    plan = {"facts": True, "seconds": 1, "exit": 1}, {"facts": True, "beats": 12, "exit": 0}
    assert watched.start(*plan).to_end() == 0
    assert watched.causes == ["failed", "done"]


# --- the watchdog's own end -----------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_H4_a_watchdog_that_is_told_to_end_lets_the_run_save_and_starts_nothing(
    watched: Watched, signum: int, status: int
) -> None:
    watched.start({"facts": True, "helper": "group", "orderly": True, "seconds": 600})
    watched.ready()
    watched.tell(signum)
    assert watched.to_end() == status
    assert watched.causes == ["terminated"]
    # The run's helpers answer while it saves; then they are ended, too.
    assert (watched.folder / "notes.txt").read_text() == "saved, helper alive\n"
    assert born(watched.helper) == ""


def test_H4_a_run_that_does_not_end_when_it_is_told_is_killed_after_the_grace(
    watched: Watched,
) -> None:
    watched.options = ["--grace", "0.3"]
    watched.start({"deaf": True, "helper": "group", "seconds": 600})
    watched.ready()
    watched.tell(signal.SIGTERM)
    assert watched.to_end() == 143
    assert watched.state["starts"][0]["status"] == -signal.SIGKILL
    assert born(watched.helper) == ""


def test_H6_a_watchdog_is_told_to_end_between_two_starts(watched: Watched) -> None:
    watched.options = ["--backoff", "600"]
    watched.start({"exit": 1})
    watched.wait_for(lambda: "follows in" in _read(watched.logs / "watchdog.log"))
    watched.tell(signal.SIGTERM)
    assert watched.to_end() == 143
    assert watched.causes == ["failed"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_H3_H4_a_watchdog_that_is_killed_leaves_nothing(watched: Watched, wrapped: bool) -> None:
    if wrapped:  # a shell that dies of the signal and does not pass it on
        child = [sys.executable, "-I", "-S", str(watched.folder / "child.py"), str(watched.folder)]
        watched.command = ["bash", "-c", shlex.join(child) + "; exit $?"]
    watched.start({"helper": "group", "orderly": True, "seconds": 600})
    watched.ready()
    leader = watched.state["starts"][0]["pid"]
    watched.tell(signal.SIGKILL)
    watched.to_end()
    watched.wait_for(lambda: not members(leader))
    assert "saved" in (watched.folder / "notes.txt").read_text()


def test_H6_an_announced_end_of_a_jobs_time_is_passed_on_and_final(watched: Watched) -> None:
    script = "trap 'exit 143' USR1; touch ready; while :; do sleep 0.05; done"
    watched.folder.mkdir()
    watched.command = ["bash", "-c", f"cd {watched.folder}; {script}"]
    watched.start({})
    watched.ready()
    watched.tell(signal.SIGUSR1)
    assert watched.to_end() == 143
    assert watched.causes == ["terminated"]
    assert "announced" in watched.state["ended"]["reason"]


# --- files ----------------------------------------------------------------------------------------


def test_H6_no_log_is_ever_overwritten_and_a_terminal_shows_the_output(watched: Watched) -> None:
    watched.logs.mkdir(parents=True)
    (watched.logs / "start-1.log").write_text("of an earlier watchdog\n")
    ours, theirs = pty.openpty()
    watched.start({"print": "to be seen", "exit": 0}, stderr=theirs)
    os.close(theirs)
    assert watched.to_end() == 0
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "to be seen" in shown
    assert (watched.logs / "start-1.log").read_text() == "of an earlier watchdog\n"
    assert (watched.logs / "start-2.log").read_text() == "to be seen\n"


def test_H6_json_has_every_start(watched: Watched) -> None:
    watched.options = ["--json"]
    process = watched.start({"exit": 1}, {"exit": 0}).process
    assert process is not None
    out, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert json.loads(out) == watched.state


def test_H6_the_script_works_from_any_folder_and_needs_a_command(tmp_path: Path) -> None:
    def script(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "watchdog.sh"), *words],
            env=os.environ | {"PYTHON": sys.executable},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    none = script("--hung", "60")
    assert (none.returncode, none.stdout) == (2, "")
    assert "write it behind --" in none.stderr
    assert len(none.stderr.splitlines()) == 1
    assert [*tmp_path.iterdir()] == []
    done = script("--", "bash", "-c", "exit $#", "bash", "--json", "--", "three")
    assert done.returncode == 3, "what stands behind -- belongs to the command"
    assert json.loads((tmp_path / "logs/watchdog/state.json").read_text())["ended"]["status"] == 3


# --- backups --------------------------------------------------------------------------------------


def test_F3_each_new_checkpoint_is_backed_up_and_a_failure_stops_nothing(
    watched: Watched,
) -> None:
    tracker = "checkpoints/latest_checkpointed_iteration.txt"
    done = watched.folder / "done.txt"
    words = f"cat {{run_dir}}/{tracker} >>{done}; echo >>{done}; exit 7"
    watched.options = ["--backup", f"bash -c {shlex.quote(words)}"]
    plan = [{"facts": True, "files": {tracker: str(n)}, "exit": int(n < 3)} for n in (1, 2, 3)]
    assert watched.start(*plan).to_end() == 0
    assert done.read_text().split() == ["1", "2", "3"]
    assert watched.causes == ["failed", "failed", "done"]
    assert watched.said.count("the backup failed with status 7") == 3


def test_F3_a_slow_backup_holds_up_no_start_and_is_ended_with_the_watchdog(
    watched: Watched,
) -> None:
    pid = watched.folder / "backup.pid"
    words = f"echo $$ >{pid}; exec sleep 600"
    watched.options = ["--backup", f"bash -c {shlex.quote(words)}", "--backup-minutes", "0.0001"]
    watched.start({"exit": 1}, {"exit": 1, "seconds": 1.2}, {"seconds": 600})
    watched.wait_for(lambda: len(watched.arguments) == 3 and bool(_read(pid).strip()))
    assert born(int(pid.read_text())), "a restart has ended it"
    watched.tell(signal.SIGTERM)
    assert watched.to_end() == 143
    assert born(int(pid.read_text())) == ""


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
