"""Ray's private folder: whose it is, and when somebody else may remove it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from delta_belief_rl.cluster import scratch
from delta_belief_rl.cluster.reaper import MARK
from delta_belief_rl.cluster.scratch import OWNER, PREFIX, clear_abandoned, make_scratch, note_owner

OWN = """
import sys
from pathlib import Path
from delta_belief_rl.cluster.scratch import note_owner
note_owner(Path(sys.argv[1]), sys.argv[2])
print("noted", flush=True)
sys.stdin.read()
"""


def abandoned(folder: Path, mark: str = "m-1") -> Path:
    """A folder whose owner was killed."""
    folder.mkdir()
    (folder / "session").mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWN, str(folder), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "noted\n"
    owner.kill()
    owner.communicate()
    return folder


def test_H3_H4_the_folder_of_a_run_that_was_killed_whole_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = abandoned(tmp_path / f"{PREFIX}left")
    own = tmp_path / f"{PREFIX}own"
    own.mkdir()
    note_owner(own, "m-2")
    silent = tmp_path / f"{PREFIX}silent"
    silent.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(scratch, "is_short", lambda path: True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made, private = make_scratch(None)
    assert private
    assert not left.exists()
    assert {made, own, silent, other} == set(tmp_path.iterdir())


def test_H3_a_folder_stays_as_long_as_anything_of_its_run_is_alive(tmp_path: Path) -> None:
    left = abandoned(tmp_path / f"{PREFIX}left", "m-3")
    worker = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
        env=os.environ | {MARK: "m-3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    assert clear_abandoned(tmp_path) == []
    worker.kill()
    worker.communicate()
    assert clear_abandoned(tmp_path) == [left]


@pytest.mark.parametrize("key", ["boot", "namespace"])
def test_H4_folders_of_other_machines_and_namespaces_are_left_alone(
    key: str, tmp_path: Path
) -> None:
    left = abandoned(tmp_path / f"{PREFIX}left")
    owner = json.loads((left / OWNER).read_text())
    (left / OWNER).write_text(json.dumps({**owner, key: "elsewhere"}))
    assert clear_abandoned(tmp_path) == []
    (left / OWNER).write_text("{")
    assert clear_abandoned(tmp_path) == []
    (left / OWNER).write_text(json.dumps(owner))
    assert clear_abandoned(tmp_path) == [left]
