"""docs/add_a_method.md: the page shows the files that are tested, and they train and compare."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from tests.runs import ROOT, play, words, write_world

PAGE = ROOT / "docs" / "add_a_method.md"
EXAMPLE = ROOT / "docs" / "examples" / "late_turns.py"
TEST = ROOT / "docs" / "examples" / "test_late_turns.py"
STEPS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    assert shown == [EXAMPLE.read_text(), TEST.read_text()]


def test_the_example_and_its_test_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TEST)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\b6 passed", done.stdout)


@pytest.mark.slow
def test_the_example_trains_through_the_loop(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "run"
    more = [f"plugins=[{EXAMPLE}]", "algorithm.adv_estimator=late_turns"]
    more += ["algorithm.kwargs.decay=0.5", f"trainer.total_training_steps={STEPS}"]
    # Wins are rare in so small a run; shorter games and repetitions are paid differently.
    status, _ = play([*words(out, world), *more])
    assert status == 0
    records = [one for one in read_records(out / "metrics.jsonl") if one["step"]]
    assert [one["step"] for one in records] == [1, STEPS]
    assert all(one["actor/grad_norm"] > 0 for one in records)
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert len(games) == 16
    assert np.isfinite([one["actor/pg_loss"] for one in records]).all()
    assert "late_turns" in (out / "config.yaml").read_text()
    assert json.loads((out / "final.json").read_text())
