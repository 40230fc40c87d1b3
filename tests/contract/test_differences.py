"""The page on differences: all 46 rows, each with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFECTS = 46
ROW = re.compile(r"^\| (\d+) \|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)


def rows() -> dict[int, list[str]]:
    text = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    return {int(n): [cell.strip() for cell in rest.split(" | ")] for n, rest in ROW.findall(text)}


def test_there_is_one_row_for_each_defect() -> None:
    assert sorted(rows()) == list(range(1, DEFECTS + 1))
    assert all(len(cells) == 3 and all(cells) for cells in rows().values())


def test_every_row_names_tests_that_exist() -> None:
    known = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in TEST.findall(file.read_text(encoding="utf-8"))
    }
    named = {number: re.findall(r"`(test_\w+)`", cells[2]) for number, cells in rows().items()}
    assert all(named.values())
    lost = {n: name for n, names in named.items() for name in names if name not in known}
    assert not lost
