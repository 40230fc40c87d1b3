"""Stored conversations of four forms become the same messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from delta_belief_rl.eval.conversations import Conversation, read_conversations
from delta_belief_rl.rollout.store import to_row
from delta_belief_rl.types import (
    Message,
    StopReason,
    Task,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "validation"
OPENING = (Message("system", "Be brief.\n\nPlay."), Message("user", "Ask:\n"))
TALK = (("Is it alive?", "Yes"), ("Is it\na dog?", "finished"))
HANDED_IN = (Message("user", "handed in"),)


def listed(padding: bool = False) -> list[Any]:
    messages = [m.as_dict() for m in OPENING]
    for said, reply in TALK:
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]
    return [*messages, "", ""] if padding else messages


def own_row() -> dict[str, Any]:
    turns = (
        Turn(0, 2, 4, (-0.5, -0.5), 0, TALK[0][0], TALK[0][1], Verdict.YES),
        Turn(1, 6, 8, (-0.5, -0.5), 0, TALK[1][0], TALK[1][1], Verdict.WIN, True, True),
    )
    task = Task("t", "tw_q", "dog", OPENING, aliases=("hound",))
    game = Trajectory(task, 0, tuple(range(10)), turns, StopReason.WIN)
    return json.loads(json.dumps(to_row(game, max_turns=4)))


FORMS: Mapping[str, Mapping[str, Any]] = {
    "own": own_row(),
    "published": {
        "secret": "dog",
        "input": "system\nBe brief.\n\nPlay.\nuser\nAsk:\n\n",
        "output": "assistant\nIs it alive?\nuser\nYes\nassistant\nIs it\na dog?\nuser\nfinished\n",
        "game_status": 1,
    },
    "val_only": {"secret": "dog", "history": listed(padding=True), "game_status": True},
    "messages": {"ground_truth": "dog", "messages": listed()},
}


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def one(tmp_path: Path, row: Any) -> Conversation:
    (found,) = read_conversations(write(tmp_path / "a.jsonl", [row]), HANDED_IN).conversations
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_messages(form: str, tmp_path: Path) -> None:
    found = one(tmp_path, FORMS[form])
    assert (found.secret, found.opening, found.exchanges) == ("dog", OPENING, TALK)
    assert [m.as_dict() for m in found.messages()] == listed()
    assert found.won is (None if form == "messages" else True)
    assert found.strict is (True if form == "own" else None)
    assert found.aliases == (("hound",) if form == "own" else ())


def test_a_conversation_stored_without_opening_gets_the_one_handed_in(tmp_path: Path) -> None:
    light = {key: value for key, value in FORMS["published"].items() if key != "input"}
    read = read_conversations(write(tmp_path / "a.jsonl", [light, FORMS["own"]]), HANDED_IN)
    assert read.bare == 1
    assert [talk.opening for talk in read.conversations] == [HANDED_IN, OPENING]


def test_a_last_question_without_reply_is_left_out(tmp_path: Path) -> None:
    row = {"ground_truth": "dog", "messages": listed()[:-1]}
    assert one(tmp_path, row).exchanges == TALK[:1]
    assert one(tmp_path, {**row, "messages": listed()[:2]}).exchanges == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "neither ground_truth nor secret"),
        ({"secret": "dog"}, "no turns, history, messages or output"),
        ({"secret": "dog", "output": "Is it?\nuser\nno\n"}, "does not begin with a role"),
        ({"secret": "dog", "output": "assistant\na\nassistant\nb\n"}, "do not alternate"),
        ({"secret": "dog", "messages": ["x"]}, "an entry that is no object"),
        ({"secret": "dog", "messages": [{"role": "judge", "content": ""}]}, "role 'judge'"),
        ({"secret": "dog", "output": "", "game_status": 2}, "neither 0 nor 1"),
        ({"secret": "dog", "output": "assistant\n\ud800\nuser\nno\n"}, "surrogate"),
        ({**own_row(), "task": None}, "task is no object"),
        ([1], "not an object"),
    ],
)
def test_a_damaged_line_is_skipped_by_number_and_changes_no_other(
    row: Any, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", [FORMS["messages"], row, FORMS["published"]])
    read = read_conversations(path, HANDED_IN)
    assert [talk.line for talk in read.conversations] == [1, 3]
    (damaged,) = read.damaged
    assert damaged.number == 2
    assert reason in damaged.reason


def test_a_file_without_conversations_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no conversation \\(line 1: there is neither"):
        read_conversations(write(tmp_path / "a.jsonl", [{"step": 1}]), HANDED_IN)
    with pytest.raises(UserError, match="no rollout file"):
        read_conversations(tmp_path / "none.jsonl", HANDED_IN)


def test_the_games_of_the_quick_start_are_read() -> None:
    path = ROOT / "validation" / "quickstart" / "start" / "seed1-val.jsonl.gz"
    with gzip.open(path) as file:
        rows = [json.loads(line) for line in file]
    read = read_conversations(path, HANDED_IN)
    assert read.damaged == ()
    assert read.bare == len(rows) == len(read.conversations)
    for talk, row in zip(read.conversations, rows, strict=True):
        assert (talk.num_turns, int(bool(talk.won))) == (row["num_questions"], row["game_status"])


def test_published_files_are_read_whole() -> None:
    files = sorted(DATA.glob("*/*.jsonl.gz"))
    if not files:
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    for path in files:
        read = read_conversations(path, HANDED_IN)
        assert (len(read.conversations), read.damaged, read.bare) == (792, (), 0)
        roles = {tuple(m.role for m in talk.opening) for talk in read.conversations}
        assert roles == {("system", "user")}
        assert all(talk.num_turns == 20 or talk.won for talk in read.conversations)
