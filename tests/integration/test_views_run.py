"""Methods that read the played tokens behind another context train through the whole loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.trainer import loop
from delta_belief_rl.types import TrainBatch
from tests.runs import (
    assert_same_state,
    games_of,
    metrics_of,
    play,
    state_of,
    words,
    write_world,
)

pytestmark = pytest.mark.slow
STEPS = 2
ESTIMATING = ("igpo", "hcapo", "relace")
CHANGING = ("rlsd", "sdar", "opid", "orsd")
TEACHING = ("opsd", "sdpo")
DISTILLING = ("sdar", *TEACHING)
SLOW_COPY = (
    "actor_rollout_ref.model.adapters=[{name: actor_lora, r: 4, alpha: 4}, {name: ema, r: 4, "
    "alpha: 4}]"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def command(out: Path, world: Path, method: str, *more: str) -> list[str]:
    """The method's own group on games that are long enough to be won by some."""
    return words(
        out,
        world,
        f"algorithm={method}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.final_test=false",
        "multi_turn.max_turns={train: 10, val: 3}",
        *more,
    )


def trained(out: Path) -> list[dict[str, Any]]:
    records = [record for record in read_records(out / "metrics.jsonl") if record["step"] > 0]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return records


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[TrainBatch]:
    """The batches that a run in this process trains on."""
    seen: list[TrainBatch] = []
    real = loop.plan_update

    def tapped(batch: TrainBatch, **options: Any) -> Any:
        seen.append(batch)
        return real(batch, **options)

    monkeypatch.setattr(loop, "plan_update", tapped)
    return seen


@pytest.mark.parametrize("method", [*ESTIMATING, *CHANGING, *TEACHING])
def test_a_method_trains_through_the_loop_by_its_own_group(
    method: str, tmp_path: Path, world: Path, batches: list[TrainBatch]
) -> None:
    out = tmp_path / "run"
    wanted = command(out, world, method)
    algorithm = load_config(wanted)[0].algorithm
    assert method in (algorithm.adv_estimator, *algorithm.transforms)
    assert play(wanted)[0] == 0
    for record in trained(out):
        assert record["actor/grad_norm"] > 0
        assert record["train/strict_successful"] > 0
        if method == "igpo":
            assert record["critic/gain_weight"] == 1.0
        else:
            assert 0 < record["critic/view_share"] <= 1
        if method in ("hcapo", "relace"):
            assert record["critic/ratio_std"] > 0
        assert ("actor/distil_loss" in record) == (method in DISTILLING)
        if method in TEACHING:
            assert record["actor/pg_loss"] == 0.0
            assert record["critic/distilled_turns"] > 0
    # What is trained on is what was played, without a word of a hint.
    for step, batch in enumerate(batches, start=1):
        games = read_trajectories(out / "rollout" / f"{step}.jsonl").trajectories
        np.testing.assert_array_equal(batch.token_ids, np.concatenate([g.token_ids for g in games]))
        lengths = [len(game.token_ids) for game in games]
        np.testing.assert_array_equal(batch.lengths(), lengths)
    assert len(batches) == STEPS


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sdpo", ("algorithm.sdpo.top_k=8", "algorithm.sdpo.teacher=ema", SLOW_COPY)),
        ("opsd", ("algorithm.opsd.top_k=8", "algorithm.opsd.beta=1.0")),
        ("rlsd", ("algorithm.rlsd.teacher=ema", SLOW_COPY)),
        ("grpo", ("algorithm.transforms=[rlsd,orsd,sdar]",)),
        ("hcapo", ("algorithm.transforms=[opid]", "multi_turn.logprob_reward.enabled=true")),
    ],
)
def test_teachers_and_chains(
    method: str, more: tuple[str, ...], tmp_path: Path, world: Path
) -> None:
    out = tmp_path / "run"
    assert play(command(out, world, method, *more))[0] == 0
    for record in trained(out):
        assert record["actor/grad_norm"] > 0
        assert record["critic/view_share"] > 0
        assert ("ema/beta" in record) == (SLOW_COPY in more)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sdpo", ("algorithm.sdpo.top_k=8", "algorithm.sdpo.teacher=ema", SLOW_COPY)),
        ("igpo", ("algorithm.igpo.curriculum_steps=2",)),
        ("orsd", ()),
    ],
)
def test_R2_a_resumed_run_is_the_straight_one(
    method: str, more: tuple[str, ...], tmp_path: Path, world: Path
) -> None:
    assert play(command(tmp_path / "straight", world, method, *more))[0] == 0
    first = command(tmp_path / "cut", world, method, *more)
    assert play([*first, "trainer.total_training_steps=1"])[0] == 0
    assert play(first)[0] == 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "straight")
    assert games_of(tmp_path / "cut") == games_of(tmp_path / "straight")
    assert_same_state(state_of(tmp_path / "cut"), state_of(tmp_path / "straight"))
    if method == "igpo":
        weights = [record.get("critic/outcome_weight") for record in metrics_of(tmp_path / "cut")]
        assert weights[-2:] == [0.5, 0.75]


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        (
            "igpo",
            ("multi_turn.logprob_reward.enabled=false",),
            "set multi_turn.logprob_reward.enabled=true",
        ),
        ("rlsd", ("algorithm.rlsd.teacher=ema",), "needs an adapter called ema"),
        ("sdar", ("algorithm.adv_estimator=opsd",), "which distil: keep one of them"),
        ("hcapo", ("algorithm.hcapo.smoothing=2",), "algorithm.hcapo.smoothing must lie in"),
        (
            "opsd",
            ("algorithm.transforms=[rlsd]",),
            "read the view 'reference' with different settings",
        ),
    ],
)
def test_a_run_that_cannot_work_is_refused_with_one_sentence(
    method: str,
    more: tuple[str, ...],
    said: str,
    tmp_path: Path,
    world: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    assert play(command(out, world, method, *more))[0] == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not (out / "metrics.jsonl").exists()
