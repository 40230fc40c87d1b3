"""Engine against trainer during training: what is compared, and what stops a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.workers import EngineWorker
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.trainer.actor import GameScore
from delta_belief_rl.trainer.crosscheck import (
    BOUNDS,
    Bound,
    CheckFailed,
    Gap,
    belief_tails,
    check_beliefs,
    check_sampled,
    run_bound,
    sampled_gap,
    tail_beliefs,
)
from tests.runs import Trace, metrics_of, play, words, write_world

BOUND = Bound(0.1, 1.0)
NAMES = [
    *(f"check/{n}" for n in ("sampled_tokens", "sampled_gap_mean", "sampled_gap_max")),
    *(f"check/{n}" for n in ("beliefs", "belief_gap_mean", "belief_gap_max")),
]


# --- numbers


def test_a_gap_has_a_mean_and_a_largest_difference() -> None:
    gap = Gap.of(np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -2.5, -2.0]))
    assert (gap.count, gap.mean, gap.largest) == (3, 0.5, 1.0)
    assert Gap.of(np.zeros(0), np.zeros(0)) == Gap(0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("gap", "held"),
    [
        (Gap(3, 0.1, 1.0), True),
        (Gap(3, 0.1001, 0.2), False),
        (Gap(3, 0.01, 1.001), False),
        (Gap(3, math.nan, math.nan), False),
        (Gap(3, math.inf, math.inf), False),
    ],
)
def test_a_gap_holds_when_both_of_its_numbers_do(gap: Gap, held: bool) -> None:
    assert gap.within(BOUND) is held
    for check in (check_sampled, check_beliefs):
        if held:
            check(gap, BOUND, "At step 3")
        else:
            with pytest.raises(CheckFailed, match=r"^At step 3 .*: [^\n]*\.$") as caught:
                check(gap, BOUND, "At step 3")
            assert f"{gap.mean:.3g}" in str(caught.value)
            assert "more than 0.1 and 1" in str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_never_holds(bad: float) -> None:
    assert not Gap.of(np.array([bad, -1.0]), np.array([bad, -1.0])).within(BOUND)


def test_B6_a_missing_log_prob_is_an_error_and_no_zero() -> None:
    with pytest.raises(ValueError, match="compared"):
        Gap.of(np.zeros(3), np.zeros(2))


def test_P3_sampled_tokens_are_compared_in_their_own_order() -> None:
    games = [fakes.make_game(seed, turns, seed) for seed, turns in ((1, 3), (2, 1))]
    rows = [np.array([x for turn in game.turns for x in turn.logprobs]) for game in games]
    scores = [GameScore(row, 0.0, {}, {}) for row in rows]
    assert sampled_gap(games, scores).largest == 0.0
    shifted = [replace(scores[0], logp=rows[0] + 0.25), scores[1]]
    gap = sampled_gap(games, shifted)
    count = len(rows[0]) + len(rows[1])
    assert gap.count == count
    assert gap.largest == pytest.approx(0.25)
    assert gap.mean == pytest.approx(0.25 * len(rows[0]) / count)


@pytest.mark.parametrize("lead", [(), (30, 31)])
def test_B9_the_engine_is_asked_at_every_belief_point_of_a_game(lead: tuple[int, ...]) -> None:
    game = fakes.make_game(5, 3)
    guess = Elicitation("oak", (7, 8, 9, 20, 21), (3, 4), lead_ids=lead)
    tails = belief_tails(game, guess, "check/0")
    assert len(tails) == game.num_turns + 1
    assert len({tail.session for tail in tails}) == len(tails)
    for number, (tail, point) in enumerate(zip(tails, game.belief_points, strict=True)):
        ahead = (*game.token_ids[:point], *(lead if number == 0 else ()))
        assert tail.token_ids == (*ahead, 7, 8, 9, 20, 21)
        assert tail.token_ids[tail.start :] == (20, 21)
    beliefs = tail_beliefs(guess, [np.array([-1.0, -0.5])] * len(tails))
    np.testing.assert_array_equal(beliefs, [-1.5] * len(tails))


def test_the_wider_bound_holds_where_engine_and_trainer_differ_in_their_number_format() -> None:
    quick, _ = load_config(["experiment=quickstart"])
    paper, _ = load_config(["experiment=paper_qwen1.7b"])
    assert run_bound(quick, "cpu") == run_bound(paper, "cpu") == BOUNDS["float32"]
    assert run_bound(quick, "cuda") == run_bound(paper, "cuda") == BOUNDS["bfloat16"]
    full, _ = load_config(["experiment=paper_qwen1.7b", "actor_rollout_ref.actor.dtype=float32"])
    assert run_bound(full, "cuda") == BOUNDS["bfloat16"]


def test_a_denoiser_is_held_to_float32_on_every_device_and_sent_to_no_doctor() -> None:
    cfg, _ = load_config(["experiment=agreement_quickstart"])
    assert run_bound(cfg, "cpu") == run_bound(cfg, "cuda") == BOUNDS["float32"]
    with pytest.raises(CheckFailed, match=r"is not the policy that is trained\.$"):
        check_sampled(Gap(1, 1.0, 1.0), BOUNDS["float32"], "Now", "")


def test_published_runs_make_no_cross_checks_and_our_own_do() -> None:
    for name, every in (("quickstart", 8), ("paper_qwen1.7b", 0), ("train_8xa100_awq_dp7", 0)):
        assert load_config([f"experiment={name}"])[0].trainer.check_freq == every


# --- runs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def short(out: Path, world: Path, *more: str) -> list[str]:
    """A run of two steps without tests."""
    plain = ["trainer.total_training_steps=2", "trainer.final_test=false", "trainer.test_freq=-1"]
    return words(out, world, *plain, "trainer.val_before_train=false", *more)


def lie(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Make every engine replica change what one of its calls returns."""
    worker: Any = EngineWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    real = getattr(worker, name)
    monkeypatch.setattr(worker, name, lambda self, *args: change(real(self, *args)))


