"""How often a judge says what the table says, by kind of question, through the judge's own path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.envs.base import Judge
from delta_belief_rl.eval.statistics import Interval, cluster_bootstrap
from delta_belief_rl.judge.parsing import VERDICTS
from delta_belief_rl.trainer.teach.cases import Case
from delta_belief_rl.types import Verdict


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of question.

    Attributes:
        right: Share with the table's answer, with a 95 % interval over things; a question without
            an answer is wrong.
        errors: Questions without any answer.
    """

    questions: int
    right: Interval
    errors: int

    def as_dict(self) -> dict[str, float | int]:
        """Plain numbers."""
        return {
            "questions": self.questions,
            "things": self.right.units,
            "right": self.right.value,
            "low": self.right.low,
            "high": self.right.high,
            "errors": self.errors,
        }


def measure(
    judge: Judge, kinds: Mapping[str, Sequence[Case]], seed: int, batch: int = 32
) -> dict[str, Measured]:
    """Ask a judge; kinds without a question are left out.

    Args:
        judge: Any judge.
        kinds: Cases by kind.
        seed: Names the draws of the intervals.
        batch: Questions that the judge is handed at once.
    """
    return {kind: _measured(judge, cases, seed, batch) for kind, cases in kinds.items() if cases}


def _measured(judge: Judge, cases: Sequence[Case], seed: int, batch: int) -> Measured:
    things = sorted({case.request.task.secret for case in cases})
    place = {thing: number for number, thing in enumerate(things)}
    right, asked = (np.zeros(len(things)) for _ in range(2))
    errors = 0
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        replies = judge.answer([case.request for case in part])
        for case, reply in zip(part, replies, strict=True):
            at = place[case.request.task.secret]
            asked[at] += 1
            right[at] += reply.verdict is VERDICTS[case.answer.lower()]
            errors += reply.verdict is Verdict.ERROR
    return Measured(len(cases), cluster_bootstrap(right, asked, seed=seed), errors)
