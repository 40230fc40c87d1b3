"""Groups, a chat format, an engine and a service for the tests of rules that models write."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from delta_belief_rl.algo.scorers.hints import HintSettings
from delta_belief_rl.algo.scorers.roles import Roles
from delta_belief_rl.algo.scorers.rubric import RubricScorer, RubricSettings
from delta_belief_rl.algo.scorers.rubric_contrast import Contrast
from delta_belief_rl.engines.api_answer import ApiAnswer, ApiFault
from delta_belief_rl.engines.api_client import ApiReply
from delta_belief_rl.engines.base import FinishReason, SamplingParams
from delta_belief_rl.engines.fake_engine import FakeEngine, Fault
from delta_belief_rl.engines.pump import EnginePump, EngineRouter
from delta_belief_rl.trainer.rubrics import PolicyWriter, RubricModels, ServiceChecker
from delta_belief_rl.types import Group, Message, StopReason, Task, Trajectory, Turn, Verdict

MODEL = RubricSettings(writer="model", verifier="model")
RETURNS = (1, 0, 1, 0)
SATISFACTION = np.array([[0.9, 0.2, 0.7, 0.3], [0.5, 0.5, 0.5, 0.5], [0.6, 0.7, 0.8, 0.1]])
RULES = ("Be bold.", "Be calm.", "Be quick.")
WRITTEN = "".join(f"<bundle>\n- {rule}\n</bundle>\n" for rule in RULES)


class Letters:
    """A chat format in which every character is a token."""

    eot_id = 3
    after_reply = ""

    def open_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.encode("".join(message.content for message in messages))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)).replace(chr(self.eot_id), "")


LETTERS: Any = Letters()


def game_of(task: Task, number: int, won: bool, turns: int = 2) -> Trajectory:
    """Turns that name their game; the last one wins or does not."""
    made = tuple(
        Turn(
            index=index,
            start=2 + 3 * index,
            end=4 + 3 * index,
            logprobs=(-0.1, -0.2),
            adapter_version=0,
            action=f"Question {number}.{index}?",
            reply="Finished" if won and index == turns - 1 else "No",
            verdict=Verdict.WIN if won and index == turns - 1 else Verdict.NO,
            strict_win=won and index == turns - 1,
            compatible_win=won and index == turns - 1,
        )
        for index in range(turns)
    )
    stop = StopReason.WIN if won else StopReason.TURN_LIMIT
    return Trajectory(task, number, tuple(range(2 + 3 * turns)), made, stop)


def group_of(name: str = "t_0", returns: Sequence[int] = RETURNS, turns: int = 2) -> Group:
    task = Task(name, "tw_q", "eagle", (Message("user", "Find it."),), aliases=("sea eagle",))
    games = [game_of(task, number, bool(won), turns) for number, won in enumerate(returns)]
    return Group(task, tuple(games))


def contrast_of(group: Group) -> Contrast:
    outcome = np.array([float(game.strict_win) for game in group.trajectories])
    found = Contrast.of(group.trajectories, outcome, 2, 2)
    assert found is not None
    return found


def models_of(**changes: Any) -> RubricModels:
    return replace(RubricModels(7, 10_000, 8_000, 500, 1.0, 30.0, 0.05), **changes)


@dataclass
class Service:
    """Answers checks by a table: the satisfaction of a rule by a game."""

    said: Callable[[str, int], str | None]
    finish: FinishReason = FinishReason.STOP
    seconds: Mapping[int, float] = field(default_factory=dict[int, float])
    seeds: list[int] = field(default_factory=list[int])
    shown: list[str] = field(default_factory=list[str])
    closed: bool = False

    async def complete(
        self, messages: Sequence[Message], sampling: SamplingParams, seed: int
    ) -> ApiReply:
        assert sampling.temperature == 0
        text = messages[-1].content
        game = re.search(r"Question (\d+)\.", text)
        assert game is not None
        number = int(game[1])
        self.seeds.append(seed)
        self.shown.append(text)
        await asyncio.sleep(self.seconds.get(number, 0.0))
        rule = next(rule for rule in RULES if rule in text)
        said = self.said(rule, number)
        if said is None:
            return ApiReply(None, (ApiFault.TIMEOUT,), "it is silent", 0.0)
        return ApiReply(ApiAnswer(said, self.finish), (), "", 0.0)

    async def close(self) -> None:
        self.closed = True


def by_table(rule: str, game: int) -> str:
    return f"1: {SATISFACTION[RULES.index(rule), game]}"


@dataclass
class Played:
    """A scorer with its models; ``run`` prepares it."""

    engine: FakeEngine
    service: Service
    models: RubricModels = field(default_factory=models_of)
    pumped: bool = False

    def roles(self) -> Roles:
        engine = (
            EnginePump(self.engine.step, self.engine.release_all) if self.pumped else self.engine
        )
        writer = PolicyWriter(EngineRouter([engine]), LETTERS, self.models)
        return Roles(writer, ServiceChecker(self.service, LETTERS, self.models))

    def run(
        self, *groups: Group, step: int = 1, rubric: RubricSettings = MODEL
    ) -> tuple[list[str | None], dict[str, float]]:
        scorer = RubricScorer(HintSettings(), rubric)
        ready, told = asyncio.run(scorer.prepare(groups, self.roles(), step))
        return ready.hints(groups), dict(told)


def played(
    written: str | Callable[[Any], str] = WRITTEN,
    said: Callable[[str, int], str | None] = by_table,
    *,
    faults: Mapping[tuple[str, int], Fault] | None = None,
    pumped: bool = False,
    service: Service | None = None,
    **changes: Any,
) -> Played:
    script = written if callable(written) else (lambda _request: written)
    engine = FakeEngine(script, LETTERS.encode, faults=faults)
    return Played(engine, service or Service(said), models_of(**changes), pumped)
