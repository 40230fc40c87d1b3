"""A game that leaves another one: the same beginning, and from there a game like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rollout_fakes import CharChat, HookedEnv, ScriptedEnv, ScriptedJudge, make_task

from delta_belief_rl.engines.fake_engine import FakeEngine, Fault, FaultKind
from delta_belief_rl.envs.base import Action, Env, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.guess_my_city.game import GuessMyCity, GuessMyCitySettings
from delta_belief_rl.envs.twenty_questions import TwentyQuestions, TwentyQuestionsSettings
from delta_belief_rl.envs.worlds.game import WorldTwentyQuestions, world_settings
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.rollout.branching import Memory, Origin, Way, lineage_of, rewind_way
from delta_belief_rl.rollout.game import OPENING, Beginning, GameId, GameSettings, play_game
from delta_belief_rl.rollout.seeds import turn_seed
from delta_belief_rl.types import StopReason, Task, Trajectory, UserError, Verdict
from tests.worlds import small_world, task_for

CHAT = CharChat()
TURNS = 5
SETTINGS = GameSettings(
    max_turns=TURNS, max_turn_tokens=60, max_episode_tokens=2000, clock=lambda: 0.0
)


class ReplayEnv(HookedEnv):
    """Hooks, no snapshot, and a state that follows from what was done."""

    def replayable(self) -> bool:
        return True


class RewindEnv(HookedEnv):
    def snapshot(self) -> object:
        return tuple(self.history)

    def restore(self, snapshot: Any) -> None:
        self.history = list(snapshot)


def judge_by_letters(request: JudgeRequest) -> JudgeReply:
    """A reply that depends on the question, what was asked before, and sometimes fails."""
    if "fail" in request.action:
        return JudgeReply(Verdict.ERROR, reason="no answer")
    odd = (len(request.action) + len(request.history)) % 2
    return JudgeReply(Verdict.YES if odd else Verdict.NO, "yes" if odd else "no")


def play(
    make: Callable[[Task], Env],
    task: Task,
    texts: Sequence[str],
    number: int = 0,
    origin: Origin | None = None,
    way: Way = "snapshot",
    settings: GameSettings = SETTINGS,
    faults: dict[tuple[str, int], Fault] | None = None,
) -> tuple[Trajectory, Memory, FakeEngine, ScriptedJudge]:
    """One game that says the texts, from the opening or from its origin."""
    left = iter(texts)
    engine = FakeEngine(lambda _request: next(left), CHAT.encode, version=3, faults=faults)
    judge, env = ScriptedJudge(judge_by_letters), make(task)
    beginning: Beginning = OPENING
    if origin is not None:
        origin.restore(env)
        beginning = origin.beginning(number)
    memory = Memory(way, origin)
    identity = GameId(run_seed=7, step=3, game=number, run_id="run-a")
    game = asyncio.run(
        play_game(
            env,
            engine,
            judge,
            CHAT,
            settings,
            identity,
            beginning=beginning,
            witness=memory,
        )
    )
    return game, memory, engine, judge


GRAMMAR = Grammar(small_world())
QUESTIONS = (
    *("Is it alive?", "Is it big?", "Is it a dog?", "Does it fly?", "Is it alive?", "fail?", ""),
    *("what", "Is it a cat or a dog?"),
)
ENVS: dict[str, tuple[Callable[[Task], Env], Task, Way]] = {
    "twenty_questions": (
        lambda task: TwentyQuestions(task, TwentyQuestionsSettings(max_turns=TURNS)),
        Task("t0", "tw_q", "dog", ()),
        "snapshot",
    ),
    "world": (
        lambda task: WorldTwentyQuestions(task, world_settings(TURNS), GRAMMAR),
        task_for("dog"),
        "snapshot",
    ),
    "guess_my_city": (
        lambda task: GuessMyCity(task, GuessMyCitySettings(max_turns=TURNS)),
        Task("t0", "gmc", "Paris, France", ()),
        "snapshot",
    ),
    "snapshot": (RewindEnv, make_task(), "snapshot"),
    "replay": (ReplayEnv, make_task(), "replay"),
}


@pytest.mark.parametrize("name", ENVS)
def test_environments_say_how_they_come_back_to_a_state(name: str) -> None:
    make, task, way = ENVS[name]
    assert rewind_way(make(task)) == way


@pytest.mark.parametrize("name", ENVS)
@hypothesis_settings(max_examples=25, deadline=None)
@given(
    said=st.lists(st.sampled_from(QUESTIONS), min_size=TURNS, max_size=TURNS),
    other=st.lists(st.sampled_from(QUESTIONS), min_size=TURNS, max_size=TURNS),
    turn=st.integers(0, TURNS - 1),
)
def test_T1_a_branch_is_the_game_that_says_the_same_from_the_beginning(
    name: str, said: list[str], other: list[str], turn: int
) -> None:
    """Verdicts, repetitions, keys, progress, budgets and the end are those of the straight game."""
    make, task, way = ENVS[name]
    parent, memory, _, _ = play(make, task, said, way=way)
    turn = min(turn, parent.num_turns - 1)
    origin = Origin(parent, memory, turn)
    branch, _, engine, judge = play(make, task, other, 4, origin, way)
    straight, _, _, asked = play(make, task, [*said[:turn], *other], 4, way=way)
    assert branch.turns == straight.turns
    assert branch.token_ids == straight.token_ids
    assert branch.stop == straight.stop
    assert branch.turns[:turn] == parent.turns[:turn]
    end = parent.belief_points[turn]
    assert branch.token_ids[:end] == parent.token_ids[:end]
    assert branch.num_shared == turn
    # Nothing of the beginning was sampled or judged anew.
    assert len(engine.requests) == branch.num_turns - turn
    earlier = len(asked.requests) - len(judge.requests)
    assert judge.requests == asked.requests[earlier:]


def test_R2_a_branch_draws_by_its_own_number_and_has_a_session_of_its_own() -> None:
    parent, memory, _, _ = play(RewindEnv, make_task(), ["a", "b", "c", "d", "e"])
    branch, _, engine, _ = play(
        RewindEnv, make_task(), ["x", "y", "z"], 4, Origin(parent, memory, 2)
    )
    first = engine.requests[0]
    assert first.seed == turn_seed(7, "t0", 3, 4, 2) != turn_seed(7, "t0", 3, 0, 2)
    assert first.session == GameId(7, 3, 4).session("t0")
    assert engine.released == [first.session]
    assert first.prompt_ids == parent.token_ids[: parent.turns[2].start]
    assert [turn.index for turn in branch.turns] == [0, 1, 2, 3, 4]
    assert branch.game == 4
    assert branch.stop is StopReason.TURN_LIMIT


def test_C2_a_branch_has_the_room_that_its_beginning_leaves() -> None:
    opening = len(CHAT.open_ids(make_task().messages))
    small = replace(SETTINGS, max_turn_tokens=9, max_episode_tokens=opening + 30)
    parent, memory, alone, _ = play(RewindEnv, make_task(), ["abcdefg"] * 5, settings=small)
    assert parent.stop is StopReason.CONTEXT_FULL
    rooms = [request.sampling.max_tokens for request in alone.requests]
    assert rooms[-1] < rooms[0] == 9
    branch, _, engine, _ = play(
        RewindEnv, make_task(), ["abcdefg"] * 5, 1, Origin(parent, memory, 1), settings=small
    )
    assert branch.stop is StopReason.CONTEXT_FULL
    assert branch.token_ids == parent.token_ids
    assert [request.sampling.max_tokens for request in engine.requests] == rooms[1:]


def test_errors_of_the_judge_before_a_branch_count_in_it() -> None:
    said = ["fail", "fail", "a", "b", "c"]
    parent, memory, _, _ = play(RewindEnv, make_task(), said)
    assert parent.stop is StopReason.TURN_LIMIT
    branch, _, _, _ = play(RewindEnv, make_task(), ["fail", "b"], 1, Origin(parent, memory, 2))
    assert branch.stop is StopReason.JUDGE_FAILED
    assert branch.num_turns == 3


def test_a_branch_whose_first_call_fails_has_no_turn_of_its_own() -> None:
    parent, memory, _, _ = play(RewindEnv, make_task(), ["a", "b", "c", "d", "e"])
    faults = {(GameId(7, 3, 4).session("t0"), 0): Fault(FaultKind.ERROR)}
    branch, _, _, _ = play(
        RewindEnv, make_task(), ["x"], 4, Origin(parent, memory, 2), faults=faults
    )
    assert branch.stop is StopReason.ENGINE_FAILED
    assert branch.turns == parent.turns[:2]
    assert branch.num_shared == branch.num_turns == 2


@pytest.mark.parametrize(("make", "way"), [(RewindEnv, "snapshot"), (ReplayEnv, "replay")])
def test_a_branch_of_a_branch_knows_all_that_was_before_it(
    make: Callable[[Task], Env], way: Way
) -> None:
    first, memory, _, _ = play(make, make_task(), ["a", "b", "c", "d", "e"], way=way)
    second, deeper, _, _ = play(
        make, make_task(), ["x", "y", "z"], 3, Origin(first, memory, 2), way
    )
    third, _, _, _ = play(make, make_task(), ["r"], 5, Origin(second, deeper, 4), way)
    early, _, _, _ = play(make, make_task(), list("klmn"), 6, Origin(second, deeper, 1), way)
    assert [turn.action for turn in third.turns] == ["a", "b", "x", "y", "r"]
    assert third.lineage == ((0, 0), (3, 2), (5, 4))
    assert [third.player_of(turn) for turn in range(5)] == [0, 0, 3, 3, 5]
    assert third.branch_of == (3, 4)
    # Before turn 1 nothing of game 3 is left, so it is game 0 that game 6 left.
    assert [turn.action for turn in early.turns] == ["a", "k", "l", "m", "n"]
    assert early.lineage == ((0, 0), (6, 1))
    assert early.branch_of == (0, 1)
    assert [turn.progress for turn in early.turns] == [0.0, 1.0, 2.0, 3.0, 4.0]
    straight, _, _, _ = play(make, make_task(), ["a", "b", "x", "y", "r"], 5, way=way)
    assert third.turns == straight.turns


def test_a_game_that_shares_the_opening_alone_stays_in_the_tree() -> None:
    parent, memory, _, _ = play(RewindEnv, make_task(), ["a", "b", "c", "d", "e"], 2)
    branch, _, engine, _ = play(RewindEnv, make_task(), list("vwxyz"), 4, Origin(parent, memory, 0))
    assert branch.lineage == ((2, 0), (4, 0))
    assert (branch.tree, branch.num_shared, branch.branch_of) == (2, 0, None)
    assert branch.player_of(0) == 4
    assert engine.requests[0].prompt_ids == CHAT.open_ids(make_task().messages)
    alone, _, _, _ = play(RewindEnv, make_task(), list("vwxyz"), 4)
    assert (alone.tree, alone.num_shared, alone.branch_of, alone.lineage) == (4, 0, None, ())
    assert alone.player_of(3) == 4
    assert replace(branch, lineage=()) == alone


@pytest.mark.parametrize("turn", [-1, 3, 4])
def test_a_game_is_left_before_one_of_its_turns(turn: int) -> None:
    parent, memory, _, _ = play(RewindEnv, make_task(), ["a", "b", "win"])
    with pytest.raises(ValueError, match=f"not before turn {turn}"):
        Origin(parent, memory, turn)


def test_lineages_name_the_tree_first_and_the_game_last() -> None:
    parent, _, _, _ = play(RewindEnv, make_task(), ["a", "b", "win"], 3)
    assert lineage_of(parent, 2, 7) == ((3, 0), (7, 2))
    deep = replace(parent, game=8, lineage=((0, 0), (3, 1), (8, 3)))
    assert lineage_of(deep, 4, 9) == ((0, 0), (3, 1), (8, 3), (9, 4))
    # Before the first own turn of game 8 nothing of it is shared.
    assert lineage_of(deep, 3, 9) == ((0, 0), (3, 1), (9, 3))
    assert lineage_of(deep, 0, 9) == ((0, 0), (9, 0))


def test_an_environment_without_a_way_back_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match="ScriptedEnv has neither snapshot and restore nor replay"):
        rewind_way(ScriptedEnv(make_task()))

    class Unsure(ScriptedEnv):
        def replayable(self) -> bool:
            return False

    with pytest.raises(UserError, match="The environment Unsure has neither"):
        rewind_way(Unsure(make_task()))


class Moody(ReplayEnv):
    """Says that it is replayable, and counts its games."""

    games = 0
    mood = "reply"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        type(self).games += 1

    def parse(self, text: str) -> Action:
        moved = self.games > 1 and self.mood == "parse"
        return Action(text, text, needs_judge=not moved)

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        outcome = super().apply(action, reply)
        if self.games > 1 and self.mood == "reply":
            return replace(outcome, reply="something else")
        if self.games > 1 and self.mood == "done":
            return replace(outcome, done=True)
        return outcome


@pytest.mark.parametrize("mood", ["reply", "done", "parse"])
def test_a_replay_that_goes_another_way_ends_the_run_in_one_sentence(
    mood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Moody, "games", 0)
    monkeypatch.setattr(Moody, "mood", mood)
    parent, memory, _, _ = play(Moody, make_task(), ["a", "b", "c", "d", "e"], way="replay")
    with pytest.raises(UserError, match="Moody says that it is replayable, but turn 0") as caught:
        play(Moody, make_task(), ["x"], 1, Origin(parent, memory, 2), "replay")
    assert "\n" not in str(caught.value)


def test_a_failed_judge_is_replayed_as_it_failed() -> None:
    parent, memory, _, _ = play(ReplayEnv, make_task(), ["a", "fail", " ", "d", "e"], way="replay")
    assert [turn.verdict for turn in parent.turns][1:3] == [Verdict.ERROR, Verdict.INVALID]
    branch, _, _, judge = play(
        ReplayEnv, make_task(), ["x", "y"], 1, Origin(parent, memory, 3), "replay"
    )
    assert branch.turns[:3] == parent.turns[:3]
    assert [request.action for request in judge.requests] == ["x", "y"]
    assert judge.requests[0].history == (("a", "yes" if len("a") % 2 else "no"),)
