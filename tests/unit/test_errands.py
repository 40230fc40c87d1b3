"""Errands: how commands are read, what they do, and what the environment says of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from delta_belief_rl.envs.base import JudgeReply, Outcome
from delta_belief_rl.envs.check import available_hooks, check_env
from delta_belief_rl.envs.errands import ENVIRONMENTS
from delta_belief_rl.envs.errands.game import NOT_UNDERSTOOD, Errand
from delta_belief_rl.envs.errands.planning import effective
from delta_belief_rl.envs.errands.reading import Command, read
from delta_belief_rl.envs.errands.settings import read_settings
from delta_belief_rl.envs.errands.vocabulary import vocabulary
from delta_belief_rl.envs.errands.world import House, first_state, house_from_json, step
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.types import Message, Task, UserError, Verdict

HOUSE = House(
    rooms=("kitchen", "hall", "study"),
    doors=(("kitchen", "hall"), ("hall", "study")),
    fixtures=("sink", "stove", "table", "cupboard", "mailbox", "chest", "desk", "drawer"),
    items=("mug", "soup", "kettle", "tea", "letter", "stamp", "key", "book", "pen"),
    begin=("drawer", "table", "cupboard", "table", "desk", "drawer", "desk", "chest", "desk"),
    locked=("chest",),
    start="hall",
)
GOALS = ("clean mug", "at mug desk")


def task(*goals: str, house: House = HOUSE) -> Task:
    scenario = json.dumps({"goals": list(goals or GOALS), **house.to_json()})
    opening = (Message("user", "Errand: put the clean mug on the desk."),)
    return Task("t", "errands", "in the drawer in the study", opening, scenario=scenario)


def game(*goals: str, turns: int = 30) -> Errand:
    return Errand(task(*goals), turns)


def do(env: Errand, *texts: str) -> list[Outcome]:
    return [env.apply(env.parse(text), None) for text in texts]


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("go kitchen", "go kitchen"),
        ("I go to the kitchen.", "go kitchen"),
        ("GO TO THE LIVING ROOM!", "go lounge"),
        ("Let's walk back from the study to the hall", "go hall"),
        ("Open the drawer, please.", "open drawer"),
        ("Look inside the washing machine", "open washer"),
        ("pick the cup up", "take mug"),
        ("I'll grab the dirty mug from the table", "take mug"),
        ("Put the clean mug on the desk.", "put mug on desk"),
        ("put mug drawer", "put mug in drawer"),
        ("I put the mug down on the couch", "put mug on sofa"),
        ("put down the mug", "drop mug"),
        ("place the mug", "drop mug"),
        ("drop the mug into the drawer", "put mug in drawer"),
        ("clean the mug in the sink", "wash mug"),
        ("warm up the soup on the stove", "heat soup"),
        ("turn on the stove", "turn on stove"),
        ("Turn the lamp on.", "turn on lamp"),
        ("switch the stove off", "turn off stove"),
        ("stick the stamp: put the stamp on the letter", "stamp letter"),
        ("stamp the postcard", "stamp card"),
        ("put the letter in the mail box", "post letter"),
        ("make tea", "brew tea"),
        ("pour the watering can over the plant", "water can"),
        ("water the plant with the can", "water plant"),
        ("unlock the chest with the key", "unlock chest"),
        ("look around", "look"),
        ("inventory", "hands"),
        ("Action: take key", "take key"),
        ("Hm, where is it?\nOpen the chest.", "open chest"),
    ],
)
def test_a_command_is_read_in_many_wordings(text: str, command: str) -> None:
    assert str(read(text).command) == command


@pytest.mark.parametrize(
    "text",
    ["", " ", "Is it alive?", "mug", "go", "open", "open the banana", "do not open the drawer",
     "I should never open the drawer", "go mug", "hello there"],
)  # fmt: skip
def test_what_is_no_command_is_not_understood(text: str) -> None:
    assert read(text).command is None


def test_only_the_first_of_several_commands_counts() -> None:
    reading = read("Open the drawer and take the key, then go to the hall.")
    assert str(reading.command) == "open drawer"
    assert reading.several
    assert not read("Open the drawer. I open the drawer.").several
    (outcome,) = do(game(), "go study and go kitchen")
    assert outcome.action_key == "go study"
    assert outcome.diagnostics == ("several_commands",)


def test_the_canonical_text_of_every_command_reads_as_that_command() -> None:
    known = vocabulary()
    commands = [Command(verb) for verb in ("look", "hands")]
    commands += [Command("go", room) for room in known.rooms]
    names = (*known.kind_of, *known.items)
    verbs = [
        verb for verb in set(known.verbs.values()) if verb not in ("go", "put", "look", "hands")
    ]
    commands += [Command(verb, name) for verb in verbs for name in names if verb != "stamp"]
    commands += [Command("stamp", name) for name in known.of_kind("mail")]
    commands += [
        Command("put", item, place)
        for item in known.items
        for place in known.kind_of
        if place != "mailbox" or known.items[item].kind != "mail"
    ]
    assert len(commands) > 800
    assert [str(c) for c in commands if read(str(c)).command != c] == []


# --- the world ----------------------------------------------------------------------------------


def test_what_is_in_a_container_is_neither_seen_nor_taken_before_it_is_opened() -> None:
    env = game()
    said, before, opened, taken = do(env, "go study", "take mug", "open drawer", "take mug")
    assert said.reply == (
        "You are in the study. Here: desk (letter, key, pen), drawer (closed). Doors: hall."
    )
    assert before.reply == "Nothing happens: you see no mug here."
    assert opened.reply == "You open the drawer: dirty mug, stamp."
    assert taken.reply == "You take the dirty mug."


def test_two_hands_carry_two_things() -> None:
    env = game()
    *_, full = do(env, "go study", "take key", "take pen", "take letter")
    assert full.reply == "Nothing happens: your hands are full."
    assert full.diagnostics == ("no_effect",)
    _, reads = full, env.footprint()[0]
    assert {"at key", "at pen"} <= reads
    dropped, taken = do(env, "drop pen", "take letter")
    assert dropped.reply == "You drop the pen."
    assert taken.reply == "You take the letter."
    assert "floor (pen)" in do(env, "look")[0].reply


@pytest.mark.parametrize(
    ("texts", "reply"),
    [
        (("go study", "go kitchen"), "no door leads to the kitchen"),
        (("go hall",), "you are in the hall already"),
        (("open chest",), "the chest is locked"),
        (("unlock chest",), "you do not hold the key"),
        (("open mailbox",), "the mailbox does not open"),
        (("open stove",), "there is no stove here"),
        (("close chest",), "the chest is not open"),
        (("take hall",), "the hall cannot be carried"),
        (("put book on desk",), "you do not hold the book"),
        (("turn on chest",), "the chest has no switch"),
        (("go study", "take key", "wash key"), "the key need not be washed"),
        (("go study", "take key", "put key in drawer"), "the drawer is closed"),
        (
            ("go study", "take key", "go hall", "put key on mailbox"),
            "nothing can be put on the mailbox",
        ),
        (("go study", "take letter", "go hall", "post letter"), "the letter has no stamp"),
        (("go study", "take letter", "stamp letter"), "you do not hold the stamp"),
        (("go study", "take letter", "heat letter"), "the letter cannot be heated"),
        (("go kitchen", "take soup", "heat soup"), "the stove is off"),
        (("go kitchen", "take tea", "brew tea"), "you do not hold the kettle"),
        (("go kitchen", "turn off stove"), "the stove is not on"),
        (("go kitchen", "open cupboard", "open cupboard"), "the cupboard is open already"),
        (
            ("go kitchen", "open cupboard", "take kettle", "turn on stove", "heat kettle"),
            "the kettle is empty",
        ),
    ],
)
def test_a_command_without_effect_says_why(texts: tuple[str, ...], reply: str) -> None:
    env = game()
    outcome = do(env, *texts)[-1]
    assert outcome.reply == f"Nothing happens: {reply}."
    assert outcome.verdict is Verdict.OTHER
    assert reply in env.feedback()
    assert env.footprint()[1] == frozenset()


@pytest.mark.parametrize(
    ("goals", "texts"),
    [
        (("clean mug", "at mug desk"),
         "go study; open drawer; take mug; go hall; go kitchen; wash mug; go hall; go study; "
         "put mug on desk"),
        (("warm soup", "at soup cupboard"),
         "go kitchen; take soup; turn on stove; heat soup; open cupboard; put soup in cupboard"),
        (("brewed tea", "at tea table"),
         "go kitchen; open cupboard; take kettle; fill kettle; turn on stove; heat kettle; "
         "take tea; brew tea; put tea on table"),
        (("stamped letter", "posted letter"),
         "go study; take letter; open drawer; take stamp; stamp letter; go hall; post letter"),
        (("unlocked chest", "at book desk"),
         "go study; take key; go hall; unlock chest; open chest; take book; go study; "
         "put book on desk"),
    ],
)  # fmt: skip
def test_an_errand_is_won_by_doing_what_it_asks_for(goals: tuple[str, ...], texts: str) -> None:
    env = game(*goals)
    outcomes = do(env, *texts.split("; "))
    assert [o.verdict for o in outcomes] == [Verdict.OTHER] * (len(outcomes) - 1) + [Verdict.WIN]
    assert all(not o.diagnostics for o in outcomes)
    assert outcomes[-1].strict_win
    assert outcomes[-1].compatible_win
    assert outcomes[-1].reply.endswith("The errand is done.")
    assert env.progress() == len(goals)


def test_goals_must_hold_together_at_the_end() -> None:
    env = game("at key desk", "at soup desk")
    do(env, "go study", "take key")
    assert env.progress() == 0
    do(env, "put key on desk")
    assert env.progress() == 1
    do(env, "take key", "go hall", "go kitchen", "take soup", "go hall", "go study")
    assert env.progress() == 0
    (first,) = do(env, "put soup on desk")
    assert (first.verdict, env.progress()) == (Verdict.OTHER, 1)
    (second,) = do(env, "put key on desk")
    assert second.verdict is Verdict.WIN


# --- the environment ----------------------------------------------------------------------------


def test_the_contract_of_environments_holds() -> None:
    texts = (
        *("look", "look", "Is it alive?", " ", "go study", "open drawer", "take mug", "take mug"),
        *("go hall", "go kitchen", "wash mug", "go hall", "go study", "put mug on desk"),
    )
    check_env(game, texts)
    check_env(lambda: game(turns=4), texts)
    assert available_hooks(game()) >= {
        "state_key", "progress", "footprint", "snapshot", "restore", "reference", "feedback",
        "action_key",
    }  # fmt: skip


def test_the_same_command_in_vain_is_a_repetition_only_in_the_same_state() -> None:
    env = game()
    first, second = do(env, "open chest", "I open the chest again")
    assert (first.verdict, second.verdict) == (Verdict.OTHER, Verdict.REPEATED)
    assert second.diagnostics == ("no_effect", "repeated")
    do(env, "go study", "take key", "go hall")
    (now,) = do(env, "open chest")
    assert now.verdict is Verdict.OTHER
    assert do(env, "look", "look")[1].verdict is Verdict.REPEATED


def test_what_is_not_understood_is_invalid_and_costs_a_turn() -> None:
    env = game(turns=2)
    (outcome,) = do(env, "Is it a mug?")
    assert (outcome.verdict, outcome.reply) == (Verdict.INVALID, NOT_UNDERSTOOD)
    assert env.parse("Is it a mug?").question is None
    assert env.action_key("Is it a mug?") == "invalid"
    assert env.footprint() == (frozenset(), frozenset())
    (last,) = do(env, "look")
    assert last.done
    assert last.score == 0.0


def test_a_lost_game_is_scored_with_the_share_of_its_goals() -> None:
    env = game("clean mug", "at mug desk", turns=6)
    outcomes = do(
        env, *["go study", "open drawer", "take mug", "go hall", "go kitchen", "wash mug"]
    )
    assert outcomes[-1].done
    assert outcomes[-1].verdict is Verdict.OTHER
    assert [o.score for o in outcomes] == [None] * 5 + [0.5]


def test_different_orders_of_the_same_deeds_lead_to_the_same_state() -> None:
    one, two = game(), game()
    do(one, "go study", "take key", "open drawer", "take stamp")
    do(two, "go study", "open drawer", "take stamp", "look", "take key")
    assert one.state_key() == two.state_key()
    before = one.state_key()
    do(one, "go hall")
    away = one.state_key()
    do(one, "go study")
    assert one.state_key() == before != away


def test_what_was_seen_is_part_of_the_state() -> None:
    one, two = game(), game()
    do(one, "go study", "open drawer", "close drawer")
    do(two, "go study")
    assert one.state_key() != two.state_key()
    # A thing that nobody has seen is not, wherever it is.
    moved = replace(HOUSE, begin=("cupboard", *HOUSE.begin[1:]))
    other = Errand(task(house=moved), 9)
    do(other, "go study")
    assert other.state_key() == two.state_key()


def test_a_footprint_names_what_made_an_action_possible() -> None:
    env = game("brewed tea", "at tea table")
    log = []
    for text in ("go kitchen", "open cupboard", "take kettle", "fill kettle", "turn on stove",
                 "heat kettle", "take tea", "brew tea"):  # fmt: skip
        do(env, text)
        log.append(env.footprint())
    writes = dict(zip(("go", "open", "take", "fill", "on", "heat", "tea", "brew"),
                      (w for _, w in log), strict=True))  # fmt: skip
    assert writes["open"] == {"open cupboard", "seen cupboard", "seen kettle"}
    assert writes["fill"] == {"full kettle"}
    assert writes["brew"] == {"brewed tea", "full kettle", "warm kettle"}
    needs = log[5][0]
    enablers = [name for name in ("go", "open", "take", "fill", "on") if writes[name] & needs]
    assert enablers == ["go", "take", "fill", "on"]


def test_every_change_writes_something_and_every_effect_is_among_the_effective_commands() -> None:
    state = first_state(HOUSE)
    for text in ("go study", "take key", "go hall", "unlock chest", "open chest"):
        command = read(text).command
        assert command is not None
        assert command in effective(HOUSE, state)
        change = step(HOUSE, state, command)
        assert change.writes
        state = change.state
    for command in effective(HOUSE, state):
        assert not step(HOUSE, state, command).blocked


def test_the_reference_is_a_shortest_way_from_wherever_the_game_is() -> None:
    env = game()
    do(env, "look", "go kitchen")
    count = 0
    while env.reference():
        do(env, env.reference())
        count += 1
    assert env.progress() == 2
    assert count == 10


def test_an_errand_that_cannot_be_run_any_more_has_no_reference() -> None:
    house = replace(HOUSE, items=(*HOUSE.items, "card"), begin=(*HOUSE.begin, "desk"))
    env = Errand(task("stamped letter", "posted letter", house=house), 30)
    do(env, "go study", "take card", "open drawer", "take stamp")
    assert env.reference()
    do(env, "stamp card")
    assert env.reference() == ""


def test_no_judge_is_asked() -> None:
    env = game()
    action = env.parse("go study")
    assert not action.needs_judge
    with pytest.raises(ValueError, match="sent to a judge"):
        env.judge_request(action)
    with pytest.raises(ValueError, match="judge's reply"):
        env.apply(action, JudgeReply(Verdict.YES))


@pytest.mark.parametrize(
    "scenario",
    [None, "no json", "{}", '{"goals": []}',
     json.dumps({"goals": [], **HOUSE.to_json()}),
     json.dumps({"goals": ["on lamp"], **HOUSE.to_json()}),
     json.dumps({"goals": ["at mug"], **HOUSE.to_json()}),
     json.dumps({"goals": ["at mug moon"], **HOUSE.to_json()}),
     json.dumps({"goals": ["broken mug"], **HOUSE.to_json()}),
     json.dumps({"goals": ["clean mug"], **HOUSE.to_json(), "start": "attic"}),
     json.dumps({"goals": ["clean mug"], **HOUSE.to_json(), "things": {"mug": "moon"}})],
)  # fmt: skip
def test_a_task_without_a_house_is_refused(scenario: str | None) -> None:
    with pytest.raises(UserError, match="has no house that errands can be run in"):
        Errand(replace(task(), scenario=scenario), 5)


def test_a_house_survives_its_text() -> None:
    assert house_from_json(task().scenario or "") == (HOUSE, GOALS)


def test_a_question_stands_in_its_tag_where_tags_are_asked_for() -> None:
    env = Errand(task(), 5, question_tag=True)
    assert env.parse("go study").question is None
    assert env.parse("The desk? <question>I go to the study</question>").question == "go study"


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"sed": 1}, "did you mean seed"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"tasks": 3}, "tasks is 3"),
        ({"tasks": {"trian": 3}}, "did you mean train"),
        ({"tasks": {"train": 1.5}}, "tasks.train is 1.5"),
        ({"prompt": "long"}, "prompt is 'long'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(kwargs: dict[str, object], part: str) -> None:
    with pytest.raises(UserError, match=part):
        read_settings(kwargs)


def test_a_game_needs_a_turn() -> None:
    with pytest.raises(UserError, match="at least one turn"):
        ENVIRONMENTS["errands"].make(EnvOptions(0))
