"""The Ray actor of a judge replica, which only translates between Ray and the judge's room.

It stands apart from the actors of the policy: the process of a judge that asks no model starts
without PyTorch and transformers.
"""

from __future__ import annotations

from delta_belief_rl.cluster.members import Present, remote_worker
from delta_belief_rl.engines.base import EngineState
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.build import JudgeSettings, build_judge
from delta_belief_rl.judge.selftest import SelfTestReport, self_test
from delta_belief_rl.judge.vllm_judge import VllmJudge


@remote_worker()
class JudgeWorker(Present):
    """One replica of the judge."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._judge = build_judge(settings)

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """One reply for each request, in their order."""
        return self._judge.answer(requests)

    def self_test(self) -> SelfTestReport:
        """What it makes of plain facts."""
        return self_test(self._judge)

    def memory(self) -> list[dict[str, int]]:
        """Bytes that each GPU worker of the judge holds; empty for a judge without any."""
        return self._judge.memory() if isinstance(self._judge, VllmJudge) else []

    def sleep(self) -> str:
        """Give a GPU's memory back; returns the state, which of a judge without any is asleep."""
        return self._judge.sleep() if isinstance(self._judge, VllmJudge) else EngineState.ASLEEP

    def wake(self) -> None:
        """Take the GPU's memory again."""
        if isinstance(self._judge, VllmJudge):
            self._judge.wake()
