"""Jobs of a batch system: what they may use, how they are cut short, and what they leave.

``nvidia-smi``, ``scontrol`` and ``srun`` are stand-ins, first on the path, that write down their
calls. The shell, the signals and the runs are real.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer import checkpoint
from tests.processes import descendants, mentioning
from tests.runs import ROOT, assert_same_run, play, words, write_world

pytestmark = pytest.mark.fault

SETUP = ROOT / "scripts" / "slurm_setup.sh"
HEAD = f'set -euo pipefail\nsource "{SETUP}"\n'
SECONDS = 120.0
"""Longest that a stand-in may take on a busy machine."""
RUN_SECONDS = 800.0
"""Longest that a tiny run may take there."""
FIXED_PORTS = {6379, 8076, 8077, 8265, 10001, 44217, 44227, 52365, *range(10002, 20000)}
"""Ports that Ray takes where it is not told otherwise: a second instance would meet the first."""
NVIDIA_SMI = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"{folder}/calls"
gpu=""
if [[ $1 == -i ]]; then gpu=$2; shift 2; fi
case $1 in
--query-gpu=index) cut -d' ' -f1 "{folder}/gpus" ;;
--query-gpu=memory.used)
  awk -v gpu="$gpu" '$1 == gpu {{ print $2; found = 1 }} END {{ exit !found }}' "{folder}/gpus"
  [[ ! -e "{folder}/later" ]] || mv "{folder}/later" "{folder}/gpus" ;;
*) awk -v gpu="$gpu" '$1 == gpu && NF > 2 {{ print $3 ", " $4 }}' "{folder}/gpus" ;;
esac
"""
SCONTROL = '#!/usr/bin/env bash\nprintf \'scontrol %s\\n\' "$*" >>"{folder}/calls"\n'
SRUN = """#!/usr/bin/env bash
printf 'srun %s\\n' "$*" >>"{folder}/calls"
while [[ $1 == --* ]]; do
  [[ $1 != --nodes=* ]] || nodes="${{1#--nodes=}}"
  shift
done
tasks=()
trap 'woken=1; kill -USR1 "${{tasks[@]}}" 2>/dev/null' USR1
trap 'woken=1; kill -KILL "${{tasks[@]}}" 2>/dev/null' TERM
for ((node = 0; node < nodes; node++)); do
  SLURM_NODEID=$node SLURM_STEP_NUM_NODES=$nodes "$@" &
  tasks+=("$!")
done
highest=0
for task in "${{tasks[@]}}"; do
  woken=1
  while [[ -n $woken ]]; do woken='' status=0; wait "$task" || status=$?; done
  ((status <= highest)) || highest=$status
done
exit "$highest"
"""
"""Starts a task for each node, and has the highest status. As the real one it passes SIGUSR1 on to
its tasks, and kills them on SIGTERM."""
NODE = """#!/usr/bin/env bash
if [[ $1 != -m ]]; then exec {python} "$@"; fi
printf 'node %s %s\\n' "${{SLURM_NODEID:--}}" "$*" >>"{folder}/calls"
while [[ $1 != -- ]]; do shift; done
[[ ${{SLURM_NODEID:-${{NODE_RANK:-0}}}} == 0 ]] || exit 0
trap 'kill -TERM "$run" 2>/dev/null' USR1 TERM
"${{@:2}}" &
run=$!
while :; do
  status=0
  wait "$run" || status=$?
  kill -0 "$run" 2>/dev/null || exit "$status"
done
"""
"""An interpreter whose ``delta-belief node`` runs the command on rank 0, asks it to end where it is
asked itself, and starts no Ray."""
APART = re.compile(
    r"SLURM|NNODES$|NODE_RANK$|MEET_|NET_INTERFACE$|CUDA_VISIBLE|RAY_|TMPDIR$|REQUEUE$|GPU_(BUSY|WAIT)|STOP_WITHIN"
)


