"""docs/results_credit.md says what the records in validation/credit say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from validation.credit import records
from validation.credit.reading import Findings
from validation.credit.render import FOLDER, TEMPLATE, blocks, findings, pictures, rendered
from validation.credit.study import METHODS, STUDIES
from validation.credit.tables import EVERY, ONE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results_credit.md"
HERE = pytest.mark.skipif(not PAGE.is_file(), reason="the studies have not been run")


@pytest.fixture(scope="module")
def found() -> dict[str, Findings]:
    return findings(FOLDER)


def test_every_mark_of_the_template_names_a_part_that_is_made() -> None:
    marks = re.findall(r"<!-- part (.*) -->", TEMPLATE.read_text(encoding="utf-8"))
    known = {*EVERY, *(f"{kind} {study}" for kind in ONE for study in STUDIES)}
    assert sorted(marks) == sorted(known)
    assert marks == list(blocks(TEMPLATE.read_text(encoding="utf-8")))


def test_page_and_records_are_there_together() -> None:
    assert PAGE.is_file() == any((FOLDER / f"{name}.json").is_file() for name in STUDIES)


@HERE
def test_the_page_and_its_pictures_are_what_the_records_give(found: dict[str, Findings]) -> None:
    """``python -m validation.credit.render --page docs/results_credit.md`` changes nothing."""
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text, found) == text
    for path, picture in pictures(PAGE, found).items():
        assert path.read_text(encoding="utf-8") == picture, path
        assert f"]({path.name})" in text


@HERE
def test_at_least_twenty_methods_have_five_seeds_in_both_environments(
    found: dict[str, Findings],
) -> None:
    assert list(found) == list(STUDIES)
    shared = set.intersection(*({one.method for one in study.ranked} for study in found.values()))
    assert len(shared) >= 20
    for study in found.values():
        assert len(study.record["seeds"]) >= 5


@HERE
def test_records_are_of_the_studies_that_stand_in_the_code(found: dict[str, Findings]) -> None:
    for name, study in found.items():
        assert study.record["study"] == name
        assert tuple(study.record["settings"]) == STUDIES[name].words
        assert study.record["steps"] == STUDIES[name].steps
        assert set(study.record["methods"]) <= set(METHODS)
        for machine in study.record["machines"]:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", machine["date"])
            assert machine["versions"]["torch"]


@HERE
def test_records_hold_no_place_of_a_machine(found: dict[str, Findings]) -> None:
    for name in found:
        text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|tmp|work|mnt)/", text), name


@HERE
def test_runs_stay_within_the_budget(found: dict[str, Findings]) -> None:
    for study in found.values():
        budget = records.budget_of(study.record)
        for seeds in records.cells_of(study.record).values():
            for one in seeds.values():
                assert one.evaluations[0].spent == 0
                assert one.final.spent <= budget.total
