"""report.html is made from the files of a run's folder."""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_belief_rl.eval.charts import Series, line_chart, nice_ticks, running_mean, stacked_bar
from delta_belief_rl.eval.report import (
    PlayerScore,
    load,
    render,
    save_scores,
    time_split,
    view_game,
)
from delta_belief_rl.obs.jsonl import MetricsLog
from delta_belief_rl.rollout.store import GameScore, to_row
from delta_belief_rl.types import (
    Message,
    StopReason,
    Task,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)


def game(secret: str, questions: list[str], won: bool, beliefs: list[float]) -> dict[str, Any]:
    task = Task("t", "tw_q", secret, (Message("user", "Ask."),))
    turns = tuple(
        Turn(
            index=i,
            start=2 * i,
            end=2 * i + 1,
            logprobs=(-0.5,),
            adapter_version=0,
            action=question,
            reply="Yes",
            verdict=Verdict.WIN if won and i == len(questions) - 1 else Verdict.YES,
            strict_win=won and i == len(questions) - 1,
        )
        for i, question in enumerate(questions)
    )
    stop = StopReason.WIN if won else StopReason.TURN_LIMIT
    played = Trajectory(task, 0, tuple(range(2 * len(turns))), turns, stop, tuple(beliefs))
    return to_row(played, max_turns=4, score=GameScore(1.0))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "project" / "experiment"
    (folder / "validation").mkdir(parents=True)
    log = MetricsLog(folder / "metrics.jsonl", "run-7")
    for step in range(1, 5):
        log.append(
            step,
            {
                "train/strict_successful": 0.1 * step,
                "belief/prior": -5.0,
                "belief/final": -2.0,
                "timing_s/step": 3.0,
                "timing_s/gen": 2.0,
                "timing_s/update_actor": 1.0,
            },
        )
    first = [game("owl", ["Is it big?", "Can it fly?"], False, [-5.0, -4.0, -3.0])]
    last = [
        game("owl", ["Can it fly?", "Is it an owl?"], True, [-5.0, -1.0, -0.1]),
        game("<script>alert(1)</script>", ["Is it a car?"], False, [-5.0, -6.0]),
    ]
    for step, rows in ((0, first), (4, last)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "validation" / f"{step}.jsonl").write_text(text)
    scores = [
        PlayerScore("random player", "", 320, 40, 0.48, 0.44, 0.53, 11.3),
        PlayerScore("trained agent", "temperature 1", 320, 40, 0.71, 0.63, 0.78, 9.9, 0.72),
        PlayerScore("trained agent", "validation sampling", 320, 40, 0.86, 0.8, 0.92, 9.1),
    ]
    save_scores(folder, scores, {"seed": "0"})
    (folder / "config.yaml").write_text("trainer:\n  seed: 0\n")
    return folder


def test_page_loads_nothing_from_elsewhere(run_dir: Path) -> None:
    page = render(run_dir).read_text()
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script", page)


def test_page_shows_scores_with_intervals_curves_time_games_and_config(run_dir: Path) -> None:
    page = render(run_dir).read_text()
    for text in ("71.0 %", "[63.0, 78.0]", "compatible 72.0 %", "320 games on 40 secrets"):
        assert text in page
    for text in ("Games won", "Belief in the secret", "gen 2.00 s", "Is it an owl?", "run-7"):
        assert text in page
    assert "trainer:\n  seed: 0" in page


def test_text_of_games_cannot_become_markup(run_dir: Path) -> None:
    page = render(run_dir).read_text()
    assert "&lt;script&gt;alert(1)" in page


def test_rendering_again_gives_the_same_page(run_dir: Path) -> None:
    assert render(run_dir).read_bytes() == render(run_dir).read_bytes()


def test_each_file_may_be_missing(run_dir: Path) -> None:
    for name in ("config.yaml", "final.json", "validation/0.jsonl", "validation/4.jsonl"):
        (run_dir / name).unlink()
        assert "<h1>experiment</h1>" in render(run_dir).read_text()
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="name a run's folder"):
        render(run_dir)


