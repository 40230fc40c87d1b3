"""metrics.jsonl and events.jsonl."""

import json
from pathlib import Path

import pytest

from delta_belief_rl.obs.events import EventLog, config_diff
from delta_belief_rl.obs.jsonl import MetricsLog, read_records
from delta_belief_rl.types import UserError


def write(path: Path, steps: range, resume_step: int | None = None) -> None:
    log = MetricsLog(path, "run", resume_step)
    for step in steps:
        log.append(step, {"loss": 1.0 / step})


def test_one_object_a_step_with_the_key_step(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", range(1, 4))
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_resumed_file_equals_the_straight_one(tmp_path: Path) -> None:
    write(tmp_path / "straight.jsonl", range(1, 8))
    # Killed after step 5, the last checkpoint was that of step 3.
    write(tmp_path / "resumed.jsonl", range(1, 6))
    write(tmp_path / "resumed.jsonl", range(4, 8), resume_step=3)
    assert (tmp_path / "resumed.jsonl").read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


def test_line_cut_short_by_a_kill_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4))
    with path.open("ab") as file:
        file.write(b'{"step": 4, "lo')
    assert [r["step"] for r in read_records(path)] == [1, 2, 3]
    write(path, range(4, 5), resume_step=3)
    assert [r["step"] for r in read_records(path)] == [1, 2, 3, 4]


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read_records(path)


def test_R9_file_of_another_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 3))
    before = path.read_bytes()
    with pytest.raises(UserError, match="belongs to run run"):
        MetricsLog(path, "another", resume_step=2)
    assert path.read_bytes() == before


def test_fresh_start_of_the_same_run_drops_what_an_earlier_start_left(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", range(1, 3))
    write(tmp_path / "m.jsonl", range(1, 2))
    assert [r["step"] for r in read_records(tmp_path / "m.jsonl")] == [1]


def test_numbers_that_json_cannot_hold_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl", "run")
    log.append(0, {"a": float("nan"), "b": float("inf"), "c": 0.5, "d": "text", "e": None})
    text = (tmp_path / "m.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    record = read_records(tmp_path / "m.jsonl")[0]
    assert (record["a"], record["b"], record["c"], record["d"]) == (None, None, 0.5, "text")


@pytest.mark.parametrize("step", [1, 2])
def test_step_that_was_logged_already_is_refused(tmp_path: Path, step: int) -> None:
    log = MetricsLog(tmp_path / "m.jsonl", "run")
    log.append(2, {})
    with pytest.raises(ValueError, match="after step 2"):
        log.append(step, {})


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_id"):
        MetricsLog(tmp_path / "m.jsonl", "run").append(1, {"run_id": "x"})


def test_events_keep_their_context_and_are_counted(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "logs" / "events.jsonl", "run")
    log.write("judge_error", step=3, task="train_17", error=TimeoutError("late"))
    log.write("judge_error", step=4)
    first, second = read_records(log.path)
    assert (first["kind"], first["step"], first["task"], first["error"]) == (
        "judge_error",
        3,
        "train_17",
        "late",
    )
    assert second["run_id"] == "run"
    assert log.counts == {"judge_error": 2}


def test_W3_changed_settings_are_told_as_a_diff() -> None:
    old = {"trainer": {"seed": 1, "gone": 2}, "same": [1]}
    new = {"trainer": {"seed": 3}, "same": [1], "new": True}
    assert config_diff(old, new) == {
        "new": (None, True),
        "trainer.gone": (2, None),
        "trainer.seed": (1, 3),
    }
