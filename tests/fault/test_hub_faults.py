"""``hf_backup.sh`` as a process of its own, killed and ended while it uploads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from delta_belief_rl.cli.upload_lock import LOCK_FILE
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer.resume import open_run
from tests.hub_server import TOKEN, FakeHub, Fault, serve
from tests.runs import ROOT

pytestmark = pytest.mark.fault

REPO = "me/runs"


def start(hub: FakeHub, *words: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    return subprocess.Popen(
        [str(ROOT / "hf_backup.sh"), *words],
        cwd=cwd,
        env=environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_F3_F4_R8_an_upload_that_was_killed_is_completed_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    open_run(root, "disable", run_id="r1")
    for step in (1, 2):
        files: dict[str, checkpoint.Content] = {"a.bin": b"a" * step, "b.bin": b"b" * 9 * step}
        checkpoint.save(root, step, files, {}, run_id="r1")
    with serve() as hub:
        # The first file of step 1 arrives, the second one never does.
        hub.faults.append(Fault("put", times=1, status=-1))
        killed = start(hub, "upload", "run", REPO, cwd=tmp_path)
        assert hub.stalled.wait(60)
        lock = (tmp_path / "run" / LOCK_FILE).read_text().split()
        assert lock[0] == str(killed.pid)
        killed.kill()
        killed.communicate(timeout=60)
        leases = list(root.rglob(".lease-*"))
        assert [lease.name for lease in leases] == [f".lease-{killed.pid}"]
        assert hub.repositories[REPO].commits == ["first"]

        again = start(hub, "upload", "run", REPO, cwd=tmp_path)
        out, err = again.communicate(timeout=120)
        assert again.returncode == 0, err
        assert out == "uploaded to me/runs: 1, 2\n"
        assert len(hub.repositories[REPO].commits) == 3
        assert [*root.rglob(".lease-*"), *tmp_path.rglob(LOCK_FILE)] == []
        assert TOKEN not in out + err
        assert hub.url not in out + err

        restored = start(hub, "restore", REPO, "new", "--step", "1", cwd=tmp_path)
        out, err = restored.communicate(timeout=120)
        assert (restored.returncode, out) == (0, "new/checkpoints/global_step_1\n"), err
        there = tmp_path / "new" / "checkpoints" / "global_step_1"
        assert checkpoint.load(there).read("b.bin") == b"b" * 9


def test_R8_an_upload_that_is_asked_to_end_leaves_no_lease_and_no_lock(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    open_run(root, "disable", run_id="r1")
    checkpoint.save(root, 1, {"a.bin": b"a"}, {}, run_id="r1")
    with serve() as hub:
        hub.faults.append(Fault("commit", status=429, retry_after=600))
        process = start(hub, "upload", "run", REPO, "--watch", "60", cwd=tmp_path)
        assert process.stderr is not None
        assert "trying again in 6" in process.stderr.readline()
        assert list(root.rglob(".lease-*"))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert [*root.rglob(".lease-*"), *tmp_path.rglob(LOCK_FILE)] == []


def test_a_python_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with serve() as hub:
        done = start(hub, "verify", "run", REPO, cwd=tmp_path, PYTHON="no-such-python")
        out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "no-such-python" in err