def test_damaged_final_json_is_one_sentence(run_dir: Path) -> None:
    (run_dir / "final.json").write_text("{")
    with pytest.raises(UserError, match=r"final\.json is no JSON"):
        load(run_dir)


def test_games_are_the_last_ones_beside_the_first_agents_game_of_the_same_secret(
    run_dir: Path,
) -> None:
    pairs = load(run_dir).pairs
    assert [(p.latest.secret, p.latest.won, p.latest.step) for p in pairs] == [
        ("owl", True, 4),
        ("<script>alert(1)</script>", False, 4),
    ]
    assert pairs[0].first is not None
    assert (pairs[0].first.won, pairs[0].first.step) == (False, 0)
    assert pairs[1].first is None


def test_belief_of_a_turn_is_the_probability_after_it(run_dir: Path) -> None:
    shown = load(run_dir).pairs[0].latest
    assert shown.prior == pytest.approx(math.exp(-5.0))
    assert [turn.belief for turn in shown.turns] == pytest.approx([math.exp(-1.0), math.exp(-0.1)])


def test_belief_of_zero_probability_can_be_shown() -> None:
    view = view_game(game("owl", ["Is it big?"], False, [float("-inf"), -1.0]), 0)
    assert view.prior == 0.0


def test_row_of_the_published_schema_is_read_from_its_text() -> None:
    row = {
        "secret": "owl",
        "input": "system\nrules\nuser\nAsk.",
        "output": "assistant\nIs it\nalive?\nuser\nYes\nassistant\nIs it an owl?\nuser\nfinished",
        "game_status": 1,
        "log_prob_reward": [-3.0, -2.0, -1.0, 0.0, 0.0],
    }
    view = view_game(row, 9)
    assert [(t.question, t.reply) for t in view.turns] == [
        ("Is it alive?", "Yes"),
        ("Is it an owl?", "finished"),
    ]
    assert view.won
    assert view.turns[-1].belief == pytest.approx(math.exp(-1.0))


def test_time_of_a_step_is_split_by_its_parts_without_the_whole() -> None:
    records = [
        {"step": s, "timing_s/step": 4.0, "timing_s/gen": 3.0, "timing_s/adv": 1.0} for s in (1, 2)
    ]
    assert time_split(records) == {"gen": 3.0, "adv": 1.0}


def test_many_small_parts_are_summed() -> None:
    record = {"step": 1, "timing_s/step": 55.0} | {f"timing_s/p{i}": float(i) for i in range(1, 11)}
    split = time_split([record])
    assert next(iter(split)) == "p10"
    assert split["others"] == 6.0
    assert sum(split.values()) == 55.0


finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, finite)
def test_ticks_are_round_ascending_and_cover_the_data(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    if high - low < 1e-3:
        high = low + 1.0
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert ticks == sorted(set(ticks))
    tolerance = 1e-6 * max(abs(low), abs(high), 1.0)
    assert ticks[0] <= low + tolerance
    assert ticks[-1] >= high - tolerance


@given(st.lists(finite, min_size=1, max_size=12))
def test_chart_of_any_numbers_is_well_formed_and_stays_inside_its_frame(
    values: list[float],
) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    root = ElementTree.fromstring(line_chart([Series("a <b>", points, dots=True)]))
    for circle in root.iter("circle"):
        assert 0 <= float(circle.get("cx", "-1")) <= 460
        assert 0 <= float(circle.get("cy", "-1")) <= 230


def test_chart_without_data_is_empty() -> None:
    assert line_chart([Series("a", [])]) == ""
    assert stacked_bar({}) == ""


def test_running_mean_uses_what_is_there_at_the_start() -> None:
    points = [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]
    assert running_mean(points, width=2) == [(1.0, 2.0), (2.0, 3.0), (3.0, 5.0)]
