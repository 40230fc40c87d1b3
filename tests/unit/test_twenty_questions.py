"""The 20 Questions environment: wins, lists, repeats, judge failures, hooks, contract."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from delta_belief_rl.envs.base import Action, Env, JudgeReply, Outcome
from delta_belief_rl.envs.check import EnvContractError, available_hooks, check_env
from delta_belief_rl.envs.parquet import read_parquet
from delta_belief_rl.envs.twenty_questions import TwentyQuestions, TwentyQuestionsSettings
from delta_belief_rl.envs.worlds.game import WorldTwentyQuestions, world_settings
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.tasks import world_tasks
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.types import Message, UserError, Verdict
from tests.worlds import ask, small_world, task_for

FILES = Path(__file__).resolve().parents[2].parent / "shared/data/envs/twenty_questions"
WORLD = small_world()
GRAMMAR = Grammar(WORLD)
JUDGE = WorldJudge(WORLD, GRAMMAR)
PUBLISHED = TwentyQuestionsSettings()
STRICT = TwentyQuestionsSettings(win_rule="strict")


def _game(settings: TwentyQuestionsSettings = PUBLISHED, secret: str = "dog") -> TwentyQuestions:
    return TwentyQuestions(task_for(secret), settings)


def _world(secret: str = "dog", max_turns: int = 20) -> WorldTwentyQuestions:
    return WorldTwentyQuestions(task_for(secret), world_settings(max_turns), GRAMMAR)


def _say(env: TwentyQuestions, text: str, verdict: Verdict = Verdict.NO) -> Outcome:
    action = env.parse(text)
    return env.apply(action, JudgeReply(verdict) if action.needs_judge else None)


# --- published files --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rows"), [("train_rl", 1000), ("val", 198), ("test", 433)])
def test_every_secret_of_a_published_file_is_played_to_a_win(name: str, rows: int) -> None:
    path = FILES / f"{name}.parquet"
    if not path.is_file():
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    tasks = read_parquet(str(path), system_key=None)
    assert len(tasks) == rows
    for task in tasks:
        env = TwentyQuestions(task, STRICT)
        asked = _say(env, "Is it bigger than a house?", Verdict.NO)
        assert (asked.verdict, asked.done) == (Verdict.NO, False), task.id
        guess = _say(env, f"Is it {task.secret}?", Verdict.WIN)
        assert (guess.verdict, guess.done, guess.strict_win) == (Verdict.WIN, True, True), task.id


# --- wins -------------------------------------------------------------------------------------


def test_the_published_rule_ends_the_game_at_any_mention() -> None:
    outcome = _say(_game(), "Is it a cat or a dog?")
    assert (outcome.verdict, outcome.done) == (Verdict.WIN, True)
    assert (outcome.compatible_win, outcome.strict_win, outcome.is_list) == (True, False, True)


def test_J12_the_strict_rule_needs_one_candidate_guessed_directly() -> None:
    for text in ("Is it a cat or a dog?", "Is it like a dog?", "Is it a cat, a dog?"):
        outcome = _say(_game(STRICT), text, Verdict.WIN)
        assert (outcome.verdict, outcome.done, outcome.strict_win) == (Verdict.YES, False, False)
        assert outcome.compatible_win
        assert "false_positive" in outcome.diagnostics
    outcome = _say(_game(STRICT), "Is it a dog?")
    assert (outcome.verdict, outcome.reply, outcome.done) == (Verdict.WIN, "finished", True)
    assert outcome.strict_win
    assert outcome.compatible_win
    assert outcome.is_guess


def test_a_strict_win_is_a_compatible_win_for_secrets_of_several_words() -> None:
    outcome = _say(_game(secret="ice cream"), "Is it an ice cream?")
    assert outcome.verdict is Verdict.WIN
    assert outcome.compatible_win
    assert outcome.strict_win


def test_an_unconfirmed_win_of_the_judge_becomes_its_replacement() -> None:
    assert _say(_game(), "Is it a puppy?", Verdict.WIN).verdict is Verdict.YES
    kept = TwentyQuestionsSettings(false_positive_behavior=None)
    outcome = _say(_game(kept), "Is it a puppy?", Verdict.WIN)
    assert outcome.verdict is Verdict.WIN
    assert outcome.done
    assert outcome.compatible_win


def test_without_verification_the_judge_decides_the_win() -> None:
    unverified = TwentyQuestionsSettings(verify_methods=())
    assert _say(_game(unverified), "Is it like a dog", Verdict.NO).verdict is Verdict.NO
    assert _say(_game(unverified), "Is it a puppy", Verdict.WIN).done


# --- lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "text", "verdict", "reply"),
    [
        ("report", "Is it a cat or a cow?", Verdict.NO, "no"),
        ("penalise", "Is it a cat or a cow?", Verdict.INVALID, "no"),
        ("refuse", "Is it a cat or a cow?", Verdict.INVALID, "invalid"),
        ("report", "Is it a cat or a dog?", Verdict.WIN, "finished"),
        ("penalise", "Is it a cat or a dog?", Verdict.WIN, "finished"),
        ("refuse", "Is it a cat or a dog?", Verdict.INVALID, "invalid"),
    ],
)
def test_J12_lists_are_reported_penalised_or_refused(
    policy: str, text: str, verdict: Verdict, reply: str
) -> None:
    settings = TwentyQuestionsSettings(candidate_lists=policy)  # pyright: ignore[reportArgumentType]
    env = _game(settings)
    outcome = _say(env, text)
    assert (outcome.verdict, outcome.reply) == (verdict, settings.notice(reply))
    assert outcome.is_list
    assert "candidate_list" in outcome.diagnostics
    assert outcome.compatible_win == (verdict is Verdict.WIN)
    assert not outcome.strict_win


# --- validity and repeats ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "   ", "Is it big", "Is it big? Is it red?", "Is it\nbig?", "?"]
)
def test_J4_the_judge_is_not_asked_about_an_action_that_code_finds_invalid(text: str) -> None:
    env = _game()
    assert not env.parse(text).needs_judge
    outcome = _say(env, text)
    assert (outcome.verdict, outcome.done) == (Verdict.INVALID, False)
    assert outcome.diagnostics


def test_J4_text_without_the_question_tag_is_not_judged() -> None:
    env = _game(TwentyQuestionsSettings(question_tag=True))
    assert env.parse("Is it alive?") == Action("Is it alive?", None, needs_judge=False)
    tagged = env.parse("I think. <question>Is it alive?</question> More.")
    assert (tagged.question, tagged.needs_judge) == ("Is it alive?", True)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("<think>\nIs it big? Or red?\n</think>\n\n<question>Is it alive?</question>", True),
        ("Hm.\n<question>\n Is it alive? \n</question> And then?", True),
        ("<question>Is it alive?</question><question>Is it big? Is it red?</question>", True),
        ("Is it big? <question>Is it alive</question>", False),
        ("<question>Is it big? Is it red?</question>", False),
        ("<question></question> Is it alive?", False),
        ("<think>Is it alive?</think> <question>Is it ali", False),
    ],
)
def test_J4_the_rules_look_at_the_question_inside_the_first_tags(text: str, asked: bool) -> None:
    env = _game(TwentyQuestionsSettings(question_tag=True))
    assert env.parse(text).needs_judge is asked
    outcome = _say(env, text)
    assert (outcome.verdict is not Verdict.INVALID) is asked
    request = env.judge_request(env.parse("<question>Is it red?</question>"))
    # A text without a question is no part of what the judge is shown.
    assert all(question.strip() and "<" not in question for question, _ in request.history)
    assert ("Is it alive?" in [question for question, _ in request.history]) is asked


def test_J13_repeats_are_found_by_code_before_the_judge_is_asked() -> None:
    env = _game()
    assert _say(env, "Is it alive?", Verdict.YES).verdict is Verdict.YES
    action = env.parse("  is it ALIVE ?")
    assert not action.needs_judge
    outcome = env.apply(action, None)
    assert outcome.verdict is Verdict.REPEATED
    assert "already asked" in outcome.reply
    assert outcome.diagnostics == ("repeated",)


def test_repeating_an_invalid_question_stays_invalid() -> None:
    env = _game()
    _say(env, "What is it?", Verdict.INVALID)
    assert _say(env, "What is it?").verdict is Verdict.INVALID


def test_a_question_that_the_judge_failed_on_may_be_asked_again() -> None:
    env = _game()
    assert _say(env, "Is it alive?", Verdict.ERROR).verdict is Verdict.ERROR
    assert env.parse("Is it alive?").needs_judge
    assert env.judge_request(env.parse("Is it alive?")).history == ()


def test_repeats_can_be_left_to_the_judge() -> None:
    env = _game(TwentyQuestionsSettings(duplicates="judge"))
    _say(env, "Is it alive?", Verdict.YES)
    assert env.parse("Is it alive?").needs_judge
    outcome = _say(env, "Is it alive?", Verdict.REPEATED)
    assert outcome.verdict is Verdict.REPEATED
    assert "repeated" in outcome.diagnostics


@pytest.mark.parametrize("verdict", [Verdict.ERROR, Verdict.OTHER])
def test_J1_a_judge_failure_is_an_error_and_teaches_nothing(verdict: Verdict) -> None:
    env = _world()
    before = (env.state_key(), env.progress(), env.belief())
    outcome = _say(env, "Is it alive?", verdict)
    assert outcome.verdict is Verdict.ERROR
    assert not (outcome.done)
    assert not (outcome.strict_win)
    assert not (outcome.compatible_win)
    assert (env.state_key(), env.progress(), env.belief()) == before


# --- what the judge is sent -------------------------------------------------------------------


def test_J13_the_judge_sees_questions_and_its_own_replies() -> None:
    env = _game()
    _say(env, "Is it alive?", Verdict.YES)
    _say(env, "broken")
    request = env.judge_request(env.parse("Is it big?"))
    # The judge's words, not the sentences that a player reads.
    assert request.history == (("Is it alive?", "yes"), ("broken", "invalid"))
    assert request.task == env.task
    assert request.action == "Is it big?"


def test_the_judge_key_depends_on_the_history_only_where_the_judge_sees_it() -> None:
    keys: dict[bool, set[str]] = {}
    for sees in (True, False):
        settings = TwentyQuestionsSettings(judge_history=sees)
        fresh, later = _game(settings), _game(settings)
        _say(later, "Is it alive?", Verdict.YES)
        requests = [
            env.judge_request(env.parse(text))
            for env in (fresh, later)
            for text in ("Is it big?", "is it BIG ?")
        ]
        keys[sees] = {request.key for request in requests}
    assert (len(keys[True]), len(keys[False])) == (2, 1)


# --- the end ----------------------------------------------------------------------------------


def test_the_game_is_over_after_the_last_turn() -> None:
    env = _game(TwentyQuestionsSettings(max_turns=2))
    assert not _say(env, "Is it alive?").done
    outcome = _say(env, "Is it big?")
    assert (outcome.done, outcome.verdict) == (True, Verdict.NO)
    with pytest.raises(ValueError, match="over"):
        _say(env, "Is it red?")


def test_a_reply_is_needed_exactly_when_the_judge_was_asked() -> None:
    env = _game()
    with pytest.raises(ValueError, match="exactly when"):
        env.apply(env.parse("Is it big?"), None)
    with pytest.raises(ValueError, match="exactly when"):
        env.apply(env.parse("broken"), JudgeReply(Verdict.NO))
    with pytest.raises(ValueError, match="not sent"):
        env.judge_request(env.parse(""))


@pytest.mark.parametrize(
    "change",
    [
        {"max_turns": 0},
        {"win_rule": "loose"},
        {"candidate_lists": "allow"},
        {"duplicates": "none"},
        {"verify_methods": ("spelling",)},
        {"false_positive_behavior": "maybe"},
        {"notices": {"hello": "x"}},
        {"duplicates": "judge", "judge_history": False},
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError):
        replace(PUBLISHED, **change)  # pyright: ignore[reportArgumentType]


def test_tasks_that_cannot_be_played_are_refused() -> None:
    with pytest.raises(UserError, match="no secret"):
        _game(secret=" ? ")
    with pytest.raises(UserError, match="not a regular expression"):
        _game(TwentyQuestionsSettings(verify_methods=("regex",)), secret="c++(")
    with pytest.raises(UserError, match="not among the things"):
        _world("unicorn")


# --- the embedded world -----------------------------------------------------------------------


def test_replies_of_the_embedded_world_are_single_words() -> None:
    env = _world("orange")
    truth = {True: ("yes", "Yes"), False: ("no", "No")}
    assert ask(env, JUDGE, "Can it fly?") == truth[WORLD.value("orange", "flies")]
    assert ask(env, JUDGE, "Is it able to fly?") == ("repeated", "Repeated")
    assert ask(env, JUDGE, "Is it a dog?") == ("no", "No")
    assert ask(env, JUDGE, "Is it a hound?") == ("repeated", "Repeated")
    assert ask(env, JUDGE, "Is it a cat or an orange?") == ("invalid", "Invalid")
    assert ask(env, JUDGE, "Is it orange?") == truth[WORLD.value("orange", "orange")]
    assert ask(env, JUDGE, "Isn't it an orange?") == ("invalid", "Invalid")
    assert ask(env, JUDGE, "So, is it an 'orange'?") == ("win", "Finished")


def test_an_alias_wins_in_the_embedded_world() -> None:
    assert ask(_world("bicycle"), JUDGE, "Is it a push-bike?") == ("win", "Finished")


def test_state_progress_and_belief_follow_the_facts() -> None:
    one, two = _world("whale"), _world("whale")
    assert one.progress() == 0.0
    for env, order in (
        (one, ("Can it fly?", "Is it a cat?")),
        (two, ("Is it a cat?", "Does it fly?")),
    ):
        for text in order:
            ask(env, JUDGE, text)
    assert one.state_key() == two.state_key() != _world("whale").state_key()
    left = [
        thing.name
        for thing in WORLD.things
        if WORLD.value(thing.name, "flies") == WORLD.value("whale", "flies") and thing.name != "cat"
    ]
    assert one.belief() == pytest.approx(dict.fromkeys(left, 1 / len(left)))
    assert one.progress() == pytest.approx(math.log2(24 / len(left)))


def test_footprints_name_what_was_read_and_written() -> None:
    env = _world("whale")
    ask(env, JUDGE, "Can it fly?")
    assert env.footprint() == (frozenset(), frozenset({"flies"}))
    ask(env, JUDGE, "Is it a cat?")
    assert env.footprint() == (frozenset({"flies"}), frozenset({"guess:cat"}))
    ask(env, JUDGE, "What?")
    assert env.footprint() == (frozenset(), frozenset())


def test_action_keys_reference_and_feedback() -> None:
    env = _world("whale")
    assert env.action_key("Does it fly?") == env.action_key("can it fly") == "property:flies"
    assert env.action_key("Is it a bike?") == "guess:bicycle"
    assert env.action_key("") == "invalid"
    assert (env.reference(), env.feedback()) == ("whale", "")
    ask(env, JUDGE, "Is it a cat or a dog?")
    assert env.feedback() == "Asked: Is it a cat or a dog? Reply: Invalid (candidate_list)"


def test_the_prior_may_be_restricted_to_candidates() -> None:
    env = WorldTwentyQuestions(task_for("dog"), world_settings(5), GRAMMAR, ["dog", "cat"])
    assert env.belief() == {"dog": 0.5, "cat": 0.5}
    with pytest.raises(UserError, match="not among"):
        WorldTwentyQuestions(task_for("sun"), world_settings(5), GRAMMAR, ["dog", "cat"])


def test_a_snapshot_is_not_changed_by_later_actions() -> None:
    env = _world("whale")
    ask(env, JUDGE, "Can it fly?")
    state, key = env.snapshot(), env.state_key()
    ask(env, JUDGE, "Is it orange?")
    other = _world("whale")
    other.restore(state)
    assert other.state_key() == key != env.state_key()
    with pytest.raises(TypeError):
        env.restore("somewhere")


def test_settings_tasks_and_grammar_survive_pickling() -> None:
    for thing in (PUBLISHED, world_settings(8), world_tasks(WORLD, "val")):
        assert pickle.loads(pickle.dumps(thing)) == thing
    assert pickle.loads(pickle.dumps(GRAMMAR)).parse("Is it a bike?").thing == "bicycle"


def test_tasks_cover_a_split_with_a_short_prompt() -> None:
    tasks = world_tasks(WORLD, "val")
    assert [task.id for task in tasks] == ["val_0", "val_1", "val_2", "val_3"]
    assert tuple(task.secret for task in tasks) == tuple(WORLD.splits["val"])
    assert {task.source for task in tasks} == {"tw_q"}
    assert len(tasks[0].messages[0].content.split()) <= 6
    assert world_tasks(WORLD, "train")[6].aliases == ("bike", "push-bike")
    prompt = (Message("user", "Go."),)
    assert world_tasks(WORLD, "test", prompt)[0].messages == prompt
    with pytest.raises(UserError, match="no split 'dev'"):
        world_tasks(WORLD, "dev")


# --- the contract check -----------------------------------------------------------------------


def test_both_environments_keep_the_contract() -> None:
    check_env(_game)
    check_env(lambda: _game(STRICT))
    judge = lambda request: JUDGE.answer([request])[0]  # noqa: E731
    check_env(_world, judge=judge)
    texts = ("Can it fly?", "Does it fly?", "Is it a cat?", "Is it a cat or a dog?", "Is it a dog?")
    check_env(_world, texts, judge)
    check_env(lambda: _world(max_turns=3), texts, judge)
    assert available_hooks(_game()) < available_hooks(_world())
    assert isinstance(_game(), Env)


class _SharedState(TwentyQuestions):
    progress_made: ClassVar[list[float]] = [0.0]

    def progress(self) -> float:
        return self.progress_made[0]

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        self.progress_made[0] += 1.0
        return super().apply(action, reply)


class _ImpureParse(TwentyQuestions):
    def parse(self, text: str) -> Action:
        self._state = replace(self._state, feedback=self._state.feedback + "x")
        return super().parse(text)


class _PaidFailure(TwentyQuestions):
    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        outcome = super().apply(action, reply)
        return replace(outcome, verdict=Verdict.NO) if outcome.verdict is Verdict.ERROR else outcome


class _WordVerdict(TwentyQuestions):
    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        outcome = super().apply(action, reply)
        return replace(outcome, verdict="maybe")  # pyright: ignore[reportArgumentType]


class _Forgetful(TwentyQuestions):
    def restore(self, snapshot: object) -> None:
        pass


class _Resettable(TwentyQuestions):
    def reset(self) -> None:
        pass


class _HalfBelief(TwentyQuestions):
    def belief(self) -> dict[str, float]:
        return {"dog": 0.5}


class _Endless(TwentyQuestions):
    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        self._state = replace(self._state, done=False)
        return super().apply(action, reply)


class _Lenient(TwentyQuestions):
    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        return super().apply(
            action, reply or (JudgeReply(Verdict.NO) if action.needs_judge else None)
        )


class _Counting(TwentyQuestions):
    games: ClassVar[list[int]] = [0]

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        self.games[0] += 1
        return replace(super().apply(action, reply), reply=f"No {self.games[0]}")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (_SharedState, "state is shared"),
        (_ImpureParse, "changed the game"),
        (_PaidFailure, "must have the verdict 'error'"),
        (_WordVerdict, "must be a Verdict"),
        (_Forgetful, "'restore' did not bring back"),
        (_Resettable, "'reset' must not exist"),
        (_HalfBelief, "must sum to 1"),
        (_Endless, "after the game is over"),
        (_Lenient, "reply is missing"),
        (_Counting, "went differently"),
    ],
)
def test_a_breach_of_the_contract_is_named(
    kind: Callable[..., TwentyQuestions], sentence: str
) -> None:
    settings = TwentyQuestionsSettings(max_turns=4)
    with pytest.raises(EnvContractError, match=sentence):
        check_env(lambda: kind(task_for("dog"), settings))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"score": 0.5}, "must be None until the game is over"),
        ({"score": 0.5, "done": True}, ""),
        ({"score": 1, "done": True}, ""),
        ({"score": 1.5, "done": True}, "must lie in .0, 1. and is 1.5"),
        ({"score": math.nan, "done": True}, "must lie in .0, 1. and is nan"),
        ({"score": "1", "done": True}, "must be None or a number"),
        ({"score": True, "done": True}, "must be None or a number"),
        ({"action_key": None}, "'Outcome.action_key' must be text"),
        ({"diagnostics": ["a note"]}, "'Outcome.diagnostics' must be a tuple of texts"),
        ({"diagnostics": (1,)}, "'Outcome.diagnostics' must be a tuple of texts"),
        ({"diagnostics": ("a note",), "action_key": "key"}, ""),
    ],
)
def test_what_is_stored_of_a_turn_is_checked(changes: dict[str, Any], sentence: str) -> None:
    class Odd(TwentyQuestions):
        def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
            outcome = super().apply(action, reply)
            if changes.get("done"):
                self._state = replace(self._state, done=True)
            return replace(outcome, **changes)

    settings = TwentyQuestionsSettings(max_turns=9)
    if not sentence:
        check_env(lambda: Odd(task_for("dog"), settings))
        return
    with pytest.raises(EnvContractError, match=sentence):
        check_env(lambda: Odd(task_for("dog"), settings))


def test_a_factory_that_returns_one_object_is_refused() -> None:
    env = _game()
    with pytest.raises(EnvContractError, match="same object twice"):
        check_env(lambda: env)
