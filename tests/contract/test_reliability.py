"""The page on reliability: every fault has a row, and every row a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
COLUMNS = 6
KINDS = (
    "SIGKILL of the driver",
    "an actor rank is lost",
    "an engine dies",
    "a judge dies",
    "a judge hangs",
    "the disk is full while saving",
    "a checkpoint is cut off",
    "a damaged manifest",
    "the clock jumps",
    "W&B is down",
    "the hub is down",
    "the Ray head is gone",
    "two jobs on one host",
    "SIGTERM",
)
"""Faults that a night can bring: each has a row that begins so."""


def rows() -> list[list[str]]:
    """Cells of every row of the tables, heads left out."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "fault"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_has_a_row(kind: str) -> None:
    assert [row[0] for row in rows() if row[0].startswith(kind)]


def test_every_row_is_whole_and_names_a_test() -> None:
    assert len(rows()) >= len(KINDS)
    assert [row[0] for row in rows() if len(row) != COLUMNS or not all(row)] == []
    tested = re.compile(r"`\w+/test_\w+\.py::test_\w+`|\[`make chaos`\]\(#[\w-]+\)")
    assert [row[0] for row in rows() if not tested.search(row[2])] == []


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", PAGE)
    lost = []
    for file, name in named:
        path = ROOT / "tests" / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if not re.search(rf"^(?:async )?def {name}\(", text, flags=re.MULTILINE):
            lost.append(f"{file}::{name}")
    assert named
    assert lost == []


def test_every_cell_is_a_number_or_one_of_the_marks_that_the_page_explains() -> None:
    lost = re.compile(r"·|n|(at most )?\d+|those of the damaged")
    seconds = re.compile(r"·|\d+(\.\d+)?( to \d+(\.\d+)?)?")
    cells = [(row[0], cell, lost) for row in rows() for cell in row[3:5]]
    cells += [(row[0], row[5], seconds) for row in rows()]
    assert [(fault, cell) for fault, cell, form in cells if not form.fullmatch(cell)] == []
    told = PAGE.split("## Faults", 1)[1].split("### ", 1)[0]
    assert [mark for mark in ("`·`", "`n`") if mark not in told] == []


def test_a_fault_of_a_real_run_has_its_seconds() -> None:
    chaos = [row for row in rows() if "make chaos" in row[2]]
    assert chaos
    assert [row[0] for row in chaos if row[5] == "·"] == []


def test_the_page_tells_of_every_fault_of_make_chaos() -> None:
    told = PAGE.split("## A run under random faults", 1)[1]
    words = {
        "driver killed": "SIGKILL or SIGTERM of the driver",
        "driver asked to end": "SIGKILL or SIGTERM of the driver",
        "everything killed": "SIGKILL of everything",
        "raylet killed": "Ray's own processes",
        "Ray head killed": "Ray's own processes",
        "checkpoint cut short": "the newest checkpoint cut short",
        "checkpoint file removed": "a file of it removed",
        "manifest cut short": "its manifest cut short",
        "started twice": "a second start",
    }
    workers = "SIGKILL or SIGSTOP of a rank, an engine or a judge"
    flat = " ".join(told.split())
    assert [kind for kind in FAULTS if words.get(kind, workers) not in flat] == []
