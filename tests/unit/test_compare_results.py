"""What is read from the folders of runs, what counts within the budget, and what is compared."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from compare_fakes import game, write_run, write_validation

from delta_belief_rl.cli.compare import CSV, JSON, PLOT, TABLE, write_report
from delta_belief_rl.eval.compare import compare
from delta_belief_rl.eval.compare_plot import comparison_plot
from delta_belief_rl.eval.compare_results import Budget, CellResult, kept_cell, read_cell
from delta_belief_rl.eval.compare_statistics import grid_mean
from delta_belief_rl.eval.compare_text import Report, sentences, to_json, to_markdown, to_text
from delta_belief_rl.obs.jsonl import MetricsLog
from delta_belief_rl.rollout.store import write_groups
from delta_belief_rl.types import Group, Task, UserError

BUDGET = Budget(steps=4, secrets=3, games=2, turns=5)
SECRETS = ["s0", "s1"]


def exact(run_dir: Path, at: dict[int, list[list[bool]]], batches: int = 1) -> CellResult:
    """A run whose games of two secrets are given for each validation."""
    log = MetricsLog(run_dir / "metrics.jsonl", "fake")
    for step in range(1, 5):
        made = {"train/num_gen_batches": float(batches), "timing_s/step": 2.0 * step}
        log.append(step, {**made, "state_tokens/sampled": 10.0, "perf/cpu_memory_used_gb": step})
    for step, games in at.items():
        write_validation(run_dir, step, dict(zip(SECRETS, games, strict=True)))
    return read_cell(run_dir, BUDGET)


def test_budget_counts_games_times_turns() -> None:
    assert BUDGET.step_turns == 30
    assert BUDGET.total == 120


def test_a_run_is_read_with_all_that_it_cost(tmp_path: Path) -> None:
    cell = exact(tmp_path, {0: [[False, False]] * 2, 4: [[True, False], [True, True]]})
    assert [one.spent for one in cell.evaluations] == [0, 120]
    assert cell.final.rate == 0.75
    assert cell.final.turns == 2.0
    assert (cell.steps, cell.games, cell.tokens, cell.seconds) == (4, 24, 40.0, 20.0)
    assert cell.host_gib == 4.0
    assert math.isnan(cell.gpu_gib)
    np.testing.assert_array_equal(cell.rates(SECRETS), [[0, 0], [0.5, 1.0]])
    np.testing.assert_allclose(cell.areas(SECRETS, BUDGET), [0.25, 0.5])


def test_what_was_read_is_kept_until_the_run_or_the_budget_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, place = tmp_path / "seed1", tmp_path / "seed1.result.json"
    cell = exact(run, {0: [[False, False]] * 2, 4: [[True, False], [True, True]]})
    reads: list[Path] = []

    def read(run_dir: Path, budget: Budget) -> CellResult:
        reads.append(run_dir)
        return read_cell(run_dir, budget)

    monkeypatch.setattr("delta_belief_rl.eval.compare_results.read_cell", read)
    for _ in range(2):
        kept = kept_cell(run, BUDGET, place)
        assert kept.evaluations == cell.evaluations
        assert (kept.steps, kept.games, kept.host_gib) == (cell.steps, cell.games, cell.host_gib)
        assert math.isnan(kept.gpu_gib)
    assert len(reads) == 1
    place.write_text(place.read_text()[:-20])
    assert kept_cell(run, BUDGET, place).evaluations == cell.evaluations
    assert len(reads) == 2
    assert kept_cell(run, replace(BUDGET, turns=6), place).games == 24
    assert len(reads) == 3
    write_validation(run, 4, dict(zip(SECRETS, [[True, True, True]] * 2, strict=True)))
    assert kept_cell(run, replace(BUDGET, turns=6), place).final.rate == 1.0
    assert len(reads) == 4


def test_a_place_that_takes_no_file_costs_no_result(tmp_path: Path) -> None:
    cell = exact(tmp_path / "seed1", {0: [[False, False]] * 2})
    place = tmp_path / "nowhere" / "seed1.result.json"
    assert kept_cell(tmp_path / "seed1", BUDGET, place).evaluations == cell.evaluations


def test_a_method_that_plays_twice_the_games_gets_half_the_steps(tmp_path: Path) -> None:
    games = {step: [[True, False], [step > 2, True]] for step in (0, 1, 2, 3, 4)}
    cell = exact(tmp_path, games, batches=2)
    assert [one.step for one in cell.evaluations] == [0, 1, 2]
    assert cell.final.spent == BUDGET.total
    assert cell.final.rate == 0.5
    assert (cell.steps, cell.games, cell.tokens, cell.seconds) == (2, 24, 20.0, 6.0)


def test_trees_spend_the_turns_that_they_play(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", "fake")
    for step, played in ((1, 12.0), (2, 48.0), (3, 24.0)):
        log.append(step, {"state_turns/played": played, "state_turns/total": 24.0})
    for step in (0, 1, 2, 3):
        write_validation(tmp_path, step, {"s0": [True]})
    spent = [one.spent for one in read_cell(tmp_path, BUDGET).evaluations]
    assert spent == [0, 15, 75, 105]


def test_the_last_validation_stands_for_what_is_left_of_the_budget(tmp_path: Path) -> None:
    cell = exact(tmp_path, {0: [[False, False]] * 2, 2: [[True, True]] * 2})
    np.testing.assert_allclose(cell.areas(SECRETS, BUDGET), [0.75, 0.75])


def test_games_that_failed_count_for_nothing(tmp_path: Path) -> None:
    task = Task("s0", "fake", "s0", (), "val")
    games = (game("s0", 0, True), game("s0", 1, False, failed=True), game("s0", 2, False))
    write_groups(tmp_path / "validation" / "0.jsonl", [Group(task, games)], max_turns=4)
    MetricsLog(tmp_path / "metrics.jsonl", "fake").append(0, {})
    final = read_cell(tmp_path, BUDGET).final
    assert final.counts == {"s0": (1.0, 2)}
    assert final.failed == 1


def test_a_run_without_a_validation_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no validation within the budget of 120 turns"):
        read_cell(tmp_path, BUDGET)
    exact(tmp_path, {4: [[True, False], [True, True]]})
    with (tmp_path / "validation" / "4.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(UserError, match=r"4\.jsonl, line 5, is damaged"):
        read_cell(tmp_path, BUDGET)


# --- comparing ------------------------------------------------------------------------------------


def cells(folder: Path, ends: dict[str, float], seeds: int = 3) -> dict[str, dict[int, CellResult]]:
    """Runs that begin alike and end with given chances."""
    budget = Budget(4, 2, 4, 4)
    found: dict[str, dict[int, CellResult]] = {}
    for number, (method, end) in enumerate(ends.items()):
        for seed in range(1, seeds + 1):
            rates = {0: 0.1, 2: (0.1 + end) / 2, 4: end}
            place = folder / method / str(seed)
            write_run(place, rates, seed=10 * number + seed, secrets=40)
            found.setdefault(method, {})[seed] = read_cell(place, budget)
    return found


ENDS = {"grpo": 0.3, "better": 0.7, "same": 0.3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, CellResult]]:
    return cells(tmp_path_factory.mktemp("cells"), ENDS)


@pytest.fixture
def report(made: dict[str, dict[int, CellResult]]) -> Report:
    return Report(
        comparison=compare(made, "grpo", Budget(4, 2, 4, 4)),
        methods=(*ENDS, "broken", "cut"),
        seeds=(1, 2, 3),
        labels={"grpo": "CODE", "better": "OWN"},
        failures={("broken", seed): "killed: SIGKILL" for seed in (1, 2, 3)},
        facts={"environment": "a|b"},
        differing={"better": ["a is 1, not 2"], "same": []},
    )


def test_a_better_method_is_found_and_an_equal_one_is_not(report: Report) -> None:
    better, same = report.comparison.differences
    assert (better.method, same.method) == ("better", "same")
    assert better.is_real
    assert not same.is_real
    assert better.rate.interval.low < 0.4 < better.rate.interval.high
    assert better.rate_p >= better.rate.p
    assert "better is above grpo: +" in sentences(report)[0]
    assert sentences(report)[0].endswith("This difference is real.")
    assert "cannot be told apart" in sentences(report)[1]


def test_differences_are_paired_by_seed_and_secret(made: dict[str, dict[int, CellResult]]) -> None:
    fewer = {"grpo": made["grpo"], "better": {2: made["better"][2]}}
    (gap,) = compare(fewer, "grpo", Budget(4, 2, 4, 4)).differences
    secrets = sorted(made["grpo"][2].final.counts)
    ours, theirs = (made[name][2].rates(secrets)[-1:] for name in ("better", "grpo"))
    assert gap.rate == grid_mean(ours - theirs)
    assert gap.rate.seeds == 1


def test_a_method_against_itself_differs_by_nothing(
    made: dict[str, dict[int, CellResult]],
) -> None:
    twice = {"grpo": made["grpo"], "again": made["grpo"]}
    (gap,) = compare(twice, "grpo", Budget(4, 2, 4, 4)).differences
    assert (gap.rate.interval.value, gap.rate_p, gap.is_real) == (0.0, 1.0, False)


def test_without_a_finished_baseline_there_are_rates_and_no_differences(
    made: dict[str, dict[int, CellResult]],
) -> None:
    found = compare({"grpo": {}, "better": made["better"]}, "grpo", Budget(4, 2, 4, 4))
    assert [one.method for one in found.results] == ["better"]
    assert found.differences == ()


def test_the_table_has_every_method_and_every_failure(report: Report) -> None:
    text = to_text(report)
    for method in report.methods:
        assert method in text
    assert "0 of 3, 3 failed" in text
    assert "broken with seed 2 failed: killed: SIGKILL" in text
    assert "Not run to its end: cut with seed 1, cut with seed 2, cut with seed 3." in text
    assert "better differs from grpo in more than credit: a is 1, not 2." in text
    assert "same differs" not in text
    assert "One seed" not in text
    page = to_markdown(report, "compare.svg")
    assert "![compare.svg](compare.svg)" in page
    assert "a\\|b" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in rows} <= {3, 8, 13}


def test_one_seed_is_said_to_be_one_seed(made: dict[str, dict[int, CellResult]]) -> None:
    one = {name: {1: seeds[1]} for name, seeds in made.items()}
    found = Report(compare(one, "grpo", Budget(4, 2, 4, 4)), tuple(ENDS), (1,), {})
    assert "With one seed an interval is over secrets alone" in to_text(found)


def test_files_of_a_comparison_agree(report: Report, tmp_path: Path) -> None:
    paths = write_report(report, tmp_path)
    assert [path.name for path in paths] == [TABLE, CSV, JSON, PLOT]
    rows = list(csv.DictReader(io.StringIO((tmp_path / CSV).read_text())))
    value = json.loads((tmp_path / JSON).read_text())
    assert [row["method"] for row in rows] == list(report.methods)
    by_name = {one["method"]: one for one in value["methods"]}
    for row in rows[:3]:
        assert float(row["rate"]) == by_name[row["method"]]["rate"]["interval"]["value"]
    assert [row["real"] for row in rows] == ["", "1", "0", "", ""]
    assert [row["seeds_failed"] for row in rows] == ["0", "0", "0", "3", "0"]
    assert value["differences"][0]["real"] is True
    assert value["methods"][0]["gpu_gib"] is None
    assert len(value["missing"]) == 3
    assert json.loads(json.dumps(to_json(report))) == value


def test_the_plot_shows_every_curve_and_marks_what_is_real(report: Report) -> None:
    picture = comparison_plot(report.comparison)
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}polyline")) == len(ENDS)
    words = ["".join(item.itertext()) for item in root.iter(f"{space}text")]
    assert sum(word.endswith(" real") for word in words) == 1
    assert "Difference from grpo at the end, in points" in words
    width = float(root.attrib["width"])
    assert all(0 <= float(dot.attrib["cx"]) <= width for dot in root.iter(f"{space}circle"))


def test_without_a_finished_run_there_is_a_table_and_no_plot(tmp_path: Path) -> None:
    (tmp_path / PLOT).write_text("of an earlier call")
    found = compare({"grpo": {}}, "grpo", BUDGET)
    empty = Report(found, ("grpo",), (1,), {}, {("grpo", 1): "bad input: no"})
    assert [path.name for path in write_report(empty, tmp_path)] == [TABLE, CSV, JSON]
    assert not (tmp_path / PLOT).exists()
    assert "grpo with seed 1 failed: bad input: no" in (tmp_path / TABLE).read_text()
