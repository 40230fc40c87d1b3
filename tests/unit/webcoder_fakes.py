"""Small projects and tasks for the tests of the environment webcoder."""

from __future__ import annotations

import json
from collections.abc import Sequence

from delta_belief_rl.envs.base import Outcome
from delta_belief_rl.envs.webcoder.game import WebCoder
from delta_belief_rl.types import (
    Message,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

PAGE = '<h1>Tea</h1>\n<span id="a">0</span>\n<button id="plus">Add</button>\n'
RULES = '{"rules": [{"on": "click", "of": "#plus", "do": [{"increment": "#a", "by": 1}]}]}'
HEADING = {
    "id": "h",
    "weight": 2,
    "since": "reproduce",
    "steps": [{"holds": ["text", "h1", "Tea"]}],
}
BUTTON = {"id": "b", "weight": 1, "since": "reproduce", "steps": [{"holds": ["exists", "#plus"]}]}
ADDS = {
    "id": "a",
    "weight": 1,
    "since": "reproduce",
    "steps": [{"events": [["click", "#plus"]], "holds": ["text", "#a", "1"]}],
}


def job(kind: str, fault: dict[str, str] | None = None) -> dict[str, object]:
    solution = {"index.html": PAGE, "app.json": RULES + "\n"}
    return {"kind": kind, "text": f"{kind} it.", "solution": solution, "fault": fault or {}}


def task(
    *jobs: dict[str, object], requirements: Sequence[object] = (HEADING, BUTTON, ADDS)
) -> Task:
    scenario = {"family": "x", "jobs": list(jobs), "requirements": list(requirements)}
    opening = (Message("user", "Task 1"),)
    return Task("t", "webcoder", "the rules", opening, scenario=json.dumps(scenario))


THREE = task(job("reproduce"), job("generate"), job("modify"))


def block(path: str, text: str) -> str:
    return f"```{path}\n{text}\n```\n"


def do(env: WebCoder, *texts: str) -> list[Outcome]:
    return [env.apply(env.parse(text), None) for text in texts]


def played(env: WebCoder, *texts: str, stop: StopReason = StopReason.TURN_LIMIT) -> Trajectory:
    """A trajectory as a rollout would store it."""
    turns = [
        Turn(n, n, n + 1, (0.0,), 0, text, outcome.reply, outcome.verdict,
             diagnostics=outcome.diagnostics, score=outcome.score)
        for n, (text, outcome) in enumerate(zip(texts, do(env, *texts), strict=True))
    ]  # fmt: skip
    return Trajectory(env.task, 0, tuple(range(len(turns))), tuple(turns), stop)
