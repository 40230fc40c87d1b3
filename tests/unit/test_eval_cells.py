"""The figures of an evaluation's cells, by hand, and the published numbers beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.eval.benchmarks import BENCHMARKS
from delta_belief_rl.eval.cells import Cell, Player, make_cell
from delta_belief_rl.eval.eval_page import document, to_html
from delta_belief_rl.eval.eval_text import eval_text, main_rows
from delta_belief_rl.eval.metrics import summarise
from delta_belief_rl.eval.published_results import (
    Comparison,
    compare,
    comparison_text,
    published_conditions,
    published_results,
)
from delta_belief_rl.types import Group, StopReason, Task, Trajectory, Turn, Verdict

T = 50
AGENT = Player("agent", "org/agent")
RECORD = {"run_id": "r", "step": 0, "val-aux/judge/tokens": 120.0, "timing_s/testing": 2.5}


def game(
    task: Task,
    number: int,
    turns: int,
    *,
    won: bool = False,
    listed: bool = False,
    failed: bool = False,
    verdicts: Sequence[Verdict] = (),
    beliefs: tuple[float, ...] | None = None,
    score: float | None = None,
) -> Trajectory:
    """A game of so many turns; a list wins by the compatible rule alone."""
    marks = [*verdicts, *[Verdict.NO] * (turns - len(verdicts))]
    if won:
        marks[-1] = Verdict.WIN
    if failed:
        marks[-1] = Verdict.ERROR
    made = [
        Turn(i, 3 * i, 3 * i + 2, (-0.5, -0.5), 0, f"Question {i}?", "No", verdict)
        for i, verdict in enumerate(marks)
    ]
    made[-1] = replace(
        made[-1], compatible_win=won, strict_win=won and not listed, is_list=listed, score=score
    )
    stop = StopReason.JUDGE_FAILED if failed else StopReason.WIN if won else StopReason.TURN_LIMIT
    return Trajectory(task, number, tuple(range(3 * turns)), tuple(made), stop, beliefs, "r", 0)


def task(name: str) -> Task:
    return Task(name, "tw_q", name, ())


def groups() -> list[Group]:
    """Three secrets, two games each: one game fails, one wins by a list, one after turn 20."""
    dog, cat, hat = task("dog"), task("cat"), task("hat")
    return [
        Group(dog, (game(dog, 0, 4, won=True), game(dog, 1, 30, won=True))),
        Group(cat, (game(cat, 0, 10, won=True, listed=True), game(cat, 1, T))),
        Group(hat, (game(hat, 0, T), game(hat, 1, 2, failed=True))),
    ]


def cell(
    played: list[Group] | None = None,
    *words: str,
    benchmark: str = "twenty_questions",
    player: Player = AGENT,
) -> Cell:
    own = ("multi_turn.val.n=2", f"multi_turn.max_turns.val={T}")
    cfg, _ = load_config(["experiment=eval_twenty_questions", *own, *words])
    made = groups() if played is None else played
    return make_cell(benchmark, player, cfg, "out/x", RECORD, made)


# --- figures ------------------------------------------------------------------------------------


def test_rates_leave_failed_games_out_and_tell_what_they_would_be_with_them() -> None:
    found = cell()
    assert (found.games, found.secrets, found.failed_games) == (6, 3, 1)
    assert found.compatible.rate.value == pytest.approx(3 / 5)
    assert found.strict.rate.value == pytest.approx(2 / 5)
    assert found.compatible.errors_as_losses == pytest.approx(3 / 6)
    assert found.judge_failures == pytest.approx(1 / (4 + 30 + 10 + T + T + 2))
    # Mean@n is a mean over secrets.
    assert found.compatible.mean == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.compatible.rate.low <= found.compatible.rate.value <= found.compatible.rate.high
    assert found.mean_turns.value == pytest.approx((4 + 30 + 10 + T + T) / 5)


def test_V1_pass_at_k_is_the_share_of_all_draws_and_stops_where_a_secret_has_too_few() -> None:
    rng = np.random.default_rng(3)
    won = rng.random((4, 6)) < 0.3
    played = [
        Group(task(f"s{i}"), tuple(game(task(f"s{i}"), j, 3, won=bool(w)) for j, w in enumerate(r)))
        for i, r in enumerate(won)
    ]
    found = cell(played, "multi_turn.val.n=6").strict
    assert list(found.pass_at_k) == [1, 2, 4, 6]
    for k, value in found.pass_curve.items():
        draws = [[any(row[list(pick)]) for pick in combinations(range(6), k)] for row in won]
        assert value == pytest.approx(float(np.mean(draws)))
    for k, interval in found.pass_at_k.items():
        assert interval.value == pytest.approx(found.pass_curve[k])
        assert interval.low <= interval.value <= interval.high
    # One game of a secret failed, so there is no pass@2 over all secrets.
    assert list(cell().compatible.pass_at_k) == [1]


def test_a_long_evaluation_has_the_rate_of_every_smaller_budget() -> None:
    found = cell()
    by_turn = found.compatible.by_turn
    assert len(by_turn) == T + 1
    assert [by_turn[t] for t in (0, 3, 4, 9, 10, 29, 30, T)] == pytest.approx(
        [0, 0, 1 / 5, 1 / 5, 2 / 5, 2 / 5, 3 / 5, 3 / 5]
    )
    assert list(found.compatible.budgets) == [20, T]
    for budget, interval in found.compatible.budgets.items():
        assert interval.value == pytest.approx(by_turn[budget])
    assert found.compatible.gain_20_50 is not None
    assert found.compatible.gain_20_50.value == pytest.approx(1 / 5)
    assert found.strict.budgets[20].value == pytest.approx(1 / 5)
    short = cell(None, "multi_turn.max_turns.val=30")
    assert short.compatible.gain_20_50 is None
    assert list(short.compatible.budgets) == [20, 30]
    assert list(cell(None, "multi_turn.max_turns.val=10").compatible.budgets) == [10]


def test_a_budget_of_a_long_evaluation_is_the_evaluation_that_stops_there() -> None:
    def cut(one: Trajectory) -> Trajectory:
        turns = one.turns[:20]
        lost = not any(turn.compatible_win for turn in turns)
        return replace(one, turns=turns, stop=StopReason.TURN_LIMIT if lost else one.stop)

    played = [group for group in groups() if group.task.id != "hat"]
    stopped = [Group(g.task, tuple(cut(t) for t in g.trajectories)) for g in played]
    long, short = cell(played), cell(stopped, "multi_turn.max_turns.val=20")
    for rule in ("compatible", "strict"):
        ours, theirs = getattr(long, rule), getattr(short, rule)
        assert ours.by_turn[:21] == theirs.by_turn
        assert ours.budgets[20] == theirs.rate


def test_questions_grades_beliefs_and_cost_are_those_of_the_games() -> None:
    dog = task("dog")
    marks = [Verdict.INVALID, Verdict.REPEATED, Verdict.NO]
    first = game(dog, 0, 4, verdicts=marks, beliefs=(-4.0, -3.0, -3.5, -2.0, -1.0), score=0.25)
    again = replace(first.turns[2], action="question 1 ?")
    first = replace(first, turns=(*first.turns[:2], again, first.turns[3]))
    second = game(dog, 1, 2, won=True, beliefs=(-4.0, -2.0, -0.5), score=1.0)
    found = cell([Group(dog, (first, second))])
    assert (found.invalid, found.repeated, found.duplicates) == (1 / 6, 1 / 6, 1 / 6)
    assert found.mean_score is not None
    assert found.mean_score.value == pytest.approx(0.625)
    assert (found.sampled_tokens, found.judge_tokens, found.seconds) == (12, 120.0, 2.5)
    beliefs = found.beliefs
    assert beliefs["all"] is not None
    assert beliefs["all"].by_turn == pytest.approx((-4.0, -2.5, -2.0, -2.0, -1.0))
    assert beliefs["won"] is not None
    assert beliefs["won"].by_turn == pytest.approx((-4.0, -2.0, -0.5))
    assert beliefs["lost"] is not None
    assert beliefs["lost"].games == 1


def test_J3_a_failed_game_gets_no_grade_and_an_environment_without_grades_has_no_mean() -> None:
    dog = task("dog")
    graded = [game(dog, 0, 3, score=0.5), game(dog, 1, 3, failed=True)]
    found = cell([Group(dog, tuple(graded))]).mean_score
    assert found is not None
    assert found.value == 0.5
    assert cell().mean_score is None


def test_a_full_game_without_a_grade_counts_as_nothing_where_games_are_graded() -> None:
    dog, cat = task("dog"), task("cat")
    full_game = replace(game(cat, 0, 3), stop=StopReason.CONTEXT_FULL)
    graded = game(dog, 0, 3, score=0.5)
    played = [
        Group(dog, (graded, game(dog, 1, 3, failed=True))),
        Group(cat, (full_game, replace(graded, task=cat, game=1))),
    ]
    found = cell(played).mean_score
    assert found is not None
    assert found.value == pytest.approx((0.5 + 0.0 + 0.5) / 3)
    assert summarise(played, draws=10)["val-core/mean_score"] == pytest.approx(1 / 3)


def test_a_game_that_failed_after_a_budget_is_known_for_it() -> None:
    """Two of four games are won in turn 3; the others fail in turns 30 and 2."""
    dog = task("dog")
    late, early = game(dog, 2, 30, failed=True), game(dog, 3, 2, failed=True)
    played = [Group(dog, (game(dog, 0, 3, won=True), game(dog, 1, 3, won=True), late, early))]
    for rule in (cell(played).compatible, cell(played).strict):
        assert rule.rate.value == 1.0
        assert [rule.by_turn[t] for t in (0, 1, 2)] == [0.0, 0.0, 0.0]
        assert [rule.by_turn[t] for t in (3, 20, 29)] == pytest.approx([2 / 3] * 3)
        assert [rule.by_turn[t] for t in (30, T)] == [1.0, 1.0]
        assert list(rule.by_turn) == sorted(rule.by_turn)
        assert rule.budgets[20].value == pytest.approx(2 / 3)
        assert rule.budgets[T].value == rule.rate.value
    # The engine's failure leaves the turns before it as they are.
    stopped = replace(game(dog, 2, 20), stop=StopReason.ENGINE_FAILED)
    found = cell([Group(dog, (game(dog, 0, 3, won=True), stopped))]).strict
    assert (found.by_turn[20], found.by_turn[21]) == (0.5, 1.0)


# --- what is shown ------------------------------------------------------------------------------


def test_V9_the_table_has_a_row_for_each_cell_and_an_interval_with_each_rate() -> None:
    rows = main_rows([cell(), cell(player=Player("other", "org/other"))])
    assert [row[1] for row in rows] == ["player", "agent", "other"]
    assert rows[1][3].startswith("60.0 [")
    assert "(n=2)" in rows[1][5]
    assert "score" not in rows[0]
    text = eval_text([cell()])
    assert "20" in text
    assert "judge Qwen/Qwen3-14B" in text
    assert "temperature 0.7, top-p 0.8, top-k 20" in text
    assert eval_text([]) == "No cell of this evaluation is complete."


def test_the_document_is_plain_json_and_numbers_that_are_none_are_null() -> None:
    dog = task("dog")
    found = cell([Group(dog, (game(dog, 0, 2, failed=True),))])
    text = json.dumps(document([found], compare([found])), allow_nan=False)
    body = json.loads(text)
    assert body["cells"][0]["compatible"]["rate"]["value"] is None
    assert body["cells"][0]["compatible"]["errors_as_losses"] == 0.0
    assert len(body["published"]) == len(compare([found]))
    assert "published" not in document([found], [])


def test_the_page_stands_alone_and_draws_every_curve() -> None:
    dog = task("dog <b>")
    played = [Group(dog, (game(dog, 0, 2, won=True, beliefs=(-3.0, -1.0, -0.2)), game(dog, 1, 3)))]
    found = [cell(played), cell(player=Player("a <b>", "org/x"), benchmark="everyday")]
    page = to_html(found, compare(found))
    assert page.lower().startswith("<!doctype html>")
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", page)
    for title in ("Games won within so many turns", "pass@k", "Belief in the secret"):
        assert f"<h3>{title}</h3>" in page
    assert "a &lt;b&gt;" in page
    assert "<b>" not in page
    assert page.count("<svg") == 5  # three curves of the first benchmark, two of the second


def test_what_an_environment_reports_is_in_the_text_the_page_and_the_document() -> None:
    said = {
        "val-aux/clinical/high/harm": 0.125,
        "val-aux/clinical/reward/mean@2": 3.0,
        "val-aux/clinical_high/score/mean@2": 3.0,
    }
    own = ("env=clinical", "judge=rules", "multi_turn.val.n=2", f"multi_turn.max_turns.val={T}")
    cfg, _ = load_config(["experiment=smollm2_cpu", *own])
    found = make_cell("clinical", AGENT, cfg, "out/x", {**RECORD, **said}, groups())
    assert found.reported == {"high/harm": 0.125}
    title = "What the environment says of the games"
    last = eval_text([found]).split(title)[1].splitlines()[2].split()
    assert last == ["clinical", "agent", "high/harm", "0.125"]
    assert title in to_html([found], [])
    assert json.dumps(document([found], [])).count('"reported": {"high/harm": 0.125}') == 1
    assert title not in eval_text([cell()])
    assert title not in to_html([cell()], [])


# --- beside the published numbers ---------------------------------------------------------------

PLAYED = (
    "data.val_files=[delta_belief_rl/env/twenty_questions/direct/coca_plus/test.parquet]",
    "judge_rollout.model.path=Qwen/Qwen3-14B",
    "multi_turn.val.n=8",
    "multi_turn.max_turns.val=20",
    "judge_rollout.parser=published",
)
CIA = Player("CIA-4B", "iaa01/CIA-4B")


def full(player: Player = CIA, *words: str) -> Cell:
    """433 secrets with eight games each, of which one is won."""
    made: list[Group] = []
    for i in range(433):
        one = task(f"s{i}")
        made.append(Group(one, tuple(game(one, j, 2, won=j == 0) for j in range(8))))
    return cell(made, *PLAYED, *words, player=player)


def of(found: Sequence[Comparison], model: str, measure: str) -> Comparison:
    return next(
        one
        for one in found
        if (one.published.model, one.published.measure) == (model, measure)
        and one.published.conditions["best_of"] == 1
    )


def test_a_difference_is_told_where_every_condition_is_the_same() -> None:
    found = compare([full()])
    mean, eight = of(found, "CIA-4B", "mean"), of(found, "CIA-4B", "pass@8")
    assert (mean.differs, mean.unknown) == ((), ())
    assert mean.difference == pytest.approx(1 / 8 - 0.3372)
    assert eight.difference == pytest.approx(1.0 - 0.6397)
    assert "difference -21.2 points" in comparison_text(found)
    # The longer games of the published gain were not played.
    gain = of(found, "CIA-4B", "gain_20_50")
    assert gain.ours is None
    assert gain.difference is None
    assert [c.name for c in gain.differs] == ["turns"]
    assert {"games", "temperature", "tasks", "judge"} <= {c.name for c in gain.unknown}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("judge_rollout.model.path=Qwen/Qwen3-14B-AWQ",), "judge"),
        (("actor_rollout_ref.rollout.val_kwargs.temperature=1.0",), "temperature"),
        (("multi_turn.win_rule=strict",), "win_rule"),
        (("multi_turn.max_turns.val=30",), "turns"),
        (("data.val_files=[mine.parquet]",), "tasks"),
        (("multi_turn.logprob_sampling.enabled=true", "actor_rollout_ref.rollout.n=8"), "best_of"),
        (("judge_rollout.parser=grammar",), "parser"),
        (("multi_turn.candidate_lists=refuse",), "candidate_lists"),
        (("multi_turn.duplicates=code",), "duplicates"),
    ],
)
def test_no_claim_is_made_where_a_condition_differs(words: tuple[str, ...], name: str) -> None:
    found = of(compare([full(CIA, *words)]), "CIA-4B", "mean")
    assert found.difference is None
    assert [condition.name for condition in found.differs] == [name]
    assert f"not comparable: other {name} (" in comparison_text([found])


def test_no_claim_is_made_where_a_condition_was_not_published_or_the_model_is_another() -> None:
    found = compare([full(Player("x", "iaa01/CIA-4B", adapter="outputs/run/global_step_4"))])
    assert [c.name for c in of(found, "CIA-4B", "mean").differs] == ["model"]
    starpo = of(found, "StarPO-4B", "mean")
    assert [c.name for c in starpo.unknown] == ["model"]
    assert all(one.difference is None for one in found)
    assert "not published: model" in comparison_text([starpo])


def test_nothing_is_claimed_beside_rows_whose_source_does_not_say_how_they_were_played() -> None:
    best = ("multi_turn.logprob_sampling.enabled=true", "actor_rollout_ref.rollout.n=8")
    model = Player("m", "Klingspor/Qwen3-4B-SFT")
    rows = [
        *compare([full(model, *best)]),
        *compare([full(Player("q", "Qwen/Qwen3-8B"))]),
        *compare([full(model, "multi_turn.max_turns.val=50")]),
    ]
    unsaid = [
        row
        for row in rows
        if row.published.conditions["best_of"] == 8
        or row.published.model == "Qwen3-8B"
        or row.published.measure == "gain_20_50"
    ]
    # Three of best-of-8, the plain number of the 8B model and six gains, beside three cells.
    assert len(unsaid) == 3 * (3 + 1 + 6)
    for row in unsaid:
        assert row.difference is None
        names = {condition.name for condition in row.unknown}
        assert {"tasks", "judge", "secrets", "games", "temperature", "win_rule", "parser"} <= names
        assert ("turns" in names) == (row.published.measure != "gain_20_50")


def test_fewer_secrets_or_games_are_another_condition() -> None:
    found = of(compare([cell(None, *PLAYED[:2], PLAYED[-1], player=CIA)]), "CIA-4B", "mean")
    assert {c.name for c in found.differs} == {"secrets", "games", "turns"}


def test_a_grade_is_shown_on_the_published_scale() -> None:
    dog = task("dog")
    graded = cell([Group(dog, (game(dog, 0, 2, score=0.5),))], benchmark="user_personalization")
    found = of(compare([graded]), "CIA-4B", "mean_score")
    assert found.ours is not None
    assert found.ours.value == pytest.approx(5.5)
    assert found.difference is None


def test_the_published_numbers_are_complete_and_those_of_known_benchmarks() -> None:
    found = published_results()
    counts: dict[tuple[str, str], int] = {}
    for one in found:
        key = (one.benchmark, one.measure)
        counts[key] = counts.get(key, 0) + 1
        low, high = one.scale
        assert low <= one.value <= high
    for name in ("guess_my_city", "murder_mystery", "customer_service"):
        assert counts[name, "pass@8"] == counts[name, "pass@1"] == 6
    assert counts["twenty_questions", "gain_20_50"] == 6
    assert counts["user_personalization", "mean_score"] == 6
    named = {one.benchmark for one in found} - {"user_personalization"}
    assert named <= BENCHMARKS.keys()
    assert published_conditions("everyday") == {}


@pytest.mark.parametrize(
    "name", ["twenty_questions", "guess_my_city", "murder_mystery", "customer_service"]
)
def test_a_benchmark_is_played_as_the_published_one_unless_it_is_told_otherwise(name: str) -> None:
    # The parser is this project's own unless it is named: it tells failures from answers.
    cfg, _ = load_config([*BENCHMARKS[name].words(), "judge_rollout.parser=published"])
    wanted: dict[str, Any] = {**published_conditions(name)}
    del wanted["secrets"]
    made = make_cell(name, CIA, cfg, "out/x", RECORD, groups()).conditions
    assert {key: getattr(made, key) for key in wanted} == wanted