def switch(asleep: bool) -> Callable[[Any], str]:
    def act(self: Any) -> str:
        self.asleep = asleep
        return "asleep" if asleep else "ready"

    return act


def off(size: float) -> Callable[[Any], Any]:
    def change(completions: Any) -> Any:
        return [replace(c, logprobs=tuple(x - size for x in c.logprobs)) for c in completions]

    return change


def test_P3_B1_a_healthy_run_records_its_gaps_and_goes_on(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "run"
    status, trace = play(short(out, world, "trainer.check_freq=1"))
    assert status == 0
    assert "EngineWorker.score_tails" in trace.names
    for record in metrics_of(out):
        assert [name for name in NAMES if name not in record] == []
        assert record["check/sampled_tokens"] == record["state_tokens/sampled"]
        assert 0 < record["check/sampled_gap_max"] < 1e-4
        assert record["check/beliefs"] >= 4 * 2
        assert 0 < record["check/belief_gap_max"] < 1e-4


def test_L8_an_engine_that_sleeps_while_games_are_scored_is_woken_for_their_beliefs(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = EngineWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    real = worker.score_tails

    def score_tails(self: Any, requests: Any) -> Any:
        assert not self.asleep
        return real(self, requests)

    monkeypatch.setattr(worker, "score_tails", score_tails)
    for name, asleep in (("sleep", True), ("wake", False)):
        monkeypatch.setattr(worker, name, switch(asleep), raising=False)
    monkeypatch.setattr(pools, "_sleeps", lambda cfg, device: True)
    status, trace = play(short(tmp_path / "run", world, "trainer.check_freq=1"))
    assert status == 0
    told = ["EngineWorker.sleep", "EngineWorker.wake", "EngineWorker.score_tails"]
    step = [*told, "EngineWorker.sleep", "ActorWorker.update"]
    assert trace.order(*step) == [*step, "EngineWorker.wake", *step]


def test_a_cross_check_changes_nothing_of_the_run(tmp_path: Path, world: Path) -> None:
    kept = []
    for name, every in (("with", 1), ("without", 0)):
        assert play(short(tmp_path / name, world, f"trainer.check_freq={every}"))[0] == 0
        records = metrics_of(tmp_path / name)
        kept.append([{k: v for k, v in one.items() if k not in NAMES} for one in records])
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("call", "change", "expected"),
    [
        ("step", off(0.01), r"At step 2 the engine's log-probs of \d+ sampled tokens differ"),
        ("step", off(math.nan), r"At step 2 the engine's log-probs of \d+ sampled tokens differ"),
        ("score_tails", lambda tails: [t + 0.01 for t in tails], r"At step 2 \d+ beliefs of the"),
    ],
)
def test_P3_B1_an_engine_that_lies_stops_the_run_before_the_update(
    call: str,
    change: Callable[[Any], Any],
    expected: str,
    tmp_path: Path,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lie(monkeypatch, call, change)
    out, trace = tmp_path / "run", Trace()
    # The first step is not checked: the number of steps between checks is what it says.
    status, _ = play(short(out, world, "trainer.check_freq=2"), trace=trace)
    assert status == ExitStatus.CHECK_FAILED == 1
    assert trace.names.count("ActorWorker.update") == 1
    sentence = [line for line in capsys.readouterr().err.splitlines() if "differ" in line]
    assert len(sentence) == 1
    assert sentence[0].startswith("At step 2 ")
    assert re.match(expected, sentence[0])
    assert [record["step"] for record in metrics_of(out)] == [1]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    failed = [event for event in events if event["kind"] == "check_failed"]
    assert [event["reason"] for event in failed] == sentence


def test_without_cross_checks_a_lie_of_the_engine_goes_unseen(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, "step", off(0.01))
    assert play(short(tmp_path / "run", world, "trainer.check_freq=0"))[0] == 0
    assert not any(name in record for record in metrics_of(tmp_path / "run") for name in NAMES)
