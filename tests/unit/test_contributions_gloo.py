"""A head of contributions on two real ranks over gloo against one: same readings, same head.

The two ranks are spawned once and play all scenes; each test looks at one scene's results.
"""

from __future__ import annotations

from pathlib import Path

import contribution_fakes as heads
import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.algo.credit.spa_rl import COLUMN
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.trainer.actor import PolicyActor, parse_state
from delta_belief_rl.trainer.contributions import ContributionSettings
from delta_belief_rl.trainer.packing import deal
from tests.ranks import RANKS, Job, assert_close, resumed, run_ranks, scenes
from tests.runs import assert_same_state

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
GROUPS = fakes.make_groups(((3, 1, 2), (9, 1)))
REQUESTS = fakes.requests(GROUPS, None)


def actor_of(folder: Path, source: str, rank: int = 0, world_size: int = 1) -> PolicyActor:
    # A dear head is small, and rounding moves a small one little.
    own = ContributionSettings(source=source, ridge=0.1)
    settings = heads.settings_of(folder / "model", learners=(own,), score_tokens=60)
    return PolicyActor(settings, rank, world_size)


def play(rank: int, jobs: dict[str, Job], folder: Path) -> dict[str, Job]:
    """What a spawned rank does."""
    out: dict[str, Job] = {}
    for name, job in jobs.items():
        out[name] = scenes(actor_of(folder, name, rank, RANKS), job, REQUESTS)
        out[name]["resumed"] = resumed(actor_of(folder, name, rank, RANKS), job["state"], job)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    fakes.save_model(path / "model")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Job]:
    """The same scenes on one rank, and the job that the two ranks are given, by source."""
    out: dict[str, Job] = {}
    for name in heads.SOURCES:
        actor = actor_of(folder, name)
        batch = heads.make_batch(GROUPS, actor.score(REQUESTS))
        plans = {
            ranks: [
                fakes.one_step(batch, ranks=ranks, max_tokens=40),
                # The last optimizer step has fewer games than ranks; a second pass adds nothing.
                fakes.one_step(batch, ranks=ranks, max_tokens=40, games_per_step=4, epochs=2),
            ]
            for ranks in (1, RANKS)
        }
        one = {"batch": batch, "plans": plans[1], "deal": [range(len(REQUESTS))]}
        out[name] = scenes(actor, one, REQUESTS) | {"one": one}
        out[name]["job"] = {
            "batch": batch,
            "plans": plans[RANKS],
            "deal": deal([len(game.token_ids) for game in REQUESTS], RANKS),
            "state": out[name]["states"][0],
        }
    return out


@pytest.fixture(scope="module")
def pair(folder: Path, alone: dict[str, Job]) -> list[Job]:
    return run_ranks(play, {name: scene["job"] for name, scene in alone.items()}, folder)


def head_in(state: bytes) -> Job:
    return parse_state(state)["learners"]["contributions"]


@pytest.mark.parametrize("name", heads.SOURCES)
def test_A11_two_ranks_give_the_metrics_and_states_of_one(
    alone: dict[str, Job], pair: list[Job], name: str
) -> None:
    for update in (0, 1):
        want = merge_pairs([alone[name]["updates"][update]])
        got = merge_pairs([rank[name]["updates"][update] for rank in pair])
        assert got.keys() == want.keys()
        for metric, value in got.items():
            assert value == pytest.approx(want[metric], abs=TOLERANCE, rel=1e-4), metric
        assert want["contributions/loss"] > 0.1
        for rank in pair:
            assert_close(
                head_in(rank[name]["states"][update]), head_in(alone[name]["states"][update])
            )
        assert pair[0][name]["states"][update] == pair[1][name]["states"][update]


@pytest.mark.parametrize("name", heads.SOURCES)
def test_A19_ranks_with_unequal_numbers_of_games_give_the_readings_of_one(
    alone: dict[str, Job], pair: list[Job], name: str
) -> None:
    parts = alone[name]["job"]["deal"]
    assert len({len(part) for part in parts}) == 2
    for rank, part in enumerate(parts):
        for score, i in zip(pair[rank][name]["scores"], part, strict=True):
            want = alone[name]["scores"][i].columns[COLUMN]
            np.testing.assert_allclose(score.columns[COLUMN], want, atol=1e-4)
            assert np.abs(want).max() > 1e-3


@pytest.mark.parametrize("name", heads.SOURCES)
def test_R11_a_head_of_one_rank_continues_on_two_and_back(
    folder: Path, alone: dict[str, Job], pair: list[Job], name: str
) -> None:
    want = head_in(alone[name]["states"][1])
    for rank in pair:
        held, after = rank[name]["resumed"]
        assert_same_state(parse_state(held), parse_state(alone[name]["job"]["state"]))
        assert_close(head_in(after), want)
    saved = pair[0][name]["states"][0]
    held, after = resumed(actor_of(folder, name), saved, alone[name]["one"])
    assert_same_state(parse_state(held), parse_state(saved))
    assert_close(head_in(after), want)
