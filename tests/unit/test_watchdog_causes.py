"""What the watchdog makes of an end: causes, budget, pauses, records, lowered settings."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.cli.watchdog import Heart, Lowering
from delta_belief_rl.cli.watchdog_causes import (
    FINAL,
    MOST_LOWERINGS,
    Budget,
    Cause,
    End,
    as_shell,
    classify,
    default_lowerings,
    lowered,
    newest_step,
    oom_kills,
    pause_seconds,
    read_end,
    tail_records,
)
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig, leaves
from delta_belief_rl.obs import run_facts
from delta_belief_rl.obs.exits import ExitStatus

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("status", "end", "cause"),
    [
        (0, None, Cause.DONE),
        (0, End(0, "done"), Cause.DONE),
        (1, None, Cause.FAILED),
        (77, None, Cause.FAILED),
        (2, None, Cause.BAD_INPUT),
        (3, None, Cause.COLLAPSED),
        (4, None, Cause.OUT_OF_MEMORY),
        (5, None, Cause.STALLED),
        (6, None, Cause.DISK_FULL),
        (143, None, Cause.TERMINATED),
        (-signal.SIGTERM, None, Cause.TERMINATED),
        (-signal.SIGKILL, None, Cause.KILLED),
        (137, None, Cause.KILLED),  # a shell's word for it
        (-signal.SIGSEGV, None, Cause.KILLED),
        (127, None, Cause.NO_COMMAND),
        (126, None, Cause.NO_COMMAND),
        (2, End(4, "out_of_memory"), Cause.OUT_OF_MEMORY),  # make says 2 to every failure
        (0, End(3, "collapsed"), Cause.COLLAPSED),  # the status was lost in a pipe
        (-signal.SIGKILL, End(0, "done"), Cause.KILLED),  # a new start finds it complete
        (1, End(None), Cause.FAILED),
    ],
)
def test_H6_an_end_is_told_by_status_signal_and_record(
    status: int, end: End | None, cause: Cause
) -> None:
    assert classify(status, end) is cause
    assert classify(status, end, hung=True) is Cause.HUNG


def test_H6_every_status_of_a_run_has_a_cause_and_only_hopeless_ones_are_final() -> None:
    causes = {status: classify(status, None) for status in ExitStatus}
    assert len({*causes.values()}) == len(ExitStatus)
    final = {status for status, cause in causes.items() if cause in FINAL}
    assert final == {ExitStatus.DONE, ExitStatus.BAD_INPUT, ExitStatus.COLLAPSED}


def test_H6_only_a_kill_can_be_the_kernels() -> None:
    assert classify(-9, None, oom_kills=1) is Cause.HOST_OUT_OF_MEMORY
    assert classify(137, None, oom_kills=2) is Cause.HOST_OUT_OF_MEMORY
    assert classify(-11, None, oom_kills=1) is Cause.KILLED
    assert classify(1, None, oom_kills=1) is Cause.FAILED


def test_H6_a_status_is_shown_as_a_shell_shows_it() -> None:
    assert [as_shell(status) for status in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_H6_the_budget_counts_restarts_without_progress_inside_the_window() -> None:
    budget = Budget(2, 100.0)
    assert [budget.take(now) for now in (0.0, 50.0, 99.0)] == [True, True, False]
    assert budget.take(101.0), "the first one is out of the window"
    assert not budget.take(102.0)
    assert budget.progress(3)
    assert [budget.take(now) for now in (103.0, 104.0, 105.0)] == [True, True, False]
    # The same step again, played from the same checkpoint, is no progress.
    assert not budget.progress(3)
    assert not budget.progress(2)
    assert not budget.progress(None)
    assert not budget.take(106.0)
    assert not Budget(0, 100.0).take(0.0)


def test_H6_pauses_double_up_to_a_bound_and_differ_between_runs() -> None:
    pauses = [pause_seconds(10.0, n, Cause.FAILED, "a") for n in range(1, 12)]
    for n, pause in enumerate(pauses):
        plain = min(10.0 * 2**n, 600.0)
        assert 0.8 * plain <= pause <= 1.2 * plain
    assert pauses == [pause_seconds(10.0, n, Cause.FAILED, "a") for n in range(1, 12)]
    assert pauses != [pause_seconds(10.0, n, Cause.FAILED, "b") for n in range(1, 12)]
    assert pause_seconds(10.0, 1, Cause.DISK_FULL, "a") == pytest.approx(10 * pauses[0])
    assert pause_seconds(10.0, 9, Cause.DISK_FULL, "a") <= 1.2 * 600


# --- records


def write_lines(path: Path, *records: object) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_H6_an_end_of_an_earlier_start_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    write_lines(events, {"kind": "start", "step": 0}, {"kind": "end", "status": 4, "step": 7})
    before = events.stat().st_size
    assert read_end(tmp_path, before) is None
    assert read_end(tmp_path, 0) == End(4)
    write_lines(events, {"kind": "start", "step": 5})
    assert read_end(tmp_path, before) is None
    assert newest_step(tmp_path, before) == 5
    write_lines(events, {"kind": "end", "status": 1, "cause": "rank_failed", "step": 6})
    assert read_end(tmp_path, before) == End(1, "rank_failed")
    write_lines(tmp_path / "metrics.jsonl", {"step": 8}, {"step": 9})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "torn')
    assert newest_step(tmp_path, before) == 9


def test_H6_records_are_read_whole_from_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert tail_records(path) == []
    write_lines(path, {"n": 0}, {"n": 1}, {"n": 2})
    size = path.stat().st_size // 3
    starts = range(3 * size + 2)
    found = [[record["n"] for record in tail_records(path, start)] for start in starts]
    whole = [[n for n in range(3) if n * size >= start] for start in starts]
    assert found == whole


def test_H6_the_kernels_kills_are_counted_in_our_own_cgroup(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "jobs" / "a").mkdir(parents=True)
    (root / "memory" / "jobs").mkdir(parents=True)
    (root / "jobs" / "a" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
    (root / "memory" / "jobs" / "memory.oom_control").write_text(control)
    membership.write_text("0::/jobs/a\n")
    assert oom_kills(membership, root) == 2
    membership.write_text("5:cpu:/x\n4:memory:/jobs\n0::/\n")
    assert oom_kills(membership, root) == 5
    membership.write_text("0::/elsewhere\n")
    assert oom_kills(membership, root) == 0
    assert oom_kills(tmp_path / "none", root) == 0


# --- settings


def test_H6_lowered_settings_stay_what_they_are_and_become_smaller() -> None:
    config = {"a": {"tokens": 70000, "share": 0.5, "one": 1, "flag": True, "none": None}}
    factors = {"a.tokens": 0.8, "a.share": 0.9, "a.one": 0.5, "a.flag": 0.5, "a.none": 0.5}
    found = lowered(config, {**factors, "a.unknown": 0.5, "a.tokens.deep": 0.5})
    assert found == {"a.tokens": 56000, "a.share": 0.45}
    assert isinstance(found["a.tokens"], int)


@pytest.mark.parametrize("experiment", ["train_8xa100_paper", "quickstart"])
def test_H6_only_settings_that_act_are_lowered_unasked(experiment: str) -> None:
    import yaml

    from delta_belief_rl.config.compose import resolved_yaml

    config, _ = load_config([f"experiment={experiment}"])
    factors = default_lowerings(yaml.safe_load(resolved_yaml(config)))
    assert {*factors} <= {name for name, *_ in leaves(RunConfig)}
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    named = {name.rpartition(".")[2] for name in factors}
    assert ("ppo_max_token_len_per_gpu" in named) == actor.use_dynamic_bsz
    assert ("ppo_micro_batch_size_per_gpu" in named) != actor.use_dynamic_bsz
    assert ("gpu_memory_utilization" in named) == (rollout.name == "vllm")


def test_H6_settings_are_lowered_three_times_and_taken_back_where_refused(tmp_path: Path) -> None:
    lowering, tokens = Lowering(), 1000
    for count in range(1, MOST_LOWERINGS + 1):
        (tmp_path / "config.yaml").write_text(f"a: {{tokens: {tokens}}}\n")
        assert f"lowered {count} of 3" in lowering.lower(tmp_path, {"a.tokens": 0.8})
        tokens = int(tokens * 0.8)
        assert lowering.words() == [f"a.tokens={tokens}"]
    assert "3 times is all" in lowering.lower(tmp_path, {"a.tokens": 0.8})
    assert lowering.words() == ["a.tokens=512"]
    lowering.take_back()
    assert lowering.words() == ["a.tokens=640"]
    assert "no setting is lowered" in lowering.lower(tmp_path, {"a.tokens": 0.8})
    assert "is not known" in Lowering().lower(None, {})


# --- heartbeat


def test_H11_a_heartbeat_is_missed_by_the_watchdogs_own_clock(tmp_path: Path) -> None:
    heart, file = Heart(10.0), tmp_path / "heartbeat.json"
    assert heart.stopped(file, 0.0) == ""
    file.write_text('{"time": 1}')
    # Left by an earlier start, perhaps: says nothing until it changes.
    assert heart.stopped(file, 1.0) == ""
    assert heart.stopped(file, 500.0) == ""
    file.write_text('{"time": -1e9, "loop_seconds": 0.1}')
    assert heart.stopped(file, 501.0) == ""
    assert heart.stopped(file, 510.9) == ""
    assert heart.stopped(file, 511.0) == "no heartbeat for 10 s"
    file.write_text('{"time": 2, "loop_seconds": 9.0}')
    assert heart.stopped(file, 512.0) == ""
    file.write_text('{"time": 3, "loop_seconds": 10.5}')
    assert "its loop has not answered" in heart.stopped(file, 513.0)
    heart.expect(60.0)
    assert heart.stopped(file, 514.0) == ""
    heart.expect("nonsense")
    assert heart.stopped(file, 513.0 + 180) == "no heartbeat for 180 s"
    never = Heart(0.0)
    never.expect(60.0)
    for time in (0.0, 1.0):
        file.write_text(json.dumps({"time": time, "loop_seconds": 1e6}))
        assert never.stopped(file, time) == ""
    assert never.stopped(file, 1e6) == ""


# --- what a run says of itself


def test_H6_a_run_says_its_folder_only_where_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, target = tmp_path / "run", tmp_path / "facts.json"
    run.mkdir()
    (run / "events.jsonl").write_text("12345\n")
    monkeypatch.delenv(run_facts.VARIABLE, raising=False)
    run_facts.tell_run_facts(run)
    assert run_facts.read_run_facts(target) is None
    monkeypatch.setenv(run_facts.VARIABLE, str(target))
    run_facts.tell_run_facts(run)
    found = run_facts.read_run_facts(target)
    assert found is not None
    assert (found.run_dir, found.events_bytes) == (str(run), 6)
    assert [path.name for path in tmp_path.iterdir() if "facts" in path.name] == ["facts.json"]
    monkeypatch.setenv(run_facts.VARIABLE, str(tmp_path / "gone" / "facts.json"))
    run_facts.tell_run_facts(run)
    target.write_text('{"run_dir": 1}')
    assert run_facts.read_run_facts(target) is None


def test_the_watchdog_imports_nothing_heavy() -> None:
    script = (
        "import sys, delta_belief_rl.cli.watchdog\nprint(sorted({'torch', 'ray', 'hydra', "
        "'omegaconf', 'transformers', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--hung", "-1", "--", "true"], "'-1' is no number from 0 on"),
        (["--max-restarts", "2.5", "--", "true"], "'2.5' is no whole number"),
        (["--on-oom", "a.b=2", "--", "true"], "is no SETTING=FACTOR with a factor between 0 and 1"),
        (["--backup", "'", "--", "true"], "--backup is no command line"),
        (["--backup", "no-such-command", "--", "true"], "there is no command 'no-such-command'"),
        (["--", "no-such-command"], "there is no command 'no-such-command'"),
        (["--"], "there is no command: write it behind --"),
        (["true"], "unrecognized arguments: true"),
    ],
)
def test_a_mistake_in_the_watchdogs_options_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = cli(["watchdog", *words])
    except SystemExit as error:
        status = error.code
    assert status == 2
    error_lines = capsys.readouterr().err.splitlines()
    assert len(error_lines) == 1
    assert sentence in error_lines[0]
