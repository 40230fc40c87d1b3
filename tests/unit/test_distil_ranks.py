"""Two real ranks over gloo read views and distil as one rank does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.algo.credit.distilling import Distillation
from delta_belief_rl.belief.branched import ScoreRequest, View
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.trainer.actor import BASE, ActorSettings, PolicyActor
from delta_belief_rl.trainer.distil import with_tops
from delta_belief_rl.trainer.packing import UpdatePlan
from delta_belief_rl.types import TrainBatch
from tests.ranks import RANKS, run_ranks

pytestmark = pytest.mark.slow

GROUPS = fakes.make_groups(((3, 1, 2), (9, 1)))
DEAL = ([0, 3], [1, 2, 4])
"""Games of each rank; game 1 has no hint, so the ranks have 2 views each of unequal length."""


def hinted(ask: ScoreRequest, number: int) -> ScoreRequest:
    if number == 1:
        return ask
    view = View((5, 11, 2, *ask.token_ids), ask.action_positions + 3)
    return replace(ask, views={"reference": view})


REQUESTS = [hinted(ask, number) for number, ask in enumerate(fakes.requests(GROUPS, None))]


def settings_of(folder: Path) -> ActorSettings:
    return fakes.settings_of(
        folder,
        beliefs=(),
        contexts=(("reference", BASE),),
        distil=Distillation("reference", form="top", top_k=4),
        score_tokens=40,
    )


def lesson(actor: PolicyActor) -> TrainBatch:
    scores = actor.score(REQUESTS)
    batch = fakes.make_batch(GROUPS, scores)
    known = (np.isfinite(batch.views["reference"]) & (batch.turn_ids >= 0)).astype(float)
    batch = replace(
        batch,
        advantages=batch.advantages * 0.0,
        weight=known,
        views={**batch.views, "distil": known},
    )
    return with_tops(batch, [score.top for score in scores])


def play(rank: int, job: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """Body of a spawned rank."""
    actor = PolicyActor(settings_of(folder / "model"), rank, RANKS)
    scores = actor.score([REQUESTS[game] for game in DEAL[rank]])
    one_sided = actor.score(REQUESTS if rank == 0 else [])
    metrics = actor.update(fakes.share(job["batch"], job["plan"], rank), 1)
    return scores, one_sided, metrics, actor.snapshot()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    fakes.save_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[Any, ...]:
    actor = fresh(folder)
    batch = lesson(actor)
    plan: UpdatePlan = fakes.one_step(batch, ranks=1)
    scores = actor.score(REQUESTS)
    metrics = merge_pairs([actor.update(fakes.share(batch, plan), 1)])
    return batch, scores, metrics, actor.snapshot()


@pytest.fixture(scope="module")
def pair(alone: tuple[Any, ...], folder: Path) -> list[Any]:
    batch: TrainBatch = alone[0]
    plan = fakes.one_step(batch, ranks=RANKS, max_tokens=1)
    return run_ranks(play, {"batch": batch, "plan": plan}, folder)


def fresh(folder: Path) -> PolicyActor:
    return PolicyActor(settings_of(folder / "model"))


def test_A19_ranks_with_unequal_views_read_them_as_one_rank_does(
    alone: tuple[Any, ...], pair: list[Any]
) -> None:
    scores = alone[1]
    for rank, games in enumerate(DEAL):
        for game, score in zip(games, pair[rank][0], strict=True):
            want = scores[game]
            np.testing.assert_allclose(score.views["reference"], want.views["reference"], atol=1e-5)
            assert (score.top is None) == (game == 1)
            if score.top is not None:
                np.testing.assert_array_equal(score.top.ids, want.top.ids)


def test_A19_a_rank_without_games_takes_part_in_reading_views(
    alone: tuple[Any, ...], pair: list[Any]
) -> None:
    for score, want in zip(pair[0][1], alone[1], strict=True):
        np.testing.assert_allclose(score.views["reference"], want.views["reference"], atol=1e-5)
    assert pair[1][1] == []


def test_A11_two_ranks_distil_as_one_does(alone: tuple[Any, ...], pair: list[Any]) -> None:
    metrics = merge_pairs([rank[2] for rank in pair])
    for name in ("actor/distil_loss", "actor/distil_gap", "actor/distil_capped"):
        assert metrics[name] == pytest.approx(alone[2][name], abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(alone[2]["actor/grad_norm"], rel=1e-4)
    for rank in pair:
        fakes.assert_states_close(rank[3].state, alone[3].state, 1e-5)
