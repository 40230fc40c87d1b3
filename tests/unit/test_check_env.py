"""``delta-belief check-env``: what it prints, a breach, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from delta_belief_rl.cli.main import main as cli
from tests.runs import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "guess_the_number.py"
GAME = """
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.plugin import EnvPlugin
from delta_belief_rl.types import Message, Task, Verdict

SHARED = []

class Game:
    def __init__(self, task, options):
        self.task, self.turns, self.done = task, 0, False

    def parse(self, text):
        return Action(text, text or None, needs_judge={needs_judge} and bool(text))

    def judge_request(self, action):
        {request}
        return JudgeRequest(self.task, action.text)

    def apply(self, action, reply):
        if (reply is None) == action.needs_judge:
            raise ValueError("a reply is missing")
        {step}
        return Outcome(reply.verdict if reply else Verdict.OTHER, said, False)

{more}
class Judge:
    def answer(self, requests):
        return {replies}

def tasks(split, options):
    return {tasks}

ENVIRONMENTS = {{"maze": EnvPlugin(lambda o: lambda t: Game(t, o), tasks, {judge})}}
"""
ONE = "[Task(f'{split}_1', 'maze', 'left', (Message('user', 'Go.'),), split)]"
FINE = {
    "step": "said = 'On.'",
    "needs_judge": "False",
    "replies": "[JudgeReply(Verdict.YES, 'Yes') for _ in requests]",
    "tasks": ONE,
    "judge": "Judge",
    "more": "",
    "request": "pass",
}


def written(folder: Path, **changes: str) -> str:
    path = folder / "maze.py"
    path.write_text(dedent(GAME).format(**{**FINE, **changes}))
    return str(path)


def words(path: Path | str, *more: str, env: str = "maze") -> list[str]:
    return ["check-env", f"plugins=[{path}]", f"multi_turn.env={env}", "judge=rules", *more]


def test_it_says_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(words(EXAMPLE, "--tasks", "2", env="guess_the_number")) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "guess_the_number keeps the contract of an environment.",
        "train 2 of 60 tasks: train_2, train_3",
        "val 2 of 20 tasks: val_5, val_10",
        "test 2 of 20 tasks: test_1, test_6",
        "judge rules",
        "hooks state_key, progress, belief, snapshot, restore, feedback, action_key",
    ]


def test_it_says_so_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(words(written(tmp_path), "judge_rollout.name=hf", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["judge"] == "alternating yes and no"
    assert found["hooks"] == []
    assert found["replayable"] is None
    assert found["splits"]["val"] == {"tasks": 1, "checked": ["val_1"]}


def test_the_secret_is_played_as_a_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = "said = 'x' if action.text != self.task.secret else ''"
    assert cli(words(written(tmp_path, step=step))) == 1
    assert "'Outcome.reply' must not be empty" in capsys.readouterr().out


def test_an_environment_of_this_package_is_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["check-env", "experiment=quickstart", "--tasks", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["environment"], found["judge"]) == ("twenty_questions", "world")
    assert "belief" in found["hooks"]


SAYS = "    def replayable(self):\n        return {}\n"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("True", "replay the same actions and replies lead to the same state"),
        ("False", "replay games say that they cannot be played again"),
        ("self.task.id != 'val_1'", "replay games say that they cannot be played again"),
    ],
)
def test_it_says_whether_games_can_be_played_again(
    said: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, more=SAYS.format(said))
    assert cli(words(path)) == 0
    lines = [" ".join(one.split()) for one in capsys.readouterr().out.splitlines()]
    assert lines[-2:] == ["hooks replayable", line]
    assert cli(words(path, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["replayable"] is (said == "True")


BREACHES = {
    "shared state": (
        {"step": "SHARED.append(1); said = f'{len(SHARED)}'"},
        "train_1: Environment contract: two games with the same actions went differently.",
    ),
    "no reply": ({"step": "said = ''"}, "'Outcome.reply' must not be empty"),
    "its own error": (
        {"step": "said = {}['size']"},
        "train_1: the environment failed with KeyError: 'size' (maze.py, line ",
    ),
    "its tasks": ({"tasks": "[1 / 0]"}, "the environment failed with ZeroDivisionError: division"),
    "no judge": (
        {"needs_judge": "True", "judge": "None"},
        "an action needs a judge, and none is there: The environment 'maze' brings no judge",
    ),
    "replayable by name only": (
        {
            # What was asked is told to the game beside its actions and replies.
            "needs_judge": "True",
            "step": "said = getattr(self, 'asked', 'Nothing was asked.')",
            "request": "self.asked = 'Asked.'",
            "more": SAYS.format("True"),
        },
        "train_1: Environment contract: 'replayable' is true, but a game went differently with",
    ),
    "no bool": ({"more": SAYS.format("'yes'")}, "'replayable' must return a bool"),
    "no answer": (
        {"needs_judge": "True", "replies": "[]"},
        "train_1: the judge gave 0 replies to one request.",
    ),
}


@pytest.mark.parametrize("case", BREACHES)
def test_a_breach_is_one_sentence_and_status_1(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, part = BREACHES[case]
    # The first turn needs a reply that no failed judge gives.
    changes = {"step": "said = reply.text or 'Error.' if reply else 'On.'", **changes}
    assert cli(words(written(tmp_path, **changes))) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert part in line


BAD_INPUT = {
    "no plug-in": (["multi_turn.env=maze"], "multi_turn.env does not know maze"),
    "no file": (["plugins=[/no/maze.py]", "multi_turn.env=maze"], "does not exist"),
    "no such key": (["plugin=[/no/maze.py]"], "There is no setting plugin; did you mean plugins?"),
    "no count": (["--tasks", "0"], "--tasks must be at least 1, not 0."),
    "options": (
        [f"plugins=[{EXAMPLE}]", "multi_turn.env=guess_the_number", "multi_turn.env_kwargs.size=1"],
        "multi_turn.env_kwargs has size: guess_the_number reads highest only.",
    ),
    "nobody reads": (["multi_turn.env_kwargs.size=1"], "multi_turn.env_kwargs is for environments"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more, part = BAD_INPUT[case]
    assert cli(["check-env", "judge=rules", *more]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("delta-belief check-env: ")
    assert part in line


def test_without_a_task_nothing_can_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(words(written(tmp_path, tasks="[]"))) == 2
    assert "maze has no task that could be played." in capsys.readouterr().err
