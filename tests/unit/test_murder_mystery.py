"""Murder Mystery: its cases, its reading of actions, its judge, and its rules of winning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.envs.base import JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.check import check_env
from delta_belief_rl.envs.goal_phrase import has_goal_phrase
from delta_belief_rl.envs.murder_mystery.actions import read_action
from delta_belief_rl.envs.murder_mystery.data import (
    DATA_DIR,
    SPLITS,
    TEST_KINDS,
    Case,
    MysteryError,
    case_of,
    load_cases,
    opening,
    problems,
    reachable,
    read,
    task_of,
    tasks,
)
from delta_belief_rl.envs.murder_mystery.game import MurderMystery, MurderMysterySettings
from delta_belief_rl.envs.parquet import read_parquet, write_parquet
from delta_belief_rl.judge.murder_mystery.rules import MysteryJudge, found_clues
from delta_belief_rl.types import Message, Task, UserError, Verdict

JUDGE = MysteryJudge()
by_case = pytest.mark.parametrize("which", load_cases(), ids=lambda which: which.id)


def case(name: str = "sherry_at_six") -> Case:
    return next(case for case in load_cases() if case.id == name)


def game(of: Case | None = None, **settings: Any) -> MurderMystery:
    return MurderMystery(task_of(of or case()), MurderMysterySettings(**settings))


def ask(request: JudgeRequest) -> JudgeReply:
    return JUDGE.answer([request])[0]


def play(env: MurderMystery, text: str) -> Outcome:
    action = env.parse(text)
    return env.apply(action, ask(env.judge_request(action)) if action.needs_judge else None)


def action_for(which: Case, key: str) -> str:
    """A natural action that asks for a clue."""
    head, _, tail = key.partition("/")
    people = {person.name for person in which.people}
    if not tail:
        return f"Interview {head}." if head in people else f"Examine the {head}."
    if tail == "alibi":
        return f"Ask {head} where they were at the time."
    if tail == "check":
        return f"Check the alibi of {head}."
    if head in people:
        return f"I would like to ask {head} about the {tail}."
    return f"Have the {head} examined for {TEST_KINDS[tail][0]}."


def path_to(which: Case, keys: Iterator[str] | list[str]) -> list[str]:
    """Clues in an order in which each can be found, up to the wanted ones."""
    order: list[str] = []

    def add(key: str) -> None:
        for earlier in which.clues[key].after:
            add(earlier)
        if key not in order:
            order.append(key)

    for key in keys:
        add(key)
    return order


def proof(which: Case) -> str:
    named = ", ".join(" ".join(words[0]) for words in which.decisive.values())
    return f"I accuse {which.culprit} because of this: {named}."


# --- data -------------------------------------------------------------------------------------


def test_there_are_enough_mysteries_and_no_two_are_alike() -> None:
    cases = load_cases()
    assert len(cases) >= 50
    for what in ("id", "title", "scene", "victim", "solution"):
        assert len({getattr(each, what) for each in cases}) == len(cases), what
    texts = [clue.text for each in cases for clue in each.clues.values()]
    assert len(set(texts)) > 0.98 * len(texts)


@by_case
def test_each_mystery_is_consistent(which: Case) -> None:
    assert problems(which) == []
    assert reachable(which) == which.clues.keys()
    assert which.culprit in {person.name for person in which.people}
    assert len(which.decisive) >= 3
    assert which.herrings
    assert sum(not person.holds for person in which.people) == 1


@by_case
def test_every_clue_can_be_asked_for_in_plain_words(which: Case) -> None:
    for key in which.clues:
        reading = read_action(which, action_for(which, key))
        assert (reading.kind, reading.key) == ("clue", key), action_for(which, key)


@by_case
def test_every_name_of_everybody_and_everything_is_understood(which: Case) -> None:
    for look in which.looks:
        for words in look.names:
            assert read_action(which, f"Examine the {' '.join(words)}").key == look.name
    for person in which.people:
        for words in person.names:
            reading = read_action(which, f"I accuse {' '.join(words)} of murder.")
            assert reading.accused == (person.name,), words
        for key, phrases in person.topics.items():
            for words in phrases:
                assert read_action(which, f"Ask {person.name} about {' '.join(words)}").key == key


@by_case
def test_each_mystery_can_be_solved_within_twenty_turns_with_a_full_score(which: Case) -> None:
    env = game(which)
    for key in path_to(which, list(which.decisive)):
        outcome = play(env, action_for(which, key))
        assert outcome.reply == which.clues[key].text
    assert env.progress() == 1.0
    outcome = play(env, proof(which))
    assert (outcome.verdict, outcome.strict_win, outcome.score) == (Verdict.WIN, True, 1.0)


@by_case
def test_the_first_message_holds_the_case_and_nothing_hidden(which: Case) -> None:
    text = opening(which)
    assert which.scene in text
    assert all(person.name in text for person in which.people)
    assert which.solution not in text
    listed = text.split("you can examine: ")[1].split(".\n")[0].split(", ")
    assert all(not which.clues[name].after for name in listed)


def test_splits_are_disjoint_stable_and_cover_everything() -> None:
    secrets = {split: [task.secret for task in tasks(split)] for split in SPLITS}
    flat = [secret for each in secrets.values() for secret in each]
    assert sorted(flat) == sorted(case.solution for case in load_cases())
    assert len(set(flat)) == len(flat)
    assert all(secrets[split] for split in SPLITS)
    assert len(secrets["train"]) > len(secrets["val"])
    assert [task.id for task in tasks("val")] == [task.id for task in tasks("val")]
    with pytest.raises(UserError, match="use train, val, test"):
        tasks("dev")


def test_tasks_survive_the_published_file_format(tmp_path: Path) -> None:
    path = tmp_path / "test.parquet"
    write_parquet(path, tasks("test"))
    back = read_parquet(str(path), system_key=None)
    assert back == tasks("test")
    assert all(case_of(task) is not None for task in back)


def _broken(tmp_path: Path, **changes: object) -> Path:
    file = sorted(DATA_DIR.glob("murder_mystery*.yaml"))[0]
    entry = yaml.safe_load(file.read_text(encoding="utf-8"))[0]
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump([{**entry, **changes}]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"culprit": "Nobody Known"}, "who is none of its people"),
        ({"culprit": "Edith Crane"}, "alibi that"),
        ({"people": {}}, "none of its people|0 people"),
        (
            {"looks": {"library": {"see": "x", "after": ["attic"]}}},
            "which is no clue|does not have",
        ),
        ({"decisive": {"attic": ["attic"]}}, "names the clue 'attic'"),
        ({"herrings": ["decanter/lab"]}, "decisive and a red herring"),
        ({"scene": "There was foxglove about."}, "'foxglove', which every player reads"),
        ({"need": 9}, "needs 9 of 3"),
        ({"need": "two"}, "'need' must be a number"),
        ({"solution": "Somebody did it."}, "does not name the culprit"),
        ({"solution": 3}, "'solution' must be a text"),
        ({"weather": "rain"}, "has 'weather'"),
        ({"herrings": "umbrella"}, "must be a list"),
        ({"looks": []}, "must be a mapping"),
    ],
)
def test_a_broken_case_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(MysteryError, match=message) as failure:
        read(_broken(tmp_path, **changes))
    assert "broken.yaml" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_name_of_two_things_and_a_circle_of_clues_are_refused(tmp_path: Path) -> None:
    looks = {"desk | table": "A desk.", "table": "A table."}
    with pytest.raises(MysteryError, match="means 'desk' and 'table'"):
        read(
            _broken(tmp_path, looks=looks, decisive={"desk": ["desk"], "table": ["t"]}, herrings=[])
        )
    circle = {
        "desk": {"see": "A desk.", "after": ["safe"]},
        "safe": {"see": "A safe.", "after": ["desk"]},
    }
    with pytest.raises(MysteryError, match="can never show 'desk'"):
        read(_broken(tmp_path, looks=circle, decisive={"desk": ["d"], "safe": ["s"]}, herrings=[]))


# --- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("Let me take a look at the decanter on the tray", "decanter"),
        ("Go to the library and look at the writing desk.", "writing desk"),
        ("Look around", "library"),
        ("Inspect the crime scene for clues.", "library"),
        ("What does the body look like?", "body"),
        ("Is there anything unusual about the decanter?", "decanter"),
        ("Examine Harold Finch's body", "body"),
        ("Perform an autopsy", "body/autopsy"),
        ("Order a post-mortem on the victim", "body/autopsy"),
        ("Send the sherry to the laboratory", "decanter/lab"),
        ("Request a toxicology report on Harold Finch", "body/autopsy"),
        ("Have the sherry analyzed", "decanter/lab"),
        ("Examine the glass on the table for fingerprints.", "glass/prints"),
        ("Mrs. Pell, where were you at six?", "Mrs Agnes Pell/alibi"),
        ("Where were you at six, Dr Marsh?", "Dr Lionel Marsh/alibi"),
        ("Ask the doctor what he was doing that evening", "Dr Lionel Marsh/alibi"),
        ("Verify Edith Crane's story with the telephone exchange", "Edith Crane/check"),
        ("Check if Tobias's alibi holds", "Tobias Finch/check"),
        ("Tobias, do you have any debts?", "Tobias Finch/debt"),
        ("I approach the cook and ask her about the foxglove.", "Mrs Agnes Pell/garden"),
        ("Press the secretary about her quarrel with the victim", "Edith Crane/quarrel"),
        ("The glass.", "glass"),
        ("The autopsy speaks of foxglove, so I will search the potting shed.", "potting shed"),
        ("First, I will question Tobias Finch.", "Tobias Finch"),
        ("Interview Tobias Finch and ask him where he was at six.", "Tobias Finch/alibi"),
        ("Search the shed thoroughly for tools, chemicals or plants", "potting shed"),
        ("Ask Edith Crane about her relationship with Harold Finch.", "Edith Crane"),
        ("Ask the doctor if he noticed anything unusual.", "Dr Lionel Marsh"),
    ],
)
def test_natural_actions_are_understood(text: str, key: str) -> None:
    reading = read_action(case(), text)
    assert (reading.kind, reading.key) == ("clue", key)


@pytest.mark.parametrize(
    ("text", "accused"),
    [
        ("I accuse Tobias Finch, Harold's nephew, because of the saucepan.", ("Tobias Finch",)),
        ("I accuse Tobias with the saucepan in the potting shed.", ("Tobias Finch",)),
        ("Edith Crane is the one who found the letter.", ()),
        ("Edith Crane is responsible for the letters.", ()),
        ("The saucepan is old. It is Tobias's.", ()),
        ("I think it was Tobias.", ("Tobias Finch",)),
        ("I name Tobias Finch as the murderer.", ("Tobias Finch",)),
        ("The evidence points to Tobias as the killer.", ("Tobias Finch",)),
        ("She thought that it was Tobias.", ()),
        ("Tobias Finch is responsible for the death of his uncle.", ("Tobias Finch",)),
        ("I do not accuse Tobias.", ()),
        ("I accuse both Tobias and Edith.", ("Tobias Finch", "Edith Crane")),
        ("Final accusation: Edith Crane", ("Edith Crane",)),
        ("I accuse Edith rather than Tobias.", ("Edith Crane",)),
        ("Tobias pushed the door open.", ()),
    ],
)
def test_who_is_accused(text: str, accused: tuple[str, ...]) -> None:
    assert read_action(case(), text).accused == accused


_PIECES = st.sampled_from(
    [
        "I accuse",
        "Tobias",
        "Edith Crane",
        "Harold Finch",
        "the cook",
        "everyone",
        "and",
        "or",
        "because",
        "not",
        "is the killer",
        "did it",
        "examine",
        "ask",
        "dust",
        "test",
        "the desk",
        "the saucepan",
        "about",
        "the sherry",
        "her",
        "where were you",
        "for prints",
        ",",
        ".",
        "?",
        "!",
        ":",
        "\n",
        "1)",
        "2.",
        "'",
        '"',
        "go to",
        "then",
        "alibi of",
        "check",
        "what is",
        "murderer",
        "goal reached",
        "who",
        "if",
        "the",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(_PIECES, max_size=20).map(" ".join)))
def test_J12_any_text_is_read_and_only_one_sole_culprit_wins(text: str) -> None:
    reading = read_action(case(), text)
    assert reading == read_action(case(), text)
    assert bool(reading.accused) == (reading.kind == "accuse")
    reply = ask(JudgeRequest(task_of(case()), text or "x"))
    assert reply.text
    alone = reading.accused == ("Tobias Finch",) and not has_goal_phrase(text)
    assert (reply.verdict is Verdict.WIN) == alone


# --- judge ------------------------------------------------------------------------------------


def test_a_hidden_thing_answers_like_one_that_does_not_exist() -> None:
    env = game()
    tries = ("Examine the saucepan", "Test the saucepan for blood", "Dust the saucepan for prints")
    hidden = [play(env, text).reply for text in tries]
    missing = play(env, "Examine the chandelier").reply
    assert set(hidden) == {missing}
    play(env, "Search the potting shed")
    assert "Tobias Finch" in play(env, "Dust the saucepan for prints").reply


def test_the_judge_finds_out_from_the_history_alone_what_was_found() -> None:
    task, action = task_of(case()), "Dust the saucepan for prints"
    without = ask(JudgeRequest(task, action))
    with_shed = ask(JudgeRequest(task, action, (("Search the potting shed", "anything"),)))
    assert without.text != with_shed.text
    assert with_shed == ask(JudgeRequest(task, action, (("Search the potting shed", "anything"),)))
    shed, prints = "Search the potting shed", "Dust the saucepan for prints"
    assert found_clues(case(), [shed, prints]) == {"potting shed", "saucepan/prints"}
    assert found_clues(case(), [prints, shed]) == {"potting shed"}


def test_J1_a_case_that_the_judge_does_not_know_is_an_error_and_costs_nothing() -> None:
    task = Task("x", "murder_mystery", "The culprit is Ann Lee.", (Message("user", "A case."),))
    reply = ask(JudgeRequest(task, "Examine the desk"))
    assert reply.verdict is Verdict.ERROR
    assert "none of the packaged mysteries" in reply.reason
    env = MurderMystery(task, MurderMysterySettings())
    outcome = env.apply(env.parse("Examine the desk"), reply)
    assert (outcome.verdict, outcome.score, outcome.done) == (Verdict.ERROR, None, False)


# --- environment ------------------------------------------------------------------------------

ACTIONS = (
    "Examine the library",
    "Examine the saucepan",
    "",
    "Search the potting shed",
    "Dust the saucepan for prints",
    "Why?",
    "Examine the library",
    "I accuse Edith Crane",
)


def test_the_environment_keeps_the_contract() -> None:
    check_env(game, ACTIONS, ask)
    check_env(lambda: game(win_rule="strict", wrong_accusation="continues"), ACTIONS, ask)
    check_env(game)


def test_J1_a_failed_judge_call_on_an_accusation_does_not_end_the_game() -> None:
    env = game()
    outcome = env.apply(env.parse("I accuse Edith Crane"), JudgeReply(Verdict.ERROR, reason="down"))
    assert (outcome.verdict, outcome.done, outcome.score) == (Verdict.ERROR, False, None)
    assert play(env, "I accuse Tobias Finch").compatible_win


def test_an_accusation_ends_the_game_unless_the_published_rule_is_asked_for() -> None:
    assert play(game(), "I accuse Edith Crane").done
    env = game(wrong_accusation="continues")
    outcome = play(env, "I accuse Edith Crane")
    assert (outcome.done, outcome.score) == (False, None)
    assert play(env, "I accuse Tobias Finch").verdict is Verdict.WIN


def test_the_strict_rule_pays_no_win_for_a_lucky_accusation() -> None:
    outcome = play(game(win_rule="strict"), "I accuse Tobias Finch")
    assert outcome.verdict is Verdict.OTHER
    assert (outcome.done, outcome.score, outcome.compatible_win) == (True, 0.5, True)
    assert "goal reached" not in outcome.reply.lower()


def test_a_game_without_an_accusation_ends_with_zero() -> None:
    env = game(max_turns=2)
    assert play(env, "Examine the body").score is None
    outcome = play(env, "Examine the glass")
    assert (outcome.done, outcome.verdict, outcome.score) == (True, Verdict.OTHER, 0.0)


def test_equal_actions_have_equal_keys_and_a_second_one_is_noted() -> None:
    env = game()
    assert env.action_key("Examine the desk") == env.action_key("I look at the writing desk.")
    assert env.action_key("I accuse Tobias") == env.action_key("The killer is Tobias Finch.")
    assert env.action_key("") == "invalid"
    first, second = play(env, "Examine the desk"), play(env, "Search the writing desk")
    assert "repeated" not in first.diagnostics
    assert second.diagnostics == ("repeated",)
    assert first.reply == second.reply


def test_state_key_and_footprint_follow_what_was_found() -> None:
    one, other = game(), game()
    for text in ("Examine the body", "Search the potting shed"):
        play(one, text)
    for text in ("Search the potting shed", "Examine the body"):
        play(other, text)
    assert one.state_key() == other.state_key()
    play(one, "Dust the saucepan for prints")
    assert one.state_key() != other.state_key()
    assert one.footprint() == (frozenset({"potting shed"}), frozenset({"saucepan/prints"}))
    assert one.progress() == pytest.approx(1 / 3)


def test_settings_refuse_what_they_do_not_know() -> None:
    with pytest.raises(UserError, match="at least one turn"):
        MurderMysterySettings(max_turns=0)
    with pytest.raises(UserError, match="win_rule is 'both'"):
        MurderMysterySettings(win_rule="both")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="verify_methods is 'magic'"):
        MurderMysterySettings(verify_methods=("magic",))
    with pytest.raises(UserError, match="the keys of notices"):
        MurderMysterySettings(notices={"hello": "x"})
    with pytest.raises(UserError, match="has no solution"):
        MurderMystery(Task("x", "murder_mystery", " ", ()), MurderMysterySettings())


def test_the_action_can_stand_in_tags() -> None:
    env = game(question_tag=True)
    assert env.parse("I wonder. <question>Examine the body</question>").question == (
        "Examine the body"
    )
    assert env.parse("Examine the body").question is None


DOCS = Path(__file__).resolve().parents[2] / "docs" / "murder_mystery.md"


def test_the_game_in_the_docs_is_what_is_played() -> None:
    rows = [line.strip("| \n").split(" | ") for line in DOCS.read_text().splitlines()]
    start = rows.index(["Action", "Reply", "Progress"]) + 2
    stop = next(at for at in range(start, len(rows)) if len(rows[at]) != 3)
    env = game(case("ferry_fog"))
    assert stop - start > 8
    for action, reply, progress in rows[start:stop]:
        outcome = play(env, action)
        assert (outcome.reply, f"{env.progress():.2f}") == (reply, progress), action
    assert (outcome.verdict, outcome.strict_win, outcome.score) == (Verdict.WIN, True, 1.0)


def test_the_numbers_in_the_docs_are_those_of_the_cases() -> None:
    text = " ".join(DOCS.read_text().split())
    cases = load_cases()
    clues = [clue for each in cases for clue in each.clues.values()]
    lucky = sum(1 / len(each.people) for each in cases) / len(cases)
    turns = [len(path_to(each, list(each.decisive))) + 1 for each in cases]
    sizes = [len(tasks(split)) for split in SPLITS]
    assert f"{len(cases)} cases of our own" in text
    assert f"{len(clues):,} clues, {sum(bool(c.after) for c in clues)} of them hidden" in text
    assert f"wins {100 * lucky:.1f} % of the games" in text
    assert f"a mean score of {lucky / 2:.2f}" in text
    assert (min(turns), max(turns)) == (5, 7)
    assert "takes five to seven turns" in text
    assert "{} cases are for training, {} for validation, {} for the test".format(*sizes) in text
