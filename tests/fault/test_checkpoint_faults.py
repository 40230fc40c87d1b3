"""A kill at any file operation of a save leaves a valid checkpoint."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delta_belief_rl.obs import jsonl
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.trainer import checkpoint as ckpt
from delta_belief_rl.trainer.checkpoint import find_latest, list_valid, load, save
from delta_belief_rl.types import UserError
from tests.runs import Trace, play, state_of, words, write_world

pytestmark = pytest.mark.fault

# Runs one save after the other in children, child n killed at its n-th file operation, until one
# gets through. What each leaves on the disk is told on stdout.
DRIVER = """
import json, os, shutil, sys
from pathlib import Path
from delta_belief_rl.trainer import checkpoint as ckpt

root, case = Path(sys.argv[1]), sys.argv[2]

def files(tag):
    return {"a.bin": tag.encode() * 2000, "deep/b.bin": lambda path: path.write_text(tag) and None}

def arm(limit):
    count = 0
    def wrap(module, name):
        real = getattr(module, name)
        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            if count == limit:
                if name == "write_synced":  # half of the data reached the disk
                    Path(args[0]).write_bytes(args[1][: len(args[1]) // 2])
                os._exit(9)
            return real(*args, **kwargs)
        setattr(module, name, counted)
    for name in ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        wrap(os, name)
    real_write = ckpt._write_synced
    ckpt.write_synced = real_write
    wrap(ckpt, "write_synced")
    ckpt._write_synced = ckpt.write_synced

n = 0
while True:
    n += 1
    shutil.rmtree(root, ignore_errors=True)
    ckpt.save(root, 1, files("one"), {}, run_id="run")
    ckpt.save(root, 2, files("two"), {}, run_id="run")
    child = os.fork()
    if child == 0:
        arm(n)
        step = 2 if case == "same step" else 3
        ckpt.save(root, step, files("new"), {}, run_id="run", keep=1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    latest = ckpt.find_latest(root)
    intact = latest is not None and ckpt.load(latest.path).read("deep/b.bin").decode()
    # The next save must work on whatever was left, and clean it up.
    ckpt.save(root, 4, files("four"), {}, run_id="run", keep=1)
    left = sorted(entry.name for entry in root.iterdir())
    step = latest and latest.step
    print(json.dumps({"status": status, "step": step, "tag": intact, "left": left}))
    if status == 0:
        break
"""


@pytest.mark.parametrize("case", ["next step", "same step"])
def test_R5_kill_at_every_file_operation_keeps_one_valid_checkpoint(
    tmp_path: Path, case: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "root"), case],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) > 15, "the hook saw too few operations to mean anything"
    assert [o["status"] for o in outcomes[:-1]] == [9] * (len(outcomes) - 1)
    step = 2 if case == "same step" else 3
    assert {(o["step"], o["tag"]) for o in outcomes} == {(2, "two"), (step, "new")}
    assert (outcomes[0]["tag"], outcomes[-1]["tag"]) == ("two", "new")
    tags = [o["tag"] for o in outcomes]
    assert tags == sorted(tags, reverse=True), "the switch from old to new happens once"
    assert {name for o in outcomes for name in o["left"] if name.startswith(".tmp")} == set()
    assert outcomes[-1]["left"] == ["global_step_4", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("operation", ["fsync", "rename", "mkdir"])
def test_R5_full_or_failing_disk_is_one_sentence_and_the_old_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    save(tmp_path, 1, {"a": b"one"}, {}, run_id="run")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ckpt.os, operation, refuse)
        with pytest.raises(UserError, match="No space left"):
            save(tmp_path, 2, {"a": b"two"}, {}, run_id="run", keep=1)
    assert [c.step for c in list_valid(tmp_path)] == [1]
    assert not list(tmp_path.glob(".tmp-*"))
    save(tmp_path, 2, {"a": b"two"}, {}, run_id="run", keep=1)
    assert [c.step for c in list_valid(tmp_path)] == [2]


LIMITED = """
import resource, sys
from pathlib import Path
from delta_belief_rl.obs.disk import DiskRefused
from delta_belief_rl.trainer import checkpoint as ckpt

root = Path(sys.argv[1])
ckpt.save(root, 1, {"a": b"one"}, {}, run_id="run")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    ckpt.save(root, 2, {"a": b"x" * 100_000}, {}, run_id="run", keep=1)
except DiskRefused as error:
    print(error)
"""


def test_R5_a_write_that_the_system_cuts_short_leaves_the_checkpoint_before_it(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "The checkpoint of step 2 could not be written" in done.stdout
    assert "File too large" in done.stdout
    latest = find_latest(tmp_path)
    assert latest is not None
    assert load(latest.path).read("a") == b"one"
    assert not list(tmp_path.glob(".*"))


SHORT = (
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.final_test=false",
    "trainer.save_freq=-1",
)


@pytest.mark.slow
def test_R5_training_goes_on_while_a_checkpoint_is_written_and_a_full_disk_ends_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, trace = tmp_path / "run", Trace(threads=True)
    real_save, real_write = ckpt.save, ckpt._write_synced

    def slow_save(root: Path, step: int, *args: Any, **more: Any) -> Path:
        end = time.monotonic() + 60
        while step == 1 and trace.names.count("ActorWorker.update") < 2:
            assert time.monotonic() < end, "the training waits for the checkpoint"
            time.sleep(0.01)
        return real_save(root, step, *args, **more)

    def write(path: Path, data: bytes) -> None:
        if path.parent.name.startswith(".tmp-2") and path.name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real_write(path, data)

    monkeypatch.setattr(ckpt, "save", slow_save)
    monkeypatch.setattr(ckpt, "_write_synced", write)
    status, _ = play(words(out, write_world(tmp_path / "tiny.yaml"), *SHORT), trace=trace)
    assert status == ExitStatus.DISK_FULL
    shown = capsys.readouterr().err
    assert "The checkpoint of step 2 could not be written" in shown
    assert "Traceback" not in shown
    saved = find_latest(out / "checkpoints")
    assert saved is not None
    assert load(saved.path).step == 1
    assert not list((out / "checkpoints").glob(".*"))
    # What was kept of step 2 is there until its checkpoint is.
    assert list((out / "checkpoints").glob("pending_2_*.jsonl"))


@pytest.mark.slow
def test_R5_a_record_that_the_disk_refuses_ends_the_run_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, synced = tmp_path / "run", 0

    def fsync(descriptor: int) -> None:
        nonlocal synced
        synced += 1
        if synced == 3:  # after the beginning of the record and the line of step 1
            raise OSError(errno.ENOSPC, "No space left on device")
        os.fsync(descriptor)

    calls = SimpleNamespace(fsync=fsync, replace=os.replace, getpid=os.getpid)
    monkeypatch.setattr(jsonl, "os", calls)
    status, _ = play(words(out, write_world(tmp_path / "tiny.yaml"), *SHORT))
    assert status == ExitStatus.DISK_FULL
    shown = capsys.readouterr().err
    assert "The record of step 2 could not be written" in shown
    assert "Traceback" not in shown
    assert state_of(out)["run"]["step"] == 1


def test_R11_every_single_flipped_byte_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": b"one"}, {}, run_id="run")
    path = save(tmp_path, 2, {"a": b"payload", "b": b"x"}, {"cursor": 5}, run_id="run")
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        for position in range(len(original)):
            data = bytearray(original)
            data[position] ^= 0x04
            file.write_bytes(bytes(data))
            latest = find_latest(tmp_path)
            assert latest is not None
            if latest.step == 2:  # sizes agree, so only the checksums can tell
                with pytest.raises(ckpt.CheckpointDamaged):
                    load(path)
        file.write_bytes(original)
    assert load(path).meta == {"cursor": 5}


def test_R5_two_kills_in_a_row_do_not_lose_a_step_that_was_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 2, {"a": b"two"}, {}, run_id="run")
    # The first kill fell between the two renames of a replacement.
    path.rename(tmp_path / ".replaced-2-99999")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ckpt.os, "fsync", refuse)
        with pytest.raises(UserError, match="Input/output"):
            save(tmp_path, 2, {"a": b"new"}, {}, run_id="run")
    latest = find_latest(tmp_path)
    assert latest is not None
    assert load(latest.path).read("a") == b"two"
    save(tmp_path, 2, {"a": b"new"}, {}, run_id="run")
    assert [load(c.path).read("a") for c in list_valid(tmp_path)] == [b"new"]
    assert not list(tmp_path.glob(".replaced-*"))
