"""A language model as judge, with a text engine that says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.shapers.channels import ChannelShaper, build_table
from delta_belief_rl.engines.base import FinishReason, SamplingParams
from delta_belief_rl.engines.text_engine import TextCompletion, TextEngine, TextRequest
from delta_belief_rl.envs.answers import UNRECOGNISED
from delta_belief_rl.envs.base import Judge, JudgeReply, JudgeRequest
from delta_belief_rl.envs.twenty_questions import TwentyQuestions, TwentyQuestionsSettings
from delta_belief_rl.judge.llm_judge import KEPT_CHARACTERS, LlmJudge, LlmJudgeSettings
from delta_belief_rl.judge.pool import JudgePool, JudgePoolSettings, local_replica
from delta_belief_rl.judge.prompts import opening_key
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.types import Group, StopReason, Trajectory, Turn, Verdict
from tests.worlds import task_for

QUICK = JudgePoolSettings(backoff=0.001, max_error_rate=1.0)


class Script:
    """Answers from a function of the request; notes what it was asked."""

    def __init__(
        self,
        say: Callable[[TextRequest], str] = lambda request: "<answer>Yes</answer>",
        finish: FinishReason = FinishReason.STOP,
    ) -> None:
        self.asked: list[TextRequest] = []
        self.calls = 0
        self._say, self._finish = say, finish

    def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        self.calls += 1
        self.asked += requests
        return [TextCompletion(self._say(r), self._finish, 100, 7) for r in requests]


def ask(
    action: str = "Is it big?", history: tuple[tuple[str, str], ...] = (), **more: object
) -> JudgeRequest:
    return JudgeRequest(task_for("dog"), action, history, **more)  # type: ignore[arg-type]


def by_question(request: TextRequest) -> str:
    last = request.messages[-1].content.rsplit("\n", 1)[-1]
    return "<answer>No</answer>" if "fly" in last else "It is big. <answer>**Yes**.</answer>"


def test_it_is_a_judge_over_any_text_engine() -> None:
    script = Script(by_question)
    assert isinstance(script, TextEngine)
    judge = LlmJudge(script)
    assert isinstance(judge, Judge)
    replies = judge.answer([ask("Can it fly?"), ask("Is it big?")])
    assert [(r.verdict, r.text, r.reason) for r in replies] == [
        (Verdict.NO, "no", ""),
        (Verdict.YES, "yes", ""),
    ]
    assert script.calls == 1


def test_J16_tokens_read_and_written_and_the_time_are_told() -> None:
    reply = LlmJudge(Script()).answer([ask()])[0]
    assert reply.tokens == 107
    assert reply.seconds > 0


def test_equal_questions_of_one_moment_are_answered_once() -> None:
    script = Script(by_question)
    replies = LlmJudge(script).answer([ask(key="a"), ask("Can it fly?", key="b"), ask(key="a")])
    assert [reply.verdict for reply in replies] == [Verdict.YES, Verdict.NO, Verdict.YES]
    assert [reply.tokens for reply in replies] == [107, 107, 0]
    assert len(script.asked) == 2


def test_no_request_asks_nothing() -> None:
    script = Script()
    assert LlmJudge(script).answer([]) == []
    assert script.calls == 0


def test_decoding_is_greedy_unless_sampling_is_asked_for() -> None:
    limits = {"prompt_length": 321, "response_length": 33}
    drawn = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)
    for greedy, want in ((True, (0.0, 1.0, -1)), (False, (0.7, 0.8, 20))):
        script = Script()
        LlmJudge(script, LlmJudgeSettings(greedy=greedy, sampling=drawn, **limits)).answer([ask()])
        (asked,) = script.asked
        params = asked.sampling
        assert (params.temperature, params.top_p, params.top_k) == want
        assert params.max_tokens == 33
        assert asked.max_prompt_tokens == 321
    assert LlmJudgeSettings().sampling == drawn


def test_R15_the_random_stream_is_named_by_the_request() -> None:
    script = Script()
    judge = LlmJudge(script, LlmJudgeSettings(greedy=False))
    requests = [
        ask(key="a"),
        ask("Is it red?", key="a"),
        ask(key="b"),
        ask(key="a", attempt=1),
        ask(),
        ask("Is it red?"),
        ask(history=(("Is it red?", "no"),)),
    ]
    judge.answer(requests)
    seeds = [request.seed for request in script.asked]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == len(seeds) - 1
    other = Script()
    LlmJudge(other, LlmJudgeSettings(greedy=False, seed=43)).answer(requests)
    assert not {request.seed for request in other.asked} & set(seeds)


def test_history_is_shown_or_left_out() -> None:
    for shown in (True, False):
        script = Script()
        judge = LlmJudge(script, LlmJudgeSettings(with_history=shown))
        judge.answer([ask(history=(("Is it alive?", "yes"),))])
        assert ("alive" in script.asked[0].messages[1].content) is shown


def test_J14_a_text_without_an_answer_is_an_error_with_the_text() -> None:
    reply = LlmJudge(Script(lambda r: "I would\nrather not.")).answer([ask()])[0]
    assert reply.verdict is Verdict.ERROR
    assert reply.text == "I would rather not."
    assert reply.reason == "no answer was found"
    long = LlmJudge(Script(lambda r: "hm " * 1000)).answer([ask()])[0]
    assert len(long.text) <= KEPT_CHARACTERS
    assert LlmJudge(Script(lambda r: "")).answer([ask()])[0].text == "(nothing)"


def test_C1_a_refused_prompt_is_an_error_of_that_call_alone() -> None:
    class Refusing(Script):
        def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
            done = super().generate(requests)
            reason = "the prompt has more than 1600 tokens"
            return [TextCompletion("", FinishReason.ERROR, 1700, error=reason), *done[1:]]

    first, second = LlmJudge(Refusing()).answer([ask(), ask("Is it red?")])
    assert (first.verdict, first.tokens) == (Verdict.ERROR, 1700)
    assert "1600" in first.reason
    assert second.verdict is Verdict.YES


def test_reasoning_that_was_cut_off_counts_where_it_is_clear() -> None:
    def reply(text: str) -> Verdict:
        return LlmJudge(Script(lambda r: text, FinishReason.LENGTH)).answer([ask()])[0].verdict

    assert reply("It is large, so the answer is yes. In other") is Verdict.YES
    assert reply("It is large, so the answer is no") is Verdict.ERROR


def test_the_mode_decides_where_the_published_parser_looks() -> None:
    def word(mode: str, text: str) -> str:
        settings = LlmJudgeSettings(mode=mode, parser="published")  # type: ignore[arg-type]
        return LlmJudge(Script(lambda r: text), settings).answer([ask()])[0].text

    assert word("direct", "Yes it is") == "yes"
    assert word("cot", "No. <answer>Yes</answer>") == "yes"
    assert word("thinking", "<think>No</think><answer>Yes</answer>") == "yes"


def test_the_published_parser_calls_an_unreadable_text_invalid_and_it_is_counted() -> None:
    settings = LlmJudgeSettings(parser="published")
    reply = LlmJudge(Script(lambda r: "<answer>Yes.</answer>"), settings).answer([ask()])[0]
    assert (reply.verdict, reply.reason) == (Verdict.INVALID, UNRECOGNISED)
    assert reply.text == "<answer>Yes.</answer>"
    env = TwentyQuestions(task_for("dog"), TwentyQuestionsSettings())
    outcome = env.apply(env.parse("Is it big?"), reply)
    assert outcome.verdict is Verdict.INVALID
    assert outcome.diagnostics == (UNRECOGNISED, "invalid_by_judge")


# --- with the pool ------------------------------------------------------------------------------


def through(pool: JudgePool, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
    async def main() -> list[JudgeReply]:
        return [await pool.ask(request) for request in requests]

    return asyncio.run(main())


def unsure_when_greedy(request: TextRequest) -> str:
    return "hm" if request.sampling.temperature == 0 else "<answer>No</answer>"


def test_J1_a_further_attempt_is_drawn_anew_and_goes_to_another_replica() -> None:
    scripts = [Script(unsure_when_greedy), Script(unsure_when_greedy)]
    pool = JudgePool([local_replica(LlmJudge(script)) for script in scripts], QUICK)
    assert through(pool, [ask()])[0].verdict is Verdict.NO
    assert [script.calls for script in scripts] == [1, 1]
    temperatures = [script.asked[0].sampling.temperature for script in scripts]
    assert temperatures == [0.0, 0.7]
    assert pool.stats().tokens == 2 * 107
    assert pool.stats().failures == {"no answer was found": 1}


def test_R15_a_dead_replica_does_not_change_what_the_next_one_is_asked() -> None:
    async def dead(requests: list[JudgeRequest]) -> list[JudgeReply]:
        raise ConnectionResetError("gone")

    script = Script()
    pool = JudgePool([dead, local_replica(LlmJudge(script))], QUICK)
    assert through(pool, [ask()])[0].verdict is Verdict.YES
    assert script.asked[0].sampling.temperature == 0.0


def test_J14_the_last_error_carries_reason_and_text() -> None:
    script = Script(lambda r: "who knows")
    pool = JudgePool([local_replica(LlmJudge(script))], QUICK)
    reply = through(pool, [ask()])[0]
    assert (reply.verdict, reply.text) == (Verdict.ERROR, "who knows")
    assert script.calls == QUICK.max_attempts
    assert len({request.seed for request in script.asked}) == QUICK.max_attempts
    assert pool.stats().errors == 1


def test_questions_without_a_history_are_judged_once() -> None:
    script = Script(by_question)
    pool = JudgePool([local_replica(LlmJudge(script))], QUICK, cache_key=opening_key)
    first = (("Is it alive?", "yes"),)
    replies = through(
        pool,
        [
            ask("Can it fly?"),
            ask(" Can it  fly?"),
            ask("Is it big?", first),
            ask("Is it big?", first),
        ],
    )
    assert [reply.cached for reply in replies] == [False, True, False, False]
    assert replies[1].verdict is Verdict.NO
    assert replies[1].tokens == 0
    assert script.calls == 3
    assert pool.stats().cached == 1


@pytest.mark.parametrize(
    "again", ["Is it alive?", "is it  ALIVE", "\u201cIs it alive\u200b?\u201d"]
)
def test_J13_a_repeated_question_is_found_by_code_and_no_judge_is_called(again: str) -> None:
    script = Script()
    pool = JudgePool([local_replica(LlmJudge(script))], QUICK)
    env = TwentyQuestions(task_for("dog"), TwentyQuestionsSettings(verify_methods=("exact",)))

    async def play(text: str) -> Verdict:
        action = env.parse(text)
        reply = await pool.ask(env.judge_request(action)) if action.needs_judge else None
        return env.apply(action, reply).verdict

    assert asyncio.run(play("Is it alive?")) is Verdict.YES
    assert asyncio.run(play(again)) is Verdict.REPEATED
    assert asyncio.run(play("Is it a dog?")) is Verdict.WIN
    assert script.calls == 1
    assert pool.stats().calls == 1


@pytest.mark.parametrize("estimator", ["grpo", "grpo_turn", "grpo_turn_rtg", "reinforce"])
def test_J1_a_turn_without_a_judges_answer_is_neither_paid_nor_trained(estimator: str) -> None:
    pool = JudgePool([local_replica(LlmJudge(Script(lambda r: "who knows")))], QUICK)
    env = TwentyQuestions(task_for("dog"), TwentyQuestionsSettings())
    action = env.parse("Is it big?")
    outcome = env.apply(action, through(pool, [env.judge_request(action)])[0])
    assert outcome.verdict is Verdict.ERROR
    assert outcome.diagnostics == ("judge_failed",)

    def game(number: int, first: Verdict) -> Trajectory:
        turns = (
            Turn(0, 1, 3, (-1.0, -1.0), 0, "Is it big?", outcome.reply, first),
            Turn(1, 4, 6, (-1.0, -1.0), 0, "Is it red?", "no", Verdict.INVALID),
        )
        return Trajectory(env.task, number, tuple(range(7)), turns, StopReason.TURN_LIMIT)

    games = (game(0, outcome.verdict), game(1, Verdict.NO))
    groups = [Group(env.task, games)]
    table = build_table(groups)
    channels = ChannelShaper().shape(table, groups, np.array([5.0, 1.0, 2.0, 0.0]))
    assert all(values[0] == 0.0 for values in channels.values())
    advantage = build_credit(estimator, {}).apply(replace(table, rewards=channels))
    batch = build_batch(groups, table, advantage.turns, advantage.weight, [np.zeros(4)] * 2)
    assert batch.weight[:7].tolist() == [0, 0, 0, 0, 1, 1, 0]
    assert batch.weight[7:].tolist() == [0, 1, 1, 0, 1, 1, 0]
