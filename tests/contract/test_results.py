"""The win rates in the documents are those of the stored games."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delta_belief_rl.eval.recount import MethodResult, difference, percent, recount
from delta_belief_rl.types import UserError

ROOT = Path(__file__).resolve().parents[2]
GAMES = ROOT / "validation" / "quickstart"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
HEADINGS = {"train": "## Temperature 1", "val": "## Sampling of validation"}
START = {"start": "starting agent"}


@pytest.fixture(scope="module")
def results() -> list[MethodResult]:
    return recount(GAMES)


def section(heading: str) -> str:
    return PAGE.split(heading, 1)[1].split("\n## ", 1)[0]


def test_V9_every_win_rate_of_the_results_page_is_recounted_from_stored_games(
    results: list[MethodResult],
) -> None:
    assert len(results) == 8
    for result in results:
        name = START.get(result.method, f"`{result.method}`")
        lines = section(HEADINGS[result.sampling]).splitlines()
        rows = [line for line in lines if f"| {name} |" in line]
        assert len(rows) == 1, name
        row = rows[0].replace("*", "")
        assert percent(result.rate) in row
        assert ", ".join(f"{100 * rate:.1f}" for rate in result.seeds.values()) in row
        assert f"| {result.mean_turns:.1f} |" in row
        if result.gain is not None:
            assert percent(result.gain, sign=True) in row


def test_V9_the_paired_differences_of_the_results_page_are_recounted(
    results: list[MethodResult],
) -> None:
    by_name = {(result.method, result.sampling): result for result in results}
    rows = re.findall(r"\| `(\w+)` minus `(\w+)` \| (.+?) \| (.+?) \|", PAGE)
    assert len(rows) == 3
    for second, first, *cells in rows:
        for sampling, cell in zip(("train", "val"), cells, strict=True):
            gap = difference(by_name[first, sampling], by_name[second, sampling])
            assert percent(gap, sign=True) == cell


def test_the_five_seeds_of_the_quick_start_each_gain_more_than_25_points(
    results: list[MethodResult],
) -> None:
    for result in results:
        if result.method == "delta_belief":
            assert sorted(result.seed_gains) == [1, 2, 3, 4, 5]
            assert all(gain.value > 0.25 and gain.low > 0 for gain in result.seed_gains.values())
            assert result.games == 5 * 48 * 8


def test_a_folder_without_games_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no games"):
        recount(tmp_path)