@dataclass
class Machine:
    """A machine with stand-ins for the programs of the batch system.

    Attributes:
        folder: Of this test alone.
    """

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def gpus(self, *lines: str, file: str = "gpus") -> None:
        """Give it GPUs: index, MiB in use, perhaps a process and its MiB."""
        (self.folder / file).write_text("".join(f"{line}\n" for line in lines))
        self._program("nvidia-smi", NVIDIA_SMI)

    def calls(self, program: str = "") -> list[str]:
        """What the stand-ins were asked."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(program)]

    def start(self, *command: str, **more: str) -> subprocess.Popen[str]:
        """Start a job in a session of its own."""
        self._program("scontrol", SCONTROL)
        self._program("srun", SRUN)
        kept = {name: value for name, value in os.environ.items() if not APART.match(name)}
        path = f"{self.folder / 'bin'}:{kept['PATH']}"
        process = subprocess.Popen(
            command,
            env=kept | {"PATH": path, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def bash(self, script: str, **more: str) -> tuple[int, str, str]:
        """``(status, stdout, stderr)`` of a script that sources the setup first."""
        process = self.start("bash", "-c", HEAD + script, **more)
        out, err = process.communicate(timeout=SECONDS)
        return process.returncode, out, err

    def python(self) -> str:
        """An interpreter that starts no Ray; see ``NODE``."""
        return str(self._program("python", NODE))

    def _program(self, name: str, text: str) -> Path:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(folder=self.folder, python=sys.executable))
        path.chmod(0o755)
        return path


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for process in machine.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ray_folder(out: str) -> Path:
    found = re.search(r"Ray in (\S+)", out)
    assert found is not None, out
    return Path(found[1])


def listening(pid: int) -> set[int]:
    """TCP ports on which a process or one below it listens."""
    inodes = set()
    for member in [pid, *descendants(pid)]:
        for link in Path(f"/proc/{member}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes
    }


def until(happened: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


# --- what the job may use -------------------------------------------------------------------------


def test_N1_cpus_and_gpus_of_the_allocation_are_printed(machine: Machine) -> None:
    machine.gpus("0 3", "1 3", "2 3")
    there = len(os.sched_getaffinity(0))
    cases = [
        ({"SLURM_CPUS_PER_TASK": "1"}, "1 CPUs"),
        ({"SLURM_CPUS_ON_NODE": "1"}, "1 CPUs"),
        ({"SLURM_CPUS_ON_NODE": "99999"}, f"{there} CPUs"),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, "2 GPUs (2 0)"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "0 GPUs,"),
        ({}, "3 GPUs (0 1 2)"),
    ]
    for environment, expected in cases:
        job = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "node3"}
        status, out, err = machine.bash("", **environment, **job)
        assert (status, err) == (0, "")
        assert out.startswith("job 77 on node3: ")
        assert expected in out


def test_N1_only_gpus_of_the_job_have_to_be_free(machine: Machine) -> None:
    machine.gpus("0 70123 4242 70000", "1 3")
    status, out, err = machine.bash("", CUDA_VISIBLE_DEVICES="1", GPU_WAIT_S="0")
    assert (status, err) == (0, "")
    assert [call for call in machine.calls("-i") if not call.startswith("-i 1 ")] == []

    status, out, err = machine.bash("", CUDA_VISIBLE_DEVICES="1,0", GPU_WAIT_S="0")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "GPU 0 has 70123 MiB in use by process 4242 (70000 MiB): end what is on it" in err

    more = {"CUDA_VISIBLE_DEVICES": "1,0", "GPU_BUSY_MIB": "80000"}
    assert machine.bash("", **more)[0] == 0


def test_N1_memory_of_a_run_that_has_just_ended_may_take_a_moment(machine: Machine) -> None:
    machine.gpus("0 70123")
    machine.gpus("0 3", file="later")
    status, out, err = machine.bash("", GPU_WAIT_S="60")
    assert (status, err) == (0, "")
    assert "1 GPUs (0)" in out


def test_N1_more_gpus_than_the_job_has_are_refused(machine: Machine) -> None:
    machine.gpus("0 3", "1 3", "2 3")
    more = {"CUDA_VISIBLE_DEVICES": "0,1,2", "SLURM_GPUS_ON_NODE": "2"}
    status, out, err = machine.bash("", **more)
    assert (status, out) == (2, "")
    assert "names 3 GPUs and the job has 2 on this node" in err


def test_variables_of_rocm_go_where_there_are_gpus_of_nvidia(machine: Machine) -> None:
    script = 'echo "${ROCR_VISIBLE_DEVICES-gone} ${HIP_VISIBLE_DEVICES-gone}"'
    rocm = {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}
    nothing = {"PATH": str(machine.folder / "bin") + ":/usr/bin:/bin"}
    if shutil.which("nvidia-smi", path=nothing["PATH"]) is None:
        assert machine.bash(script, **rocm, **nothing)[1].endswith("\n0 1\n")
    machine.gpus("0 3")
    assert machine.bash(script, **rocm, **nothing)[1].endswith("\ngone gone\n")


# --- Ray's folder, and what the shell keeps -------------------------------------------------------


def test_N2_each_job_has_a_folder_of_its_own_that_goes_with_it(machine: Machine) -> None:
    short = Path("/tmp") / f"s{os.getpid()}"
    long = machine.folder / ("long" * 20)
    short.mkdir()
    long.mkdir()
    try:
        script = 'ls -d "$RAY_TMPDIR"; source "$SETUP"; echo "$RAY_TMPDIR"'
        seen: set[Path] = set()
        for more, place in (
            ({"SLURM_TMPDIR": str(short), "TMPDIR": "/tmp"}, short),
            ({"TMPDIR": str(short)}, short),
            ({"TMPDIR": str(long)}, Path("/tmp")),
            ({"TMPDIR": "/nowhere"}, Path("/tmp")),
            ({}, Path("/tmp")),
        ):
            status, out, err = machine.bash(script, SETUP=str(SETUP), **more)
            assert (status, err) == (0, "")
            folder = ray_folder(out)
            # The second time that the file is sourced does nothing.
            assert out.splitlines()[1:] == [str(folder), str(folder)]
            assert folder.parent == place
            assert not folder.exists()
            seen.add(folder)
        assert len(seen) == 5
        assert list(short.iterdir()) == []
    finally:
        short.rmdir()


def test_traps_of_the_shell_stay_and_a_status_is_the_commands(machine: Machine) -> None:
    before = "trap 'echo last words $?' EXIT\ntrap 'echo asked' USR1\n"
    script = 'job_run bash -c "exit 5" || echo "status $?"\ntrap -p USR1\njob_run bash -c "exit 7"'
    process = machine.start("bash", "-c", before + HEAD + script + "\necho never")
    out, err = process.communicate(timeout=SECONDS)
    folder = ray_folder(out)
    told = ["status 5", "trap -- 'echo asked' SIGUSR1", "last words 7"]
    assert (out.splitlines()[1:], err) == (told, "")
    assert process.returncode == 7
    assert not folder.exists()


# --- a job that is cut short ----------------------------------------------------------------------

WAITER = """
import pathlib, signal, sys, time
def leave(*_):
    pathlib.Path(sys.argv[1] + ".asked").touch()
    if sys.argv[2] != "stays":
        raise SystemExit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path(sys.argv[1] + ".dumped").touch())
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(0.1)
"""
JOB = {"SLURM_JOB_ID": "77"}


def cut_short(
    machine: Machine, end: str, sent: signal.Signals, **more: str
) -> tuple[int, str, list[str]]:
    """``(status, stderr, calls of scontrol)`` of a job whose shell gets a signal.

    Args:
        machine: Of the test.
        end: Status with which the command answers SIGTERM; ``stays`` for none.
        sent: To the shell alone.
        more: Environment.
    """
    ready = machine.folder / "ready"
    script = f'job_run "{sys.executable}" -c "$WAITER" "{ready}" {end}'
    process = machine.start("bash", "-c", HEAD + script, WAITER=WAITER, **more)
    until(ready.exists)
    os.kill(process.pid, sent)
    out, err = process.communicate(timeout=SECONDS)
    assert not ray_folder(out).exists()
    assert mentioning(str(ray_folder(out))) == []
    assert ready.with_suffix(".asked").exists()
    assert not ready.with_suffix(".dumped").exists(), "the run itself got the shell's signal"
    return process.returncode, err, machine.calls("scontrol")


def test_H6_a_job_whose_time_ends_is_asked_to_stop_and_requeued_once(machine: Machine) -> None:
    status, err, calls = cut_short(machine, "143", signal.SIGUSR1, **JOB)
    assert (status, calls) == (143, ["scontrol requeue 77"])
    assert err == "slurm_setup.sh: job 77 goes back into the queue\n"


@pytest.mark.parametrize(
    ("case", "end", "sent", "more"),
    [
        ("cancelled by somebody", "143", signal.SIGTERM, JOB),
        ("a terminal that closes", "143", signal.SIGHUP, {}),
        ("no batch system", "143", signal.SIGUSR1, {}),
        ("not wanted", "143", signal.SIGUSR1, JOB | {"REQUEUE": "0"}),
        ("finished meanwhile", "0", signal.SIGUSR1, JOB),
        ("failed meanwhile", "3", signal.SIGUSR1, JOB),
    ],
)
def test_H6_any_other_end_keeps_its_status_and_stays_out_of_the_queue(
    machine: Machine, case: str, end: str, sent: signal.Signals, more: dict[str, str]
) -> None:
    del case
    status, err, calls = cut_short(machine, end, sent, **more)
    assert (status, err, calls) == (int(end), "", [])


def test_H6_a_run_that_does_not_stop_is_killed_in_time_to_be_requeued(machine: Machine) -> None:
    began = time.monotonic()
    status, err, calls = cut_short(machine, "stays", signal.SIGUSR1, STOP_WITHIN_S="2", **JOB)
    assert (status, calls) == (137, ["scontrol requeue 77"])
    assert "the run did not stop within 2 s and was killed" in err
    assert 2 <= time.monotonic() - began < 60


@pytest.mark.parametrize(("restarts", "requeued"), [("1", True), ("2", False), ("7", False)])
def test_H6_a_job_goes_back_into_the_queue_only_so_often(
    machine: Machine, restarts: str, requeued: bool
) -> None:
    more = JOB | {"REQUEUE": "2", "SLURM_RESTART_COUNT": restarts}
    status, err, calls = cut_short(machine, "143", signal.SIGUSR1, **more)
    assert (status, bool(calls)) == (143, requeued)
    assert ("it stays out" in err) != requeued


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_H3_a_run_whose_shell_is_killed_is_asked_to_end(machine: Machine) -> None:
    ready = machine.folder / "ready"
    script = f'job_run "{sys.executable}" -c "$WAITER" "{ready}" 143'
    process = machine.start("bash", "-c", HEAD + script, WAITER=WAITER)
    until(ready.exists)
    process.kill()
    out, _ = process.communicate(timeout=SECONDS)
    folder = ray_folder(out)
    until(lambda: mentioning(str(folder)) == [])
    assert ready.with_suffix(".asked").exists()
    # Nobody is left to remove it but the next start, see test_slurm_folders.py.
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_N2_H6_two_jobs_on_one_host_and_one_of_them_cut_short_and_requeued(
    machine: Machine,
) -> None:
    """Both end as one run that nothing disturbed, and nothing of either is left."""
    world = write_world(machine.folder / "tiny.yaml")
    one, other = machine.folder / "one", machine.folder / "other"
    # Ray's sockets would not fit below it.
    long = machine.folder / ("long" * 20)
    long.mkdir()

    def job(number: int, out: Path) -> subprocess.Popen[str]:
        command = [word for word in words(out, world) if not word.startswith("experiment=")]
        more = {"SLURM_JOB_ID": str(number), "TMPDIR": str(long)}
        return machine.start(
            "bash", str(ROOT / "scripts/launch.sh"), "quickstart", *command, **more
        )

    first, second = job(1, one), job(2, other)
    ports: tuple[set[int], set[int]] = (set(), set())

    def both_listen() -> bool:
        for seen, started in zip(ports, (first, second), strict=True):
            seen |= listening(started.pid)
        return all(ports) or first.poll() is not None

    # Whatever Ray listens on, the kernel has given it.
    until(both_listen, RUN_SECONDS)
    saved = one / "checkpoints" / "global_step_1" / "manifest.json"
    until(lambda: saved.exists() or first.poll() is not None, RUN_SECONDS)
    assert first.poll() is None, first.communicate()[1][-4000:]
    both_listen()
    assert not ports[0] & ports[1]
    assert not (ports[0] | ports[1]) & FIXED_PORTS
    os.kill(first.pid, signal.SIGUSR1)
    out, err = first.communicate(timeout=RUN_SECONDS)
    assert first.returncode == 143, err[-4000:]
    assert machine.calls("scontrol") == ["scontrol requeue 1"]
    assert mentioning(str(ray_folder(out))) == []
    latest = checkpoint.find_latest(one / "checkpoints")
    assert latest is not None
    straight, err = second.communicate(timeout=RUN_SECONDS)
    assert second.returncode == 0, err[-4000:]

    again = job(1, one)
    resumed, err = again.communicate(timeout=RUN_SECONDS)
    assert again.returncode == 0, err[-4000:]
    assert "resumed run" in err
    starts = [e["step"] for e in read_records(one / "events.jsonl") if e["kind"] == "start"]
    assert starts == [0, latest.step]
    assert_same_run(one, other)
    folders = [ray_folder(text) for text in (out, straight, resumed)]
    assert len(set(folders)) == 3
    assert not any(folder.exists() or mentioning(str(folder)) for folder in folders)
    assert list(long.iterdir()) == []


# --- jobs of several machines ---------------------------------------------------------------------


def test_H6_a_job_of_several_machines_runs_through_srun_and_is_requeued(machine: Machine) -> None:
    """The signal of the shell reaches the command on rank 0 by way of all tasks."""
    meet = machine.folder / "meet"
    more = {"PYTHON": machine.python(), "MEET_DIR": str(meet), "SLURM_JOB_NUM_NODES": "3"}
    status, err, calls = cut_short(machine, "143", signal.SIGUSR1, **JOB, **more)
    assert (status, calls) == (143, ["scontrol requeue 77"])
    assert err == "slurm_setup.sh: job 77 goes back into the queue\n"
    (srun,) = machine.calls("srun")
    words = srun.split()
    assert words[1:6] == [
        "--nodes=3",
        "--ntasks=3",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--cpu-bind=none",
    ]
    ranks = [line.split()[1] for line in machine.calls("node")]
    assert sorted(ranks) == ["0", "1", "2"]
    assert f"-m delta_belief_rl.cli.main node --deadline 300 --meet {meet}/.meet-77 --" in srun

    # What an earlier start of the job has left in its folder is of no interest to the next one.
    again = machine.bash("job_run true", **JOB, **more, SLURM_RESTART_COUNT="1")
    assert again[0] == 0
    assert f"--meet {meet}/.meet-77-1 -- true" in machine.calls("srun")[-1]


@pytest.mark.parametrize("end", ["0", "3"])
def test_H6_a_job_of_several_machines_has_the_status_of_rank_0(machine: Machine, end: str) -> None:
    more = {"PYTHON": machine.python(), "SLURM_JOB_NUM_NODES": "2"}
    status, _, err = machine.bash(f'job_run bash -c "exit {end}"', **JOB, **more)
    assert (status, err) == (int(end), "")
    assert machine.calls("scontrol") == []


def test_several_machines_without_a_batch_system_are_told_apart_by_the_user(
    machine: Machine,
) -> None:
    given = {
        "PYTHON": machine.python(),
        "NNODES": "2",
        "NODE_RANK": "0",
        "MEET_DIR": "/shared/meet",
        "MEET_WITHIN_S": "60",
        "NET_INTERFACE": "ib0",
    }
    status, out, err = machine.bash("job_run echo here", **given)
    assert (status, err) == (0, "")
    assert out.endswith("\nhere\n")
    status, out, _ = machine.bash("job_run echo here", **given | {"NODE_RANK": "1"})
    assert status == 0
    assert "here" not in out
    start = "node - -m delta_belief_rl.cli.main node --deadline 60 --interface ib0"
    assert machine.calls("node") == [
        f"{start} --rank {rank} --nodes 2 --meet /shared/meet -- echo here" for rank in (0, 1)
    ]
    assert machine.calls("srun") == []
    for lacking, expected in (
        ({"NODE_RANK": ""}, "needs NODE_RANK, the number of this machine from 0, and MEET_DIR"),
        ({"MEET_DIR": ""}, "needs NODE_RANK, the number of this machine from 0, and MEET_DIR"),
        ({"NNODES": "two"}, "NNODES=two is no number of machines"),
    ):
        status, _, err = machine.bash("job_run echo here", **given | lacking)
        assert status == 2
        assert expected in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("variable", ["NNODES", "SLURM_JOB_NUM_NODES"])
def test_U5_the_launcher_sets_the_machines_of_the_run(machine: Machine, variable: str) -> None:
    launch = ["bash", str(ROOT / "scripts/launch.sh"), "quickstart", "--dry-run"]
    process = machine.start(*launch, **{variable: "2"})
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "0 GPUs needed on 2 machines)" in out
    one = machine.start(*launch, **{variable: "1"})
    assert "machines" not in one.communicate(timeout=SECONDS)[0]


@pytest.mark.slow
def test_N2_H6_a_job_of_two_machines_is_cut_short_and_requeued(machine: Machine) -> None:
    """It ends as the run that nothing disturbed, and no process and no folder is left."""
    world = write_world(machine.folder / "tiny.yaml")
    out, meet = machine.folder / "run", machine.folder / "meet"
    engines = "actor_rollout_ref.rollout.replicas=2"
    command = [word for word in words(out, world, engines) if not word.startswith("experiment=")]

    def job(restarts: int) -> subprocess.Popen[str]:
        more = {"SLURM_JOB_NUM_NODES": "2", "SLURM_RESTART_COUNT": str(restarts)}
        script = str(ROOT / "scripts/launch.sh")
        more |= {"MEET_DIR": str(meet), "MEET_WITHIN_S": str(int(RUN_SECONDS))} | JOB
        return machine.start("bash", script, "quickstart", *command, **more)

    first = job(0)
    saved = out / "checkpoints" / "global_step_1" / "manifest.json"
    until(lambda: saved.exists() or first.poll() is not None, RUN_SECONDS)
    assert first.poll() is None, first.communicate()[1][-4000:]
    ports = listening(first.pid)
    assert ports
    assert not ports & FIXED_PORTS
    os.kill(first.pid, signal.SIGUSR1)
    told, err = first.communicate(timeout=RUN_SECONDS)
    assert first.returncode == 143, err[-4000:]
    assert machine.calls("scontrol") == ["scontrol requeue 77"]
    assert mentioning(str(ray_folder(told))) == []

    second = job(1)
    told, err = second.communicate(timeout=RUN_SECONDS)
    assert second.returncode == 0, err[-4000:]
    assert "resumed run" in err
    assert mentioning(str(ray_folder(told))) == []
    assert list(meet.iterdir()) == []
    status, _ = play(words(machine.folder / "straight", world, engines))
    assert status == 0
    assert_same_run(out, machine.folder / "straight")
