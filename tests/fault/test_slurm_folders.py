"""Ray's folders of launchers that were killed: the next start removes them, and nothing else.

The shells, the signals and the processes are real. A launcher here makes its folder, says where it
is, does what it is told and waits for the end of its stdin.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from delta_belief_rl.cluster.scratch import note_owner
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer import checkpoint
from tests.processes import born, descendants, mentioning
from tests.runs import ROOT, words, write_world

pytestmark = pytest.mark.fault

SETUP = ROOT / "scripts" / "slurm_setup.sh"
TOLD = 'echo "$RAY_TMPDIR"\n'
HEAD = f'set -euo pipefail\nsource "{SETUP}" >/dev/null\n{TOLD}'
WAIT = "\nread -r _ || :\n"
SECONDS = 120.0
"""Longest that a stand-in may take on a busy machine."""
RUN_SECONDS = 800.0
"""Longest that a tiny run may take there."""
APART = re.compile(
    r"SLURM|NNODES$|NODE_RANK$|MEET_|NET_INTERFACE$|CUDA_VISIBLE|RAY_|TMPDIR$|REQUEUE$|GPU_|STOP_"
)


@dataclass
class Place:
    """A folder, short enough for Ray's sockets, in which launchers make theirs.

    Attributes:
        folder: Of this test alone.
    """

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *command: str, **more: str) -> subprocess.Popen[str]:
        """Start something in a session of its own; its stdin is a pipe."""
        kept = {name: value for name, value in os.environ.items() if not APART.match(name)}
        kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        process = subprocess.Popen(
            command,
            env=kept | {"TMPDIR": str(self.folder)} | more,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def launcher(self, script: str = "", **more: str) -> tuple[subprocess.Popen[str], Path]:
        """A launcher and its folder."""
        process = self.start("bash", "-c", HEAD + script + WAIT, **more)
        return process, Path(line_of(process))

    def abandoned(self, **more: str) -> Path:
        """The folder of a launcher that was killed."""
        process, folder = self.launcher('mkdir "$RAY_TMPDIR/session" "$RAY_TMPDIR/.hidden"', **more)
        until((folder / ".hidden").is_dir)
        process.kill()
        process.communicate()
        return folder

    def copy(self, name: str, owner: str) -> Path:
        """A folder that says of its owner what it is told."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "session").mkdir()
        (folder / "owner").write_text(owner)
        return folder

    def sweep(self) -> None:
        """A launcher that starts and ends, without a word but the place of its folder."""
        process = self.start("bash", "-c", HEAD)
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, err) == (0, "")
        assert Path(out.strip()).parent == self.folder

    def left(self) -> set[Path]:
        return set(self.folder.iterdir())


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place(Path(tempfile.mkdtemp(prefix="s", dir="/tmp")))
    yield place
    for process in place.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    shutil.rmtree(place.folder)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    return line.rstrip("\n")


