"""Methods of credit train through the whole loop, and say at the start what they need."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.jsonl import read_records
from tests.runs import games_of, metrics_of, play, words, write_world

pytestmark = pytest.mark.slow
STEPS = 2
METHODS = (
    *("grpo_passk", "opo", "mt_grpo", "gigpo", "hgpo", "graphgpo", "state_progress"),
    *("pearl", "starpo_s", "dapo", "decay", "reinforce_plus_plus", "graph_opd"),
)
SETTINGS = ("starpo_s", "dapo", "decay")
"""Groups of settings around a method of another name."""
WITHOUT_HOOK = """
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.plugin import EnvPlugin
from delta_belief_rl.types import Message, Task, Verdict


class Maze:
    def __init__(self, task):
        self.task = task

    def parse(self, text):
        return Action(text, text, needs_judge=False)

    def judge_request(self, action):
        return JudgeRequest(self.task, action.text)

    def apply(self, action, reply):
        return Outcome(Verdict.WIN, "Out.", True, True, True)


def tasks(split, options):
    opening = (Message("user", "Go."),)
    return [Task(f"{split}_{n}", "maze", "left", opening, split) for n in range(4)]


ENVIRONMENTS = {"maze": EnvPlugin(make=lambda options: Maze, tasks=tasks)}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def command(out: Path, world: Path, method: str, *more: str) -> list[str]:
    """The method's own group, on the embedded world.

    Beliefs are paid, because three turns are too short to win, and equal games teach nothing.
    """
    return words(
        out,
        world,
        f"algorithm={method}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.final_test=false",
        "multi_turn.logprob_reward.enabled=true",
        *more,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_through_the_loop_by_its_own_group(
    method: str, tmp_path: Path, world: Path
) -> None:
    # Nobody wins in three turns, so that outcomes do not differ, but beliefs do.
    more = {
        "dapo": "algorithm.filter_groups.metric=seq_reward",
        "decay": "algorithm.process_reward.horizon=4",
    }
    own = [word for name, word in more.items() if name == method]
    wanted = command(tmp_path / "run", world, method, *own)
    chosen = load_config(wanted)[0].algorithm
    assert method in (chosen.adv_estimator, *chosen.transforms, *SETTINGS)
    assert play(wanted)[0] == 0
    trained = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    groups = 1 if method == "starpo_s" else 4
    assert all(record["critic/num_groups"] == groups for record in trained)
    assert all(record["critic/frac_dead_groups"] < 1 for record in trained)
    assert all(record["actor/grad_norm"] > 0 for record in trained)
    for record in trained:
        counted = {name for name in record if "state" in name and name.startswith("critic/")}
        if method in ("gigpo", "hgpo", "graphgpo"):
            # The games of a secret all begin in one state.
            assert record["critic/mean_state_group_size"] > 1
            assert record["critic/frac_lone_states"] < 1
        else:
            assert counted == set()


def test_R2_a_resumed_run_compares_the_states_that_the_straight_one_did(
    tmp_path: Path, world: Path
) -> None:
    assert play(command(tmp_path / "straight", world, "hgpo"))[0] == 0
    first = command(tmp_path / "cut", world, "hgpo")
    assert play([*first, "trainer.total_training_steps=1"])[0] == 0
    assert play(first)[0] == 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "straight")
    assert games_of(tmp_path / "cut") == games_of(tmp_path / "straight")


@pytest.mark.parametrize(("method", "name"), [("gigpo", "GiGpo"), ("hgpo", "Hgpo")])
def test_an_environment_that_names_no_state_is_refused_where_states_are_compared(
    method: str, name: str, tmp_path: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "maze_without_states.py", tmp_path / "run"
    path.write_text(dedent(WITHOUT_HOOK), encoding="utf-8")
    own = [f"plugins=['{path}']", "multi_turn.env=maze", "data.world=null", "judge=rules"]
    own += ["multi_turn.logprob_reward.enabled=false"]
    assert play(command(out, world, method, *own))[0] == 2
    said = capsys.readouterr().err
    assert f"{name} needs the hook state_key, which the environment maze does not have" in said
    assert "Traceback" not in said
    assert not (out / "metrics.jsonl").exists()
    with_hook = WITHOUT_HOOK.replace(
        "    def parse", '    def state_key(self):\n        return "start"\n\n    def parse'
    )
    path = tmp_path / "maze_with_states.py"
    path.write_text(with_hook, encoding="utf-8")
    own[0] = f"plugins=['{path}']"
    assert play(command(out, world, method, *own))[0] == 0
    assert len(read_records(out / "metrics.jsonl")) > STEPS
