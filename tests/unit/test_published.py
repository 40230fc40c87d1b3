"""Reading stored games: three forms of a line, and every kind of damage to one of them."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.eval.published import Exchange, Form, read_game, read_games
from delta_belief_rl.rollout.store import to_row
from delta_belief_rl.types import StopReason, Task, Trajectory, Turn, UserError, Verdict
from tests.stored import INVALID, LISTED, LOST, MENTIONED, REPEATED, WON, published, val_only, write


def own_game(stop: StopReason = StopReason.WIN, won: bool = True) -> Trajectory:
    last = Verdict.WIN if won else Verdict.ERROR
    turns = (
        Turn(0, 2, 4, (-0.5, -0.5), 0, "Is it\nalive?", "Yes", Verdict.YES),
        Turn(1, 6, 8, (-0.5, -0.5), 0, "Is it\nalive?", "Repeated", Verdict.REPEATED),
        Turn(2, 9, 11, (-0.5, -0.5), 0, "Is it the hound?", "Finished", last, won, won),
    )
    task = Task("t", "tw_q", "dog", (), aliases=("hound",))
    return Trajectory(task, 0, tuple(range(12)), turns, stop, (-5.0, -1.0, -0.5, -0.25), "r", 3)


# --- forms


def test_a_published_row_is_read_from_its_text_alone() -> None:
    game = read_game(published(WON, beliefs=(-8.0, -9.0, -1.0)), line=7)
    assert (game.line, game.form, game.secret, game.step) == (7, Form.PUBLISHED, "dog", 3)
    assert [(turn.question, turn.reply) for turn in game.exchanges] == list(WON)
    assert game.won
    assert game.strict
    assert game.win_turn() == game.win_turn(strict=True) == 2
    assert game.beliefs == (-8.0, -9.0, -1.0)
    assert game.failed is None, "the published form cannot tell a failed judge"


@pytest.mark.parametrize("pairs", [LISTED, MENTIONED])
def test_a_list_and_a_mention_win_by_the_compatible_rule_only(pairs: tuple[Any, ...]) -> None:
    game = read_game(published(pairs))
    assert game.won
    assert not game.strict
    assert game.win_turn(strict=True) is None
    assert game.win_turn() == len(pairs)


def test_a_strict_guess_that_was_called_invalid_does_not_win() -> None:
    game = read_game(published((("Is it a dog?", INVALID), *LOST[1:])))
    assert not game.strict


def test_notices_and_second_question_marks_are_flags() -> None:
    pairs = (("Is it alive?", REPEATED), ("Is it? Is it?", INVALID), ("A? B?", "no"))
    turns = read_game(published(pairs)).exchanges
    assert [(turn.repeated, turn.invalid) for turn in turns] == [
        (True, False),
        (False, True),
        (False, True),
    ]


def test_a_rollout_row_has_neither_reward_nor_number_of_questions() -> None:
    game = read_game(published(WON, reward=None, num_questions=None))
    assert game.num_turns == 2
    assert game.reward is None


def test_beliefs_that_are_off_are_absent() -> None:
    game = read_game(published(WON, log_prob_reward=None, log_prob_diff=None))
    assert game.beliefs is None
    assert game.stored_diffs is None


def test_a_question_with_new_lines_stays_one_question() -> None:
    pairs = (("Is it\n\nalive,\nor dead?\n", "yes"), ("", "no"), ("users\nassistant?", "no"))
    game = read_game(published(pairs))
    assert [(turn.question, turn.reply) for turn in game.exchanges] == list(pairs)


def test_a_question_with_reasoning_is_what_its_tag_holds() -> None:
    text = "<think>It may be\na pet?</think><question>Is it a dog?</question>"
    game = read_game(published(((text, "finished"),)))
    assert game.exchanges[0].question == "Is it a dog?"
    assert game.strict


def test_a_val_only_row_is_read_from_its_messages() -> None:
    game = read_game(val_only(WON))
    assert game.form is Form.VAL_ONLY
    assert [(turn.question, turn.reply) for turn in game.exchanges] == list(WON)
    assert game.won
    assert game.win_turn() == 2
    assert game.beliefs == (-8.0, -6.5, -5.0), "k + 1 values that are left are all of them"


def test_a_val_only_row_whose_beliefs_lost_their_places_has_none() -> None:
    game = read_game(val_only(WON, log_prob_reward=[-8.0, -5.0]))
    assert game.beliefs is None
    assert game.stored_beliefs == (-8.0, -5.0)


def test_a_win_on_the_last_turn_is_a_win_whatever_finished_at_says() -> None:
    pairs = (*LOST[:3], ("Is it a dog?", "finished"))
    row = val_only(pairs)
    assert row["finished_at"] == -1
    game = read_game(row)
    assert game.won
    assert game.win_turn() == 4


def test_an_own_row_is_read_from_its_turns() -> None:
    game = read_game(to_row(own_game(), max_turns=4))
    assert game.form is Form.OWN
    assert [turn.question for turn in game.exchanges] == [
        "Is it\nalive?", "Is it\nalive?", "Is it the hound?",
    ]  # fmt: skip
    assert [turn.repeated for turn in game.exchanges] == [False, True, False]
    assert game.strict, "an alias counts because the file says so"
    assert game.win_turn(strict=True) == 3
    assert game.beliefs == (-5.0, -1.0, -0.5, -0.25)
    assert game.failed is False
    assert game.score is None


def test_an_own_question_inside_reasoning_is_the_one_the_environment_read() -> None:
    one = own_game()
    turn = replace(one.turns[0], action="Hm. Is it big?", question="Is it big?")
    game = read_game(to_row(replace(one, turns=(turn, *one.turns[1:])), max_turns=4))
    assert game.exchanges[0].question == "Is it big?"


@pytest.mark.parametrize("stop", [StopReason.JUDGE_FAILED, StopReason.TURN_LIMIT])
def test_V5_an_own_game_whose_judge_failed_has_no_outcome(stop: StopReason) -> None:
    game = read_game(to_row(own_game(stop, won=False), max_turns=4))
    assert game.failed
    assert game.void()
    assert game.void(strict=True)
    assert game.exchanges[-1].failed


def test_an_own_row_without_its_turns_is_read_from_its_text() -> None:
    row = to_row(own_game(), max_turns=4)
    for name in ("turns", "task", "token_ids", "beliefs", "input"):
        del row[name]
    game = read_game(row)
    assert game.form is Form.OWN
    assert game.num_turns == 3
    assert game.strict
    assert game.exchanges[1] == Exchange("Is it\nalive?", "Repeated", repeated=True)
    assert game.failed is False
    assert game.exchanges[1].failed is None, "a turn that the judge failed cannot be told"


def test_own_beliefs_stand_in_for_padded_ones() -> None:
    row = to_row(own_game(), max_turns=4)
    del row["log_prob_reward"]
    assert read_game(row).beliefs == (-5.0, -1.0, -0.5, -0.25)


def test_forms_may_be_mixed_in_a_file(tmp_path: Path) -> None:
    rows = [published(WON), val_only(LOST), to_row(own_game(), max_turns=4)]
    found = read_games(write(tmp_path / "mixed.jsonl", rows))
    assert [game.form for game in found.games] == [Form.PUBLISHED, Form.VAL_ONLY, Form.OWN]
    assert [game.line for game in found.games] == [1, 2, 3]
    assert found.damaged == ()


# --- damage

USER_LINE = (("Is it\nuser\nalive?", "yes"), *LOST[1:])
HIDDEN_PAIR = (("Is it a\nuser\nyes\nassistant\nIs it alive?", "yes"), *LOST[1:])

ROW_DAMAGE: list[tuple[Any, str]] = [
    (b"{", "not JSON"),
    (json.dumps(published())[:-20], "not JSON"),
    (b"\xff\xfe\x00", "not JSON"),
    (b'{"secret": "\xc3("}', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"step": ' + "1" * 5000 + "}", "not JSON"),
    ("[1, 2]", "not an object: list"),
    ('"text"', "not an object: str"),
    ("null", "not an object: NoneType"),
    ("{}", "secret is missing"),
    *(
        (published(**{name: None}), f"{name} is missing")
        for name in ("secret", "output", "score", "game_status", "invalid_count", "repeated_count")
    ),
    (published(secret=" "), "secret is empty"),
    (published() | {"secret": 5}, "secret is not text"),
    (json.dumps(published() | {"secret": "\ud800"}), "secret has half of a surrogate pair"),
    (published(output=["assistant"]), "output is not text"),
    (published(score="good"), "score is not a number"),
    (published(score=True), "score is not a number"),
    (published(score=math.nan), "score is not finite"),
    (json.dumps(published()).replace('"step": 3', '"step": 3.5'), "step is not a whole number"),
    (published(score=10**400), "score is not finite"),
    (published(reward=math.inf), "reward is not finite"),
    (published(game_status="1"), "game_status is neither 0 nor 1"),
    (published(game_status=2), "game_status is neither 0 nor 1"),
    (published(game_status=1.0), "game_status is neither 0 nor 1"),
    (published(game_status=[]), "game_status is neither 0 nor 1"),
    (published(num_questions=3), "4 pairs of question and reply, but num_questions is 3"),
    (published(num_questions=4.0), "num_questions is not a whole number"),
    (published(num_questions=True), "num_questions is not a whole number"),
    (published(invalid_count=-1), "invalid_count is not a whole number"),
    (published(log_prob_reward="x"), "log_prob_reward is not a list"),
    (published(log_prob_reward=["x"] * 5), "an entry of log_prob_reward is not a number"),
    (published(log_prob_reward=[-1.0] * 4), "log_prob_reward has 4 values for 4 turns"),
    (published(log_prob_reward=[math.nan] * 5), "an entry of log_prob_reward is not finite"),
    (published(log_prob_diff=[1.0]), "log_prob_diff has 1 values for 4 turns"),
    (published(log_prob_diff=[None] * 4), "an entry of log_prob_diff is not a number"),
    (published(output="Is it alive?\nuser\nyes\n"), "output does not begin with a question"),
    (published(output=published()["output"] + "assistant\nIs it"), "do not alternate in output"),
    (published(output="user\nyes\n"), "do not alternate in output"),
    (published(USER_LINE), "do not alternate in output"),
    (published(HIDDEN_PAIR), "5 pairs of question and reply, but num_questions is 4"),
    (published(HIDDEN_PAIR, num_questions=None), "log_prob_reward has 5 values for 5 turns"),
    (published((), game_status=1), "game_status is 1 but there is no question"),
    (
        published(WON, num_questions=None, log_prob_reward=[-1.0] * 5),
        "log_prob_reward goes on after the 2 turns",
    ),
    (val_only(history="x"), "history is not a list"),
    (val_only(history=[{"role": "assistant"}]), "content is missing"),
    (val_only(history=[{"role": "assistant", "content": "A?"}]), "do not alternate in history"),
    (val_only(log_prob_reward=[-1.0] * 9), "log_prob_reward has 9 values for 4 turns"),
    (val_only(log_prob_diff=[1.0] * 5), "log_prob_diff has 5 values for 4 turns"),
    (published(turns="x"), "turns is not a list"),
    (published(turns=["x"]), "turns has an entry that is no object"),
    (published(turns=[{"action": "A?"}]), "reply is missing"),
    (
        published(turns=[{"action": "A?", "reply": "no", "verdict": "perhaps"}]),
        "a turn has the unknown verdict 'perhaps'",
    ),
    (published(turns=[{"action": 3, "reply": "no", "verdict": "no"}]), "action is not text"),
    (published((), strict_status=1), "strict_status is 1 but there is no question"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), ROW_DAMAGE, ids=[reason for _, reason in ROW_DAMAGE])
def test_a_damaged_row_is_named_and_changes_no_other(
    damage: Any, reason: str, tmp_path: Path
) -> None:
    before, after = published(WON), published(LISTED, secret="dog")
    found = read_games(write(tmp_path / "games.jsonl", [before, damage, after]))
    assert [(line.number, reason in line.reason) for line in found.damaged] == [(2, True)], (
        found.damaged
    )
    assert [game.line for game in found.games] == [1, 3]
    assert found.games[0] == read_game(before, 1)
    assert found.games[1] == read_game(after, 3)


def test_empty_lines_are_no_damage_and_count_as_lines(tmp_path: Path) -> None:
    found = read_games(write(tmp_path / "games.jsonl", ["", published(WON), "  ", published()]))
    assert [game.line for game in found.games] == [2, 4]
    assert found.damaged == ()


def test_a_truncated_last_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "games.jsonl", [published(WON), published(LOST)])
    path.write_bytes(path.read_bytes()[:-30])
    found = read_games(path)
    assert [game.line for game in found.games] == [1]
    assert [line.number for line in found.damaged] == [2]


def compressed(tmp_path: Path, count: int = 400) -> tuple[Path, bytes]:
    rows = [published(WON, secret=f"dog{i}", log_prob_reward=[-i / 7] * 5) for i in range(count)]
    plain = write(tmp_path / "games.jsonl", rows).read_bytes()
    return tmp_path / "games.jsonl.gz", gzip.compress(plain, mtime=0)


@pytest.mark.parametrize("share", [0.3, 0.7, 0.999])
def test_the_rows_before_the_end_of_a_truncated_file_survive(share: float, tmp_path: Path) -> None:
    path, data = compressed(tmp_path)
    path.write_bytes(data[: int(share * len(data))])
    found = read_games(path)
    last = found.damaged[-1]
    assert len(found.damaged) == 1
    assert "the compressed data is damaged and ends here" in last.reason
    assert [game.line for game in found.games] == list(range(1, last.number))
    assert last.number > 0.25 * share * 400


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) * 40 + data[middle + 40 :]


@pytest.mark.parametrize(
    "damage", [flip, lambda data: data[:-8] + bytes(8), lambda data: data + b"junk"]
)
def test_damage_inside_compressed_data_is_named(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path, data = compressed(tmp_path)
    path.write_bytes(damage(data))
    found = read_games(path)
    assert found.damaged
    assert [game.secret for game in found.games[:20]] == [f"dog{i}" for i in range(20)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
FORMS: dict[str, dict[str, Any]] = {
    "published": published(WON),
    "val_only": val_only(WON),
    "own": to_row(own_game(), max_turns=4),
}


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_stands_in_a_field_is_a_game_or_damage(form: str, data: st.DataObject) -> None:
    row = json.loads(json.dumps(FORMS[form]))
    place = row
    name = data.draw(st.sampled_from(sorted(row)))
    if name in ("turns", "history") and data.draw(st.booleans()):
        place = data.draw(st.sampled_from([entry for entry in row[name] if entry]))
        name = data.draw(st.sampled_from(sorted(place)))
    place[name] = data.draw(JSON)
    try:
        game = read_game(row)
    except ValueError:
        return
    assert game.win_turn() is None or 1 <= (game.win_turn() or 0) <= game.num_turns
    assert game.beliefs is None or len(game.beliefs) == game.num_turns + 1


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_that_change_in_one_line_leave_the_others_alone(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("games") / "games.jsonl"
    rows = [published(pairs) for pairs in (WON, LOST, LISTED)]
    first, middle, last = write(path, rows).read_bytes().splitlines()
    start = data.draw(st.integers(0, len(middle)))
    end = data.draw(st.integers(start, min(start + 9, len(middle))))
    junk = data.draw(st.binary(max_size=9)).replace(b"\n", b"")
    path.write_bytes(b"\n".join((first, middle[:start] + junk + middle[end:], last)) + b"\n")
    found = {game.line: game for game in read_games(path).games}
    assert found[1] == read_game(rows[0], 1)
    assert found[3] == read_game(rows[2], 3)


# --- files that hold nothing


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.jsonl", b"", "holds no game because it is empty"),
        ("blank.jsonl", b"\n \n", "holds no game because it is empty"),
        ("other.jsonl", b'{"step": 1}\n', r"holds no game \(line 1: secret is missing\)"),
        ("plain.jsonl.gz", b'{"step": 1}\n', r"holds no game \(line 1: the compressed data"),
        ("empty.jsonl.gz", b"", "holds no game because it is empty"),
        ("packed.jsonl", gzip.compress(b"{}", mtime=0), r"holds no game \(line 1: not JSON"),
    ],
)
def test_a_file_without_a_game_is_refused(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_games(tmp_path / name)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(UserError, match="there is no rollout file"):
            read_games(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "games.jsonl", [published()])
    path.chmod(0)
    with pytest.raises(UserError, match="cannot be read"):
        read_games(path)
