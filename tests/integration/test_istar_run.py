"""iStar trains through the whole loop, and a resumed run is the straight one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.jsonl import read_records
from tests.runs import games_of, metrics_of, play, words, write_world

pytestmark = pytest.mark.slow
STEPS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def command(out: Path, world: Path, *more: str) -> list[str]:
    """The method's own group, on the embedded world, with games long enough to be won."""
    return words(
        out,
        world,
        "algorithm=istar",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.final_test=false",
        "multi_turn.max_turns={train: 12, val: 3}",
        "multi_turn.train.n=8",
        "algorithm.istar.lr=1e-2",
        *more,
    )


def test_R2_istar_trains_through_the_loop_and_a_resumed_run_is_the_straight_one(
    tmp_path: Path, world: Path
) -> None:
    wanted = command(tmp_path / "straight", world)
    assert load_config(wanted)[0].algorithm.adv_estimator == "istar"
    assert play(wanted)[0] == 0
    records = read_records(tmp_path / "straight" / "metrics.jsonl")
    first, second = [record for record in records if record["step"] > 0]
    for record in (first, second):
        # Two pairs or more, so that the loss is one of real games.
        assert record["critic/istar_pairs"] > 1
        assert record["prm/grad_norm"] > 0
        assert record["prm/lr"] == 0.01
        assert record["prm/skipped_updates"] == 0
        assert record["actor/grad_norm"] > 0
        assert record["timing_s/learners"] > 0
    # Score first, then learn: what a new model says of the first games is what the policy says.
    assert first["critic/istar_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert first["critic/istar_worth_std"] < 1e-4
    assert abs(second["critic/istar_loss"] - math.log(2)) > 1e-4
    assert second["critic/istar_worth_std"] > 1e-3
    cut = command(tmp_path / "cut", world)
    assert play([*cut, "trainer.total_training_steps=1"])[0] == 0
    assert play(cut)[0] == 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "straight")
    assert games_of(tmp_path / "cut") == games_of(tmp_path / "straight")


def test_settings_of_istar_are_checked_before_anything_is_played(
    tmp_path: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting, said in (
        ("algorithm.istar.beta=0", "algorithm.istar.beta is 0"),
        ("algorithm.istar.lr=0", "algorithm.istar.lr is 0"),
        ("algorithm.istar.grad_clip=-1", "algorithm.istar.grad_clip is -1"),
        ("multi_turn.train.n=1", "multi_turn.train.n"),
    ):
        out = tmp_path / "run"
        assert play(command(out, world, setting))[0] == 2
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err
        assert not (out / "metrics.jsonl").exists()
