"""What is read out of the checks of a GPU machine, and the tables that are made of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.measuring import Check as Agreement
from benchmarks.measuring import Part, Row
from delta_belief_rl.types import UserError
from validation.gpu import checks, reading, records, render, tables
from validation.gpu.findings import Claims, Findings
from validation.gpu.site import ROOT, Site

RECORDED = ROOT / "tests" / "data" / "gpu_run"
"""What a run of two steps on a CPU left, cut down to what is read."""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "out", 2, 32, str(tmp_path / "smollm2"))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path / "run"))


def change(run_dir: Path, step: int, **values: float | None) -> None:
    """Overwrite metrics of one step; double underscores stand for slashes."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step:
            line |= {key.replace("__", "/"): value for key, value in values.items()}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def broken(found: Findings) -> list[str]:
    return [claim.text for claim in found.claims if not claim.holds]


def test_a_recorded_run_shows_its_steps_and_that_engine_and_trainer_agree(recorded: Path) -> None:
    found = reading.training(recorded, 2, "float32")
    assert broken(found) == []
    assert len(found.claims) == 1 + 2 * len(reading.GAPS)
    figures = found.figures
    assert figures["steps"] == 2
    assert figures["end"] == {"status": 0, "cause": "done"}
    assert [one["step"] for one in figures["validations"]] == [0, 1, 2]
    assert {one["secrets"] for one in figures["validations"]} == {12}
    assert all(gap["steps"] == 2 for gap in figures["gaps"].values())
    assert set(figures["seconds"]) == set(reading.PHASES)
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()


def test_a_run_that_stopped_early_lacks_steps(recorded: Path) -> None:
    assert broken(reading.training(recorded, 3, "float32")) == ["all training steps are made"]
    (recorded / "metrics.jsonl").unlink()
    assert len(broken(reading.training(recorded, 3, "float32"))) == 1 + 2 * len(reading.GAPS)


@pytest.mark.parametrize("value", [0.0002, None, float("nan")])
@pytest.mark.parametrize("step", [1, 2])
def test_one_step_out_of_bounds_or_without_a_number_breaks_its_claim(
    recorded: Path, step: int, value: float | None
) -> None:
    # JSON has no NaN, and a run writes null for it.
    kept = None if value is None or value != value else value
    change(recorded, step, sync__probe_gap_mean=kept)
    found = broken(reading.training(recorded, 2, "float32"))
    assert found == ["sync probe at every step, mean"]


def test_no_value_is_no_evidence() -> None:
    claims = Claims()
    claims.below("nothing", [], 1.0, "nats")
    assert not claims.made[0].holds


def test_the_rise_of_the_win_rate_is_paired_over_secrets_with_its_interval(recorded: Path) -> None:
    found = reading.learning(recorded, 2, "float32")
    tests = [f"test secrets, {sampling} sampling" for sampling in ("training", "validation")]
    assert list(found.figures["gains"]) == ["validation secrets", *tests]
    assert len(broken(found)) == 3
    rows = [json.loads(line) for line in (recorded / "validation/2.jsonl").read_text().splitlines()]
    won = "".join(json.dumps(row | {"strict_status": 1}) + "\n" for row in rows)
    (recorded / "validation" / "10.jsonl").write_text(won)
    gain = reading.validation_gain(recorded)
    assert gain is not None
    assert gain["steps"] == [0, 10]
    assert gain["units"] == 12
    first, *_ = found.figures["validations"]
    assert first["step"] == 0
    assert gain["value"] == pytest.approx(1 - first["strict"])
    assert gain["low"] > 0
    assert "the strict win rate rises, validation secrets" not in broken(
        reading.learning(recorded, 2, "float32")
    )


def test_a_game_without_an_outcome_counts_for_neither_side(recorded: Path) -> None:
    path = recorded / "validation" / "2.jsonl"
    before = reading.validation_gain(recorded)
    path.write_text(path.read_text() + '{"secret": "axe", "strict_status": null}\n')
    assert reading.validation_gain(recorded) == before


def test_a_run_without_two_evaluations_shows_no_rise(recorded: Path) -> None:
    shutil.rmtree(recorded / "validation")
    (recorded / "final.json").unlink()
    assert "the strict win rate rises" in broken(reading.learning(recorded, 2, "float32"))


