"""``delta-belief analyze``: rates, comparisons, JSON, text, pictures, and mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.eval.analyze import FileAnalysis, analyze_files, label_files, outcome
from delta_belief_rl.eval.published import read_game
from delta_belief_rl.eval.statistics import cluster_bootstrap
from delta_belief_rl.rollout.store import to_row
from delta_belief_rl.types import StopReason, Task, Trajectory, Turn, UserError, Verdict
from tests.stored import LISTED, LOST, MENTIONED, WON, published, val_only, write


def renamed(pairs: tuple[tuple[str, str], ...], secret: str) -> tuple[tuple[str, str], ...]:
    return tuple((question.replace("dog", secret), reply) for question, reply in pairs)


def rows(*games: tuple[str, tuple[tuple[str, str], ...]]) -> list[dict[str, Any]]:
    return [published(renamed(pairs, secret), secret) for secret, pairs in games]


FIRST = rows(
    ("dog", WON), ("dog", LISTED), ("dog", LOST), ("dog", LOST),
    ("cat", LOST), ("cat", LOST), ("cat", LOST), ("cat", LOST),
    ("ant", MENTIONED), ("ant", LISTED), ("ant", WON), ("ant", WON),
)  # fmt: skip


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write(tmp_path / "0.jsonl", FIRST)


def one(path: Path, **settings: Any) -> FileAnalysis:
    return analyze_files([path], **settings)[0]


# --- rates


def test_both_rules_have_counts_rates_and_pass_at_k(first: Path) -> None:
    file = one(first)
    assert (len(file.games), file.secrets, file.n) == (12, 3, 4)
    assert (file.compatible.wins, file.strict.wins) == (6, 3)
    assert file.compatible.rate.value == pytest.approx(6 / 12)
    assert file.compatible.mean == pytest.approx(6 / 12)
    # Won games of the four samples: 2, 2, 1 and 1 of three secrets.
    assert file.compatible.std == pytest.approx(np.std([2 / 3, 2 / 3, 1 / 3, 1 / 3]))
    assert file.compatible.pass_at_k == pytest.approx(
        {1: 1 / 2, 2: (5 / 6 + 1) / 3, 3: 2 / 3, 4: 2 / 3}
    )
    assert file.strict.pass_at_k[4] == pytest.approx(2 / 3)
    assert {str(kind): count for kind, count in file.kinds.items()} == {
        "single": 3, "list": 2, "other": 1,
    }  # fmt: skip


def test_V1_pass_at_k_ends_at_the_games_that_every_secret_has(tmp_path: Path) -> None:
    file = one(write(tmp_path / "a.jsonl", FIRST[1:]))
    assert file.n is None
    assert sorted(file.compatible.pass_at_k) == [1, 2, 3]
    assert math.isnan(file.compatible.mean)
    assert any("3 to 4 games" in note for note in file.notes)


def test_wins_by_turn_accumulate_over_all_games(first: Path) -> None:
    file = one(first)
    assert file.compatible.by_turn == pytest.approx((0, 1 / 12, 6 / 12, 6 / 12, 6 / 12))
    assert file.strict.by_turn == pytest.approx((0, 0, 3 / 12, 3 / 12, 3 / 12))


def test_V9_an_interval_rests_on_secrets_and_not_on_games(tmp_path: Path) -> None:
    same = [("dog", WON)] * 50 + [("cat", LOST)] * 50
    rate = one(write(tmp_path / "a.jsonl", rows(*same))).compatible.rate
    assert rate.units == 2
    assert (rate.low, rate.high) == (0.0, 1.0), "two secrets say next to nothing"


def test_the_draws_of_a_file_do_not_depend_on_its_neighbours(first: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "1.jsonl", FIRST[:8])
    alone, beside = one(first), analyze_files([other, first])[1]
    assert beside.compatible.rate == alone.compatible.rate
    assert one(first, seed=1).compatible.rate != alone.compatible.rate


def test_a_generator_is_drawn_from_where_it_stands() -> None:
    totals, counts = [0.0, 1.0, 3.0, 4.0], [4.0] * 4
    stream = np.random.default_rng(0)
    first_draw, second = (cluster_bootstrap(totals, counts, seed=stream) for _ in range(2))
    assert first_draw == cluster_bootstrap(totals, counts, seed=0)
    assert second != first_draw


def own(stop: StopReason, verdict: Verdict, secret: str = "dog") -> dict[str, Any]:
    won = verdict is Verdict.WIN
    turn = Turn(0, 1, 2, (-0.5,), 0, f"Is it a {secret}?", verdict.value, verdict, won, won)
    task = Task(f"t_{secret}", "tw_q", secret, ())
    return to_row(Trajectory(task, 0, (1, 2, 3), (turn,), stop), max_turns=4)


def test_V5_games_without_outcome_are_left_out_and_counted_as_lost_beside(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl",
        [
            own(StopReason.WIN, Verdict.WIN),
            own(StopReason.JUDGE_FAILED, Verdict.ERROR),
            own(StopReason.TURN_LIMIT, Verdict.NO, "cat"),
            own(StopReason.TURN_LIMIT, Verdict.NO, "cat"),
        ],
    )
    file = one(path)
    assert file.failed_games == 1
    assert file.compatible.rate.value == pytest.approx(1 / 3)
    assert file.compatible.errors_as_losses == pytest.approx(1 / 4)
    assert file.questions.judge_failures == pytest.approx(1 / 4)
    assert any("1 games have no outcome" in note for note in file.notes)


def test_a_file_whose_every_judge_failed_has_no_rate_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "own.jsonl", [own(StopReason.JUDGE_FAILED, Verdict.ERROR)] * 2)
    words = ["analyze", "--json", str(path), "--plots", str(tmp_path / "plots")]
    assert cli(words) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert found["win_rate"] is None
    assert found["failed_games"] == 2


def test_the_strict_rule_may_win_what_the_exact_rule_cannot(tmp_path: Path) -> None:
    pairs = (("Is it ice cream?", "yes"), ("Is it good?", "yes"))
    path = write(tmp_path / "a.jsonl", [published(pairs, "ice cream")])
    file = one(path)
    assert (file.compatible.wins, file.strict.wins) == (0, 1)
    assert any("the strict rule 1" in note for note in file.notes)


def test_val_only_says_what_it_lost(tmp_path: Path) -> None:
    lost_place = val_only(LOST, log_prob_reward=[-8.0])
    file = one(write(tmp_path / "validation.jsonl", [val_only(WON), lost_place]))
    assert file.compatible.wins == 1
    assert any("no zeros" in note and "(1 games" in note for note in file.notes)
    assert file.beliefs["all"] is not None
    assert file.beliefs["all"].games == 1


def test_an_outcome_needs_games_only() -> None:
    found = outcome([read_game(row) for row in FIRST], strict=True)
    assert found.counts == {"dog": (1.0, 4), "cat": (0.0, 4), "ant": (2.0, 4)}


# --- training secrets


def parquet(path: Path, secrets: list[Any], name: str = "golden_answers") -> Path:
    pq.write_table(pa.table({name: secrets}), path)
    return path


def test_secrets_of_the_training_data_are_reported_apart(first: Path) -> None:
    parts = one(first, train_secrets={"ANT", "other"}).subsets
    assert (parts["overlap"].secrets, parts["clean"].secrets) == (1, 2)
    assert parts["overlap"].compatible.value == pytest.approx(1.0)
    assert parts["clean"].compatible.value == pytest.approx(2 / 8)
    assert parts["clean"].strict.value == pytest.approx(1 / 8)


def test_training_data_that_shares_nothing_says_so(first: Path) -> None:
    assert any("'overlap'" in note for note in one(first, train_secrets={"x"}).notes)


# --- comparison


def test_a_second_file_is_compared_over_the_secrets_of_both(first: Path, tmp_path: Path) -> None:
    second = write(
        tmp_path / "1.jsonl", rows(*[("dog", WON)] * 4, *[("cat", LOST)] * 4, *[("elk", WON)] * 4)
    )
    found = analyze_files([first, second])[1].comparison
    assert found is not None
    assert found.secrets == 2
    assert found.compatible.value == pytest.approx((2 / 4 + 0) / 2)
    assert found.strict.value == pytest.approx((3 / 4 + 0) / 2)
    assert found.agreement == 1.0


def test_V4_V9_files_with_unlike_numbers_of_games_are_labelled_and_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four = write(tmp_path / "4.jsonl", rows(*[("dog", WON), ("dog", LOST)] * 2))
    eight = write(tmp_path / "8.jsonl", rows(*[("dog", WON), ("dog", LOST)] * 4))
    assert cli(["analyze", str(four), str(eight)]) == 0
    text = capsys.readouterr().out
    assert "mean@4 50.00" in text
    assert "mean@8 50.00" in text
    assert "pass@8 100.00" in text
    assert "8 games a secret against 4" in text


def test_equal_first_beliefs_mean_the_same_weights(first: Path, tmp_path: Path) -> None:
    near = [row | {"log_prob_reward": [-8.0000001, *row["log_prob_reward"][1:]]} for row in FIRST]
    again = write(tmp_path / "again.jsonl", FIRST[1:])
    other = write(tmp_path / "other.jsonl", near)
    found = analyze_files([first, other, again])
    assert found[1].same_priors == {}
    assert found[2].same_priors == {found[0].label: 11}
    assert any("the same weights played both files" in note for note in found[2].notes)


def test_files_without_a_common_secret_are_not_compared(first: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "1.jsonl", rows(*[("elk", WON)] * 4))
    found = analyze_files([first, other])[1]
    assert found.comparison is None
    assert any("nothing to compare" in note for note in found.notes)


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/x/run/0.jsonl"], ["run/0"]),
        (["0.jsonl.gz"], ["0"]),
        (["a/v/0.jsonl", "b/v/0.jsonl"], ["a/v/0", "b/v/0"]),
        (["a/0.jsonl", "a/0.jsonl.gz"], ["a/0.jsonl", "a/0.jsonl.gz"]),
    ],
)
def test_labels_tell_files_apart(paths: list[str], labels: list[str]) -> None:
    assert label_files(paths) == labels


def test_a_file_that_is_named_twice_is_refused(first: Path) -> None:
    with pytest.raises(UserError, match="named twice"):
        analyze_files([first, first])


# --- the verb

KEYS = {
    "file", "games", "secrets", "n", "wins", "strict_wins", "published_strict_wins", "list_wins",
    "other_wins", "win_rate", "mean_at_n", "std_at_n", "pass_at_n", "pass_at_k", "cluster_se",
    "ci_low", "ci_high", "strict_rate", "strict_ci_low", "strict_ci_high", "strict_cluster_se",
    "strict_pass_at_k", "strict_win_by_turn", "list_question_share", "words_per_question",
    "duplicate_share", "normalised_duplicate_share", "unflagged_duplicate_share", "invalid_count",
    "repeated_count", "prior", "final", "net_gain", "positive_sum", "beliefs",
    "mean_belief_by_turn", "win_by_turn", "damaged", "relations", "judge_failure_share",
    "win_rate_errors_as_losses", "units", "notes",
}  # fmt: skip


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli(["analyze", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(["analyze", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


def test_json_is_a_list_with_an_object_for_each_file(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "off.jsonl", [published(LOST, log_prob_reward=None)])
    found = shown(capsys, str(first), str(other), "--per-secret")
    assert [entry["file"] for entry in found] == [str(first), str(other)]
    for entry in found:
        assert entry.keys() >= KEYS
    one_file, off = found
    assert one_file["pass_at_k"].keys() == {"1", "2", "3", "4"}
    assert one_file["pass_at_n"] == one_file["pass_at_k"]["4"]
    assert one_file["wins"] == 6
    kinds = ("published_strict_wins", "list_wins", "other_wins")
    assert sum(one_file[kind] for kind in kinds) == 6
    assert one_file["beliefs"].keys() == {"all", "won", "lost"}
    assert one_file["relations"]["score"] == {"checked": 12, "satisfied": 12}
    assert one_file["judge_failure_share"] is None
    assert [entry["secret"] for entry in one_file["per_secret"]] == ["dog", "cat", "ant"]
    assert one_file["per_secret"][0] == {
        "secret": "dog", "games": 4, "wins": 2, "strict_wins": 1, "mean_turns": 3.0,
    }  # fmt: skip
    assert "against_first" not in one_file
    assert off["against_first"]["secrets"] == 1
    assert off["prior"] is None
    assert off["beliefs"] == {"all": None, "won": None, "lost": None}


def test_json_has_the_parts_of_the_training_secrets(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = parquet(tmp_path / "train.parquet", ["ant", "bee"])
    (entry,) = shown(capsys, str(first), "--train", str(train))
    assert entry["training_secrets"]["overlap"]["win_rate"] == 1.0
    assert entry["training_secrets"]["clean"]["secrets"] == 2


def test_damaged_lines_are_in_the_output_and_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", [*FIRST[:4], "{", "[]", *FIRST[4:]])
    assert cli(["analyze", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    (entry,) = json.loads(out)
    assert [line["line"] for line in entry["damaged"]] == [5, 6]
    assert entry["damaged"][1]["reason"] == "not an object: list"
    assert entry["games"] == 12
    assert f"{path}, line 6 skipped: not an object: list" in err.splitlines()
    assert cli(["analyze", str(path)]) == 0
    assert "2 damaged lines were skipped" in capsys.readouterr().out


def test_many_damaged_lines_do_not_flood_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", [*FIRST, *["{"] * 70])
    assert cli(["analyze", str(path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 51
    assert lines[-1].endswith("20 more lines skipped")


def test_the_tables_name_their_units(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = write(tmp_path / "1.jsonl", FIRST)
    train = parquet(tmp_path / "train.parquet", ["ant"])
    words = [str(first), str(second), "--train", str(train), "--per-secret"]
    assert cli(["analyze", *words]) == 0
    text = capsys.readouterr().out
    for part in (
        "won % [95 %]", "50.0 [", "6/12", "single guess", "nats", "overlap", "12/12", "points",
        "dog", "mean turns",
    ):  # fmt: skip
        assert part in text, part
    assert "nan" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["NONE"], "there is no rollout file"),
        (["FIRST", "--draws", "0"], "at least one draw"),
        (["FIRST", "--seed", "-1"], "cannot be negative"),
        (["FIRST", "--train", "NONE"], "name a parquet file of training secrets"),
        (["FIRST", "--train", "FIRST"], "is no parquet file with text"),
        (["FIRST", "--train", "OTHER"], "is no parquet file with text"),
        (["FIRST", "--train", "EMPTY"], "text in a column 'golden_answers'"),
        (["FIRST", "--plots", "FIRST"], "cannot be written"),
        (["FIRST", "FIRST"], "named twice"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_two(
    words: list[str],
    says: str,
    first: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {
        "FIRST": first,
        "NONE": tmp_path / "none.jsonl",
        "OTHER": parquet(tmp_path / "other.parquet", ["x"], "word"),
        "EMPTY": parquet(tmp_path / "empty.parquet", [1, 2]),
    }
    assert says in refused(capsys, *(str(places.get(word, word)) for word in words))


# --- pictures


def test_pictures_are_whole_documents_that_show_every_file(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [first]
    for number in range(1, 10):
        changed = [row | {"secret": row["secret"]} for row in FIRST[: 12 - number]]
        paths.append(write(tmp_path / f"<{number}>.jsonl", changed))
    folder = tmp_path / "new" / "plots"
    assert cli(["analyze", *map(str, paths), "--plots", str(folder)]) == 0
    capsys.readouterr()
    assert {path.name for path in folder.iterdir()} == {
        "win_rate.svg", "pass_at_k.svg", "win_by_turn.svg", "belief_by_turn.svg",
        "winning_questions.svg",
    }  # fmt: skip
    for path in folder.iterdir():
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        text = " ".join(root.itertext())
        assert "nan" not in path.read_text(encoding="utf-8")
        for number in range(1, 10):
            assert f"<{number}>" in text, f"{path.name} names every file"
    # There are eight colours: the ninth line and the tenth are dashed, in two panels and a legend.
    assert (folder / "pass_at_k.svg").read_text(encoding="utf-8").count("stroke-dasharray") == 6


def test_pictures_without_data_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", [published(LOST, log_prob_reward=None)])
    assert cli(["analyze", str(path), "--plots", str(tmp_path / "p")]) == 0
    capsys.readouterr()
    names = {path.stem for path in (tmp_path / "p").iterdir()}
    assert names == {"win_rate", "win_by_turn"}
