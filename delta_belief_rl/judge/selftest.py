"""Does a judge know plain facts? Fixed questions with answers that nobody disputes.

A broken kernel or a bad quantisation shows here before it costs a run: as wrong answers, as texts
without an answer, or as logits that are not finite.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from delta_belief_rl.envs.base import Judge, JudgeReply, JudgeRequest
from delta_belief_rl.types import Task, UserError, Verdict

NOT_FINITE = "not finite"
"""Stands in the reason of a reply whose logits were not."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One question about one secret, and its answer."""

    secret: str
    question: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Miss:
    """A fact that a judge got wrong; ``said`` is its verdict, or why there was none."""

    fact: Fact
    said: str


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What a judge made of the facts.

    Attributes:
        asked: Number of facts.
        misses: Those without the right answer, failures among them.
        errors: Questions without any answer.
        finite: No logits were NaN or infinite.
        tokens: Tokens that the judge read and wrote, where it says so.
        seconds: Time of all answers together.
    """

    asked: int
    misses: tuple[Miss, ...]
    errors: int
    finite: bool
    tokens: int = 0
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """Share of the facts that were answered rightly."""
        return 1.0 - len(self.misses) / self.asked

    @property
    def tokens_per_second(self) -> float:
        """Tokens read and written in a second; 0 for a judge that counts none."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def rate_text(self) -> str:
        """The speed in words."""
        return f"{self.tokens_per_second:,.0f} tokens/s over {self.seconds:.1f} s"

    def passes(self, least: float) -> bool:
        """Whether the accuracy is at least ``least`` and every output was finite."""
        return self.finite and self.accuracy >= least

    def sentence(self) -> str:
        """The result in words."""
        right = self.asked - len(self.misses)
        extra = "" if self.finite else "; logits were not finite"
        return (
            f"{right} of {self.asked} plain facts answered rightly ({self.accuracy:.0%}), "
            f"{self.errors} without an answer{extra}"
        )


def self_test(judge: Judge, facts: Sequence[Fact] | None = None) -> SelfTestReport:
    """Ask a judge for the facts, all in one call.

    Args:
        judge: Any judge; one of an embedded world knows the things of that world only.
        facts: ``FACTS`` when None.
    """
    chosen = FACTS if facts is None else tuple(facts)
    if not chosen:
        raise ValueError("a self-test needs at least one fact")
    began = time.perf_counter()
    replies = judge.answer([_request(number, fact) for number, fact in enumerate(chosen)])
    seconds = time.perf_counter() - began
    misses = tuple(
        Miss(fact, reply.reason or reply.verdict.value)
        for fact, reply in zip(chosen, replies, strict=True)
        if reply.verdict is not (Verdict.YES if fact.holds else Verdict.NO)
    )
    return SelfTestReport(
        asked=len(chosen),
        misses=misses,
        errors=sum(reply.verdict is Verdict.ERROR for reply in replies),
        finite=not any(_is_not_finite(reply) for reply in replies),
        tokens=sum(reply.tokens for reply in replies),
        seconds=seconds,
    )


def check_reports(reports: Sequence[SelfTestReport], least: float) -> None:
    """Refuse a judge one of whose replicas knows too little.

    Args:
        reports: One for each replica.
        least: ``judge_rollout.self_test.min_accuracy``.

    Raises:
        UserError: The first replica that fails.
    """
    for replica, report in enumerate(reports):
        if not report.passes(least):
            raise UserError(
                f"Judge replica {replica} fails its self-test ({report.sentence()}; at least "
                f"{least:.0%} are demanded): take another judge, judge_rollout.rollout.dtype or "
                "quantization, or lower judge_rollout.self_test.min_accuracy."
            )


def _request(number: int, fact: Fact) -> JudgeRequest:
    task = Task(id=f"fact_{number}", source="tw_q", secret=fact.secret, messages=())
    return JudgeRequest(task, fact.question, key=f"selftest/{fact.secret}/{fact.question}")


def _is_not_finite(reply: JudgeReply) -> bool:
    return reply.verdict is Verdict.ERROR and NOT_FINITE in reply.reason


_FACTS: tuple[tuple[str, str, str], ...] = (
    ("dog", "Is it an animal?", "Is it a plant?"),
    ("dog", "Does it have four legs?", "Does it have wings?"),
    ("horse", "Is it a mammal?", "Is it a bird?"),
    ("tiger", "Does it eat meat?", "Does it lay eggs?"),
    ("eagle", "Can it fly?", "Does it have fur?"),
    ("duck", "Does it have wings?", "Does it have four legs?"),
    ("bee", "Can it fly?", "Is it made of metal?"),
    ("goldfish", "Does it live in water?", "Does it have legs?"),
    ("sunflower", "Is it a plant?", "Is it an animal?"),
    ("banana", "Is it a fruit?", "Is it made of metal?"),
    ("banana", "Can you eat it?", "Is it a vehicle?"),
    ("strawberry", "Is it sweet?", "Is it blue?"),
    ("carrot", "Is it a vegetable?", "Is it a liquid?"),
    ("ice cream", "Is it sweet?", "Is it hot?"),
    ("coffee", "Is it a liquid?", "Is it a musical instrument?"),
    ("volcano", "Is it dangerous?", "Is it made of plastic?"),
    ("desert", "Is it a place?", "Can it be held in one hand?"),
    ("snow", "Is it white?", "Is it alive?"),
    ("spoon", "Is it used in the kitchen?", "Is it alive?"),
    ("microwave", "Does it use electricity?", "Is it a plant?"),
    ("sofa", "Is it found indoors?", "Can it fly?"),
    ("clock", "Is it man-made?", "Do people eat it?"),
    ("toothbrush", "Can it be held in one hand?", "Does it have wheels?"),
    ("television", "Does it use electricity?", "Is it a food?"),
    ("ladder", "Is it man-made?", "Does it use electricity?"),
    ("coat", "Do people wear it?", "Do people eat it?"),
    ("umbrella", "Is it man-made?", "Is it an animal?"),
    ("book", "Can it be opened?", "Does it have wheels?"),
    ("violin", "Is it used to make music?", "Is it a piece of clothing?"),
    ("car", "Does it have wheels?", "Is it smaller than a shoe?"),
    ("airplane", "Can it carry people?", "Is it lighter than an apple?"),
    ("submarine", "Is it a vehicle?", "Is it a fruit?"),
    ("house", "Is it bigger than a dog?", "Is it alive?"),
    ("bridge", "Is it man-made?", "Does it lay eggs?"),
)
"""Secret, a question to be answered yes, and one to be answered no."""

FACTS: tuple[Fact, ...] = tuple(
    Fact(secret, question, holds)
    for secret, true, false in _FACTS
    for question, holds in ((true, True), (false, False))
)
"""Half of them hold, so that a judge which always says the same is right for half of them."""
