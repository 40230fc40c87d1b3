"""The studies of credit: what they run, what a record keeps, and what is read from it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from compare_fakes import write_run

from delta_belief_rl.algo.catalogue import GROUPS, listed
from delta_belief_rl.cli.compare_cells import read_record, write_record
from delta_belief_rl.cli.compare_plan import make_study
from delta_belief_rl.config.compose import group_options
from delta_belief_rl.config.paths import config_dir
from delta_belief_rl.eval.compare import compare
from delta_belief_rl.eval.compare_results import read_cell
from delta_belief_rl.types import UserError
from tests.processes import arguments, born, mentioning
from tests.runs import ROOT
from validation.credit import records, run
from validation.credit.plot import study_plot
from validation.credit.reading import across, analyse, sentences
from validation.credit.render import TEMPLATE, blocks, main, rendered
from validation.credit.study import FAMILIES, FIRST, METHODS, SEEDS, STUDIES, THEN
from validation.credit.tables import ONE, differences, part, rates

SETTINGS = ["experiment=quickstart"]
SECRETS = [f"s{at}" for at in range(6)]
MACHINE: dict[str, Any] = {
    "date": "2026-11-30",
    "cpu": "a processor",
    "cores": 4,
    "runs at once": 4,
    "versions": {"python": "3.11", "torch": "2.11"},
}
BETTER, WORSE = "444434", "000010"
AHEAD = ("332222", "223222", "232322")
GRADES = {
    "grpo": ("011111",) * 3,
    "rloo": ("121212",) * 3,
    "gigpo": ("222222",) * 3,
    "hgpo": ("233333",) * 3,
    "igpo": ("344444",) * 3,
}
LEVEL = ("221212", "212122", "122221")


def evaluation(step: int, won: str) -> dict[str, Any]:
    return {"step": step, "spent": 40 * step, "turns": 3.0, "failed": 0, "won": won, "games": "4"}


def cell(method: str, seed: int, won: str) -> dict[str, Any]:
    sizes = {"wall": 9.0, "steps": 4, "games": 16, "tokens": 50.0, "seconds": 6.0, "host_gib": None}
    made = [evaluation(0, LEVEL[seed - 1]), evaluation(4, won)]
    return {"method": method, "seed": seed, **sizes, "evaluations": made}


def record(study: str = "everyday", /, **won: tuple[str, ...]) -> records.Record:
    """Three seeds of each method, by the games that it wins of each secret at the end."""
    return {
        "study": study,
        "settings": SETTINGS,
        "steps": 4,
        "budget": {"steps": 4, "secrets": 2, "games": 2, "turns": 10},
        "baseline": "grpo",
        "seeds": [1, 2, 3],
        "secrets": SECRETS,
        "methods": list(won),
        "labels": dict.fromkeys(won, "CODE"),
        "differing": {"igpo": ["multi_turn.logprob_reward.enabled is true, not false"]},
        "facts": {"policy": "a policy", "environment": "twenty_questions"},
        "cells": [
            cell(method, seed, games)
            for method, seeds in won.items()
            for seed, games in enumerate(seeds, start=1)
        ],
        "failures": [],
        "machines": [MACHINE],
    }


@pytest.fixture
def small() -> records.Record:
    return record(
        grpo=LEVEL,
        igpo=(BETTER,) * 3,
        rloo=(WORSE,) * 3,
        gigpo=tuple(reversed(LEVEL)),
    )


# --- what is run ----------------------------------------------------------------------------------


def test_every_method_is_known_and_stands_once() -> None:
    known = {*listed(), *listed(transforms=True), *GROUPS}
    assert set(METHODS) <= known
    assert len(set(METHODS)) == len(METHODS) == len(FIRST) + len(THEN)
    assert len(FIRST) >= 20
    assert len(SEEDS) >= 5


def test_every_method_has_one_family_and_every_family_is_run_first() -> None:
    named = [method for methods in FAMILIES.values() for method in methods]
    assert sorted(named) == sorted(METHODS)
    assert all(set(methods) & set(FIRST) for methods in FAMILIES.values())


def test_the_page_names_every_method_whose_own_loss_is_set_aside() -> None:
    groups = group_options()["algorithm"]
    text = " ".join(TEMPLATE.read_text().split())
    told = text[text.index("This changes methods") : text.index("A run whose policy")]
    for method in METHODS:
        own: dict[str, Any] = {}
        if method in groups:
            group = (config_dir() / "algorithm" / f"{method}.yaml").read_text()
            own = yaml.safe_load(group).get("actor_rollout_ref", {}).get("actor", {})
        loss = (own.get("loss_agg_mode", "token-mean"), own.get("policy_loss", "ppo"))
        assert (f"`{method}`" in told) == (loss != ("token-mean", "ppo")), method


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_all_methods_have_one_budget_and_one_update(name: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    made = make_study(
        study.words,
        methods=study.methods,
        seeds=SEEDS[:1],
        steps=study.steps,
        baseline="grpo",
        out=tmp_path,
    )
    assert made.methods == study.methods
    assert made.budget.steps == study.steps
    assert made.plan.optimizer_steps == 1
    assert made.plan.threads == 1
    # Ray gives no process a place that it has no CPU for.
    assert made.plan.cores == len(made.plan.placements)
    validated = [step for step in range(study.steps + 1) if made.plan.validates(step)]
    assert len(validated) in (3, 4)
    assert validated[-1] == study.steps
    # At least 48 secrets x 4 games.
    assert (made.plan.val_games or 0) >= 192
    for method, items in made.differing.items():
        assert all(item.startswith("multi_turn.logprob_reward.") for item in items), method


def call(out: Path, **more: Any) -> run.Call:
    made = run.Call(
        study=STUDIES["everyday"],
        methods=("grpo", "igpo", "dr_grpo"),
        seeds=(1, 2),
        steps=2,
        cores=1,
        minutes=5.0,
        out=out,
    )
    return replace(made, **more)


def test_methods_of_the_first_list_go_first_each_with_all_seeds(tmp_path: Path) -> None:
    given = ["--study", "everyday", "--cores", "1", "--minutes", "5", "--out", str(tmp_path)]
    asked = ["--methods", "dr_grpo,grpo,igpo", "--seeds", "2,1"]
    made = run.make_call(run.parse([*given, *asked]))
    words = made.command()
    assert words[words.index("--methods") + 1] == "grpo,igpo,dr_grpo"
    assert [word for word in words if "=" in word] == list(STUDIES["everyday"].words)
    assert [(one.method, one.seed) for one in run.plan(made).cells] == [
        ("grpo", 2), ("grpo", 1), ("igpo", 2), ("igpo", 1), ("dr_grpo", 2), ("dr_grpo", 1),
    ]  # fmt: skip


def test_own_settings_are_told_against_the_baseline_of_the_page(tmp_path: Path) -> None:
    made = call(tmp_path, methods=("igpo", "rloo"))
    study = run.plan(made)
    assert {one.method for one in study.cells} == {"igpo", "rloo"}
    body = run.make_record(made, study)
    assert list(body["labels"]) == body["methods"] == ["igpo", "rloo"]
    assert list(body["differing"]) == ["igpo"]
    assert "multi_turn.logprob_reward.enabled is true, not false" in body["differing"]["igpo"]


def test_a_comparison_is_asked_to_end_when_its_time_is_up() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run._compare(sleeper, time.monotonic() - 1, ()) == -15
    assert run._compare(sleeper, time.monotonic() + 600, [15]) == -15
    assert run._compare([sys.executable, "-c", "raise SystemExit(1)"], sys.maxsize, ()) == 1


@pytest.mark.fault
def test_a_comparison_ends_with_the_program_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from validation.credit import run\n"
        f"own = [sys.executable, '-c', 'import time; time.sleep(600)', {str(tmp_path)!r}]\n"
        "run._compare(own, sys.maxsize, ())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (found := set(mentioning(str(tmp_path))) - {process.pid}):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # It has become the sleeper, which the leash holds.
    while any("leash.py" in " ".join(arguments(pid)) for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = {pid: born(pid) for pid in found}
    process.kill()
    process.wait(timeout=30)
    while any(birth and born(pid) == birth for pid, birth in family.items()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def played(monkeypatch: pytest.MonkeyPatch, made: run.Call, *ends: int) -> tuple[bool, int]:
    """What ``play`` says of comparisons that end so, and how many it made."""
    statuses = list(ends)
    monkeypatch.setattr(run, "_compare", lambda *_: statuses.pop(0))
    went = run.play(made, lambda text: None)
    return went, len(ends) - len(statuses)


def test_what_failed_is_tried_once_again_and_nothing_begins_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = call(tmp_path)
    assert played(monkeypatch, made, 0, 0) == (True, 1)
    assert played(monkeypatch, made, 1, 0) == (True, 2)
    assert played(monkeypatch, made, 1, 1, 1) == (True, 2)
    assert played(monkeypatch, made, 143, 0) == (True, 1)
    assert played(monkeypatch, made, 2, 0) == (False, 1)
    assert played(monkeypatch, replace(made, minutes=run.CLOSING / 60), 0) == (True, 0)


def test_a_comparison_that_was_refused_leaves_the_record_of_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = call(tmp_path, methods=("grpo",))
    for one in run.plan(made).cells:
        write_run(one.folder, {0: 0.3, 2: 0.6}, seed=one.seed, secrets=5)
        write_record(one, replace(read_record(one), status=0))
    monkeypatch.setattr(run, "_compare", lambda *_: 2)
    given = ["--study", "everyday", "--cores", "1", "--minutes", "5", "--out", str(tmp_path)]
    assert run.main([*given, "--methods", "grpo", "--seeds", "1,2", "--steps", "2"]) == 2
    assert "refused" in capsys.readouterr().err
    assert len(records.load(made.record)["cells"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "gspo"], "'gspo' is no method of the study"),
        (["--cores", "0"], "--cores and --steps must be 1 or more"),
        (["--minutes", "1"], "--minutes=1 is too short"),
        (["--seeds", "a"], "--seeds=a must be whole numbers"),
        (["--have", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_bad_words_are_refused_in_one_sentence(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--study", "errands", "--cores", "1", "--minutes", "5", "--out", str(tmp_path)]
    assert run.main([*given, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_method_that_an_earlier_record_has_is_not_run(
    tmp_path: Path, small: records.Record
) -> None:
    small["cells"] = [one for one in small["cells"] if (one["method"], one["seed"]) != ("igpo", 3)]
    records.write(tmp_path / "old.json", small)
    given = ["--study", "everyday", "--cores", "1", "--minutes", "5", "--out", str(tmp_path)]
    asked = ["--methods", "grpo,igpo,hgpo", "--have", str(tmp_path / "old.json")]
    assert run.make_call(run.parse([*given, *asked])).methods == ("igpo", "hgpo")


@pytest.mark.fault
def test_a_run_that_is_killed_is_made_again_within_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"rloo": "kill"}))
    monkeypatch.setenv("COMPARE_PLAN", str(tmp_path / "plan.json"))
    program = ["--train", str(ROOT / "tests" / "unit" / "compare_program.py")]
    command = run.Call.command
    monkeypatch.setattr(run.Call, "command", lambda made: [*command(made), *program])
    given = ["--study", "everyday", "--cores", "2", "--minutes", "9", "--out", str(tmp_path)]
    asked = ["--methods", "rloo,grpo", "--seeds", "1,2", "--steps", "3"]
    assert run.main([*given, *asked]) == 0
    body = records.load(tmp_path / "everyday.json")
    assert records.complete(body) == ["rloo", "grpo"]
    assert body["failures"] == []
    starts = {
        path.parent: path.read_text() for path in tmp_path.glob("everyday/runs/*/*/starts.txt")
    }
    assert sorted(len(text.splitlines()) for text in starts.values()) == [1, 1, 2, 2]


# --- what a record keeps --------------------------------------------------------------------------


def test_a_record_keeps_what_the_runs_won_and_no_place_of_the_machine(tmp_path: Path) -> None:
    made = call(tmp_path, methods=("grpo", "igpo"))
    study = run.plan(made)
    for one in study.cells[:-1]:
        write_run(one.folder, {0: 0.3, 2: 0.6}, seed=one.seed, secrets=5)
        write_record(one, replace(read_record(one), status=0, seconds=12.3))
    lost = study.cells[-1]
    said = f"ABORT: no '/home/me/a b.txt', no {lost.folder}/x, no /opt/a/b.py:3 ({lost.log})"
    write_record(lost, replace(read_record(lost), status=3, cause=said))
    body = run.make_record(made, study)
    records.write(made.record, body)
    again = records.load(made.record)
    assert again == body
    assert str(tmp_path) not in made.record.read_text()
    cause = "ABORT: no 'a b.txt', no seed2/x, no b.py:3"
    assert again["failures"] == [{"method": "igpo", "seed": 2, "cause": cause}]
    assert records.complete(again) == ["grpo"]
    found = records.cells_of(again)
    for one in study.cells[:-1]:
        cells = read_cell(one.folder, study.budget)
        theirs = found[one.method][one.seed]
        assert [each.counts for each in theirs.evaluations] == [
            each.counts for each in cells.evaluations
        ]
        assert (theirs.steps, theirs.games, theirs.seconds) == (
            cells.steps, cells.games, cells.seconds,
        )  # fmt: skip


def test_a_run_whose_files_are_damaged_stands_among_the_failures(tmp_path: Path) -> None:
    made = call(tmp_path, methods=("grpo",), seeds=(1, 2, 3))
    study = run.plan(made)
    for one in study.cells:
        write_run(one.folder, {0: 0.3, 2: 0.6}, seed=one.seed, secrets=5)
        write_record(one, replace(read_record(one), status=0))
    games, own = study.cells[0], study.cells[1]
    (games.folder / "validation" / "2.jsonl").write_text("{\n")
    own.file.write_text("{")
    body = run.make_record(made, study)
    assert [cell["seed"] for cell in body["cells"]] == [3]
    first, second = body["failures"]
    assert (first["seed"], second["seed"]) == (1, 2)
    assert first["cause"].startswith("seed1/validation/2.jsonl, line 1, is damaged")
    assert second["cause"].startswith("seed2.json cannot be read")
    assert str(tmp_path) not in json.dumps(body)


def test_games_that_failed_are_kept_as_games_that_are_missing() -> None:
    body = record(grpo=LEVEL)
    body["cells"][0]["evaluations"][1] |= {"won": "200000", "games": "304444"}
    counts = records.cells_of(body)["grpo"][1].final.counts
    assert list(counts.values())[:3] == [(2.0, 3), (0.0, 0), (0.0, 4)]


def test_records_of_one_study_are_put_together(small: records.Record) -> None:
    ours, theirs = record(grpo=LEVEL, igpo=(BETTER,) * 2), small
    ours["failures"] = [{"method": "igpo", "seed": 3, "cause": "lost"}]
    both = records.merged(ours, theirs)
    assert records.complete(both) == ["grpo", "igpo", "rloo", "gigpo"]
    assert len(both["cells"]) == 12
    assert both["failures"] == []
    assert both["machines"] == [MACHINE]
    with pytest.raises(UserError, match="differ in settings"):
        records.merged({**ours, "settings": ["experiment=starpo_quickstart"]}, theirs)


# --- what is read from it -------------------------------------------------------------------------


def test_differences_are_those_of_the_games(small: records.Record) -> None:
    found = analyse(small)
    assert found.start.interval.value == pytest.approx(30 / 72)
    assert [one.method for one in found.ranked][0::3] == ["igpo", "rloo"]
    assert found.ranked[0].rate.interval.value == pytest.approx(23 / 24)
    assert found.gains["igpo"].rate.interval.value == pytest.approx(23 / 24 - 30 / 72)
    assert found.gains["grpo"].rate.interval.value == 0
    assert found.against["rloo"].rate.interval.value == pytest.approx(1 / 24 - 30 / 72)
    assert [name for name, one in found.against.items() if one.is_real] == ["igpo", "rloo"]
    assert all(one.is_real for one in found.behind.values())
    apart = compare(records.cells_of(small), "igpo", records.budget_of(small)).differences
    for one in apart:
        # Four methods: three differences from the first, six pairs.
        assert found.behind[one.method].rate_p == pytest.approx(min(1.0, 2 * one.rate_p))
        assert found.behind[one.method].area_p == pytest.approx(min(1.0, 2 * one.area_p))
    assert found.spent["grpo"] == 1.0


def test_the_reading_names_what_is_real_and_what_is_not(small: records.Record) -> None:
    learnt, against, first, seen = sentences(analyse(small))
    assert "starts at 41.7 %" in learnt
    assert (
        "raises it with: `igpo`; lowers it with: `rloo`; no change is seen with: `grpo`" in learnt
    )
    assert "above it: `igpo`; really below it: `rloo`; not told apart from it: `gigpo`" in against
    assert "`igpo` has the highest rate, 95.8 %" in first
    assert first.endswith("really above every other method.")
    assert "3 seeds and 6 secrets. This is before Holm's rule, which asks for more" in seen


def test_a_lead_that_is_not_real_is_shared() -> None:
    found = analyse(record(grpo=LEVEL, rloo=(WORSE,) * 3, gigpo=("221222", *LEVEL[1:])))
    first = sentences(found)[2]
    assert "`gigpo` has the highest rate" in first
    assert "this lead is not real. It is really above `rloo`." in first
    assert "Not told apart from it: `grpo`; each of them may be first as well." in first


def test_a_lead_that_is_real_for_one_pair_alone_is_not_called_real() -> None:
    others = [method for method in METHODS if method != "igpo"][:15]
    lone = record(igpo=AHEAD, **dict.fromkeys(others, LEVEL))
    found = analyse(lone)
    apart = compare(records.cells_of(lone), "igpo", records.budget_of(lone)).differences
    assert found.leader == "igpo"
    assert max(one.rate_p for one in apart) < 0.05 < found.behind["rloo"].rate_p
    assert "this lead is not real" in sentences(found)[2]


def test_methods_that_are_not_judged_at_the_end_of_the_budget_are_named(
    small: records.Record,
) -> None:
    for one in small["cells"]:
        if one["method"] == "rloo":
            one["evaluations"][1] |= {"step": 3, "spent": 150}
        if one["method"] == "gigpo":
            one["evaluations"][1] |= {"spent": 80}
    early, less = sentences(analyse(small))[4:]
    assert "`rloo` after 3.0 of 4 steps with 94 % of the budget." in early
    assert "these spend in all of their steps: `gigpo` 50 %." in less
    assert "after steps 0, 3, 4" in part("setting", {"everyday": analyse(small)})


def test_a_method_without_all_seeds_is_left_out_by_name(small: records.Record) -> None:
    small["cells"] = [one for one in small["cells"] if (one["method"], one["seed"]) != ("igpo", 2)]
    small["failures"] = [{"method": "igpo", "seed": 2, "cause": "OUT OF MEMORY"}]
    found = analyse(small)
    assert "igpo" not in {one.method for one in found.ranked}
    assert "**Left out.** `igpo`" in sentences(found)[-2]
    assert "`igpo` with seed 2 failed: OUT OF MEMORY" in sentences(found)[-1]
    with pytest.raises(UserError, match="lacks seeds of grpo"):
        analyse(record(igpo=LEVEL))


def test_two_environments_are_read_together(small: records.Record) -> None:
    other = record(
        "errands", grpo=LEVEL, igpo=(BETTER,) * 3, rloo=(BETTER,) * 3, gigpo=(WORSE,) * 3
    )
    both, lone, order = across(analyse(small), analyse(other))
    assert "to the same side: `igpo`; real and opposed: `rloo`" in both
    assert "real in neither" not in both
    assert "Real in everyday: none; in errands: `gigpo`." in lone
    # Ranks 2.5, 4, 1, 2.5 against 2, 3.5, 3.5, 1.
    assert "the 4 methods in the two environments correlate with +0.00 " in order
    assert "says little" in order
    same = across(analyse(small), analyse({**small, "study": "errands"}))
    assert (
        "correlate with +1.00 (Spearman, p below 0.001): what ranks high in one tends to rank high"
        in same[2]
    )
    turned = dict(zip(GRADES, reversed(GRADES.values()), strict=True))
    against = across(analyse(record(**GRADES)), analyse(record("errands", **turned)))
    assert "what ranks high in one tends to rank low in the other" in against[2]


def test_tables_have_a_row_for_each_method_in_the_order_of_the_rate(small: records.Record) -> None:
    found = analyse(small)
    lines = rates(found).splitlines()[2:]
    assert lines[0].startswith("| `igpo` |")
    assert "95.8 [" in lines[0]
    assert "belief in the answer" in lines[0]
    widths = {
        line.count("|") for line in (*rates(found).splitlines(), *differences(found).splitlines())
    }
    assert len(widths) == 2
    with pytest.raises(UserError, match="no part 'rates errands'"):
        part("rates errands", {"everyday": found})


def test_the_page_is_made_from_its_template_and_made_anew(
    tmp_path: Path, small: records.Record
) -> None:
    records.write(tmp_path / "everyday.json", small)
    records.write(tmp_path / "errands.json", {**small, "study": "errands"})
    page = tmp_path / "page_of_credit.md"
    assert main(["--page", str(page), "--records", str(tmp_path)]) == 0
    text = page.read_text()
    assert all(blocks(text).values())
    assert set(blocks(text)) == {
        "setting", "both", *(f"{one} {study}" for one in ONE for study in STUDIES),
    }  # fmt: skip
    page.write_text(text.replace("`igpo`", "`nobody`"))
    assert main(["--page", str(page), "--records", str(tmp_path)]) == 0
    assert page.read_text() == text
    for name in STUDIES:
        assert ElementTree.parse(tmp_path / f"page_of_credit_{name}.svg").getroot() is not None


def test_a_page_needs_the_records_that_it_names(
    tmp_path: Path, small: records.Record, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--page", str(tmp_path / "page.md"), "--records", str(tmp_path)]) == 2
    assert "has no record of a study" in capsys.readouterr().err
    with pytest.raises(UserError, match="errands"):
        rendered(TEMPLATE.read_text(), {"everyday": analyse(small)})


def test_the_picture_has_full_dots_for_what_is_real(small: records.Record) -> None:
    dots = [
        one.attrib["fill"]
        for one in ElementTree.fromstring(study_plot(analyse(small), "A & B")).iter()
        if one.tag.endswith("circle") and one.attrib["r"] == "4"
    ]
    # A rate of each of four methods, and three differences, one of which is not real.
    assert len(dots) == 7
    assert dots.count("#fff") == 1


def test_the_record_is_one_line_a_run(tmp_path: Path, small: records.Record) -> None:
    records.write(tmp_path / "a.json", small)
    lines = [line for line in (tmp_path / "a.json").read_text().splitlines() if '"won"' in line]
    assert len(lines) == len(small["cells"])
    first: Mapping[str, Any] = json.loads(lines[0].strip().rstrip(","))
    assert first["method"] == "grpo"
