"""docs/results_gpu.md says what the records in validation/gpu say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from validation.gpu.render import FOLDER, blocks, table
from validation.gpu.tables import TABLES, Records

ROOT = Path(__file__).resolve().parents[2]
RECORDS = Records(FOLDER)
PAGE = (ROOT / "docs" / "results_gpu.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("|")]
MARKED = blocks(PAGE)
GIB = 2**30


def row(first: str) -> list[str]:
    (found,) = [line for line in ROWS if line.strip("| ").startswith(f"{first} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.mark.parametrize("name", MARKED)
def test_a_marked_table_is_what_its_records_give(name: str) -> None:
    """``python -m validation.gpu.render --page docs/results_gpu.md`` changes nothing."""
    assert MARKED[name] == table(name, RECORDS)


def test_every_mark_of_the_page_stands_around_a_table_and_is_known() -> None:
    marks = re.findall(r"<!-- table (.*) -->", PAGE)
    assert marks == list(MARKED)
    assert set(marks) <= TABLES.keys()
    assert PAGE.count("<!-- end -->") == len(marks)
    assert {"update", "belief", "differences"} <= set(marks)


def test_the_targets_of_the_benchmark_are_met_in_the_record() -> None:
    """Belief at least 15 times a forward for every turn; update 10 times padding, share 0.40."""
    update, belief = (part["ways"] for part in RECORDS.figures("actor_bench")["parts"])
    assert belief[-2]["speedup"] >= 15
    assert update[-1]["speedup"] >= 10
    assert update[-1]["share_of_matrix_rate_counted_as_6N"] >= 0.40


def test_records_say_when_they_were_made_and_on_what() -> None:
    paths = sorted(FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        body: dict[str, Any] = json.loads(path.read_bytes())
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", body["date"]), path
        assert "H200" in json.dumps(body), path
        if "check" not in body:
            continue
        # One that the checks have written carries its commands, versions and a verdict.
        assert body["check"] == path.stem
        assert body["commands"], path
        assert body["versions"]["torch"], path
        held = all(claim["holds"] for claim in body["claims"])
        assert (body["status"] == "passed") == (held and not any(body["exit_statuses"])), path


def test_memory_of_the_engines_is_that_of_the_record() -> None:
    engines = RECORDS.figures("engine_memory")["engines"]
    (judge, *_) = [
        one for one in engines if "qwen3_14b_awq" in one["run"] and "judge" in one["role"]
    ]
    (worker,) = judge["workers"]
    cells = row("judge, Qwen3-14B shape, AWQ, each of two replicas on one card")
    sizes = (worker["weights"], judge["estimated_weights"], worker["cache"], worker["reserved"])
    assert cells[1:] == [f"{size / GIB:.1f} GiB" for size in sizes]


def test_agreement_of_the_judges_is_that_of_the_record() -> None:
    found = RECORDS.figures("judge_agreement")
    for judge, first in (("vllm small", "bfloat16"), ("vllm small-awq", "compressed-tensors")):
        right, judged = found["judges"][judge]["accuracy"], found["judges"][judge]
        (line,) = [line for line in ROWS if line.startswith(f"| {first}") and "[" in line]
        shown = f"{right['value']:.1%} [{right['low']:.1%}, {right['high']:.1%}]"
        assert shown.replace("%", "") in line.replace(" %", "")
        assert line.rstrip("| ").endswith(str(judged["errors"]))
    rate = found["agreement"]["rate"]
    assert f"{rate['value']:.1%}".replace("%", " %") in row("the two agree")[1]
