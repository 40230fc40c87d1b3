"""``delta-belief compare`` from its command line, over a program that stands in for training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delta_belief_rl.algo import CREDITS, TRANSFORMS, build_credit
from delta_belief_rl.algo.catalogue import CATALOGUE, GROUPS, Label, needs_of
from delta_belief_rl.cli.compare_cells import (
    LAST_SECONDS,
    Cell,
    Crew,
    Record,
    file_digest,
    read_record,
    write_record,
)
from delta_belief_rl.cli.compare_plan import FORMS, OURS, make_study, room, train_program
from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.cli.watchdog_processes import Session
from delta_belief_rl.config.compose import group_options
from delta_belief_rl.config.schema import RunConfig, lookup
from delta_belief_rl.types import UserError
from tests.processes import born, mentioning
from tests.runs import ROOT
from tests.signals import signals_are_heard as signals_are_heard

PROGRAM = ROOT / "tests" / "unit" / "compare_program.py"
EXPERIMENT = "experiment=starpo_quickstart"
STEPS = 3

Call = Callable[..., int]


def asked(out: Path, *more: str, methods: str = "grpo,rloo", seeds: str = "1,2") -> list[str]:
    own = ["compare", "--methods", methods, "--seeds", seeds, "--steps", str(STEPS)]
    return [*own, "--out", str(out), "--train", str(PROGRAM), EXPERIMENT, *more]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what each method's runs do."""
    path = tmp_path / "plan.json"
    path.write_text("{}")
    monkeypatch.setenv("COMPARE_PLAN", str(path))
    return path


def starts(out: Path) -> dict[str, int]:
    """How often each run was started."""
    return {
        f"{path.parent.parent.name} {path.parent.name}": len(path.read_text().splitlines())
        for path in sorted(out.glob("runs/*/*/starts.txt"))
    }


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "compare.json").read_text())


# --- running --------------------------------------------------------------------------------------


