"""A judge is asked a fixed set of questions, each several times, and what it answers is measured.

Questions come from an embedded world, where the truth is known, or from stored games. Every
question stands alone, without a history. What the judge says is taken as it says it, before any
rule.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.base import Judge, JudgeReply, JudgeRequest
from delta_belief_rl.envs.worlds.players import sentence
from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.envs.worlds.tasks import SOURCE
from delta_belief_rl.eval.agreement import DRAWS, AnswerTable, Consistency, Said, consistency
from delta_belief_rl.eval.published import StoredGame
from delta_belief_rl.eval.statistics import Interval, cluster_bootstrap
from delta_belief_rl.rollout.seeds import named_seed
from delta_belief_rl.types import FloatArray, Task, UserError, Verdict


@dataclass(frozen=True, slots=True)
class TrialQuestion:
    """One question about one secret.

    Attributes:
        prop: The property of the world that it asks for; empty for other questions.
        truth: The right answer, where it is known.
    """

    task: Task
    text: str
    prop: str = ""
    truth: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """One reply of the judge.

    Attributes:
        round: Which of the rounds over all questions it belongs to.
        seconds: As the judge says; where it does not, the time of the call that brought the reply.
    """

    question: TrialQuestion
    round: int
    reply: JudgeReply
    seconds: float


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """What a judge did.

    Errors are left out of ``accuracy``, ``properties`` and ``consistency``; a reply that is neither
    yes nor no is wrong where the truth is known.

    Attributes:
        replies: Questions times rounds.
        accuracy: Share of replies that are the truth; None where no truth is known.
        properties: The same for each property of the world.
        invalid: Share of replies that call the question invalid.
        reasons: Why replies were errors, and how often.
        latency_p50, latency_p95: Seconds.
        tokens_per_question: Mean over replies, read and written; 0 where the judge does not count.
        cost_per_question: In the unit of the price; None without a price.
    """

    questions: int
    rounds: int
    replies: int
    accuracy: Interval | None
    properties: Mapping[str, Interval]
    consistency: Consistency
    errors: int
    error_rate: float
    invalid: float
    reasons: Mapping[str, int]
    latency_p50: float
    latency_p95: float
    tokens_per_question: float
    cost_per_question: float | None

    def rates(self) -> Iterator[tuple[str, float]]:
        """Every agreement that a bound can be put on, by name."""
        if self.accuracy is not None:
            yield "the agreement with the truth", self.accuracy.value
        yield "the consistency", self.consistency.rate.value


def world_questions(world: World, count: int, seed: int = 0) -> tuple[TrialQuestion, ...]:
    """Questions for the properties of a world, each in its first phrasing.

    Properties take turns, and for each of them things that have it alternate with things that have
    it not, as far as there are both. The set is a function of the arguments.

    Raises:
        UserError: ``count`` is below 1 or above the number of cells of the table.
    """
    cells = world.values.size
    if not 1 <= count <= cells:
        raise UserError(
            f"The world {world.name!r} has {cells} questions: ask for between 1 and {cells} of "
            f"them, not {count}."
        )
    orders = [_things_in_turn(world, column, seed) for column in range(len(world.properties))]
    out: list[TrialQuestion] = []
    for number in range(count):
        turn, column = divmod(number, len(orders))
        thing, prop = world.things[orders[column][turn]], world.properties[column]
        holds = world.value(thing.name, prop.key)
        out.append(
            TrialQuestion(
                task=Task(f"audit_{thing.name}", SOURCE, thing.name, (), aliases=thing.aliases),
                text=sentence(prop.phrasings[0]),
                prop=prop.key,
                truth=Verdict.YES if holds else Verdict.NO,
            )
        )
    return tuple(out)


def stored_questions(
    games: Sequence[StoredGame], count: int, seed: int = 0
) -> tuple[TrialQuestion, ...]:
    """Questions of stored games that were answered with yes or no, drawn without replacement.

    Raises:
        UserError: ``count`` is below 1, or there are not so many different questions.
    """
    found: dict[tuple[str, str], TrialQuestion] = {}
    for game in games:
        task = Task(f"audit_{game.secret}", SOURCE, game.secret, ())
        for turn in game.exchanges:
            if normalise(turn.reply) in ("yes", "no"):
                key = (game.secret, normalise(turn.question))
                found.setdefault(key, TrialQuestion(task, turn.question))
    if not 1 <= count <= len(found):
        raise UserError(
            f"The games hold {len(found)} different questions with an answer: ask for between 1 "
            f"and {len(found)} of them, not {count}."
        )
    keys = sorted(found)
    chosen = np.random.default_rng(named_seed("audit", seed)).permutation(len(keys))[:count]
    return tuple(found[keys[int(index)]] for index in chosen)


def ask_judge(
    judge: Judge,
    questions: Sequence[TrialQuestion],
    *,
    rounds: int = 3,
    batch: int = 8,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[int], None] | None = None,
) -> list[Answered]:
    """Ask all questions, round by round; a round names its own random streams.

    Args:
        judge: Any judge; nothing is repeated where it fails.
        questions: What is asked.
        rounds: How often each question is asked.
        batch: Questions of one call.
        clock: Seconds, for replies that do not say how long they took.
        on_progress: Called with the number of replies so far.

    Raises:
        UserError: ``rounds`` or ``batch`` is below 1.
    """
    if rounds < 1 or batch < 1:
        raise UserError(
            f"An audit needs rounds and batches of 1 or more, not {rounds} and {batch}."
        )
    out: list[Answered] = []
    for number in range(rounds):
        for start in range(0, len(questions), batch):
            part = questions[start : start + batch]
            requests = [JudgeRequest(one.task, one.text, key=_key(one, number)) for one in part]
            began = clock()
            replies = judge.answer(requests)
            elapsed = clock() - began
            for one, reply in zip(part, replies, strict=True):
                out.append(Answered(one, number, reply, reply.seconds or elapsed))
            if on_progress is not None:
                on_progress(len(out))
    return out


def report(
    answered: Sequence[Answered],
    *,
    price: float | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> JudgeReport:
    """Measure what a judge answered.

    Args:
        answered: What ``ask_judge`` returned, at least one reply.
        price: Of 1,000 tokens, in any currency.
        draws: Bootstrap samples.
        seed: Names the draws.
    """
    count = len(answered)
    verdicts = [one.reply.verdict for one in answered]
    errors = verdicts.count(Verdict.ERROR)
    judged = [
        one
        for one in answered
        if one.question.truth is not None and one.reply.verdict is not Verdict.ERROR
    ]
    properties = dict.fromkeys(one.question.prop for one in judged if one.question.prop)
    seconds = [one.seconds for one in answered]
    p50, p95 = (float(value) for value in np.percentile(seconds, [50, 95]))
    tokens = sum(one.reply.tokens for one in answered) / count
    return JudgeReport(
        questions=len({_key(one.question) for one in answered}),
        rounds=len({one.round for one in answered}),
        replies=count,
        accuracy=_accuracy(judged, draws, seed) if judged else None,
        properties={
            name: _accuracy([one for one in judged if one.question.prop == name], draws, seed)
            for name in properties
        },
        consistency=consistency(trial_table(answered), draws=draws, seed=seed),
        errors=errors,
        error_rate=errors / count,
        invalid=verdicts.count(Verdict.INVALID) / count,
        reasons=Counter(one.reply.reason for one in answered if one.reply.verdict is Verdict.ERROR),
        latency_p50=p50,
        latency_p95=p95,
        tokens_per_question=tokens,
        cost_per_question=None if price is None else tokens / 1000 * price,
    )


def trial_table(answered: Sequence[Answered]) -> AnswerTable:
    """All replies but errors; the source of an answer is its round."""
    out: dict[tuple[str, str], list[Said]] = {}
    for one in answered:
        if one.reply.verdict is not Verdict.ERROR:
            key = (one.question.task.secret, normalise(one.question.text))
            out.setdefault(key, []).append(Said(one.round, str(one.reply.verdict)))
    return out


def _accuracy(judged: Sequence[Answered], draws: int, seed: int) -> Interval:
    secrets = sorted({one.question.task.secret for one in judged})
    place = {secret: number for number, secret in enumerate(secrets)}
    right, asked = (np.zeros(len(secrets)) for _ in range(2))
    for one in judged:
        at = place[one.question.task.secret]
        asked[at] += 1
        right[at] += one.reply.verdict is one.question.truth
    return cluster_bootstrap(right, asked, draws=draws, seed=seed)


def _things_in_turn(world: World, column: int, seed: int) -> list[int]:
    """Rows of a property's column in random order: one with it, one without it, and so on."""
    holds: FloatArray = world.values[:, column].astype(np.float64)
    rng = np.random.default_rng(named_seed("audit", seed, world.properties[column].key))
    rows = rng.permutation(len(holds))
    # The n-th of either kind comes at n; a random kind is first.
    rank = np.where(holds[rows] > 0, np.cumsum(holds[rows]), np.cumsum(1 - holds[rows]))
    first = float(rng.random() < 0.5)
    rank += 0.5 * (holds[rows] != first)
    return [int(row) for row in rows[np.argsort(rank, kind="stable")]]


def _key(question: TrialQuestion, round_: int | None = None) -> str:
    name = f"audit/{question.task.secret}/{normalise(question.text)}"
    return name if round_ is None else f"{name}/{round_}"
