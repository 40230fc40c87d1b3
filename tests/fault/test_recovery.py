"""A run that loses a training rank or a policy engine mends itself and ends as the straight one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from delta_belief_rl.cluster import ranks
from delta_belief_rl.cluster.recovery import Budget
from delta_belief_rl.envs.worlds import table
from delta_belief_rl.judge import build
from delta_belief_rl.trainer import environments
from delta_belief_rl.trainer.checkpoint import list_valid
from tests.runs import Trace, assert_same_run, metrics_of, play, words, write_world

pytestmark = pytest.mark.fault

SHORT = ("trainer.total_training_steps=2", "multi_turn.train.n=2", "multi_turn.val.n=1")


@pytest.fixture(autouse=True, scope="module")
def _worlds_are_read_once() -> Iterator[None]:
    """Reading the world file is a good part of a tiny run."""
    once = lru_cache(table.load_world)
    with pytest.MonkeyPatch.context() as patch:
        for module in (environments, build):
            patch.setattr(module, "load_world", once)
        patch.setattr(ranks, "GRACE", 0.2)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, world: Path) -> tuple[Path, Trace]:
    """The run to which nothing happens."""
    out = tmp_path_factory.mktemp("straight") / "run"
    status, trace = play([*words(out, world), *SHORT])
    assert status == 0
    return out, trace


def calls_before(trace: Trace, name: str, mark: str, occurrence: int = 0) -> int:
    """How many calls of a method came before something else happened for the n-th time."""
    end = [i for i, found in enumerate(trace.names) if found == mark][occurrence]
    return trace.names[:end].count(name)


def events_of(out: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (out / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


# --- a training rank ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "phase", "step"),
    [
        ("update", "in the update of the policy", 1),  # of step 2
        ("dump", "while a checkpoint was made", 0),  # of step 1, after one of step 0
        ("probe", "while the adapter was checked", 1),  # before step 2 is played
    ],
)
def test_H12_a_rank_that_dies_costs_the_steps_since_the_last_checkpoint_and_changes_nothing(
    method: str,
    phase: str,
    step: int,
    tmp_path: Path,
    world: Path,
    straight: tuple[Path, Trace],
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    trace = Trace(deaths={f"ActorWorker.{method}": [1]})
    assert play([*words(out, world), *SHORT], trace=trace)[0] == 0
    assert_same_run(straight[0], out)
    (event,) = events_of(out, "recovered")
    assert event["lost"] == "rank"
    assert event["reason"].startswith(f"Training rank 0 of 1 died {phase}")
    # Its games were on the disk.
    assert (event["step"], event["steps_lost"], event["games_lost"]) == (step, 1 - step, 0)
    assert 0 < event["seconds"] < 60
    shown = capfd.readouterr().err
    assert shown.count("Started again in") == 1
    assert "start the run again" not in shown
    # The new rank is where the old one was, and everybody is told so.
    assert len(events_of(out, "workers")) == 2


@pytest.mark.slow
def test_H12_a_run_with_a_new_step_between_two_losses_takes_more_of_them_than_it_takes_in_a_row(
    tmp_path: Path, world: Path, straight: tuple[Path, Trace]
) -> None:
    out = tmp_path / "run"
    # Call 0 is of the validation, 1 in step 1, 2 the second try, and 3 in step 2.
    trace = Trace(deaths={"ActorWorker.score": [1, 3]})
    command = [*words(out, world), *SHORT, "trainer.max_recoveries=1", "trainer.save_rollout=false"]
    assert play(command, trace=trace)[0] == 0
    assert_same_run(straight[0], out)
    lost = [(event["step"], event["games_lost"]) for event in events_of(out, "recovered")]
    assert lost == [(0, 8), (1, 8)]


@pytest.mark.slow
def test_H12_losses_in_a_row_are_mended_as_often_as_allowed_and_then_end_the_run(
    tmp_path: Path, world: Path, straight: tuple[Path, Trace], capfd: pytest.CaptureFixture[str]
) -> None:
    del straight
    out = tmp_path / "run"
    trace = Trace(deaths={"ActorWorker.update": range(1, 9)})
    capfd.readouterr()
    assert play([*words(out, world), *SHORT, "trainer.max_recoveries=2"], trace=trace)[0] == 1
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    assert "start the run again to go on from it." in shown
    assert len(events_of(out, "recovered")) == 2
    (failed,) = events_of(out, "rank_failed")
    assert (failed["step"], failed["ranks"]) == (1, [0])
    # No step that was finished is lost.
    assert [record["step"] for record in metrics_of(out)] == [0, 1]
    assert [saved.step for saved in list_valid(out / "checkpoints")] == [0, 1]


@pytest.mark.slow
def test_H12_a_rank_that_is_lost_before_the_first_checkpoint_ends_the_run(
    tmp_path: Path, world: Path
) -> None:
    out = tmp_path / "run"
    trace = Trace(deaths={"ActorWorker.update": [0]})
    more = ("save_freq=-1", "recovery_freq=-1", "final_test=false", "val_before_train=false")
    settings = [f"trainer.{setting}" for setting in more]
    assert play([*words(out, world), *SHORT, *settings], trace=trace)[0] == 1
    assert events_of(out, "recovered") == []
    assert len(events_of(out, "rank_failed")) == 1


# --- a policy engine ------------------------------------------------------------------------------

Moment = Callable[[Trace], dict[str, list[int]]]


def while_playing(mark: str, occurrence: int) -> Moment:
    """Two steps of an engine before games are there."""
    name = "EngineWorker.step"
    return lambda trace: {name: [calls_before(trace, name, mark, occurrence) - 2]}


def after_the_last_game_before(mark: str, occurrence: int) -> Moment:
    name = "EngineWorker.release"
    return lambda trace: {name: [calls_before(trace, name, mark, occurrence) - 1]}


def at_a_sync_and_in_the_final_test(trace: Trace) -> dict[str, list[int]]:
    """Before step 2 is played, so that no number of a later call changes; then once more."""
    name = "EngineWorker.sync"
    sync = {name: [calls_before(trace, name, "ActorWorker.update", 1) - 1]}
    return sync | while_playing("final.write_groups", 2)(trace)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "steps"),
    [
        pytest.param(while_playing("ActorWorker.update", 1), [1], id="training"),
        pytest.param(while_playing("validation.write_groups", 1), [2], id="validation"),
        pytest.param(after_the_last_game_before("ActorWorker.update", 0), [0], id="last game"),
        pytest.param(at_a_sync_and_in_the_final_test, [1, 2], id="sync and final test"),
    ],
)
def test_H12_an_engine_that_dies_is_replaced_alone_and_its_games_are_played_again(
    moment: Moment,
    steps: list[int],
    tmp_path: Path,
    world: Path,
    straight: tuple[Path, Trace],
) -> None:
    out = tmp_path / "run"
    trace = Trace(deaths=moment(straight[1]))
    assert play([*words(out, world), *SHORT], trace=trace)[0] == 0
    assert_same_run(straight[0], out)
    events = events_of(out, "recovered")
    assert [(event["step"], event["steps_lost"]) for event in events] == [(s, 0) for s in steps]
    for event in events:
        assert event["lost"] == "engine"
        assert event["reason"] in ("Policy engine 0 of 2 died", "Policy engine 1 of 2 died")
    assert "persist.restore" not in trace.names


@pytest.mark.slow
def test_H12_engines_that_die_again_and_again_end_the_run(
    tmp_path: Path, world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    trace = Trace(deaths={"EngineWorker.step": range(99)})
    assert play([*words(out, world), *SHORT, "trainer.max_recoveries=2"], trace=trace)[0] == 1
    assert "Traceback" not in capfd.readouterr().err
    assert len(events_of(out, "recovered")) == 2
    (failed,) = events_of(out, "engine_failed")
    assert failed["step"] == 0


# --- a worker that hangs --------------------------------------------------------------------------


@pytest.mark.slow
def test_H12_no_step_begins_before_every_worker_gave_a_sign_of_life(
    tmp_path: Path, world: Path, straight: tuple[Path, Trace]
) -> None:
    out = tmp_path / "run"
    # Every worker is asked at the start and before step 1; engines are two.
    calls = {"Actor": 2, "Engine": 4, "Judge": 2}
    trace = Trace(hangs={f"{role}Worker.present": [call] for role, call in calls.items()})
    command = [*words(out, world), *SHORT, "trainer.heartbeat_timeout=0.2"]
    assert play(command, trace=trace)[0] == 0
    # A judge that was asked twice is what its counters count.
    assert_same_run(straight[0], out, "judge/", "val-aux/judge/")
    assert len(events_of(out, "judge_restart")) == 1
    events = events_of(out, "recovered")
    assert [event["lost"] for event in events] == ["rank", "engine"]
    for event in events:
        assert "gave no sign of life" in event["reason"]
        assert (event["step"], event["steps_lost"], event["games_lost"]) == (1, 0, 0)


# --- the budget -----------------------------------------------------------------------------------


def test_H12_only_a_step_that_is_new_gives_a_run_new_chances() -> None:
    budget, failure = Budget(2), RuntimeError("lost")
    budget.spend(10, failure)
    # Steps that were there before the loss are done again, and it fails in an earlier one.
    budget.spend(7, failure)
    with pytest.raises(RuntimeError, match="lost"):
        budget.spend(10, failure)
    budget.spend(11, failure)
    with pytest.raises(RuntimeError, match="lost"):
        Budget(0).spend(3, failure)