TESTED = """
import pytest

def test_numbers():
    print("log-probs: largest gap 0.01 nats")

@pytest.mark.skipif(True, reason="needs two GPUs")
def test_two():
    pass

def test_bad():
    assert 1 == 2, "not equal"
"""


def test_a_report_of_pytest_keeps_what_tests_print_and_a_skip_shows_nothing(
    site: Site, tmp_path: Path
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTED)
    (command,) = checks.run_tests(site, "some", str(file))
    site.folder("some").mkdir(parents=True)
    ini = ("-c", "/dev/null", "--rootdir", str(tmp_path))
    done = subprocess.run([*command, *ini], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    found = checks.read_tests(site, "some")
    assert broken(found) == ["test_two", "test_bad"]
    numbers, *_ = found.figures["tests"]
    assert numbers["printed"] == ["log-probs: largest gap 0.01 nats"]
    claims = {claim.text: claim.found for claim in found.claims}
    assert claims["test_two"] == "skipped needs two GPUs"


def benchmark_output(tmp_path: Path, value: float) -> Path:
    way = {"peak GiB": 22.5, "tokens/s": 3196.0, "6N share": 0.047}
    new = {"peak GiB": 39.0, "tokens/s": 52320.0, "6N share": 0.7712}
    rows = (Row("padded to 2500", (5.6,), 80000, way), Row("packed", (0.34, 0.342), 17900, new))
    agreement = Agreement("largest difference of the loss", value, 0.01)
    part = Part("update", "one optimizer step on 32 games, 17,900 tokens (x)", rows, (agreement,))
    path = tmp_path / "stdout-0.txt"
    body = {"hardware": {"gpu": "x"}, "settings": {}, "parts": [part.as_dict()]}
    path.write_text(json.dumps(body))
    return path


def test_the_benchmark_is_read_into_ways_and_a_difference_breaks_its_claim(tmp_path: Path) -> None:
    found = reading.bench(benchmark_output(tmp_path, 0.001))
    assert found.hold
    records.write(tmp_path / "actor_bench.json", {"check": "actor_bench"} | found.as_dict())
    shown = tables.update(tables.Records(tmp_path)).splitlines()
    assert shown[0].startswith("| one optimizer step on 32 games, 17,900 tokens | seconds |")
    assert shown[2] == "| padded to 2,500 | 5.600 | 3,196 | 0.047 | 22.5 GiB | 1.00 x |"
    assert shown[3] == "| packed | 0.341 | 52,320 | 0.771 | 39.0 GiB | 16.42 x |"
    bad = reading.bench(benchmark_output(tmp_path, 0.02))
    assert broken(bad) == ["update: largest difference of the loss"]


def test_the_doctors_failed_checks_are_broken_claims(tmp_path: Path) -> None:
    record = json.loads((ROOT / "validation" / "gpu" / "doctor_bf16.json").read_text())
    body = record["figures"]
    stdout = tmp_path / "stdout"
    stdout.write_text(json.dumps(body))
    assert len(reading.doctor(stdout).claims) == len(record["claims"]) > 10
    assert broken(reading.doctor(stdout)) == []
    body["checks"][3]["passed"] = False
    stdout.write_text(json.dumps(body))
    assert broken(reading.doctor(stdout)) == [body["checks"][3]["name"]]


def test_what_ray_prints_of_its_processes_is_no_line_of_a_test(tmp_path: Path) -> None:
    printed = "kill: after 5.7 s\n#x1B[33m(raylet)#x1B[0m A worker died: see the log\nno colon"
    junit = tmp_path / "junit.xml"
    junit.write_text(
        "<testsuites><testsuite><testcase name='t' time='1.0'>"
        f"<system-out>{printed}</system-out></testcase></testsuite></testsuites>"
    )
    assert reading.tests(junit).figures["tests"][0]["printed"] == ["kill: after 5.7 s"]


def test_warm_start_and_judge_are_held_to_what_training_needs(tmp_path: Path) -> None:
    measured = {"strict_win": {"14": 0.1}, "strict_win_interval": {"14": [0.05, 0.15]}}
    body = {"measured": measured, "settings": {}, "log": [{"step": 7}]}
    (tmp_path / "warmup.json").write_text(json.dumps(body))
    assert reading.warm_start(tmp_path, 14).hold
    measured["strict_win_interval"]["14"] = [0.0, 0.02]
    (tmp_path / "warmup.json").write_text(json.dumps(body))
    assert not reading.warm_start(tmp_path, 14).hold
    rate = {"value": 0.95, "low": 0.9, "high": 1.0}
    (tmp_path / "audit").write_text(json.dumps({"judges": {}, "agreement": {"rate": rate}}))
    assert reading.judge_audit(tmp_path / "audit", 0.9).hold
    assert not reading.judge_audit(tmp_path / "audit", 0.96).hold


def test_the_packaged_agents_report_is_read_as_a_warm_start() -> None:
    """The same file that a warm start of the checks leaves."""
    found = reading.warm_start(ROOT / "delta_belief_rl" / "assets" / "agent", checks.TURNS)
    assert found.hold
    assert found.figures["steps"] > 1000


# --- tables ---------------------------------------------------------------------------------------


def test_tables_of_a_recorded_run_have_its_numbers(recorded: Path, tmp_path: Path) -> None:
    worker = {"weights": 300 * 2**20, "cache": 2**33, "reserved": 9 * 2**30}
    engine = {"kind": "engine_memory", "role": "policy engine 0", "workers": [worker]}
    with (recorded / "events.jsonl").open("a") as file:
        file.write(json.dumps(engine | {"step": 0, "estimated_weights": 256 * 2**20}) + "\n")
    change(recorded, 2, memory__actor_peak_gib=5.25, memory__actor_estimate_gib=6.0)
    found = reading.learning(recorded, 2, "float32")
    body = {"check": "train_rules", "about": "it rises", "status": "failed", "seconds": 12.3}
    records.write(tmp_path / "train_rules.json", body | found.as_dict())
    here = tables.Records(tmp_path)
    start, *_ = found.figures["validations"]
    shown = tables.training(here)
    assert f"| {100 * start['strict']:.1f} % [" in shown
    assert "12 secrets, 24 games" in shown
    assert "48 secrets, 96 games | 35.4 % [25.0, 45.8] | 36.5 % [27.1, 45.8] | +1.0 points" in shown
    assert "| table as judge | policy engine 0 | 300 MiB | 256 MiB | 8.0 GiB | 9.0 GiB |" in (
        tables.memory(here)
    )
    assert "| training rank |  |  |  | 5.2 GiB (6.0) |" in tables.memory(here)
    assert tables.gaps(here).count("| 2 | 0.000 | 0.000 |") == 3
    assert "| table as judge | 2 |" in tables.seconds(here)
    assert "| `train_rules` | it rises | failed | 7 of 10 | 12 |" in tables.checks(here)


def test_a_page_gets_its_tables_anew_and_keeps_the_rest(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = reading.learning(recorded, 2, "float32")
    body = {"check": "train_rules"} | found.as_dict()
    records.write(tmp_path / "records" / "train_rules.json", body)
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- table training -->\nold\n<!-- end -->\n\ntext\n")
    words = ["--page", str(page), "--records", str(tmp_path / "records")]
    assert render.main(words) == 0
    text = page.read_text()
    assert text.startswith("# A\n\n<!-- table training -->\n| judge | evaluated on |")
    assert text.endswith(" |\n<!-- end -->\n\ntext\n")
    assert render.main(words) == 0
    assert page.read_text() == text
    page.write_text("<!-- table trainig -->\nold\n<!-- end -->\n")
    assert render.main(words) == 2
    assert "There is no table 'trainig'" in capsys.readouterr().err
    page.write_text("<!-- table update -->\nold\n<!-- end -->\n")
    assert render.main(words) == 2
    assert "run the check actor_bench, or copy its record" in capsys.readouterr().err
    assert render.main(["training", "--records", str(tmp_path / "records")]) == 0
    assert capsys.readouterr().out.startswith("<!-- table training -->\n| judge |")


def test_a_table_without_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No record"):
        tables.training(tables.Records(tmp_path))


def test_a_check_that_left_nothing_is_told_apart_from_one_that_did_not_run(tmp_path: Path) -> None:
    body = {"check": "warm_start", "status": "failed", "reason": "out of memory", "figures": {}}
    records.write(tmp_path / "warm_start.json", body)
    records.write(tmp_path / "train_rules.json", body | {"check": "train_rules"})
    here = tables.Records(tmp_path)
    with pytest.raises(UserError, match="warm_start has no figures: failed, out of memory"):
        tables.warm_start(here)
    with pytest.raises(UserError, match="No record"):
        tables.training(here)
    with pytest.raises(UserError, match=r"taught_judge\.json does not exist"):
        tables.taught_judge(here)
