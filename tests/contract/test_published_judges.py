"""The published figures about the two judges, counted anew from the nine published files."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_belief_rl.eval.judge_audit import GamesAudit, audit_files

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "validation"
PAPER, AWQ = "train_8xa100_paper", "train_8xa100_awq_dp7"
FILES = [(PAPER, step) for step in (0, 4, 5, 8, 9)] + [(AWQ, step) for step in (0, 9, 12, 16)]
CONTRADICTIONS = {
    (PAPER, 0): 5.1,
    (PAPER, 4): 5.4,
    (PAPER, 5): 5.7,
    (PAPER, 8): 5.7,
    (PAPER, 9): 7.1,
    (AWQ, 0): 5.3,
    (AWQ, 9): 6.1,
    (AWQ, 12): 6.5,
    (AWQ, 16): 7.0,
}
"""Per cent of pairs of answers to one question about one secret."""


@pytest.fixture(scope="module")
def audit() -> GamesAudit:
    paths = [DATA / run / f"{step}.jsonl.gz" for run, step in FILES]
    if not all(path.exists() for path in paths):
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    return audit_files(paths, draws=200)


def agreement(audit: GamesAudit, first: tuple[str, int], second: tuple[str, int]) -> float:
    """Per cent."""
    names = tuple(f"{run}/{step}" for run, step in (first, second))
    (pair,) = (pair for pair in audit.pairs if (pair.first, pair.second) == names)
    rate = pair.agreement.rate
    assert rate.low < rate.value < rate.high
    return 100 * rate.value


def test_J13_a_judge_contradicts_itself_in_5_to_7_of_100_pairs(audit: GamesAudit) -> None:
    for file, place in zip(audit.files, FILES, strict=True):
        rate = file.consistency.rate
        assert 100 * (1 - rate.value) == pytest.approx(CONTRADICTIONS[place], abs=0.05), place
        assert rate.units <= 198
        assert rate.low < rate.value < rate.high
    assert audit.files[0].consistency.pairs == 3060


@pytest.mark.parametrize(("step", "published"), [(0, 93.7), (9, 92.5)])
def test_Q4_the_quantised_judge_agrees_with_the_full_one(
    audit: GamesAudit, step: int, published: float
) -> None:
    assert agreement(audit, (PAPER, step), (AWQ, step)) == pytest.approx(published, abs=0.05)


def test_the_full_judge_agrees_with_itself_across_neighbouring_steps(audit: GamesAudit) -> None:
    found = [agreement(audit, (PAPER, a), (PAPER, b)) for a, b in ((4, 5), (5, 8), (8, 9))]
    assert (min(found), max(found)) == pytest.approx((93.3, 93.9), abs=0.05)
    steps = (0, 4, 5, 8, 9)
    every = [agreement(audit, (PAPER, a), (PAPER, b)) for a in steps for b in steps if a < b]
    assert (min(every), max(every)) == pytest.approx((93.1, 94.6), abs=0.05)


@pytest.mark.parametrize(
    ("place", "unflagged", "repeats"), [((PAPER, 0), 300, 406), ((AWQ, 9), 89, 91)]
)
def test_J13_the_judge_misses_most_repeats(
    audit: GamesAudit, place: tuple[str, int], unflagged: int, repeats: int
) -> None:
    file = audit.files[FILES.index(place)]
    assert (file.unflagged, file.repeats) == (unflagged, repeats)


def test_J13_the_share_of_missed_repeats_lies_between_64_and_98_per_cent(
    audit: GamesAudit,
) -> None:
    shares = [100 * file.unflagged / file.repeats for file in audit.files]
    assert (min(shares), max(shares)) == pytest.approx((64, 98), abs=0.5)


def test_kappa_says_how_much_of_the_agreement_is_more_than_chance(audit: GamesAudit) -> None:
    for file in audit.files:
        found = file.consistency
        # Seven of ten answers are "no", so chance alone gives 0.59.
        chance = (found.rate.value - found.kappa.value) / (1 - found.kappa.value)
        assert 0.5 < chance < 0.65
        assert 0.84 < found.kappa.value < 0.89


def test_files_without_turns_say_nothing_about_failures(audit: GamesAudit) -> None:
    assert [file.errors for file in audit.files] == [None] * 9
    assert list(audit.error_rates()) == []
