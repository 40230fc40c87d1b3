"""Tiny runs of ``train.py`` through Ray: from the command line to the report, and killed."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import RAY_IS_LATE, START_SECONDS, Finished, start, steps_of_starts, to_end

from delta_belief_rl.config.compose import from_yaml, load_config
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.trainer import checkpoint
from tests.processes import mentioning
from tests.runs import ROOT, STEPS, assert_same_run, play, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS = int(os.environ.get("DBRL_KILLS", "3"))
"""Kills of the run that is killed."""
SEED = int(os.environ.get("DBRL_KILL_SEED", "1"))


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


def test_events_say_how_the_run_began_who_worked_and_how_it_ended(straight: Finished) -> None:
    start, workers, end = read_records(straight.out / "events.jsonl")
    assert [event["kind"] for event in (start, workers, end)] == ["start", "workers", "end"]
    roles = {(worker["role"], worker["index"]) for worker in workers["workers"]}
    assert {("rank", 0), ("engine", 0), ("judge", 0)} <= roles
    assert (end["step"], end["status"], end["cause"]) == (STEPS, 0, "done")


def test_H3_H4_no_process_and_no_scratch_file_of_a_run_remains(straight: Finished) -> None:
    assert mentioning(str(straight.scratch)) == []
    assert list(straight.scratch.iterdir()) == []


def test_R15_processes_and_ray_change_nothing(
    tmp_path: Path, tiny_world: Path, straight: Finished
) -> None:
    status, _ = play(words(tmp_path / "run", tiny_world))
    assert status == 0
    assert_same_run(straight.out, tmp_path / "run")


@pytest.mark.fault
@pytest.mark.timeout(600 + 600 * KILLS)
def test_R2_R4_R15_H3_a_run_through_ray_survives_sigkill_of_its_whole_group(
    tmp_path: Path, tiny_world: Path, straight: Finished
) -> None:
    rng = random.Random(SEED)
    records = read_records(straight.out / "metrics.jsonl")
    step_seconds = sum(r.get("timing_s/step", 0.0) for r in records) / STEPS
    landed, runs = 0, [tmp_path / "run0"]
    kept: list[tuple[Path, int, int]] = []
    while landed < KILLS:
        out = runs[-1]
        run = start(out, tiny_world)
        if landed == 0:
            # Somewhere on the way up: configuration, Ray, models.
            time.sleep(rng.uniform(0.1, 0.6) * straight.seconds)
        else:
            target = len(read_records(out / "metrics.jsonl")) + rng.choice((0, 1))
            deadline = time.monotonic() + START_SECONDS
            while len(read_records(out / "metrics.jsonl")) < target and run.process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(rng.uniform(0.0, 2.0) * step_seconds)
        if run.kill():
            landed += 1
            saved = checkpoint.find_latest(out / "checkpoints")
            kept.append((out, len(steps_of_starts(out)), 0 if saved is None else saved.step))
        else:
            # It came to its end before the kill: the kills that are left go to another run, unless
            # Ray never came up.
            late = RAY_IS_LATE in run.output
            assert run.process.returncode == 0 or late, run.output[-4000:]
            runs += [] if late else [tmp_path / f"run{len(runs)}"]
    shutil.rmtree(to_end(runs[-1], tiny_world).scratch, ignore_errors=True)
    for out in runs:
        assert_same_run(straight.out, out)
    # What was saved is never trained again.
    for out, starts, step in kept:
        assert all(begun >= step for begun in steps_of_starts(out)[starts:])
