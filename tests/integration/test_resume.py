"""Runs that are cut off and resumed end as the straight one: records, games, weights, tests."""

from __future__ import annotations

import os
import random
from functools import lru_cache
from pathlib import Path

import pytest

from delta_belief_rl.envs.worlds import table
from delta_belief_rl.judge import build
from delta_belief_rl.trainer import checkpoint, environments
from tests.runs import STEPS, Killed, Trace, assert_same_run, metrics_of, play, state_of, words

MOMENTS = int(os.environ.get("DBRL_MOMENTS", "4"))
"""Moments at which the run inside this process is cut off."""
SEED = int(os.environ.get("DBRL_KILL_SEED", "1"))
MOST_STARTS = 40


@pytest.fixture(autouse=True, scope="module")
def _worlds_are_read_once() -> None:
    """Reading the world file is a good part of a tiny run."""
    once = lru_cache(table.load_world)
    with pytest.MonkeyPatch.context() as patch:
        for module in (environments, build):
            patch.setattr(module, "load_world", once)
        yield


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory, tiny_world: Path) -> tuple[Path, Trace]:
    """The straight run inside this process."""
    out = tmp_path_factory.mktemp("inside") / "run"
    status, trace = play(words(out, tiny_world))
    assert status == 0
    return out, trace


def cut_off_and_resume(out: Path, world: Path, kill_at: int) -> Trace:
    """Start a run, cut it off, resume it to its end; returns what the second start did."""
    with pytest.raises(Killed):
        play(words(out, world), kill_at)
    saved = checkpoint.find_latest(out / "checkpoints")
    status, trace = play(words(out, world))
    assert status == 0
    # A step that was saved is not trained again, and no other one is left out.
    done = 0 if saved is None else saved.step
    assert trace.names.count("ActorWorker.update") == STEPS - done
    return trace


def index_of(trace: Trace, name: str, occurrence: int) -> int:
    """Number of the point at which something happens for the n-th time, from 0."""
    return [i for i, found in enumerate(trace.names) if found == name][occurrence]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("part", range(MOMENTS))
def test_R2_R14_R15_a_run_cut_off_at_any_moment_ends_as_the_straight_one(
    part: int, tmp_path: Path, tiny_world: Path, inside: tuple[Path, Trace]
) -> None:
    out, trace = inside
    draw = random.Random(f"{SEED}/{part}").random()
    moment = int((part + draw) / MOMENTS * len(trace.names))
    cut_off_and_resume(tmp_path / "run", tiny_world, moment)
    assert_same_run(out, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "occurrence"),
    [
        ("MetricsLog.append done", 2),  # the record of step 2 is there, its checkpoint is not
        ("checkpoint.save", 2),
        ("pending.keep", 1),  # step 2 is played, and its games are nowhere
        ("validation.write_groups done", 1),  # step 2 is validated but has no record
        ("final.write_groups done", 2),  # half of the test of the trained policy
    ],
)
def test_R14_a_run_cut_off_between_two_writes_of_one_step_ends_as_the_straight_one(
    name: str, occurrence: int, tmp_path: Path, tiny_world: Path, inside: tuple[Path, Trace]
) -> None:
    out, trace = inside
    cut_off_and_resume(tmp_path / "run", tiny_world, index_of(trace, name, occurrence))
    assert_same_run(out, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.fault
def test_R14_R15_a_run_cut_off_before_an_update_plays_no_game_again_and_skips_no_update(
    tmp_path: Path, tiny_world: Path, inside: tuple[Path, Trace], capsys: pytest.CaptureFixture[str]
) -> None:
    out, straight_trace = inside
    moment = index_of(straight_trace, "pending.keep done", 1)
    trace = cut_off_and_resume(tmp_path / "run", tiny_world, moment)
    assert "step 2: 16 games were played before and are not again" in capsys.readouterr().err
    before = trace.names[: trace.names.index("ActorWorker.update")]
    assert "ActorWorker.score" in before
    assert "EngineWorker.step" not in before
    assert trace.names.count("ActorWorker.update") == STEPS - 1
    assert_same_run(out, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("*pending*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "place"), [(0, "start"), (1, "middle of an epoch"), (2, "end of an epoch")]
)
def test_R1_R4_a_run_resumed_anywhere_in_an_epoch_syncs_before_it_plays_and_does_all_steps(
    step: int, place: str, tmp_path: Path, tiny_world: Path, inside: tuple[Path, Trace]
) -> None:
    del place
    out, straight_trace = inside
    moment = index_of(straight_trace, "checkpoint.save done", step)
    trace = cut_off_and_resume(tmp_path / "run", tiny_world, moment)
    assert_same_run(out, tmp_path / "run")
    order = trace.order("persist.restore done", "EngineWorker.sync", "EngineWorker.step")
    assert order[:3] == ["persist.restore done", "EngineWorker.sync", "EngineWorker.step"]
    assert trace.names.count("ActorWorker.update") == STEPS - step


@pytest.mark.slow
@pytest.mark.fault
def test_R15_a_run_that_is_cut_off_again_and_again_ends_as_the_straight_one(
    tmp_path: Path, tiny_world: Path, inside: tuple[Path, Trace]
) -> None:
    rng = random.Random(SEED)
    for _ in range(MOST_STARTS):
        try:
            status, _ = play(words(tmp_path / "run", tiny_world), rng.randrange(40, 160))
        except Killed:
            continue
        assert status == 0
        break
    assert_same_run(inside[0], tmp_path / "run")


@pytest.mark.slow
def test_R1_a_complete_run_says_so_and_does_nothing(
    tmp_path: Path, tiny_world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert play(words(out, tiny_world))[0] == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "report.html"}
    (out / "report.html").unlink()
    capsys.readouterr()
    status, trace = play(words(out, tiny_world))
    assert status == 0
    assert trace.names == []
    assert f"is complete: {STEPS} of {STEPS} training steps are done" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in before} == before
    assert (out / "report.html").exists()
    # More steps are asked for: it goes on where it ended.
    records = metrics_of(out)
    status, trace = play([*words(out, tiny_world), f"trainer.total_training_steps={STEPS + 1}"])
    assert status == 0
    assert trace.names.count("ActorWorker.update") == 1
    assert metrics_of(out)[: len(records)] == records
    assert state_of(out)["run"]["step"] == STEPS + 1
