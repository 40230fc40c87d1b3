"""Two starts of one run: the second is refused, and a killed first one holds nobody up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from delta_belief_rl.trainer.sole_start import sole_start
from delta_belief_rl.types import UserError
from tests.runs import ROOT, metrics_of, play, words, write_world

pytestmark = pytest.mark.fault

HOLDER = """
import sys
from pathlib import Path
from delta_belief_rl.trainer.sole_start import sole_start
with sole_start(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(root: Path) -> subprocess.Popen[str]:
    """A process that plays the run in a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_R9_a_second_start_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    first = holder(root)
    refused = pytest.raises(UserError, match=r"Another process is playing the run in .*checkpoints")
    with refused, sole_start(root):
        pytest.fail("two at the same time")
    first.kill()
    first.communicate()
    with sole_start(root):
        (root / "something").touch()
    # Nothing stands for the lock, and what the run left is still there.
    assert [path.name for path in root.iterdir()] == ["something"]


def test_a_start_that_comes_to_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with sole_start(tmp_path / "checkpoints"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_R9_a_second_start_of_a_run_is_one_sentence_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, world = tmp_path / "run", write_world(tmp_path / "tiny.yaml")
    first = holder(out / "checkpoints")
    try:
        status, trace = play(words(out, world))
    finally:
        first.communicate("\n", timeout=60)
    assert status == 2
    assert "Another process is playing the run" in capsys.readouterr().err
    assert trace.names == []
    assert not (out / "events.jsonl").exists()
    assert metrics_of(out) == []