def until(happened: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_H4_the_folder_of_a_killed_launcher_goes_at_the_next_start_and_no_other(
    place: Place,
) -> None:
    elsewhere = Path(tempfile.mkdtemp(prefix="e", dir="/tmp"))
    living, folder = place.launcher()
    gone = place.abandoned()
    owner = (gone / "owner").read_text()
    pid, _, boot, namespace = owner.split()
    here = f"{boot} {namespace}\n"
    own = int(born(os.getpid()))
    shutil.copytree(gone, elsewhere / "target")
    names = ("r.linked", "r.silent", "r.afile0", "r.around", "r.olinks")
    linked, silent, file, around, owner_link = (place.folder / name for name in names)
    linked.symlink_to(elsewhere / "target")
    silent.mkdir()
    file.write_text(owner)
    place.copy(around.name, owner)
    (around / "r.silent").mkdir()
    owner_link.mkdir()
    (owner_link / "owner").symlink_to(gone / "owner")
    try:
        kept = {folder, linked, silent, file, around, owner_link} | {
            place.copy("r.alive0", f"{os.getpid()} {own} {here}"),
            place.copy("r.booted", owner.replace(boot, "0" * len(boot))),
            place.copy("r.spaces", owner.replace(namespace, "pid:[1]")),
            place.copy("r.half00", owner.rstrip("\n")),
            place.copy("r.empty0", ""),
            place.copy("r.words0", f"nobody at_all {here}"),
            place.copy("r.longer0", owner),
            place.copy("x.others", owner),
        }
        if os.geteuid() == 0:
            other = place.copy("r.others", owner)
            os.chown(other, 4242, 4242)
            kept.add(other)
        # A number that another process has got since, and a folder in an abandoned one.
        place.copy("r.reused", f"{os.getpid()} {own + 1} {here}")
        nested = place.copy("r.nested", owner)
        shutil.copytree(gone, nested / "r.within")
        # Those of the machines of one run, one of which is another one.
        for outer in (nested, place.copy("r.shared", owner)):
            (outer / "dbrl-1").mkdir()
            note_owner(outer / "dbrl-1", "m-1")
        told = place.folder / "r.shared" / "dbrl-1" / "owner.json"
        told.write_text(told.read_text().replace(boot, "0" * len(boot)))
        kept.add(place.folder / "r.shared")
        assert len(place.left()) == len(kept) + 3
        place.sweep()
        assert place.left() == kept
        assert not Path(f"/proc/{pid}").exists()
        assert (elsewhere / "target" / "session").is_dir()
        living.communicate("\n", timeout=SECONDS)
        assert place.left() == kept - {folder}
    finally:
        shutil.rmtree(elsewhere)


def test_H4_a_folder_that_nobody_could_claim_goes_when_it_is_old_and_empty(place: Place) -> None:
    new, old, full = (place.folder / f"r.{name}" for name in ("newone", "oldone", "fullon"))
    for folder in (new, old, full):
        folder.mkdir()
    (full / "session").mkdir()
    before = time.time() - 3700
    for folder in (old, full):
        os.utime(folder, (before, before))
    place.sweep()
    assert place.left() == {new, full}


def test_H4_a_launcher_that_nobody_has_waited_for_is_gone_too(place: Place) -> None:
    process, folder = place.launcher()
    process.kill()
    until(lambda: not born(process.pid))
    assert Path(f"/proc/{process.pid}").exists()
    place.sweep()
    assert not folder.exists()


@pytest.mark.parametrize("way", ["exact", "below", "linked", "cwd", "word"])
def test_H4_a_folder_stays_as_long_as_a_process_uses_it(place: Place, way: str) -> None:
    folder = place.abandoned()
    link = place.folder / "link"
    link.symlink_to(place.folder)
    environment = {
        "exact": str(folder),
        "below": f"{folder}/r.ABCDEF",
        "linked": str(link / folder.name),
    }
    more = {"RAY_TMPDIR": environment[way]} if way in environment else {}
    wait = "import sys; print('here', flush=True); sys.stdin.read()"
    session = f"--session-dir={folder}/session"
    command = [sys.executable, "-c", wait, session if way == "word" else ""]
    if way == "cwd":
        command = ["bash", "-c", 'cd "$0"; exec "$@"', f"{folder}/session", *command]
    process = place.start(*command, **more)
    assert line_of(process) == "here"
    place.sweep()
    assert (folder / "session").is_dir()
    process.kill()
    until(lambda: not born(process.pid))
    place.sweep()
    assert place.left() == {link}


def test_H3_H4_a_run_that_outlives_its_launcher_keeps_the_folder_until_it_ends(
    place: Place,
) -> None:
    deaf = "import signal, os, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    deaf += "print(os.getpid(), flush=True); time.sleep(3600)"
    process, folder = place.launcher(f'job_run "{sys.executable}" -c "$DEAF"', DEAF=deaf)
    run = int(line_of(process))
    try:
        process.kill()
        process.wait()
        place.sweep()
        assert folder.is_dir()
    finally:
        os.kill(run, signal.SIGKILL)
    until(lambda: not born(run))
    place.sweep()
    assert place.left() == set()


def test_N2_a_shell_that_becomes_another_program_keeps_its_folder(place: Place) -> None:
    process, folder = place.launcher("exec env -u RAY_TMPDIR cat")
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "cat\n")
    place.sweep()
    assert folder.is_dir()
    process.communicate(timeout=SECONDS)
    place.sweep()
    assert not folder.exists()


def test_N2_a_folder_stays_while_a_shell_has_made_its_own_in_it(place: Place) -> None:
    """Of a subshell the environment that others see is older than Ray's folder."""
    process, outer = place.launcher(f'( source "{SETUP}" >/dev/null; {TOLD}{WAIT}); :')
    inner = Path(line_of(process))
    assert inner.parent == outer
    (shell,) = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    place.sweep()
    assert inner.is_dir()
    assert process.stdin is not None
    process.stdin.close()
    until(lambda: not born(shell))
    assert not inner.exists()
    place.sweep()
    assert not outer.exists()


def test_N2_launchers_that_start_at_once_do_not_disturb_each_other(place: Place) -> None:
    abandoned = {place.abandoned() for _ in range(4)}
    started = [place.start("bash", "-c", HEAD + WAIT) for _ in range(6)]
    folders = {Path(line_of(process)) for process in started}
    assert len(folders) == len(started)
    assert place.left() == folders
    assert not folders & abandoned
    assert all((folder / "owner").is_file() for folder in folders)
    for process in started:
        assert process.communicate("\n", timeout=SECONDS) == ("", "")
        assert process.returncode == 0
    assert place.left() == set()


