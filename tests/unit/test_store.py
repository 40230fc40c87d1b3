"""The trajectory store: the published schema, exact round trips, damaged and foreign files."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.rollout.store import (
    GameScore,
    from_row,
    read_rows,
    read_trajectories,
    to_row,
    write_groups,
)
from delta_belief_rl.types import (
    Candidate,
    Group,
    Message,
    StopReason,
    Task,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)

TASK = Task(
    "train_3", "tw_q", "éclair", (Message("system", "Play."), Message("user", "Ask:\n")),
    aliases=("eclair",), scenario="a café",
)  # fmt: skip


def game(index: int = 0, beliefs: tuple[float, ...] | None = (-9.5, -7.25, -1.0)) -> Trajectory:
    turns = (
        Turn(0, 5, 9, (-0.1, -0.2, -1 / 3, -1e-30), 4, "Is it\nbig?", "no", Verdict.REPEATED,
             state_key="s", progress=0.5, judge_seconds=0.25, raw_verdict="No."),
        Turn(1, 13, 15, (-2.0, -0.5), 5, "Éclair?", "finished", Verdict.WIN, strict_win=True,
             compatible_win=True, is_guess=True, truncated=True, score=0.1),
    )  # fmt: skip
    return Trajectory(
        TASK, index, tuple(range(20)), turns, StopReason.WIN, beliefs, run_id="run-a", step=12
    )


def test_the_fields_of_the_published_files_are_there() -> None:
    row = to_row(game(), max_turns=4, score=GameScore(1.5, (2.25, 0.0)))
    published = {
        "secret": "éclair",
        "input": "system\nPlay.\nuser\nAsk:\n\n",
        "output": "assistant\nIs it\nbig?\nuser\nno\nassistant\nÉclair?\nuser\nfinished\n",
        "score": 1.5,
        "game_status": 1,
        "step": 12,
        "log_prob_reward": [-9.5, -7.25, -1.0, 0.0, 0.0],
        "log_prob_diff": [2.25, 0.0, 0.0, 0.0],
        "reward": 1.5,
        "invalid_count": 0,
        "repeated_count": 1,
        "num_questions": 2,
    }
    assert {key: row[key] for key in published} == published


def test_beliefs_and_scores_that_are_off_leave_no_field() -> None:
    row = to_row(game(beliefs=None), max_turns=4)
    assert "log_prob_reward" not in row
    assert "score" not in row
    assert "log_prob_diff" not in row


def test_more_values_than_turns_allow_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_turns"):
        to_row(game(), max_turns=1)


def test_a_file_of_groups_reads_back_exactly_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rollout" / "12.jsonl"
    groups = [Group(TASK, (game(0), game(1))), Group(TASK, (game(2, None),))]
    assert write_groups(path, groups, max_turns=2, run_seed=7) == 3
    report = read_trajectories(path, run_id="run-a")
    assert report.damaged == ()
    assert report.trajectories == (game(0), game(1), game(2, None))
    assert all(row["run_seed"] == 7 for row in read_rows(path).rows)
    assert list(path.parent.iterdir()) == [path]


floats = st.floats(allow_nan=False, width=64)


@given(
    st.lists(floats, min_size=1, max_size=5), st.lists(floats, min_size=2, max_size=2), st.text()
)
@settings(max_examples=100, deadline=None)
def test_any_numbers_and_text_round_trip_exactly(
    logprobs: list[float], beliefs: list[float], text: str
) -> None:
    turn = Turn(0, 1, 1 + len(logprobs), tuple(logprobs), 0, text, text, Verdict.OTHER)
    one = replace(game(), turns=(turn,), beliefs=tuple(beliefs), stop=StopReason.CONTEXT_FULL)
    line = json.dumps(to_row(one, max_turns=20), allow_nan=False)
    assert from_row(json.loads(line)) == one


def test_nan_survives_as_nan() -> None:
    one = game(beliefs=(math.nan, -1.0, -math.inf))
    back = from_row(json.loads(json.dumps(to_row(one, max_turns=2), allow_nan=False)))
    assert back.beliefs is not None
    assert math.isnan(back.beliefs[0])
    assert back.beliefs[1:] == (-1.0, -math.inf)


def test_damaged_lines_are_skipped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    write_groups(path, [Group(TASK, (game(0), game(1)))], max_turns=2)
    first, second = path.read_bytes().splitlines(keepends=True)
    broken = [
        first,
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"secret": "x"}\n',
        b"\n",
        second[: len(second) // 2],
    ]
    path.write_bytes(b"".join(broken))
    report = read_trajectories(path)
    assert report.trajectories == (game(0),)
    assert [d.number for d in report.damaged] == [2, 3, 4, 6]
    assert [d.reason.split(":")[0] for d in report.damaged] == [
        "not JSON", "not an object", "not a trajectory", "not JSON",
    ]  # fmt: skip


def test_R9_games_of_another_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    write_groups(path, [Group(TASK, (game(),))], max_turns=2)
    with pytest.raises(UserError, match=r"line 1: the game belongs to run 'run-a'"):
        read_trajectories(path, run_id="run-b")


def test_a_missing_file_is_a_plain_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no rollout file"):
        read_trajectories(tmp_path / "none.jsonl")


def test_published_rows_can_be_read_compressed(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"secret": "bender", "score": -18.4}\n{"cut'))
    report = read_rows(path)
    assert report.rows == ({"secret": "bender", "score": -18.4},)
    assert [d.number for d in report.damaged] == [2]


def test_rows_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(b'\n{"a": 1}\n[]\n{"a": 2}\n')
    report = read_rows(path)
    assert report.rows == ({"a": 1}, {"a": 2})
    assert report.numbers == (2, 4)


def test_a_compressed_file_that_breaks_off_keeps_the_games_before(tmp_path: Path) -> None:
    plain = tmp_path / "1.jsonl"
    write_groups(plain, [Group(TASK, tuple(game(i) for i in range(200)))], max_turns=2)
    data = gzip.compress(plain.read_bytes())
    path = tmp_path / "1.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    report = read_trajectories(path)
    (damaged,) = report.damaged
    assert damaged.reason.startswith("the compressed data is damaged and ends here")
    assert report.trajectories == tuple(game(i) for i in range(damaged.number - 1))
    assert damaged.number > 50


def test_a_checksum_that_fails_says_that_any_line_may_be_damaged(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b'{"a": 1}\n'))
    data[-8] ^= 1
    path = tmp_path / "1.jsonl.gz"
    path.write_bytes(bytes(data))
    report = read_rows(path)
    assert report.rows == ({"a": 1},)
    assert "lines above may be too" in report.damaged[0].reason


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 5000], ids=["deep", "long"])
def test_a_line_that_python_refuses_to_parse_is_damaged(line: str, tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text(f'{line}\n{{"a": 1}}\n')
    report = read_rows(path)
    assert [damaged.number for damaged in report.damaged] == [1]
    assert report.rows == ({"a": 1},)


def test_R5_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    write_groups(path, [Group(TASK, (game(0),))], max_turns=2)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="max_turns"):
        write_groups(path, [Group(TASK, (game(1, None), game(2)))], max_turns=1)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_candidates_and_the_question_inside_an_action_round_trip_exactly() -> None:
    candidates = (
        Candidate("<question>Is it big?</question>", "no", Verdict.NO, -7.25, 2.25, chosen=True),
        Candidate("é", "", Verdict.INVALID, -math.inf, None, error="the belief is not finite"),
        Candidate("", "", Verdict.ERROR, None, None, error="down"),
    )
    turn = replace(game().turns[0], question="Is it big?", candidates=candidates)
    one = replace(game(), turns=(turn, game().turns[1]))
    assert from_row(json.loads(json.dumps(to_row(one, max_turns=2), allow_nan=False))) == one
    assert [t.asked for t in one.turns] == ["Is it big?", "Éclair?"]


def test_what_the_environment_noticed_round_trips_exactly() -> None:
    turn = replace(game().turns[0], diagnostics=("no_question", "repeated"))
    one = replace(game(), turns=(turn, game().turns[1]))
    assert from_row(json.loads(json.dumps(to_row(one, max_turns=2)))) == one


def test_files_from_before_candidates_and_diagnostics_can_be_read() -> None:
    row = to_row(game(), max_turns=2)
    for turn in row["turns"]:
        del turn["candidates"], turn["question"], turn["diagnostics"]
    assert from_row(row) == game()
