"""The judge audit: every number in closed form, intervals that hold the truth, exit statuses."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from delta_belief_rl.cli import audit_judge
from delta_belief_rl.cli.audit_judge import TrialSettings, judge_from_config, trial_questions
from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.eval.agreement import (
    Agreement,
    AnswerTable,
    Consistency,
    Said,
    agreement,
    cluster_kappa,
    consistency,
    kappa,
)
from delta_belief_rl.eval.judge_audit import answer_table, audit_files
from delta_belief_rl.eval.judge_trial import (
    Answered,
    TrialQuestion,
    ask_judge,
    report,
    stored_questions,
    trial_table,
    world_questions,
)
from delta_belief_rl.eval.published import read_games
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.rollout.store import to_row
from delta_belief_rl.types import StopReason, Task, Trajectory, Turn, UserError, Verdict
from tests.stored import INVALID, REPEATED, published, write
from tests.worlds import small_world, task_for

WORLD = small_world()
QUESTIONS = world_questions(WORLD, 24)
"""Two of each property: a thing that has it and a thing that has it not."""
ROUNDS = 4
FLIPPED = {Verdict.YES: Verdict.NO, Verdict.NO: Verdict.YES}


class ScriptedJudge:
    """Answers by a function of the question and the round."""

    def __init__(self, script: Callable[[TrialQuestion, int], JudgeReply]) -> None:
        self.script = script
        self.calls: list[list[str]] = []
        self._questions = {(one.task.secret, one.text): one for one in QUESTIONS}

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        self.calls.append([request.key for request in requests])
        return [
            self.script(
                self._questions[request.task.secret, request.action],
                int(request.key.rsplit("/", 1)[1]),
            )
            for request in requests
        ]


def truth(question: TrialQuestion) -> Verdict:
    assert question.truth is not None
    return question.truth


def faulty(question: TrialQuestion, round_: int) -> JudgeReply:
    """Wrong on "alive" in round 0, invalid on "flies" in round 1, silent on "legs" in round 2."""
    match question.prop, round_:
        case "alive", 0:
            return JudgeReply(FLIPPED[truth(question)], tokens=10)
        case "flies", 1:
            return JudgeReply(Verdict.INVALID, tokens=10)
        case "legs", 2:
            return JudgeReply(Verdict.ERROR, reason="no answer was found", tokens=58)
        case _:
            return JudgeReply(truth(question), tokens=10)


def perfect(question: TrialQuestion, round_: int) -> JudgeReply:
    return JudgeReply(truth(question))


def asked(script: Callable[[TrialQuestion, int], JudgeReply]) -> list[Answered]:
    return ask_judge(ScriptedJudge(script), QUESTIONS, rounds=ROUNDS)


# --- agreement --------------------------------------------------------------------------------


def table(**said: str) -> AnswerTable:
    """Answers by letters: ``q="yyn"`` is one question answered twice yes and once no."""
    words = {"y": "yes", "n": "no"}
    return {
        (f"secret {name}", name): [Said(i, words[letter]) for i, letter in enumerate(letters)]
        for name, letters in said.items()
    }


@pytest.mark.parametrize(
    ("joint", "expected"),
    [
        ([[20, 5], [10, 15]], 0.4),
        ([[30, 0], [0, 30]], 1.0),
        ([[25, 25], [25, 25]], 0.0),
        ([[0, 10], [10, 0]], -1.0),
        ([[90, 5], [5, 0]], (0.9 - 0.905) / (1 - 0.905)),
    ],
)
def test_kappa_is_agreement_above_chance(joint: list[list[int]], expected: float) -> None:
    assert kappa(np.array(joint, dtype=np.float64)) == pytest.approx(expected)


def test_kappa_of_one_word_does_not_exist() -> None:
    assert math.isnan(kappa(np.array([[7.0]])))
    assert math.isnan(kappa(np.zeros((2, 2))))
    found = cluster_kappa(np.array([[[7.0]], [[3.0]]]))
    assert math.isnan(found.value)
    assert math.isnan(found.low)
    assert found.units == 2


def test_consistency_counts_every_pair_once() -> None:
    found = consistency(table(a="yyn", b="nn", c="y", d="yynn"))
    assert (found.pairs, found.questions) == (3 + 1 + 6, 3)
    assert found.rate.value == pytest.approx((1 + 1 + 2) / 10)
    assert found.rate.units == 3
    assert math.isnan(found.within.value)
    assert found.between == found.rate


def test_consistency_tells_games_apart() -> None:
    said = [Said(0, "yes"), Said(0, "yes"), Said(0, "no"), Said(1, "no"), Said(1, "no")]
    found = consistency({("dog", "q"): said})
    assert found.within.value == pytest.approx(2 / 4)
    assert found.between.value == pytest.approx(2 / 6)
    assert found.rate.value == pytest.approx(4 / 10)


def test_agreement_weighs_questions_not_answers() -> None:
    found = agreement(table(a="yyyy", b="yn", c="n"), table(a="n", b="ny", d="y"))
    assert found.questions == 2
    assert found.rate.value == pytest.approx((0.0 + 0.5) / 2)
    # Rows are the first source: no 0.5, yes 1.5; columns the second: no 1.5, yes 0.5.
    chance = (0.5 * 1.5 + 1.5 * 0.5) / 4
    assert found.kappa.value == pytest.approx((0.25 - chance) / (1 - chance))


def test_nothing_in_common_is_no_agreement() -> None:
    found = agreement(table(a="y"), table(b="y"))
    assert found.questions == 0
    assert math.isnan(found.rate.value)
    assert math.isnan(consistency({}).rate.value)
    assert consistency(table(a="y")).pairs == 0


def noisy(rng: np.random.Generator, error: float, answers: int = 2) -> AnswerTable:
    """60 secrets with 4 questions each, half of them true; answers flip independently."""
    out: dict[tuple[str, str], list[Said]] = {}
    for secret in range(60):
        for question in range(4):
            right = rng.random(answers) >= error
            words = ["yes" if ok == (question % 2 == 0) else "no" for ok in right]
            out[str(secret), str(question)] = [Said(i, word) for i, word in enumerate(words)]
    return out


def test_J13_intervals_hold_the_truth_as_often_as_they_say() -> None:
    first, second = 0.1, 0.2
    same = 1 - 2 * first * (1 - first)
    both = (1 - first) * (1 - second) + first * second
    trials, held = 60, Counter[str]()
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        ours, theirs = noisy(rng, first), noisy(rng, second)
        one: Consistency = consistency(ours, draws=300)
        two: Agreement = agreement(ours, theirs, draws=300)
        for name, interval, value in (
            ("rate", one.rate, same),
            ("kappa", one.kappa, 2 * same - 1),
            ("agreement", two.rate, both),
            ("agreement kappa", two.kappa, 2 * both - 1),
        ):
            held[name] += interval.low <= value <= interval.high
            assert interval.low <= interval.value <= interval.high
    assert len(held) == 4
    assert all(52 <= count <= trials for count in held.values()), held


def test_draws_are_a_function_of_the_seed() -> None:
    said = noisy(np.random.default_rng(3), 0.2)
    assert consistency(said, seed=5).kappa == consistency(said, seed=5).kappa
    assert consistency(said, seed=5).rate == consistency(said, seed=5).rate
    assert consistency(said, seed=5).kappa.low != consistency(said, seed=6).kappa.low
    assert consistency(said, seed=5).kappa.value == consistency(said, seed=6).kappa.value


# --- questions --------------------------------------------------------------------------------


def test_questions_of_a_world_are_balanced_and_known() -> None:
    assert Counter(one.prop for one in QUESTIONS) == {prop.key: 2 for prop in WORLD.properties}
    assert Counter(one.truth for one in QUESTIONS) == {Verdict.YES: 12, Verdict.NO: 12}
    for one in QUESTIONS:
        assert (truth(one) is Verdict.YES) == WORLD.value(one.task.secret, one.prop)
        assert Grammar(WORLD).parse(one.text).property_key == one.prop


def test_all_questions_of_a_world_are_all_cells() -> None:
    every = world_questions(WORLD, WORLD.values.size)
    assert len({(one.task.secret, one.prop) for one in every}) == WORLD.values.size
    assert every[:24] == QUESTIONS, "a longer set begins with the shorter one"
    assert world_questions(WORLD, 24, seed=1) != QUESTIONS
    for count in (0, WORLD.values.size + 1):
        with pytest.raises(UserError, match="between 1 and 288"):
            world_questions(WORLD, count)


def test_questions_of_stored_games_are_those_that_were_answered(tmp_path: Path) -> None:
    pairs = [("Is it a cup?", "yes"), ("Is it  a CUP?", "no"), ("Up?", INVALID), ("Is it?", "no")]
    games = read_games(write(tmp_path / "1.jsonl", [published(pairs)])).games
    found = stored_questions(games, 2)
    assert {one.text for one in found} == {"Is it a cup?", "Is it?"}
    assert {(one.task.secret, one.truth) for one in found} == {("dog", None)}
    assert stored_questions(games, 2) == found
    with pytest.raises(UserError, match="between 1 and 2"):
        stored_questions(games, 3)


# --- asking -----------------------------------------------------------------------------------


def test_every_round_asks_everything_under_names_of_its_own() -> None:
    judge = ScriptedJudge(perfect)
    done: list[int] = []
    answered = ask_judge(judge, QUESTIONS, rounds=2, batch=10, on_progress=done.append)
    assert [len(call) for call in judge.calls] == [10, 10, 4, 10, 10, 4]
    assert done == [10, 20, 24, 34, 44, 48]
    keys = [key for call in judge.calls for key in call]
    assert len(set(keys)) == len(keys) == 48
    assert [one.question for one in answered] == [*QUESTIONS, *QUESTIONS]
    for bad in ({"rounds": 0}, {"batch": 0}):
        with pytest.raises(UserError, match="1 or more"):
            ask_judge(judge, QUESTIONS, **bad)


def test_a_reply_takes_as_long_as_the_judge_says_or_as_its_call_took() -> None:
    ticks = iter([0.0, 0.5, 10.0, 12.0])

    def some(question: TrialQuestion, round_: int) -> JudgeReply:
        return JudgeReply(truth(question), seconds=0.125 if question.prop == "alive" else 0.0)

    answered = ask_judge(
        ScriptedJudge(some), QUESTIONS[:4], rounds=1, batch=2, clock=lambda: next(ticks)
    )
    assert [one.seconds for one in answered] == [0.125, 0.5, 2.0, 2.0]
    found = report(answered)
    assert found.latency_p50 == pytest.approx(1.25)
    assert found.latency_p95 == pytest.approx(2.0)


def test_J16_a_report_counts_what_the_judge_did() -> None:
    found = report(asked(faulty), price=2.5)
    assert (found.questions, found.rounds, found.replies) == (24, ROUNDS, 96)
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx(90 / 94)
    assert {name: rate.value for name, rate in found.properties.items() if rate.value < 1} == {
        "alive": 0.75,
        "flies": 0.75,
    }
    assert len(found.properties) == 12
    assert (found.errors, found.error_rate) == (2, 2 / 96)
    assert found.reasons == {"no answer was found": 2}
    assert found.invalid == pytest.approx(2 / 96)
    assert found.tokens_per_question == pytest.approx((94 * 10 + 2 * 58) / 96)
    assert found.cost_per_question == pytest.approx(2.5 * 11 / 1000)


def test_J13_self_consistency_of_a_known_error_pattern() -> None:
    found = report(asked(faulty)).consistency
    # Four answers are six pairs, and one of the four that differs spoils three of them.
    assert found.pairs == 2 * (6 + 6 + 3 + 9 * 6)
    assert found.rate.value == pytest.approx(126 / 138)
    assert math.isnan(found.within.value)
    same, yes_no, invalid = 2 * 126, 135, 6
    chance = (2 * yes_no**2 + invalid**2) / 276**2
    assert found.kappa.value == pytest.approx((same / 276 - chance) / (1 - chance))


def test_Q4_two_judges_are_compared_question_by_question() -> None:
    both = agreement(trial_table(asked(faulty)), trial_table(asked(perfect)))
    assert both.questions == 24
    assert both.rate.value == pytest.approx((20 + 4 * 0.75) / 24)
    silent = asked(lambda question, _: JudgeReply(Verdict.ERROR, reason="down"))
    assert agreement(trial_table(asked(perfect)), trial_table(silent)).questions == 0
    nothing = report(silent)
    assert (nothing.accuracy, nothing.error_rate, dict(nothing.reasons)) == (
        None,
        1.0,
        {"down": 96},
    )


def test_the_interval_of_accuracy_holds_the_truth() -> None:
    questions = world_questions(WORLD, 288)
    held = 0
    for trial in range(40):
        rng = np.random.default_rng(trial)
        answered = [
            Answered(
                one,
                0,
                JudgeReply(FLIPPED[truth(one)] if rng.random() < 0.15 else truth(one)),
                0.1,
            )
            for one in questions
        ]
        accuracy = report(answered, draws=300).accuracy
        assert accuracy is not None
        held += accuracy.low <= 0.85 <= accuracy.high
    assert 34 <= held <= 40


def test_the_exact_judge_is_right_about_everything() -> None:
    judge = WorldJudge(WORLD)
    found = report(ask_judge(judge, world_questions(WORLD, 288), rounds=2))
    assert found.accuracy is not None
    assert (found.accuracy.value, found.consistency.rate.value, found.errors) == (1.0, 1.0, 0)


# --- stored games -----------------------------------------------------------------------------

ALIVE, BIG = "Is it alive?", "Is it big?"
FIRST = [(ALIVE, "yes"), (ALIVE, "no"), ("is it  ALIVE ?", REPEATED), (BIG, "no")]
SECOND = [(ALIVE, "yes"), (BIG, "yes"), ("Is it? Or not?", INVALID), ("Can it fly?", "no")]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write(tmp_path / "0.jsonl", [published(FIRST), published(SECOND)])


def test_J13_contradictions_and_repeats_of_a_file(stored: Path) -> None:
    (file,) = audit_files([stored]).files
    assert (file.games, file.secrets, file.turns, file.damaged) == (2, 1, 8, 0)
    assert (file.repeats, file.unflagged, file.flagged, file.invalid) == (2, 1, 1, 1)
    assert (file.errors, file.error_rate) == (None, None)
    found = file.consistency
    # "alive": yes, no | yes; "big": no | yes.
    assert (found.pairs, found.questions) == (4, 2)
    assert found.rate.value == pytest.approx(1 / 4)
    assert found.within.value == 0.0
    assert found.between.value == pytest.approx(1 / 3)


def test_files_are_compared_in_pairs_and_together(stored: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "1.jsonl", [published(SECOND), "not JSON"])
    audit = audit_files([stored, other])
    (pair,) = audit.pairs
    assert audit.files[1].damaged == 1
    assert pair.agreement.questions == 3
    assert pair.agreement.rate.value == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert audit.together is not None
    # "alive" yes no yes | yes; "big" no yes | yes; "fly" no | no.
    assert audit.together.within.value == pytest.approx((1 + 0) / (3 + 1))
    assert audit.together.between.value == pytest.approx((2 + 1 + 1) / (3 + 2 + 1))
    assert [name for name, _ in audit.rates()][-1].startswith("the agreement of")


def own(verdicts: list[Verdict]) -> dict[str, object]:
    """A line of this project with these verdicts."""
    turns = tuple(
        Turn(i, 2 * i, 2 * i + 1, (-0.5,), 0, f"Is it {i}?", verdict.value, verdict)
        for i, verdict in enumerate(verdicts)
    )
    stop = StopReason.JUDGE_FAILED if Verdict.ERROR in verdicts else StopReason.TURN_LIMIT
    game = Trajectory(task_for("dog"), 0, tuple(range(2 * len(turns))), turns, stop)
    return to_row(game, max_turns=8)


def test_failures_of_the_judge_are_counted_where_a_file_knows_them(tmp_path: Path) -> None:
    rows = [
        own([Verdict.YES, Verdict.NO, Verdict.INVALID]),
        own([Verdict.YES, Verdict.ERROR]),
    ]
    file = write(tmp_path / "own.jsonl", rows)
    audit = audit_files([file])
    assert (audit.files[0].errors, audit.files[0].error_rate) == (1, 1 / 5)
    assert [rate for _, rate in audit.error_rates()] == [1 / 5]
    assert sum(map(len, answer_table(read_games(file).games).values())) == 3
    mixed = write(tmp_path / "mixed.jsonl", [*rows, published(FIRST)])
    assert list(audit_files([mixed]).error_rates()) == []


# --- the command ------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(["audit", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err


@pytest.mark.parametrize(("bound", "status"), [("0.2", 0), ("0.25", 0), ("0.26", 1)])
def test_a_bound_decides_the_exit_status(
    stored: Path, bound: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["audit", "games", "--json", str(stored), "--min-agreement", bound]) == status
    out, err = capsys.readouterr()
    failed = json.loads(out)["failed"]
    assert len(failed) == status
    assert err.splitlines() == failed


def test_an_audit_of_games_is_one_json_document(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["audit", "games", "--json", str(stored)]) == 0
    found = json.loads(capsys.readouterr().out)
    (file,) = found["files"]
    assert file["consistency"]["rate"]["value"] == 0.25
    assert file["error_rate"] is None
    assert (found["pairs"], found["together"]) == ([], None)
    assert cli(["audit", "games", str(stored)]) == 0
    assert "75.0" in capsys.readouterr().out


def test_errors_above_their_bound_fail_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write(tmp_path / "own.jsonl", [own([Verdict.YES, Verdict.ERROR])]))
    assert cli(["audit", "games", file, "--max-error-rate", "0.5"]) == 0
    assert cli(["audit", "games", file, "--max-error-rate", "0.4"]) == 1
    assert "above --max-error-rate 0.4" in capsys.readouterr().err
    assert "no question was answered twice" in refused(
        capsys, "games", file, "--min-agreement", "0.9"
    )


def test_the_exact_judge_passes_every_bound(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env=everyday", "judge=world"]
    bounds = ["--min-agreement", "1", "--max-error-rate", "0", "--price", "3"]
    small = ["--questions", "12", "--rounds", "2"]
    assert cli(["audit", "judge", *words, "--json", *small, *bounds, "--against", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["judges"]) == ["world (1)", "world (2)"]
    one = found["judges"]["world (1)"]
    assert (one["accuracy"]["value"], one["error_rate"], one["replies"]) == (1.0, 0.0, 24)
    assert one["cost_per_question"] == 0.0
    assert found["agreement"]["rate"]["value"] == 1.0
    assert cli(["audit", "judge", *words, *small]) == 0
    assert "100.0" in capsys.readouterr().out


def test_a_judge_is_asked_the_questions_of_stored_games(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write(tmp_path / "0.jsonl", [published([(ALIVE, "yes"), ("Is it pink?", "no")])]))
    words = ["env=everyday", "judge=world", "--games", file, "--questions", "2", "--rounds", "1"]
    assert cli(["audit", "judge", "--json", *words]) == 0
    (one,) = json.loads(capsys.readouterr().out)["judges"].values()
    assert (one["accuracy"], one["replies"]) == (None, 2)
    assert one["consistency"]["rate"]["value"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["games", "/nowhere/0.jsonl"], "no rollout file"),
        (["games", "0.jsonl", "--against", "judge=world"], "belong to audit judge"),
        (["games", "0.jsonl", "--min-agreement", "93"], "between 0 and 1"),
        (["games", "0.jsonl", "--draws", "0"], "--draws must be at least 1"),
        (["judge", "judge_rollout.name=world"], "data.world, which is not set"),
        (["judge", "env=everyday", "judge_rollout.name=fake"], "not available"),
        (["judge", "env=everyday", "judge=world", "--questions", "99999"], "ask for between"),
        (["judge", "data.world=narnia", "judge=world"], "narnia"),
        (["judge", "env=everyday", "judge=wrld"], "did you mean"),
        (["judge", "env=everyday", "judge=world", "--rounds", "0"], "--rounds must be at least 1"),
    ],
)
def test_an_audit_that_cannot_be_made_is_one_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *words)


def test_a_judge_whose_engine_dies_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dead:
        def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
            raise EngineFailure("it is gone")

    monkeypatch.setattr(audit_judge, "judge_from_config", lambda cfg: Dead())
    assert cli(["audit", "judge", "env=everyday", "judge=world", "--questions", "4"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "world stopped while it was asked (it is gone)" in said[0]


def test_published_files_do_not_know_failures(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "only a run's own files" in refused(
        capsys, "games", str(stored), "--max-error-rate", "0.1"
    )


def test_the_configured_judge_is_built_in_this_process() -> None:
    cfg, _ = load_config(["env=everyday", "judge=world"])
    judge = judge_from_config(cfg)
    assert isinstance(judge, WorldJudge)
    questions = trial_questions(cfg, TrialSettings(questions=5))
    replies = judge.answer([JudgeRequest(one.task, one.text) for one in questions])
    assert [reply.verdict for reply in replies] == [one.truth for one in questions]
    plain = Task("t", "tw_q", "no such thing", ())
    assert judge.answer([JudgeRequest(plain, "Is it alive?")])[0].verdict is Verdict.ERROR
