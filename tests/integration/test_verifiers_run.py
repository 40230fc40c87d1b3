"""A run over an environment of verifiers: it trains, validates and is tested like any other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.types import Verdict
from tests.runs import ROOT, play, words

pytest.importorskip(
    "verifiers", reason="the library verifiers is not installed; docs/verifiers.md says how"
)

STEPS = 2
NUMBERS = """
import verifiers as vf
from datasets import Dataset

class Number(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        right = messages[-1]["content"].strip() == state["answer"]
        reply = [vf.UserMessage(content="Yes" if right else "No")]
        if right:
            state["final_env_response"] = reply
        return reply

def exact(completion, answer):
    return float(any(one["content"].strip() == answer for one in completion))

def talks(completion):
    return float(any(one["role"] == "user" for one in completion))

def load_environment(rows=12):
    dataset = Dataset.from_list([{"question": "Which?", "answer": str(n)} for n in range(rows)])
    return Number(dataset=dataset, rubric=vf.Rubric(funcs=[exact, talks], weights=[0.8, 0.2]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_verifiers_environment_trains_validates_and_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vf_number.py").write_text(NUMBERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "run"
    status, _ = play(
        [
            *words(out, Path("null")),
            "plugins=[delta_belief_rl.envs.verifiers]",
            "multi_turn.env=verifiers",
            "multi_turn.env_kwargs={environment: vf-number, tasks: {train: 8, val: 2, test: 2}}",
            "judge=rules",
            "data.world=null",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "multi_turn.train.n=2",
            f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=1",
        ]
    )
    assert status == 0
    trained = [record for record in read_records(out / "metrics.jsonl") if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert len(games) == 2 * 2
    assert all(game.count(Verdict.ERROR) == 0 for game in games)
    assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in games)
    # Who never names the number is paid for having been answered alone.
    assert {game.turns[-1].score for game in games} <= {0.2, 1.0, 0.8}
    assert {turn.reply for game in games for turn in game.turns} <= {"Yes", "No"}
    validated = read_trajectories(out / "validation" / f"{STEPS}.jsonl").trajectories
    assert {game.task.id for game in validated} == {"train_8", "train_9"}
    assert (out / "final.json").is_file()


def test_U5_the_command_of_the_page_has_a_plan(tmp_path: Path) -> None:
    (tmp_path / "wordle.py").write_text(NUMBERS)
    page = (ROOT / "docs" / "verifiers.md").read_text()
    found = re.findall(r"^python (train\.py .*)$", page, flags=re.M)
    assert len(found) == 1
    done = subprocess.run(
        [sys.executable, *shlex.split(found[0]), "--dry-run"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rules judge, verifiers" in done.stdout
