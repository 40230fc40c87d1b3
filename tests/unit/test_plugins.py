"""Environments of a user's own: loading, names, tasks, judges, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest

import train
from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cluster import app
from delta_belief_rl.config.compose import from_yaml, load_config, resolved_yaml
from delta_belief_rl.config.game_settings import game_digest, game_settings
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.check import check_env
from delta_belief_rl.envs.plugins import (
    SPLITS,
    check_plugins,
    find_plugin,
    load_plugins,
    plugin_tasks,
)
from delta_belief_rl.eval.benchmarks import find_benchmarks
from delta_belief_rl.eval.cells import Conditions
from delta_belief_rl.judge.build import RulesJudgeSettings, build_judge
from delta_belief_rl.trainer.doctor import CHECKS, examine
from delta_belief_rl.trainer.doctor_engine import DoctorSettings
from delta_belief_rl.trainer.environments import env_factory
from delta_belief_rl.trainer.judge_settings import judge_settings
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.types import Message, Task, UserError, Verdict
from tests.runs import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "guess_the_number.py"
PAGE = ROOT / "docs" / "add_an_environment.md"
NAME = "guess_the_number"
HEAD = """
from delta_belief_rl.envs.base import JudgeReply
from delta_belief_rl.envs.plugin import EnvPlugin
from delta_belief_rl.types import Message, Task, UserError, Verdict
"""
TASK = "Task(f'{split}_1', 'maze', 'left', (Message('user', 'Go.'),), split)"


def plugin(folder: Path, body: str, name: str = "maze_file.py") -> Path:
    path = folder / name
    path.write_text(HEAD + dedent(body))
    return path


def tasks_plugin(folder: Path, made: str, judge: str = "None") -> Path:
    """An environment ``maze`` whose tasks of every split are a list."""
    body = f"""
    class Echo:
        def answer(self, requests):
            return [JudgeReply(Verdict.YES, one.task.secret) for one in requests]

    def tasks(split, options):
        return {made}

    ENVIRONMENTS = {{"maze": EnvPlugin(make=lambda options: None, tasks=tasks, judge={judge})}}
    """
    return plugin(folder, body)


def words(path: Path | str, *more: str, env: str = "maze") -> list[str]:
    own = [f"plugins=['{path}']", f"multi_turn.env={env}", "data.world=null", "judge=rules"]
    return ["experiment=quickstart", *own, *more]


@cache
def composed(env: str, *more: str) -> RunConfig:
    return load_config(words("/a.py", *more, env=env))[0]


def config(path: Path | str, *more: str, env: str = "maze") -> RunConfig:
    """A composition takes long, so those that differ in the module only share one."""
    return replace(composed(env, *more), plugins=(str(path),))


# --- loading --------------------------------------------------------------------------------------


def test_a_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tasks_plugin(tmp_path, f"[{TASK}]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("maze_file.py", "./maze_file.py", "~/maze_file.py", str(path)):
        cfg = load_config(words(name))[0]
        assert cfg.plugins == (str(path),)
    monkeypatch.chdir("/")
    assert from_yaml(resolved_yaml(cfg)) == cfg
    assert set(load_plugins(cfg.plugins)) == {"maze"}


def test_a_module_is_named_with_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "own_envs_of_a_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    plugin(package, "ENVIRONMENTS = {'maze': EnvPlugin(make=lambda options: None)}", "maze.py")
    monkeypatch.syspath_prepend(tmp_path)
    cfg = config("own_envs_of_a_user.maze", "data.train_files=[a]", "data.val_files=[b]")
    assert cfg.plugins == ("own_envs_of_a_user.maze",)
    assert find_plugin(cfg) is not None


def test_a_file_is_imported_once_and_finds_those_beside_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "words_of_the_maze.py").write_text("WORD = 'exit'\n")
    body = f"""
    import dataclasses, pathlib
    from words_of_the_maze import WORD

    @dataclasses.dataclass(slots=True)
    class State:
        word: str = WORD

    with pathlib.Path({str(log)!r}).open("a") as file:
        file.write(State().word)
    ENVIRONMENTS = {{"maze": EnvPlugin(make=lambda options: None)}}
    """
    path = str(plugin(tmp_path, body))
    for _ in range(3):
        load_plugins([path])
    assert log.read_text() == "exit"


PLUGIN = "EnvPlugin(make=lambda options: None)"
BAD_MODULES = {
    "no mapping": ("x = 1", "has no mapping ENVIRONMENTS of names to EnvPlugin"),
    "a list": (f"ENVIRONMENTS = [{PLUGIN}]", "has no mapping ENVIRONMENTS"),
    "empty": ("ENVIRONMENTS = {}", "has no mapping ENVIRONMENTS"),
    "no plug-in": ("ENVIRONMENTS = {'maze': 3}", "has int for 'maze' in ENVIRONMENTS"),
    "a class": ("ENVIRONMENTS = {'maze': EnvPlugin}", "has type for 'maze' in ENVIRONMENTS"),
    "no name": (f"ENVIRONMENTS = {{3: {PLUGIN}}}", "calls an environment 3: name it with letters"),
    "a path": (f"ENVIRONMENTS = {{'a/b': {PLUGIN}}}", "calls an environment 'a/b'"),
    "taken": (f"ENVIRONMENTS = {{'twenty_questions': {PLUGIN}}}", "which this package has already"),
    "syntax": ("def f(:", "cannot be imported: SyntaxError: invalid syntax (maze_file.py, line 5)"),
    "import": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "its own": ("raise KeyError('size')", "cannot be imported: KeyError: 'size' (maze_file.py, li"),
    "a name": ("print(undefined)", "imported: NameError: name 'undefined' is not defined"),
    "a sentence": ("raise UserError('Do: pip install maze.')", "imported: Do: pip install maze."),
    "an exit": ("raise SystemExit(0)", "ends the program when it is imported"),
}


@pytest.mark.parametrize("case", BAD_MODULES)
def test_U2_a_module_that_cannot_be_used_is_told_in_one_sentence(case: str, tmp_path: Path) -> None:
    body, part = BAD_MODULES[case]
    path = plugin(tmp_path, body)
    with pytest.raises(UserError) as caught:
        load_plugins([str(path)])
    sentence = str(caught.value)
    assert sentence.startswith(f"The plug-in {str(path)!r} ")
    assert part in sentence
    assert "\n" not in sentence


def test_U2_a_module_that_cannot_be_used_ends_the_program_with_status_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = plugin(tmp_path, "raise KeyError('size')")
    assert train.main(words(path)) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"train.py: The plug-in {str(path)!r} cannot be imported: KeyError")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("no_such_module.maze", "'no_such_module.maze' cannot be imported: ModuleNotFoundError"),
        ("/no/such/maze.py", "'/no/such/maze.py' does not exist: correct the path in plugins"),
    ],
)
def test_a_module_that_is_not_there_is_told(name: str, part: str) -> None:
    with pytest.raises(UserError, match="plug-in") as caught:
        check_plugins(config(name))
    assert part in str(caught.value)


def test_a_name_that_two_modules_bring_is_refused(tmp_path: Path) -> None:
    paths = [plugin(tmp_path, f"ENVIRONMENTS = {{'maze': {PLUGIN}}}", f"{n}.py") for n in "ab"]
    with pytest.raises(UserError, match=r"the environment 'maze', which the plug-in .*a\.py"):
        load_plugins([str(path) for path in paths])


def test_unknown_names_are_refused_with_the_known_ones_those_of_plug_ins_included(
    tmp_path: Path,
) -> None:
    path = tasks_plugin(tmp_path, f"[{TASK}]")
    with pytest.raises(UserError) as caught:
        check_plugins(config(path, env="mazes"))
    sentence = str(caught.value)
    assert "multi_turn.env does not know mazes: choose from twenty_questions, " in sentence
    assert sentence.endswith(", maze; did you mean maze?")


# --- tasks ----------------------------------------------------------------------------------------


def test_the_default_files_are_not_those_of_a_plug_in(tmp_path: Path) -> None:
    cfg = load_config([f"plugins=[{tmp_path}/a.py]", "multi_turn.env=maze"])[0]
    assert (cfg.data.train_files, cfg.data.val_files) == ((), ())


def test_an_environment_makes_its_tasks_by_its_options() -> None:
    cfg = config(
        EXAMPLE,
        "multi_turn.env_kwargs.highest=50",
        "data.sample_count.train=7",
        "trainer.final_test=true",
        env=NAME,
    )
    sets = load_tasks(cfg)
    assert (len(sets.train), len(sets.val), len(sets.test)) == (7, 10, 10)
    names = [{task.secret for task in part} for part in (sets.train, sets.val, sets.test)]
    assert len({*names[0], *names[1], *names[2]}) == 27
    assert "from 1 to 50." in sets.train[0].messages[0].content
    _, plan, _ = prepare(words(EXAMPLE, "multi_turn.env_kwargs.highest=50", env=NAME))
    assert "30 training secrets" in plan.render()
    assert "validation before training" in plan.render()


@pytest.mark.parametrize("name", ["train_files", "val_files", "test_files"])
def test_files_beside_tasks_of_its_own_are_refused(name: str, tmp_path: Path) -> None:
    path = tasks_plugin(tmp_path, f"[{TASK}]")
    with pytest.raises(UserError, match=f"maze makes its own tasks, and data.{name} names others"):
        check_plugins(config(path, f"data.{name}=[package:guess_my_city/train]"))


def test_an_environment_without_tasks_needs_files(tmp_path: Path) -> None:
    path = plugin(tmp_path, f"ENVIRONMENTS = {{'maze': {PLUGIN}}}")
    with pytest.raises(UserError, match=r"There are no training tasks: set data\.train_files"):
        check_plugins(config(path))
    check_plugins(config(path, "data.train_files=[a]", "data.val_files=[b]", "data.test_files=[c]"))


BAD_TASKS = {
    "no task": ("['left']", "maze makes train tasks that are no Task but str"),
    "no message": ("[Task('a', 'maze', 'left', ())]", "task 'a', whose messages are no Message"),
    "a dict": (
        "[Task('a', 'maze', 'left', ({'role': 'user'},))]",
        "task 'a', whose messages are no Message objects",
    ),
    "no source": ("[Task('a', '', 'left', (Message('user', 'Go.'),))]", "without id or source"),
    "twice": (f"[{TASK}, {TASK}]", "The id 'train_1' occurs twice in the training data"),
    "none": ("[]", "There is no training task: maze makes none."),
    "no val": (
        f"[{TASK}] if split == 'train' else []",
        "There is no validation task: maze makes none, so set trainer.val_before_train=false",
    ),
    "no test": (
        f"[{TASK}] if split != 'test' else []",
        "There is no test task: maze makes none, so set trainer.final_test=false.",
    ),
    "no secret": (
        "[Task(f'{split}_1', 'maze', '', (Message('user', 'Go.'),), split)]",
        "The training task 'train_1' has no secret that a belief could be of",
    ),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_tasks_that_cannot_be_played_are_refused(case: str, tmp_path: Path) -> None:
    made, part = BAD_TASKS[case]
    cfg = config(tasks_plugin(tmp_path, made), "trainer.final_test=true")
    with pytest.raises(UserError) as caught:
        load_tasks(cfg)
    assert part in str(caught.value)


def test_tasks_without_a_secret_are_played_where_no_belief_is_asked_for(tmp_path: Path) -> None:
    made = "[Task(f'{split}_1', 'maze', '', (Message('user', 'Go.'),), split)]"
    path = tasks_plugin(tmp_path, made)
    off = ["multi_turn.logprob_reward.enabled=false", "trainer.final_test=false"]
    sets = load_tasks(config(path, *off))
    assert [task.secret for task in sets.train] == [""]
    assert sets.train_secrets() == frozenset()


def test_a_task_is_of_the_split_that_it_was_made_for(tmp_path: Path) -> None:
    made = "[Task(f'{split}_1', 'maze', 'left', (Message('user', 'Go.'),))]"
    sets = load_tasks(config(tasks_plugin(tmp_path, made), "trainer.final_test=true"))
    assert [task.split for one in (sets.train, sets.val, sets.test) for task in one] == [*SPLITS]


def test_secrets_that_two_sets_share_are_told(tmp_path: Path) -> None:
    path = tasks_plugin(tmp_path, f"[{TASK}]")
    small = ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    _, plan, _ = prepare(words(path, *small))
    assert "1 of 1 validation secrets is also a training secret (left)" in plan.render()


# --- judges ---------------------------------------------------------------------------------------

ASKED = JudgeRequest(Task("a", "maze", "left", (Message("user", "Go."),)), "left?")


def test_the_judge_of_a_plug_in_is_made_where_it_answers(tmp_path: Path) -> None:
    cfg = config(tasks_plugin(tmp_path, f"[{TASK}]", judge="Echo"))
    settings = judge_settings(cfg, 1)
    assert settings == RulesJudgeSettings("maze", cfg.plugins)
    assert build_judge(settings).answer([ASKED])[0].text == "left"
    code = (
        "import json, sys\n"
        "from delta_belief_rl.judge.packaged import rules_judge\n"
        "print(type(rules_judge(*json.load(sys.stdin))).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([settings.env, settings.plugins]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["Echo"]


def test_no_judge_is_a_failure_with_a_reason_and_never_an_answer(tmp_path: Path) -> None:
    cfg = config(tasks_plugin(tmp_path, f"[{TASK}]"))
    replies = build_judge(judge_settings(cfg, 1)).answer([ASKED, ASKED])
    reason = "The environment 'maze' brings no judge for judge_rollout.name=rules."
    assert replies == [JudgeReply(Verdict.ERROR, reason=reason)] * 2


def test_U2_a_judge_that_cannot_be_made_ends_the_run_before_ray(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("Ray was about to start")

    monkeypatch.setattr(app, "ray_session", reached)
    monkeypatch.setattr(app, "exit_on_sigterm", lambda: None)
    path = tasks_plugin(tmp_path, f"[{TASK}]", judge="lambda: {}['table']")
    small = ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    assert train.main(words(path, *small, f"trainer.output_dir={tmp_path / 'run'}")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "The judge of maze cannot be made: KeyError: 'table' (maze_file.py, line " in line


def test_a_language_model_is_refused_where_it_has_no_words_to_ask(tmp_path: Path) -> None:
    path = tasks_plugin(tmp_path, f"[{TASK}]")
    more = ["judge_rollout.name=hf", "judge_rollout.model.path=x", "trainer.final_test=false"]
    with pytest.raises(UserError, match="not told how to judge tasks with the source 'maze'"):
        load_tasks(config(path, *more))
    known = tasks_plugin(tmp_path, f"[{TASK.replace('maze', 'tw_q')}]").rename(tmp_path / "b.py")
    assert len(load_tasks(config(known, *more)).train) == 1


def test_the_doctor_has_no_questions_for_rules_and_says_so() -> None:
    others = tuple(name for name in CHECKS if name != "judge")
    found = examine(config(EXAMPLE, env=NAME), "cpu", 1, DoctorSettings(skip=others))
    (check,) = [one for one in found if one.name == "judge"]
    assert check.passed is None
    assert check.note == "the doctor has no check of judge_rollout.name=rules"


# --- games, runs and evaluations ------------------------------------------------------------------


def test_the_factory_makes_games_of_a_plug_in() -> None:
    cfg = config(EXAMPLE, env=NAME)
    make = env_factory(cfg, 3)
    (task, *_) = plugin_tasks(cfg, "val") or ()
    game = make(task)
    replies = [game.apply(game.parse(said), None) for said in ("1", "40 or 50", "100")]
    assert [one.reply for one in replies] == [
        "Higher.", "Name one number from 1 to 100.", "Lower."
    ]  # fmt: skip
    assert [one.done for one in replies] == [False, False, True]
    check_env(lambda: make(task), ["5"])


def test_options_that_do_not_fit_are_the_plug_ins_own_to_refuse() -> None:
    for more, part in (("highest=3", "a whole number from 10"), ("size=3", "has size")):
        with pytest.raises(UserError, match=part):
            env_factory(config(EXAMPLE, f"multi_turn.env_kwargs.{more}", env=NAME), 3)


def test_games_of_other_options_are_of_another_kind() -> None:
    one = config(EXAMPLE, env=NAME)
    other = config(EXAMPLE, "multi_turn.env_kwargs={highest: 50}", env=NAME)
    assert game_settings(other, "val")["multi_turn.env_kwargs"] == {"highest": 50}
    assert game_digest(one, "train") != game_digest(other, "train")
    assert game_settings(one, "train")["plugins"] == [str(EXAMPLE)]


def test_an_environment_of_a_plug_in_is_a_benchmark() -> None:
    found = find_benchmarks(f"{NAME},everyday", [NAME])
    assert list(found) == [NAME, "everyday"]
    assert found[NAME].words() == ["judge=rules", f"multi_turn.env={NAME}"]
    cfg = config(EXAMPLE, env=NAME)
    assert Conditions.of(cfg).tasks == NAME
    with pytest.raises(UserError, match="'everyday' is a benchmark and an environment of a plug"):
        find_benchmarks("everyday", ["everyday"])
    with pytest.raises(UserError, match="did you mean guess_the_number"):
        find_benchmarks("guess_the_numbr", [NAME])


# --- the page -------------------------------------------------------------------------------------


def test_the_page_shows_the_files_that_it_speaks_of() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    shown = [EXAMPLE, EXAMPLE.with_name("test_guess_the_number.py")]
    assert blocks[:2] == [path.read_text() for path in shown]


def test_the_examples_own_test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    own = import_module("test_guess_the_number")
    for split in ("train", "val", "test"):
        own.test_it_keeps_the_contract(split)
    own.test_halving_finds_every_number_in_seven_turns()
