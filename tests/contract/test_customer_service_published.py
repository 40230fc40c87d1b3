"""The published scenarios of Customer Service are read, judged by code, and played.

The file lies beside the repository (``../shared/data``); where it is absent they are skipped.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delta_belief_rl.envs.base import JudgeReply, Outcome
from delta_belief_rl.envs.customer_service.data import scenarios
from delta_belief_rl.envs.customer_service.derived import derived_rubric
from delta_belief_rl.envs.customer_service.game import CustomerService, CustomerServiceSettings
from delta_belief_rl.envs.customer_service.reading import read_named
from delta_belief_rl.envs.parquet import read_parquet
from delta_belief_rl.judge.customer_service.rules import CustomerServiceRules
from delta_belief_rl.judge.customer_service.script import PARSERS, messages
from delta_belief_rl.types import Task, Verdict

FILE = Path(__file__).resolve().parents[2].parent / "shared/data/envs/customer_service/test.parquet"
NUM_ROWS = 200


@pytest.fixture(scope="module")
def published() -> list[Task]:
    if not FILE.is_file():
        pytest.skip(f"{FILE} is absent: the published scenarios cannot be read")
    return read_parquet(str(FILE), system_key=None)


def test_every_row_is_a_task_with_a_scenario(published: list[Task]) -> None:
    assert len(published) == NUM_ROWS
    for task in published:
        assert task.source == "customer_service"
        assert task.scenario is not None
        assert task.scenario in task.messages[0].content


def test_every_golden_answer_gives_a_rubric_that_it_meets(published: list[Task]) -> None:
    for task in published:
        rubric = derived_rubric(task.secret)
        assert rubric is not None, task.secret
        assert read_named(task.secret, rubric).solved, task.secret


def test_no_scenario_names_its_own_cause(published: list[Task]) -> None:
    for task in published:
        rubric = derived_rubric(task.secret)
        assert rubric is not None
        assert not read_named(task.scenario or "", rubric).solved, task.scenario


def test_a_game_is_played_with_a_scripted_judge(published: list[Task]) -> None:
    script = [
        "<answer>I am not sure. It's in the kitchen.</answer>",
        "I cannot say.",
        "It is. <answer>Thank you! Goal reached.</answer>",
    ]
    env = CustomerService(published[0], CustomerServiceSettings())
    said = ["Where does it stand?", "Is there any noise?", published[0].secret]
    outcomes: list[Outcome] = []
    for text, written in zip(said, script, strict=True):
        action = env.parse(text)
        request = env.judge_request(action)
        assert published[0].secret in messages(request, "cot")[1].content
        parsed = PARSERS["published"](written, True, True)
        reply = JudgeReply(parsed.verdict, parsed.text, parsed.reason)
        outcomes.append(env.apply(action, reply))
    verdicts = [outcome.verdict for outcome in outcomes]
    assert verdicts == [Verdict.OTHER, Verdict.OTHER, Verdict.WIN]
    last = outcomes[-1]
    assert (last.done, last.strict_win, last.compatible_win) == (True, True, True)
    history = env.judge_request(env.parse("Thanks.")).history
    assert history[0] == ("Where does it stand?", "i am not sure. its in the kitchen.")


def test_the_packaged_customer_declines_published_scenarios(published: list[Task]) -> None:
    env = CustomerService(published[0], CustomerServiceSettings())
    request = env.judge_request(env.parse("Where does it stand?"))
    assert CustomerServiceRules().answer([request])[0].verdict is Verdict.ERROR


def test_packaged_scenarios_share_no_text_with_the_published_ones(published: list[Task]) -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[at : at + 7]) for at in range(len(words) - 6)}

    theirs = {run for task in published for run in runs(task.secret) | runs(task.scenario or "")}
    for scenario in scenarios().values():
        ours = runs(scenario.complaint) | runs(scenario.answer)
        assert not ours & theirs, scenario.id