def test_H4_all_places_are_looked_at_and_not_only_the_one_that_is_taken(place: Place) -> None:
    here, there = place.folder / "a", place.folder / "b"
    here.mkdir()
    there.mkdir()
    left = [place.abandoned(TMPDIR=str(path)) for path in (here, there)]
    process, folder = place.launcher(SLURM_TMPDIR=str(here), TMPDIR=str(there))
    assert folder.parent == here
    assert not any(path.exists() for path in left)
    process.communicate("\n", timeout=SECONDS)


def test_N2_a_folder_that_is_asked_for_is_not_removed(place: Place) -> None:
    asked = place.abandoned()
    script = f'export RAY_TMPDIR="$ASKED"\n{HEAD}{WAIT}'
    process = place.start("bash", "-c", script, ASKED=str(asked))
    assert Path(line_of(process)).parent == asked
    process.communicate("\n", timeout=SECONDS)
    assert asked.is_dir()


@pytest.mark.parametrize(
    "options", ["set -f", "set -C", "IFS=/.", "shopt -s failglob", "shopt -s nullglob dotglob"]
)
def test_H4_whatever_options_the_shell_has(place: Place, options: str) -> None:
    gone = place.abandoned()
    script = f'{options}\n{HEAD}cat "$RAY_TMPDIR/owner"'
    process = place.start("bash", "-c", script)
    out, err = process.communicate(timeout=SECONDS)
    folder, owner = out.splitlines()
    assert (process.returncode, err) == (0, "")
    assert Path(folder).parent == place.folder
    assert owner.split()[0] == str(process.pid)
    assert not gone.exists()
    assert place.left() == set()


def test_F5_a_shell_that_writes_down_what_it_does_tells_no_environment(place: Place) -> None:
    gone = place.abandoned()
    wait = "import sys; print('here', flush=True); sys.stdin.read()"
    assert line_of(place.start(sys.executable, "-c", wait, PASSWORD="open-sesame")) == "here"
    trace = place.folder / "trace"
    script = f'exec 7>"{trace}"\nBASH_XTRACEFD=7\n{HEAD}'
    process = place.start("bash", "-o", "xtrace", "-c", script)
    assert "open-sesame" not in "".join(process.communicate(timeout=SECONDS))
    assert process.returncode == 0
    assert "job_sweep" in trace.read_text()
    assert "open-sesame" not in trace.read_text()
    assert not gone.exists()


@pytest.mark.parametrize("options", [":", "set -f"])
def test_H4_a_folder_that_is_left_half_removed_still_says_whose_it_was(
    place: Place, options: str
) -> None:
    """The batch system kills a launcher that is just tidying up."""
    programs, told = place.folder / "bin", place.folder / "told"
    programs.mkdir()
    real = shutil.which("rm")
    (programs / "rm").write_text(f'#!/bin/bash\n{real} "$@"\ntouch "{told}"\nread -r _\n')
    (programs / "rm").chmod(0o755)
    script = f'mkdir "$RAY_TMPDIR/a" "$RAY_TMPDIR/.b"\n{options}'
    process, folder = place.launcher(script, PATH=f"{programs}:{os.environ['PATH']}")
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    until(told.exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(folder.iterdir()) == [folder / "owner"]
    place.sweep()
    assert not folder.exists()


@pytest.mark.slow
def test_H4_a_job_that_was_killed_whole_goes_on_and_its_folder_goes(place: Place) -> None:
    """Shell, driver, reaper and Ray at once, as a batch system kills what has used too much."""
    out = place.folder / "run"
    world = write_world(place.folder / "tiny.yaml")
    command = [word for word in words(out, world) if not word.startswith("experiment=")]

    def job() -> subprocess.Popen[str]:
        return place.start("bash", str(ROOT / "scripts/launch.sh"), "quickstart", *command)

    first = job()
    saved = out / "checkpoints" / "global_step_1" / "manifest.json"
    until(lambda: saved.exists() or first.poll() is not None, RUN_SECONDS)
    assert first.poll() is None, first.communicate()[1][-4000:]
    for pid in (first.pid, *descendants(first.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (folder,) = place.folder.glob("r.??????")
    until(lambda: mentioning(str(folder)) == [])
    first.communicate()
    assert (folder / "session_latest").is_symlink()
    latest = checkpoint.find_latest(out / "checkpoints")
    assert latest is not None

    again = job()
    _, err = again.communicate(timeout=RUN_SECONDS)
    assert again.returncode == 0, err[-4000:]
    assert "resumed run" in err
    starts = [e["step"] for e in read_records(out / "events.jsonl") if e["kind"] == "start"]
    assert starts == [0, latest.step]
    assert place.left() == {out, place.folder / "tiny.yaml"}
