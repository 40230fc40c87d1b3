"""Every published number that can be recounted from the published files is recounted.

The nine validation files and the parquet files lie beside the repository (``../shared/data``);
where they are absent these tests are skipped. Of the six checks that make an implementation
compatible,

1. reading, the tables of results and of winning questions: this file;
2. the ``exact`` rule on every stored question: ``test_the_exact_rule_decides_every_stored_reply``;
3. advantages at their edges: ``tests/unit/test_credit_estimators.py`` (a tiny gain blown up,
   finished games as zeros, singletons, equal rewards);
4. pass@k and std: ``test_V1_V9_...`` here and ``tests/unit/test_metrics.py``;
5. settings: ``tests/contract/test_configs.py`` and ``tests/unit/test_compose.py``;
6. what is reported of a run: ``test_V9_everything_a_reader_needs_...`` here and
   ``test_V5_...`` in ``tests/unit/test_analyze.py`` for the judge's failures.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.envs.answers import exact_match, verify_question
from delta_belief_rl.eval.analyze import FileAnalysis, analyze_files, training_secrets
from delta_belief_rl.eval.game_statistics import WinKind, answer_agreement, published_score
from delta_belief_rl.eval.published import Form, read_games
from delta_belief_rl.eval.statistics import cluster_bootstrap
from delta_belief_rl.rollout.store import read_rows

pytestmark = pytest.mark.slow

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
RUNS = {"paper": "train_8xa100_paper", "awq": "train_8xa100_awq_dp7"}

TABLE = {
    ("paper", 0): (76, 9.60, 0.94, 24.24, 1.43),
    ("paper", 4): (111, 14.02, 1.31, 29.80, 1.79),
    ("paper", 5): (106, 13.38, 1.49, 35.86, 1.52),
    ("paper", 8): (87, 10.98, 0.42, 26.26, 1.57),
    ("paper", 9): (100, 12.63, 1.79, 31.31, 1.56),
    ("awq", 0): (81, 10.23, 2.68, 28.79, 1.38),
    ("awq", 9): (94, 11.87, 1.16, 28.79, 1.52),
    ("awq", 12): (102, 12.88, 2.38, 32.83, 1.55),
    ("awq", 16): (126, 15.91, 2.27, 37.88, 1.74),
}
"""Run and step to wins, mean@4, std, pass@4 and standard error over secrets, all but wins in %."""
FILES = list(TABLE)

KINDS = {
    ("paper", 0): (50, 2, 24, 6.31),
    ("paper", 4): (62, 9, 40, 7.83),
    ("paper", 5): (52, 10, 44, 6.57),
    ("paper", 8): (32, 20, 35, 4.04),
    ("paper", 9): (40, 29, 31, 5.05),
    ("awq", 0): (53, 5, 23, 6.69),
    ("awq", 9): (32, 26, 36, 4.04),
    ("awq", 12): (27, 49, 26, 3.41),
    ("awq", 16): (13, 102, 11, 1.64),
}
"""Single direct guesses, lists, other mentions, and the share of single guesses in %."""

REPEATS = {
    ("paper", 0): (406, 300),
    ("paper", 4): (247, 157),
    ("paper", 5): (182, 147),
    ("paper", 8): (163, 130),
    ("paper", 9): (108, 99),
    ("awq", 0): (374, 340),
    ("awq", 9): (91, 89),
    ("awq", 12): (61, 53),
    ("awq", 16): (78, 70),
}
"""Questions repeated word for word in a game, and those not called repeated. The first and the
eighth pair are published; the others were counted once and are kept here."""

FIELDS = {
    "secret", "input", "output", "score", "game_status", "step", "log_prob_reward",
    "log_prob_diff", "reward", "invalid_count", "repeated_count", "num_questions",
}  # fmt: skip


def place(key: tuple[str, int]) -> Path:
    run, step = key
    return DATA / "validation" / RUNS[run] / f"{step}.jsonl.gz"


@pytest.fixture(scope="module", autouse=True)
def present() -> None:
    if not DATA.exists():
        pytest.skip("no ../shared/data beside this clone: the published files are not here")


@pytest.fixture(scope="module")
def files() -> dict[tuple[str, int], FileAnalysis]:
    secrets = training_secrets(DATA / "envs" / "twenty_questions" / "train_rl.parquet")
    found = analyze_files([place(key) for key in FILES], train_secrets=secrets)
    return dict(zip(FILES, found, strict=True))


Files = dict[tuple[str, int], FileAnalysis]


def percent(share: float, digits: int = 2) -> float:
    return round(100 * share, digits)


# --- what the rows are


@pytest.mark.parametrize("key", FILES)
def test_every_published_row_is_read_and_has_the_published_fields(key: tuple[str, int]) -> None:
    report = read_rows(place(key))
    assert len(report.rows) == 792
    assert report.damaged == ()
    for row in report.rows:
        assert row.keys() == FIELDS
        assert (len(row["log_prob_reward"]), len(row["log_prob_diff"])) == (21, 20)
        assert row["step"] == key[1]


def test_secrets_are_four_games_each_contiguous_and_in_one_order_in_all_files(files: Files) -> None:
    orders = []
    for file in files.values():
        names = [game.secret for game in file.games]
        assert [names[i] for i in range(0, 792, 4) for _ in range(4)] == names
        orders.append(tuple(names[::4]))
    assert len(set(orders)) == 1
    assert len(set(orders[0])) == 198
    assert orders[0][:3] == ("bender", "court", "transition")


def test_every_relation_holds_in_all_7128_rows(files: Files) -> None:
    checked: Counter[str] = Counter()
    for file in files.values():
        assert {game.form for game in file.games} == {Form.PUBLISHED}
        for relation in file.relations:
            assert relation.satisfied == relation.checked, (file.label, relation)
            checked[relation.name] += relation.checked
    assert len(checked) == 7
    assert set(checked.values()) == {7128}


def test_the_score_formula_is_exact_to_single_precision(files: Files) -> None:
    errors = [
        abs((game.score or 0.0) - published_score(game))
        for file in files.values()
        for game in file.games
    ]
    assert max(errors) == pytest.approx(4.2e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("row", "secret", "turns", "won", "invalid", "repeated", "gains", "score"),
    [
        (0, "bender", 20, False, 0, 0, 16.153999, -18.384600),
        (5, "court", 17, True, 0, 0, 19.565250, 21.506525),
        (10, "transition", 20, False, 0, 1, 15.744165, -19.425585),
        (166, "embankment", 20, False, 1, 5, 11.612816, -28.838718),
    ],
)
def test_the_worked_rows(
    row: int,
    secret: str,
    turns: int,
    won: bool,
    invalid: int,
    repeated: int,
    gains: float,
    score: float,
) -> None:
    game = read_games(place(("paper", 0))).games[row]
    assert (game.secret, game.num_turns, game.won) == (secret, turns, won)
    assert (game.invalid, game.repeated) == (invalid, repeated)
    assert sum(game.stored_diffs or ()) == pytest.approx(gains, abs=5e-7)
    assert game.score == pytest.approx(score, abs=1e-6)
    assert published_score(game) == pytest.approx(score, abs=1e-5)


# --- the tables


@pytest.mark.parametrize("key", FILES)
def test_V1_V9_the_published_table_of_results(key: tuple[str, int], files: Files) -> None:
    wins, mean, std, passed, error = TABLE[key]
    file = files[key]
    assert (file.n, file.secrets, file.compatible.wins) == (4, 198, wins)
    assert percent(file.compatible.mean) == percent(file.compatible.rate.value) == mean
    assert percent(file.compatible.std) == std
    assert percent(file.compatible.pass_at_k[4]) == passed
    rate = file.compatible.rate
    assert 100 * rate.se == pytest.approx(error, abs=0.055), "the error of 2000 draws"
    assert rate.low < rate.value < rate.high


def test_V9_the_published_standard_errors_are_one_stream_of_draws(files: Files) -> None:
    stream = np.random.default_rng(0)
    for key in FILES:
        wins, games = zip(*files[key].compatible.counts.values(), strict=True)
        rate = cluster_bootstrap(wins, games, draws=2000, seed=stream)
        assert percent(rate.se) == TABLE[key][4], key


@pytest.mark.parametrize("key", FILES)
def test_the_published_table_of_winning_questions(key: tuple[str, int], files: Files) -> None:
    *counts, share = KINDS[key]
    file = files[key]
    assert [file.kinds[kind] for kind in WinKind] == counts
    assert sum(counts) == file.compatible.wins
    assert percent(file.kinds[WinKind.SINGLE] / 792) == share
    assert file.strict.wins == counts[0], "the strict rule and the published class agree here"
    assert percent(file.strict.rate.value) == share


def test_lists_and_words_grow_with_training(files: Files) -> None:
    shares = {key: files[key].questions.list_share for key in FILES}
    assert percent(shares["paper", 0], 1) == 14.8
    assert percent(shares["paper", 9], 0) == 49
    assert percent(shares["awq", 12], 0) == 64
    assert percent(shares["awq", 16], 0) == 78
    words = [files[key].questions.words for key in (("paper", 0), ("awq", 16))]
    assert [round(number, 1) for number in words] == [6.3, 9.4]


def test_equal_first_beliefs_show_that_two_runs_share_their_weights(files: Files) -> None:
    found = {key: file.same_priors for key, file in files.items() if file.same_priors}
    assert found == {
        ("awq", 0): {files["paper", 0].label: 792},
        ("awq", 9): {files["paper", 9].label: 792},
    }


# --- the belief


def test_the_prior_falls_while_the_gain_rises(files: Files) -> None:
    steps = [("paper", 0), ("paper", 4), ("paper", 5), ("paper", 8), ("paper", 9)]
    steps += [("awq", 12), ("awq", 16)]
    parts = [files[key].beliefs for key in steps]
    priors = [round(part["all"].prior, 2) for part in parts if part["all"]]
    assert priors == [-15.47, -15.87, -16.06, -16.51, -16.74, -17.46, -18.54]
    first, last = parts[0], parts[-1]
    ends: list[tuple[float, ...]] = []
    for part in (first, last):
        every, won, lost = part["all"], part["won"], part["lost"]
        assert every is not None
        assert won is not None
        assert lost is not None
        ends.append(tuple(round(x, 1) for x in (every.net_gain, lost.final, won.final)))
    assert ends == [(5.8, -10.2, -4.9), (7.9, -11.2, -7.3)]


@pytest.mark.parametrize(
    ("key", "changes"), [(("paper", 0), (-3.13, 1.81, 1.35)), (("awq", 16), (-4.06, 2.20, 1.55))]
)
def test_the_first_turn_falls_and_the_next_ones_rebound(
    key: tuple[str, int], changes: tuple[float, ...], files: Files
) -> None:
    every = files[key].beliefs["all"]
    assert every is not None
    assert tuple(round(change, 2) for change in every.change_by_turn[:3]) == changes


def test_most_of_the_paid_belief_is_oscillation(files: Files) -> None:
    lost = files["paper", 0].beliefs["lost"]
    assert lost is not None
    assert (round(lost.positive_sum, 1), round(lost.net_gain, 1)) == (14.5, 5.4)
    for file in files.values():
        every = file.beliefs["all"]
        assert every is not None
        assert every.positive_over_net == pytest.approx(2.5, abs=0.06)


def test_equal_contexts_differ_by_the_noise_of_arithmetic(files: Files) -> None:
    deviations, ranges = zip(*(file.noise for file in files.values()), strict=True)
    assert max(deviations) == pytest.approx(0.06, abs=0.005)
    assert max(ranges) == pytest.approx(0.46, abs=0.005)


# --- training secrets, repeats, the judge


@pytest.mark.parametrize(
    ("key", "overlap", "clean"), [(("awq", 16), 32.2, 11.1), (("awq", 0), 13.9, 9.2)]
)
def test_training_secrets_win_more_often(
    key: tuple[str, int], overlap: float, clean: float, files: Files
) -> None:
    parts = files[key].subsets
    assert (parts["overlap"].secrets, parts["clean"].secrets) == (45, 153)
    assert percent(parts["overlap"].compatible.value, 1) == overlap
    assert percent(parts["clean"].compatible.value, 1) == clean


@pytest.mark.parametrize("key", FILES)
def test_most_word_for_word_repeats_are_not_called_repeated(
    key: tuple[str, int], files: Files
) -> None:
    found = files[key].questions
    assert (found.duplicates, found.unflagged) == REPEATS[key]
    assert 63.5 < 100 * found.unflagged / found.duplicates < 98
    assert found.repeated > found.duplicates - found.unflagged, "most flags hit other questions"


def test_the_judge_contradicts_itself_in_five_to_seven_of_a_hundred_pairs(files: Files) -> None:
    shares = [percent(file.questions.contradictions, 1) for file in files.values()]
    assert (min(shares), max(shares)) == (5.1, 7.1)
    cached = [file.questions.cacheable_share for file in files.values()]
    assert 0.12 < min(cached) < max(cached) < 0.165


def test_both_judges_agree_about_as_often_as_one_with_itself(files: Files) -> None:
    for step in (0, 9):
        share, pairs = answer_agreement(files["paper", step].games, files["awq", step].games)
        assert pairs > 7000
        assert share == pytest.approx(0.93, abs=0.005)


def test_the_exact_rule_decides_every_stored_reply(files: Files) -> None:
    words = {"You have not": "invalid", "You have alr": "repeated"}
    replies: Counter[str] = Counter()
    for file in files.values():
        for game in file.games:
            for turn in game.exchanges:
                word = words.get(turn.reply[:12], turn.reply)
                found = verify_question(turn.question, word, game.secret)
                positive = exact_match(turn.question, game.secret)
                assert (word == "finished") == (positive and found.valid), (file.label, game.line)
                assert found.answer == word, (file.label, game.line, turn)
                replies[word] += 1
    assert replies.total() == 138_288
    assert replies.keys() == {"yes", "no", "finished", "invalid", "repeated"}
    assert replies["finished"] == 883


# --- the command


def test_V9_everything_a_reader_needs_of_a_run_is_in_the_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = DATA / "envs" / "twenty_questions" / "train_rl.parquet"
    assert cli(["analyze", "--json", str(place(("awq", 16))), "--train", str(train)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (found,) = json.loads(out)
    expected: dict[str, Any] = {
        "games": 792, "secrets": 198, "n": 4, "wins": 126, "strict_wins": 13, "list_wins": 102,
        "other_wins": 11, "damaged": [], "notes": [], "judge_failure_share": None,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    for name in ("prior", "final", "net_gain", "positive_sum", "list_question_share"):
        assert isinstance(found[name], float)
    assert found["duplicate_share"] == pytest.approx(78 / 15212)
    assert found["training_secrets"]["clean"]["strict_ci_high"] < 0.05
    assert found["ci_low"] < found["win_rate"] < found["ci_high"]
    assert found["strict_ci_low"] < found["strict_rate"] < found["strict_ci_high"]
    assert len(found["win_by_turn"]) == len(found["mean_belief_by_turn"]) == 21


def test_a_published_file_that_was_cut_off_keeps_what_came_before(tmp_path: Path) -> None:
    whole = read_games(place(("paper", 0)))
    cut = tmp_path / "0.jsonl.gz"
    cut.write_bytes(place(("paper", 0)).read_bytes()[:200_000])
    found = read_games(cut)
    assert 300 < len(found.games) < 792
    assert found.games == whole.games[: len(found.games)]
    assert [line.number for line in found.damaged] == [len(found.games) + 1]
