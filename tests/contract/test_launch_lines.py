"""The published launch lines, word for word, through the entry point."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delta_belief_rl.config import paths
from tests.launch_lines import LINES, filled
from train import main


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without any of the published files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "published_folder", lambda: tmp_path / "published")


def files_of(words: list[str]) -> list[str]:
    return [w.split("=", 1)[1] for w in words if re.match(r"data\.(train|val)_files=", w)]


@pytest.mark.parametrize("name", LINES)
def test_U4_a_dry_run_prints_the_plan_and_how_to_get_what_is_missing(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = filled(name)
    assert main(["--dry-run", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Plan of delta_belief_rl/{name} (seed 42)\n")
    for heading in ("\nPlaces (", "\nSchedule\n"):
        assert heading in out
    if "trainer.val_only=true" in words:
        assert "\nOne training step\n" not in out
    else:
        assert "240 secrets x 16 games = 3,840 games of at most 20 turns" in out
    for path in files_of(words):
        if "train" not in Path(path).name or "trainer.val_only=true" not in words:
            assert f"{path} does not exist: fetch the published files" in out
    assert "`delta-belief data fetch`" in out


@pytest.mark.parametrize("name", LINES)
def test_U4_a_real_run_without_its_files_ends_with_status_two_and_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(filled(name)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("train.py: ")
    assert all(line.startswith("train.py: warning: ") for line in lines[:-1])
    assert "delta-belief data fetch" in lines[-1]
    assert list(tmp_path.iterdir()) == []
