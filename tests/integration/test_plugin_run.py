"""Environments of a user's own train, validate, resume and are evaluated through the same code."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import yaml
from conftest import RAY_IS_LATE, START_SECONDS, start, to_end

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.types import Verdict
from tests.runs import ROOT, Killed, Trace, assert_same_run, play, without_ray, words

EXAMPLE = ROOT / "docs" / "examples" / "guess_the_number.py"
AGENT = ROOT / "delta_belief_rl" / "assets" / "agent"
NAME = "guess_the_number"
STEPS = 2
ASKS = '''
"""Questions about a secret word, which a judge that comes along answers."""

from dataclasses import dataclass, replace

from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.plugin import EnvPlugin
from delta_belief_rl.envs.single_use import SingleUseGame
from delta_belief_rl.types import Message, Task, Verdict


@dataclass(frozen=True)
class State:
    turns: int = 0
    done: bool = False
    feedback: str = ""


class Letters(SingleUseGame):
    def __init__(self, task, options):
        self.task, self.options, self._state = task, options, State()

    def parse(self, text):
        return Action(text, text.strip() or None, needs_judge=bool(text.strip()))

    def judge_request(self, action):
        return JudgeRequest(self.task, action.text)

    def apply(self, action, reply):
        self._check_call(action, reply)
        turns = self._state.turns + 1
        won = reply is not None and reply.verdict is Verdict.WIN
        done = won or turns >= self.options.max_turns
        self._state = replace(self._state, turns=turns, done=done)
        if reply is None:
            return Outcome(Verdict.INVALID, "Say something.", done)
        return Outcome(reply.verdict, reply.text or "No answer.", done, won, won)


class Judge:
    def answer(self, requests):
        return [self._answer(one.task.secret, one.action) for one in requests]

    def _answer(self, secret, text):
        if secret in text.split():
            return JudgeReply(Verdict.WIN, "Yes, that is it.")
        shared = bool(set(secret) & set(text))
        return JudgeReply(*((Verdict.YES, "Yes") if shared else (Verdict.NO, "No")))


WORDS = {"train": ["dog", "cow", "bee", "owl"], "val": ["cat", "fox"], "test": ["bat", "pig"]}


def tasks(split, options):
    opening = (Message("user", "Find the secret thing."),)
    return [Task(f"{split}_{word}", "letters", word, opening, split) for word in WORDS[split]]


ENVIRONMENTS = {"letters": EnvPlugin(lambda o: lambda t: Letters(t, o), tasks, Judge)}
'''

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    path = tmp_path / "letters.py"
    path.write_text(ASKS)
    return path


def own(path: Path | str, env: str, *more: str) -> list[str]:
    """Settings of a run of two steps, each with two games of two tasks."""
    return [
        f"plugins=[{path}]",
        f"multi_turn.env={env}",
        "judge=rules",
        "data.world=null",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "multi_turn.train.n=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=1",
        *more,
    ]


def number(path: Path | str = EXAMPLE) -> list[str]:
    return own(path, NAME, "multi_turn.env_kwargs.highest=10")


def command(out: Path, *more: str) -> list[str]:
    return [*words(out, Path("null")), *more]


def test_the_example_trains_validates_and_is_tested_through_the_loop(tmp_path: Path) -> None:
    out = tmp_path / "run"
    status, _ = play(command(out, *number()))
    assert status == 0
    records = read_records(out / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    assert all(record["actor/grad_norm"] > 0 for record in trained)
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert len(games) == 2 * 2
    assert {game.task.source for game in games} == {NAME}
    assert {game.turns[0].state_key for game in games} == {"1-10"}
    assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in games)
    assert all(game.count(Verdict.ERROR) == 0 for game in games)
    validated = read_trajectories(out / "validation" / f"{STEPS}.jsonl").trajectories
    assert {game.task.id for game in validated} == {"val_5", "val_10"}
    assert json.loads((out / "final.json").read_text())


def test_a_judge_of_a_plug_in_answers_in_the_judges_own_workers(
    tmp_path: Path, letters: Path
) -> None:
    out = tmp_path / "run"
    status, trace = play(command(out, *own(letters, "letters", "judge_rollout.replicas=2")))
    assert status == 0
    assert "JudgeWorker.answer" in trace.names
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    verdicts = {turn.verdict for game in games for turn in game.turns}
    assert verdicts & {Verdict.YES, Verdict.NO}
    assert Verdict.ERROR not in verdicts


@pytest.mark.fault
def test_R2_a_run_that_was_cut_off_goes_on_with_its_plug_in_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    status, trace = play(command(tmp_path / "straight", *number("mine.py")))
    assert status == 0
    # Step 2 is played and trained; its record is there, its checkpoint is not.
    at = [i for i, name in enumerate(trace.names) if name == "MetricsLog.append done"][2]
    out = tmp_path / "run"
    with pytest.raises(Killed):
        play(command(out, *number("mine.py")), kill_at=at)
    stored = yaml.safe_load((out / "config.yaml").read_text())
    assert stored["plugins"] == [str(tmp_path / "mine.py")]
    monkeypatch.chdir(ROOT)
    status, _ = play(["--config", str(out / "config.yaml")])
    assert status == 0
    assert_same_run(tmp_path / "straight", out)


@pytest.mark.fault
def test_R2_processes_of_a_run_through_ray_load_the_plug_in_also_after_sigkill(
    tmp_path: Path, letters: Path
) -> None:
    out, more = tmp_path / "run", own(letters, "letters")
    world = Path("null")
    run = start(out, world, *more)
    deadline = time.monotonic() + START_SECONDS
    while len(read_records(out / "metrics.jsonl")) < 2 and run.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert run.kill() or run.process.returncode == 0 or RAY_IS_LATE in run.output, run.output[
        -4000:
    ]
    shutil.rmtree(to_end(out, world, *more).scratch, ignore_errors=True)
    records = read_records(out / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, STEPS]
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert all(turn.verdict is not Verdict.ERROR for game in games for turn in game.turns)


def test_an_environment_of_a_plug_in_is_evaluated(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eval"
    asked = ["eval", "letters", f"plugins=[{letters}]", "hardware=cpu", "--model", str(AGENT)]
    asked += ["--turns", "3", "--samples", "2", "--beliefs", "--out", str(out), "--json"]
    asked += ["actor_rollout_ref.num_threads=1", "trainer.logger=[console]"]
    asked += ["data.max_response_length=12", "data.max_prompt_length=200"]
    for _ in range(2):  # the second time there is nothing to play
        with without_ray(Trace()):
            assert cli(asked) == 0
        (cell,) = json.loads(capsys.readouterr().out)["cells"]
        assert (cell["benchmark"], cell["games"], cell["secrets"]) == ("letters", 4, 2)
        assert cell["conditions"]["tasks"] == "letters"
        assert cell["failed_games"] == 0
