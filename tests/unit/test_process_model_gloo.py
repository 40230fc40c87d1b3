"""A process model on two real ranks over gloo against one: same column, same step.

The two ranks are spawned once and play everything; each test looks at a part of the results. Pairs
join games of both ranks.
"""

from __future__ import annotations

from pathlib import Path

import istar_fakes
import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.trainer.actor import PolicyActor, parse_state
from delta_belief_rl.trainer.packing import deal
from tests.ranks import RANKS, Job, assert_close, resumed, run_ranks, scenes
from tests.runs import assert_same_state

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
GROUPS = istar_fakes.make_groups(((3, 1, 2), (9, 1)), ((0, 0), (1, 1)))
REQUESTS = fakes.requests(GROUPS, None)


def actor_of(folder: Path, rank: int = 0, world_size: int = 1) -> PolicyActor:
    settings = istar_fakes.settings_of(folder / "model", score_tokens=60)
    return PolicyActor(settings, rank, world_size)


def play(rank: int, job: Job, folder: Path) -> Job:
    """What a spawned rank does."""
    out = scenes(actor_of(folder, rank, RANKS), job, REQUESTS)
    out["resumed"] = resumed(actor_of(folder, rank, RANKS), job["state"], job)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("process_models")
    fakes.save_model(path / "model")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Job:
    """The same scenes on one rank, and the job that the two ranks are given."""
    actor = actor_of(folder)
    batch = istar_fakes.make_batch(GROUPS, actor.score(REQUESTS))
    plans = {
        ranks: [
            fakes.one_step(batch, ranks=ranks, max_tokens=40),
            fakes.one_step(batch, ranks=ranks, max_tokens=40, games_per_step=3),
        ]
        for ranks in (1, RANKS)
    }
    one = {"batch": batch, "plans": plans[1], "deal": [range(len(REQUESTS))]}
    out = scenes(actor, one, REQUESTS)
    out["one"] = one
    out["job"] = {
        "batch": batch,
        "plans": plans[RANKS],
        "deal": deal([len(game.token_ids) for game in REQUESTS], RANKS),
        "state": out["states"][0],
    }
    return out


@pytest.fixture(scope="module")
def pair(folder: Path, alone: Job) -> list[Job]:
    return run_ranks(play, alone["job"], folder)


@pytest.mark.parametrize("update", [0, 1])
def test_A11_two_ranks_give_the_metrics_and_states_of_one(
    alone: Job, pair: list[Job], update: int
) -> None:
    want = merge_pairs([alone["updates"][update]])
    got = merge_pairs([rank["updates"][update] for rank in pair])
    assert got.keys() == want.keys()
    for metric, value in got.items():
        assert value == pytest.approx(want[metric], abs=TOLERANCE, rel=1e-4), metric
    assert want["prm/grad_norm"] > 1e-3
    state = parse_state(alone["states"][update])
    for rank in pair:
        assert_close(parse_state(rank["states"][update]), state)
    assert pair[0]["states"][update] == pair[1]["states"][update]


def test_A19_ranks_with_unequal_numbers_of_games_give_the_column_of_one(
    alone: Job, pair: list[Job]
) -> None:
    parts = alone["job"]["deal"]
    assert len({len(part) for part in parts}) == 2
    for rank, part in enumerate(parts):
        for score, i in zip(pair[rank]["scores"], part, strict=True):
            want = alone["scores"][i]
            np.testing.assert_allclose(score.columns["prm"], want.columns["prm"], atol=1e-4)
            np.testing.assert_allclose(score.logp, want.logp, atol=1e-4)
            assert np.abs(want.columns["prm"] - want.logp).max() > 1e-3


def test_R11_a_process_model_of_one_rank_continues_on_two_and_back(
    folder: Path, alone: Job, pair: list[Job]
) -> None:
    want = parse_state(alone["states"][1])
    for rank in pair:
        held, after = rank["resumed"]
        assert_same_state(parse_state(held), parse_state(alone["job"]["state"]))
        assert_close(parse_state(after), want)
    saved = pair[0]["states"][0]
    held, after = resumed(actor_of(folder), saved, alone["one"])
    assert_same_state(parse_state(held), parse_state(saved))
    assert_close(parse_state(after), want)