def test_every_method_runs_with_every_seed_and_only_once(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out folder"
    assert cli(asked(out, "--jobs", "3")) == 0
    shown = capsys.readouterr()
    assert "rloo is above grpo" in shown.out
    begun = [line for line in shown.err.splitlines() if "starts (" in line]
    assert [line.split()[1] for line in begun] == ["grpo", "grpo", "rloo", "rloo"]
    assert len(list(out.glob("runs/*/*.result.json"))) == 4
    found = read(out)
    assert [one["method"] for one in found["methods"]] == ["grpo", "rloo"]
    assert found["methods"][0]["rate"]["interval"]["units"] == 30
    assert found["budget"]["steps"] == STEPS
    assert found["differences"][0]["real"] is True
    assert set(starts(out).values()) == {1}
    assert cli([*asked(out), "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == found
    assert again.err == ""
    assert set(starts(out).values()) == {1}


def test_more_seeds_and_methods_are_added_to_what_is_there(tmp_path: Path, plan: Path) -> None:
    out = tmp_path / "out"
    assert cli(asked(out, methods="grpo", seeds="1")) == 0
    assert cli(asked(out, methods="opo,grpo", seeds="2,1")) == 0
    assert starts(out) == {"grpo seed1": 1, "grpo seed2": 1, "opo seed1": 1, "opo seed2": 1}
    assert read(out)["baseline"] == "grpo"


@pytest.mark.fault
def test_R2_a_run_that_was_killed_goes_on_when_the_command_is_given_again(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.write_text(json.dumps({"rloo": "kill"}))
    out = tmp_path / "out"
    assert cli(asked(out)) == 1
    assert "rloo with seed 2 failed: killed: SIGKILL" in capsys.readouterr().out
    found = read(out)
    assert [one["method"] for one in found["methods"]] == ["grpo"]
    assert [(one["method"], one["seed"]) for one in found["failures"]] == [("rloo", 1), ("rloo", 2)]
    assert cli(asked(out)) == 0
    assert starts(out) == {"grpo seed1": 1, "grpo seed2": 1, "rloo seed1": 2, "rloo seed2": 2}
    assert read(out)["failures"] == []
    straight = tmp_path / "straight"
    plan.write_text("{}")
    assert cli(asked(straight)) == 0
    one, other = read(out), read(straight)
    assert one["differences"] == other["differences"]


@pytest.mark.fault
def test_a_run_that_fails_stands_in_the_table_with_its_cause(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.write_text(json.dumps({"rloo": "fail"}))
    out = tmp_path / "out"
    assert cli(asked(out, seeds="1")) == 1
    shown = capsys.readouterr()
    sentence = "bad input: train.py: the disk is made of cheese"
    assert f"rloo with seed 1 failed: {sentence}" in shown.out
    assert f"rloo with seed 1: {sentence}" in shown.err
    page = (out / "compare.md").read_text()
    assert sentence in page
    assert "0 of 1, 1 failed" in page
    assert "1 of 1 |" in page


@pytest.mark.fault
def test_a_run_past_its_limit_is_ended_and_named(tmp_path: Path, plan: Path) -> None:
    plan.write_text(json.dumps({"rloo": "hang"}))
    out = tmp_path / "out"
    hours = str(6 / 3600)
    assert cli(asked(out, "--limit-hours", hours, "--jobs", "2", seeds="1")) == 1
    (failure,) = read(out)["failures"]
    assert failure["method"] == "rloo"
    assert failure["cause"].startswith("it took longer than 0.00166667 h")
    assert mentioning(str(out / "runs" / "rloo")) == []


@pytest.mark.fault
def test_what_a_run_leaves_behind_is_ended_with_it(tmp_path: Path, plan: Path) -> None:
    plan.write_text(json.dumps({"grpo": "leave"}))
    out = tmp_path / "out"
    assert cli(asked(out, methods="grpo", seeds="1")) == 0
    assert mentioning(str(out)) == []


@pytest.mark.fault
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_H6_a_signal_ends_all_runs_and_keeps_what_is_done(
    tmp_path: Path, plan: Path, signum: signal.Signals
) -> None:
    plan.write_text(json.dumps({"rloo": "hang"}))
    out = tmp_path / "out"
    words = asked(out, "--jobs", "3")
    process = subprocess.Popen(
        [sys.executable, "-m", "delta_belief_rl.cli.main", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(list(out.glob("runs/rloo/*/ready"))) == 2, process)
    wait_for(lambda: len(list(out.glob("runs/grpo/*/validation/3.jsonl"))) == 2, process)
    wait_for(lambda: all(done(out, "grpo", seed) for seed in (1, 2)), process)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "2 runs are asked to end" in stderr
    assert "Not run to its end: rloo with seed 1, rloo with seed 2." in stdout
    assert mentioning(str(out)) == []
    assert [one["method"] for one in read(out)["methods"]] == ["grpo"]
    cut = json.loads((out / "runs" / "rloo" / "seed1.json").read_text())
    assert cut["status"] is None
    assert cut["seconds"] > 0
    plan.write_text("{}")
    assert cli(asked(out)) == 0
    assert starts(out) == {"grpo seed1": 1, "grpo seed2": 1, "rloo seed1": 2, "rloo seed2": 2}
    again = json.loads((out / "runs" / "rloo" / "seed1.json").read_text())
    assert again["seconds"] > cut["seconds"]


@pytest.mark.fault
def test_runs_that_do_not_hear_are_waited_for_together(
    tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.write_text(json.dumps({"grpo": "deaf"}))
    out = tmp_path / "out"
    settings: dict[str, Any] = {"seeds": [1, 2, 3], "steps": STEPS, "baseline": None, "out": out}
    cells = make_study([EXPERIMENT], methods=["grpo"], **settings).cells
    given: list[float] = []
    end = Session.end

    def noted(session: Session, grace: float) -> bool:
        given.append(grace)
        return end(session, grace)

    def look(crew: Crew) -> None:
        if len(list(out.glob("runs/*/*/ready"))) == len(cells):
            raise UserError("enough")

    monkeypatch.setattr(Session, "end", noted)
    monkeypatch.setattr(Crew, "_look", look)
    crew = Crew([sys.executable, str(PROGRAM)], [{}] * 3, 600.0, lambda _: None, grace=3.0)
    with pytest.raises(UserError, match="enough"):
        crew.run(cells)
    # None is given the whole time once more.
    assert given == [LAST_SECONDS] * 3
    assert mentioning(str(out)) == []
    for cell in cells:
        record = read_record(cell)
        assert record.status is None
        assert record.seconds >= 3.0


@pytest.mark.fault
def test_H6_a_comparison_that_is_killed_takes_its_runs_with_it(tmp_path: Path, plan: Path) -> None:
    plan.write_text(json.dumps({"grpo": "hang"}))
    out = tmp_path / "out"
    words = asked(out, methods="grpo", seeds="1")
    process = subprocess.Popen(
        [sys.executable, "-m", "delta_belief_rl.cli.main", *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: bool(list(out.glob("runs/grpo/*/ready"))), process)
    second = subprocess.run(
        [sys.executable, "-m", "delta_belief_rl.cli.main", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2
    assert f"Another comparison works in {out}" in second.stderr
    family = {pid: born(pid) for pid in mentioning(str(out))}
    process.kill()
    process.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(birth and born(pid) == birth for pid, birth in family.items()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    plan.write_text("{}")
    assert cli(words) == 0
    assert starts(out) == {"grpo seed1": 2}


def done(out: Path, method: str, seed: int) -> bool:
    path = out / "runs" / method / f"seed{seed}.json"
    return path.exists() and json.loads(path.read_text())["status"] == 0


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- what is refused ------------------------------------------------------------------------------


REFUSED = {
    "no method": (["--methods", ""], "No method is named"),
    "twice": (["--methods", "grpo,grpo"], "has an empty name or one twice"),
    "no name": (["--methods", "grpo,"], "has an empty name or one twice"),
    "unknown": (["--methods", "grpo,gigp"], "gigp cannot be compared: algorithm.adv_estimator"),
    "a seed": (["--seeds", "1,x"], "--seeds 1,x must be different whole numbers"),
    "seeds": (["--seeds", "2,2"], "--seeds 2,2 must be different whole numbers"),
    "negative": (["--seeds=-1"], "--seeds -1 must be different whole numbers"),
    "steps": (["--steps", "0"], "at least one step, not --steps 0"),
    "jobs": (["--jobs", "0"], "not --jobs 0"),
    "limit": (["--limit-hours", "nan"], "--limit-hours is nan; it must be in (0, 8760]"),
    "baseline": (["--baseline", "opo"], "--baseline opo is not among --methods grpo,rloo"),
    "program": (["--train", "no/such.py"], "There is no no/such.py"),
    "no curve": (["trainer.test_freq=-1"], "trainer.test_freq at 1 or more"),
    "no beginning": (["trainer.val_before_train=false"], "leave trainer.val_before_train true"),
    "a setting twice": (["seed=1", "seed=2"], "seed"),
    "evaluation": (["trainer.val_only=true"], "leave trainer.val_only false"),
    "value": (["algorithm.gamma=2"], "grpo cannot be compared: algorithm.gamma"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_sentence_and_starts_nothing(
    case: str, tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, sentence = REFUSED[case]
    out = tmp_path / "out"
    assert cli([*asked(out), *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("delta-belief compare: ")
    assert sentence in line
    assert starts(out) == {}


@pytest.mark.parametrize("name", OURS)
def test_settings_that_a_comparison_makes_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name != "algorithm":
        lookup(RunConfig(), name)  # it is a setting
    assert cli(asked(tmp_path, f"{name}=1")) == 2
    assert f"a comparison sets {name} itself; use {OURS[name]}" in capsys.readouterr().err


def test_other_settings_in_the_same_folder_are_refused(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli(asked(out, seeds="1")) == 0
    assert cli(asked(out, "data.train_batch_size=48", seeds="1")) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "has other settings (nothing became data.train_batch_size=48)" in said
    assert starts(out) == {"grpo seed1": 1, "rloo seed1": 1}


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    cell = Cell("grpo", 1, ("seed=1",), tmp_path / "grpo" / "seed1")
    write_record(cell, Record(cell.words, status=0, starts=2, seconds=1.5))
    assert read_record(cell) == Record(cell.words, status=0, starts=2, seconds=1.5)
    cell.file.write_text('{"status": 0}')
    with pytest.raises(UserError, match="remove it, and the run is started anew"):
        read_record(cell)


def test_methods_that_would_play_other_games_are_refused(
    tmp_path: Path,
    plan: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A group of settings may set anything, such as more games of a secret."""
    configs = tmp_path / "package" / "configs"
    shutil.copytree(ROOT / "configs", configs)
    body = (configs / "algorithm" / "opo.yaml").read_text()
    (configs / "algorithm" / "opo.yaml").write_text(body + "data: {shuffle: false}\n")
    monkeypatch.setattr("delta_belief_rl.config.paths.PACKAGE", tmp_path / "package" / "inner")
    out = tmp_path / "out"
    assert cli(asked(out, methods="grpo,opo")) == 2
    said = capsys.readouterr().err
    assert "opo would be compared with grpo on unequal terms, because data.shuffle is" in said
    assert starts(out) == {}


# --- showing --------------------------------------------------------------------------------------


def test_the_same_settings_in_another_order_are_the_same(tmp_path: Path, plan: Path) -> None:
    out, two = tmp_path / "out", ["data.shuffle=true", "trainer.rollout_freq=3"]
    assert cli([*asked(out), *two]) == 0
    before = starts(out)
    assert cli([*asked(out), *reversed(two)]) == 0
    assert starts(out) == before


def test_settings_of_an_own_method_are_given_to_it_alone(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["plugins=[docs/examples/late_turns.py]", "algorithm.kwargs.decay=0.8"]
    words = asked(tmp_path / "out", *own, methods="grpo,late_turns", seeds="1")
    assert cli([*words, "--dry-run", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    told = {cell["method"]: "algorithm.kwargs.decay=0.8" in cell["words"] for cell in cells}
    assert told == {"grpo": False, "late_turns": True}


def own_method(folder: Path) -> Path:
    """A file of the user's that can be edited."""
    path = folder / "mine.py"
    shutil.copy(ROOT / "docs" / "examples" / "late_turns.py", path)
    return path


def test_a_plug_in_that_was_edited_between_two_starts_is_refused(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, path = tmp_path / "out", own_method(tmp_path)
    words = asked(out, f"plugins=[{path}]", methods="grpo,late_turns", seeds="1")
    assert cli(words) == 0
    assert cli(words) == 0
    path.write_text(path.read_text() + "\n")
    capsys.readouterr()
    assert cli(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"The plug-in {path} was edited since the run of late_turns with seed 1" in line
    assert starts(out) == {"grpo seed1": 1, "late_turns seed1": 1}
    # What does not use the plug-in is as it was, and what is named is made anew without the runs.
    shutil.rmtree(out / "runs" / "late_turns")
    assert cli(words) == 0
    assert starts(out) == {"grpo seed1": 1, "late_turns seed1": 1}


def test_runs_in_an_environment_of_a_plug_in_know_its_file(tmp_path: Path) -> None:
    path = ROOT / "docs" / "examples" / "guess_the_number.py"
    chosen = [f"plugins=[{path}]", "multi_turn.env=guess_the_number", "judge=rules"]
    chosen += ["experiment=starpo_quickstart", "data.world=null"]
    settings = {"seeds": [1], "steps": 2, "baseline": None, "out": tmp_path}
    study = make_study(chosen, methods=["grpo"], **settings)  # type: ignore[arg-type]
    assert study.cells[0].plugins == {str(path): file_digest(path)}
    packaged = make_study([EXPERIMENT], methods=["grpo"], **settings)  # type: ignore[arg-type]
    assert packaged.cells[0].plugins == {}


def test_a_plug_in_that_is_edited_while_runs_wait_starts_none_of_them(
    tmp_path: Path, plan: Path
) -> None:
    path = own_method(tmp_path)
    cell = Cell("mine", 1, ("seed=1",), tmp_path / "runs" / "seed1", {str(path): "before"})
    crew = Crew([sys.executable, str(PROGRAM)], [{}], 60.0, lambda _: None)
    with pytest.raises(UserError, match="was edited while the comparison went on"):
        crew.run([cell])
    assert not cell.file.exists()


def test_a_folder_that_takes_no_record_is_one_sentence(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "runs").write_text("")
    assert cli(asked(out)) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert "cannot be written" in shown.splitlines()[-1]


def test_a_dry_run_shows_runs_and_cost_and_starts_nothing(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli([*asked(out), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "4 runs, 4 to do" in shown
    # 24 secrets x 8 games x 3 steps, 14 turns each, 16 tokens a turn; 2 validations.
    assert "plays 576 training games of at most 14 turns (8064 turns, at most 129024" in shown
    assert "not known before the first run is finished" in shown
    assert starts(out) == {}
    assert cli(asked(out, methods="grpo", seeds="1")) == 0
    capsys.readouterr()
    assert cli([*asked(out), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cell["state"] for cell in found["cells"]] == ["done", "to do", "to do", "to do"]
    assert found["cost"]["runs_left"] == 3
    took = read_seconds(out) * 3 / found["cost"]["jobs"] / 3600
    assert found["cost"]["hours_left"] == pytest.approx(took)


def read_seconds(out: Path) -> float:
    return json.loads((out / "runs" / "grpo" / "seed1.json").read_text())["seconds"]


def test_the_dry_run_says_what_besides_credit_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli([*asked(tmp_path, methods="grpo,rloo,delta_belief"), "--dry-run"]) == 0
    begins = "delta_belief differs from grpo in more than credit: "
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(begins)]
    (line,) = lines
    assert "multi_turn.logprob_reward.enabled is true, not false" in line


def test_the_dry_run_says_which_methods_play_more_than_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = asked(tmp_path, methods="grpo,dapo,starpo_s,arpo", seeds="1")
    words[words.index(str(STEPS))] = "32"
    assert cli([*words, "--dry-run", "--json"]) == 0
    beyond = json.loads(capsys.readouterr().out)["beyond"]
    assert set(beyond) == {"dapo", "arpo"}
    assert beyond["dapo"].startswith("dapo plays up to 10 batches for a step")
    assert beyond["dapo"].endswith(
        "fewer than 32 steps within the budget, which may end in step 4."
    )
    assert "games as trees (algorithm.tree.rule=arpo)" in beyond["arpo"]
    assert cli([*words, "--dry-run", "algorithm.filter_groups.max_num_gen_batches=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert beyond["arpo"] in lines
    (told,) = [line for line in lines if line.startswith("dapo plays")]
    assert "batch after batch" in told
    assert told.endswith("which may end in any step.")


def test_the_catalogue_has_every_method_and_no_other() -> None:
    assert set(CATALOGUE) == {*CREDITS, *TRANSFORMS}
    assert set(GROUPS) == set(group_options()["algorithm"]) - set(CATALOGUE)
    assert set(FORMS) == set(Label)
    for name, entry in {**CATALOGUE, **GROUPS}.items():
        assert len(entry.summary) <= 80, name
        assert not entry.arxiv or entry.arxiv[4] == ".", name


def test_the_list_has_every_method_group_and_plug_in(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "docs" / "examples" / "late_turns.py"
    assert cli(["compare", "--list", "--json", f"plugins=[{example}]"]) == 0
    found = {one["method"]: one for one in json.loads(capsys.readouterr().out)}
    groups = set(group_options()["algorithm"])
    assert set(found) == {*CREDITS, *TRANSFORMS, *groups, "late_turns"}
    assert found["late_turns"]["form"] == "OWN"
    assert found["gigpo"]["needs"] == ["group", "hook state_key"]
    assert (found["delta_belief"]["form"], found["delta_belief"]["needs"]) == ("CODE", ["group"])
    assert all(one["form"] and one["summary"] for one in found.values())
    assert cli(["compare", "--list"]) == 0
    text = capsys.readouterr().out
    assert "late_turns" not in text
    assert all(name in text for name in CREDITS)


def test_needs_are_those_of_the_method() -> None:
    assert needs_of(build_credit("reinforce")) == ()
    assert needs_of(build_credit("rloo")) == ("group",)


# --- room -----------------------------------------------------------------------------------------


def plan_of(gpus: int, cores: int = 8, threads: int = 8) -> Any:
    return SimpleNamespace(gpus=gpus, threads=threads, facts=SimpleNamespace(cores=cores))


def test_runs_on_a_cpu_share_its_cores() -> None:
    assert len(room(plan_of(0), None, {})) == 1
    assert len(room(plan_of(0, threads=2), None, {})) == 4
    assert len(room(plan_of(0, threads=16), None, {})) == 1
    assert len(room(plan_of(0), 3, {})) == 3


def test_runs_on_gpus_get_gpus_of_their_own() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6,7,1"}
    slots = room(plan_of(2), None, visible)
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["4,5", "6,7"]
    assert len(room(plan_of(2), 1, visible)) == 1
    with pytest.raises(UserError, match="3 runs at a time need 6 GPUs and 5 are there"):
        room(plan_of(2), 3, visible)
    with pytest.raises(UserError, match="1 runs at a time need 8 GPUs and 0 are there"):
        room(plan_of(8), None, {"CUDA_VISIBLE_DEVICES": ""})


def test_the_program_is_the_one_beside_the_package(tmp_path: Path) -> None:
    assert train_program(None) == ROOT / "train.py"
    assert train_program(PROGRAM) == PROGRAM
    with pytest.raises(UserError, match="name the program of a run with --train"):
        train_program(tmp_path / "train.py")


def test_a_gpu_slot_reaches_the_run(
    tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "delta_belief_rl.cli.compare.room", lambda *_: [{"CUDA_VISIBLE_DEVICES": "3"}]
    )
    out = tmp_path / "out"
    assert cli(asked(out, methods="grpo", seeds="1")) == 0
    assert (out / "runs/grpo/seed1/starts.txt").read_text() == "3\n"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "3"
