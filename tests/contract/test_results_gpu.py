"""docs/results_gpu.md says what the records in validation/gpu say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "validation" / "gpu"
PAGE = (ROOT / "docs" / "results_gpu.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("|")]
GIB = 2**30


def record(name: str) -> Any:
    return json.loads((RECORDS / f"{name}.json").read_bytes())


def row(first: str) -> list[str]:
    (found,) = [line for line in ROWS if line.strip("| ").startswith(f"{first} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


BENCH = record("actor_bench")
UPDATE, BELIEF = (part["ways"] for part in BENCH["parts"])


@pytest.mark.parametrize("way", UPDATE, ids=[way["name"] for way in UPDATE])
def test_update_rows_are_those_of_the_record(way: dict[str, Any]) -> None:
    cells = row(way["name"].replace("2500", "2,500"))
    assert cells[1] == f"{way['median_s']:.3f}"
    assert cells[4:] == [f"{way['peak_gib']:.1f} GiB", f"{way['speedup']:.2f} x"]
    if "tokens_per_s" in way:
        rate, share = way["tokens_per_s"], way["share_of_matrix_rate_counted_as_6N"]
        assert cells[2:4] == [f"{rate:,.0f}", f"{share:.3f}"]


@pytest.mark.parametrize("way", BELIEF, ids=[way["name"] for way in BELIEF])
def test_belief_rows_are_those_of_the_record(way: dict[str, Any]) -> None:
    assert row(way["name"])[1:] == [
        f"{way['median_s']:.3f}",
        f"{way['tokens']:,}",
        f"{way['peak_gib']:.1f} GiB",
        f"{way['speedup']:.2f} x",
    ]


def test_the_targets_of_the_benchmark_are_met_in_the_record() -> None:
    """Belief at least 15 times a forward for every turn; update 10 times padding, share 0.40."""
    assert BELIEF[-2]["speedup"] >= 15
    assert UPDATE[-1]["speedup"] >= 10
    assert UPDATE[-1]["share_of_matrix_rate_counted_as_6N"] >= 0.40


def test_differences_of_engine_and_trainer_are_those_of_the_record() -> None:
    differences = record("doctor_differences")["differences"]
    for name, found in differences.items():
        cells = row(f"`{name}`")
        assert cells[1] == f"{found['count']:,}"
        shown = [float(cell) for cell in cells[2:]]
        keys = ("mean", "p50", "p99", "max", "worst_mean")
        assert shown == pytest.approx([found[key] for key in keys], abs=5.1e-4)


def test_memory_of_the_engines_is_that_of_the_record() -> None:
    engines = record("engine_memory")["engines"]
    (judge, *_) = [
        one for one in engines if "qwen3_14b_awq" in one["run"] and "judge" in one["role"]
    ]
    (worker,) = judge["workers"]
    cells = row("judge, Qwen3-14B shape, AWQ, each of two replicas on one card")
    sizes = (worker["weights"], judge["estimated_weights"], worker["cache"], worker["reserved"])
    assert cells[1:] == [f"{size / GIB:.1f} GiB" for size in sizes]


def test_agreement_of_the_judges_is_that_of_the_record() -> None:
    found = record("judge_agreement")
    for judge, first in (("vllm small", "bfloat16"), ("vllm small-awq", "compressed-tensors")):
        right, judged = found["judges"][judge]["accuracy"], found["judges"][judge]
        (line,) = [line for line in ROWS if line.startswith(f"| {first}") and "[" in line]
        shown = f"{right['value']:.1%} [{right['low']:.1%}, {right['high']:.1%}]"
        assert shown.replace("%", "") in line.replace(" %", "")
        assert line.rstrip("| ").endswith(str(judged["errors"]))
    rate = found["agreement"]["rate"]
    assert f"{rate['value']:.1%}".replace("%", " %") in row("the two agree")[1]
