"""A tiny run of ``train.py`` through Ray, from the command line to the report."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Finished, mentioning

from delta_belief_rl.config.compose import from_yaml, load_config
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from tests.runs import ROOT, STEPS, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def promised() -> list[str]:
    """Files that docs/run_folder.md lists, as glob patterns."""
    text = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    head = text.split("\n## ", 1)[0]
    names = re.findall(r"^\| `([^`]+)` \|", head, flags=re.MULTILINE)
    return [name.replace("<step>", "*").rstrip("/") for name in names]


def test_U4_a_run_on_a_cpu_ends_well_and_leaves_every_file_that_is_promised(
    straight: Finished,
) -> None:
    assert len(promised()) > 5
    assert [name for name in promised() if not list(straight.out.glob(name))] == []
    assert "Traceback" not in straight.output
    assert f"step {STEPS}/{STEPS}" in straight.output
    assert "0 GPUs needed" in (straight.out / "plan.txt").read_text(encoding="utf-8")


def test_the_report_is_one_page_that_needs_nothing_else(straight: Finished) -> None:
    page = (straight.out / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert "<svg" in page
    assert "optimal splitter" in page
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", page)


def test_U3_the_settings_of_a_run_give_the_same_configuration_again(
    straight: Finished, tiny_world: Path
) -> None:
    asked, _ = load_config(words(straight.out, tiny_world))
    kept = straight.out / "config.yaml"
    assert from_yaml(kept.read_text(encoding="utf-8")) == asked
    again, warnings = load_config([], str(kept))
    assert again == asked
    assert warnings == []
    done = subprocess.run(
        [sys.executable, "train.py", "--dry-run", "--config", str(kept)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.rstrip() == (straight.out / "plan.txt").read_text(encoding="utf-8").rstrip()


def test_tokens_in_the_record_are_those_of_the_games(straight: Finished) -> None:
    for record in read_records(straight.out / "metrics.jsonl")[1:]:
        games = read_trajectories(straight.out / "rollout" / f"{record['step']}.jsonl").trajectories
        assert len(games) == 16
        trained = sum(int(game.action_mask().sum()) for game in games)
        assert record["state_tokens/sampled"] == trained > 0
        assert record["perf/total_num_tokens"] == sum(len(game.token_ids) for game in games)
        assert all(game.beliefs and len(game.beliefs) == game.num_turns + 1 for game in games)


def test_events_say_how_the_run_began_and_ended(straight: Finished) -> None:
    events = read_records(straight.out / "events.jsonl")
    assert [(event["kind"], event["step"]) for event in events] == [("start", 0), ("end", STEPS)]


def test_H3_H4_no_process_and_no_scratch_file_of_a_run_remains(straight: Finished) -> None:
    assert mentioning(str(straight.scratch)) == []
    assert list(straight.scratch.iterdir()) == []
