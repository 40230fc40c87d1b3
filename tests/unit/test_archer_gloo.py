"""ArCHer's critics on two real ranks over gloo against one: same columns, critics and buffer.

The two ranks are spawned once; each test looks at one part of what they did.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import archer_fakes
import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.cluster.groups import merge_pairs, rank_steps
from delta_belief_rl.trainer.actor import PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.packing import deal
from tests.ranks import RANKS, Job, assert_close, resumed, run_ranks, scenes
from tests.runs import assert_same_state

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
GROUPS = fakes.make_groups(((3, 1, 2), (9, 1)))
REQUESTS = fakes.requests(GROUPS, None)
TURNS = 16


def actor_of(folder: Path, rank: int = 0, world_size: int = 1) -> PolicyActor:
    settings = archer_fakes.settings_of(folder / "model", score_tokens=60)
    return PolicyActor(settings, rank, world_size)


def play(rank: int, job: Job, folder: Path) -> Job:
    """What a spawned rank does."""
    out = scenes(actor_of(folder, rank, RANKS), job, REQUESTS)
    out["resumed"] = resumed(actor_of(folder, rank, RANKS), job["state"], job)
    return out


def with_baseline(folder: Path, rank: int = 0, world_size: int = 1) -> PolicyActor:
    """A rank with a token baseline; its weights and the critics' are not the initial ones."""
    critics = replace(archer_fakes.SETTINGS, token_baseline=True, baseline_lr=1e-3)
    settings = archer_fakes.settings_of(folder / "model", critics, score_tokens=60)
    return archer_fakes.stir_critics(PolicyActor(settings, rank, world_size))


def play_baseline(rank: int, job: Job, folder: Path) -> Job:
    """What a spawned rank with a baseline does."""
    return scenes(with_baseline(folder, rank, RANKS), job, REQUESTS)


def play_one(rank: int, job: Job, folder: Path) -> Job:
    """What a spawned rank does where one of them never gets a game."""
    settings = archer_fakes.settings_of(folder / "model", score_tokens=60, dtype="bfloat16")
    actor = PolicyActor(settings, rank, RANKS)
    metrics = actor.update(rank_steps(job["batch"], job["plan"], rank), training_step=1)
    return {"metrics": metrics, "state": dump_state(actor.state())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archers")
    fakes.save_model(path / "model")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Job:
    """The same scenes on one rank, and the job that the two ranks are given."""
    actor = actor_of(folder)
    batch = archer_fakes.make_batch(GROUPS, actor.score(REQUESTS))
    plans = {
        # Three games a step leave a rank with an empty micro-batch; a second pass adds nothing.
        ranks: [
            fakes.one_step(batch, ranks=ranks, max_tokens=40),
            fakes.one_step(batch, ranks=ranks, max_tokens=40, games_per_step=3, epochs=2),
        ]
        for ranks in (1, RANKS)
    }
    one: Job = {"batch": batch, "plans": plans[1], "deal": [range(len(REQUESTS))]}
    out: Job = {**scenes(actor, one, REQUESTS), "one": one}
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


def learnt(state: bytes) -> Job:
    return parse_state(state)["learners"]["archer"]


@pytest.mark.parametrize("update", [0, 1])
def test_A11_two_ranks_give_the_metrics_critics_and_buffer_of_one(
    alone: Job, pair: list[Job], update: int
) -> None:
    want = merge_pairs([alone["updates"][update]])
    got = merge_pairs([rank["updates"][update] for rank in pair])
    assert got.keys() == want.keys()
    for metric, value in got.items():
        assert value == pytest.approx(want[metric], abs=TOLERANCE, rel=1e-3), metric
    assert want["archer/transitions"] == TURNS
    assert want["archer/buffer_size"] == min(TURNS * (update + 1), archer_fakes.SETTINGS.buffer)
    assert want["archer/q_loss"] > 0.1
    states = [learnt(rank["states"][update]) for rank in pair]
    assert_close(states[0], learnt(alone["states"][update]), TOLERANCE)
    policies = [parse_state(side["states"][update])["adapter"] for side in (pair[0], alone)]
    fakes.assert_states_close(*policies, atol=TOLERANCE)
    assert_same_state(states[1], states[0])


def test_A19_ranks_with_unequal_numbers_of_games_give_the_columns_of_one(
    alone: Job, pair: list[Job]
) -> None:
    parts = alone["job"]["deal"]
    assert len({len(part) for part in parts}) == 2
    for rank, part in enumerate(parts):
        for score, i in zip(pair[rank]["scores"], part, strict=True):
            for name, want in alone["scores"][i].columns.items():
                np.testing.assert_allclose(score.columns[name], want, atol=1e-3)
                assert np.abs(want).max() > 1e-2


def test_R11_critics_of_one_rank_continue_on_two_and_back(
    folder: Path, alone: Job, pair: list[Job]
) -> None:
    want = learnt(alone["states"][1])
    for rank in pair:
        held, after = rank["resumed"]
        assert_same_state(learnt(held), learnt(alone["job"]["state"]))
        assert_close(learnt(after), want, TOLERANCE)
    saved = pair[0]["states"][0]
    held, after = resumed(actor_of(folder), saved, alone["one"])
    assert_same_state(learnt(held), learnt(saved))
    assert_close(learnt(after), want, TOLERANCE)


def test_A19_a_rank_without_any_game_learns_what_the_other_read_in_bfloat16(
    folder: Path, alone: Job
) -> None:
    batch = alone["one"]["batch"].select(np.array([0]))
    plan = fakes.one_step(batch, ranks=RANKS, max_tokens=40)
    assert [len(micro.games) for rank in plan.steps[0].ranks for micro in rank] == [1, 0]
    found = run_ranks(play_one, {"batch": batch, "plan": plan}, folder)
    assert merge_pairs([rank["metrics"] for rank in found])["archer/transitions"] == 3
    one, other = (learnt(rank["state"]) for rank in found)
    assert_same_state(one, other)


def test_A11_two_ranks_train_the_token_baseline_of_one(folder: Path, alone: Job) -> None:
    actor = with_baseline(folder)
    scores = actor.score(REQUESTS)
    batch = archer_fakes.make_batch(GROUPS, scores, token_baseline=True)
    # Of three games a step one rank has two and the other one, or one and none.
    plans = [
        [
            fakes.one_step(batch, ranks=ranks, max_tokens=40),
            fakes.one_step(batch, ranks=ranks, max_tokens=40, games_per_step=3),
        ]
        for ranks in (1, RANKS)
    ]
    whole = {"batch": batch, "plans": plans[0], "deal": [range(len(REQUESTS))]}
    one = scenes(actor, whole, REQUESTS)
    job = {"batch": batch, "plans": plans[1], "deal": alone["job"]["deal"]}
    both = run_ranks(play_baseline, job, folder)
    for number in (0, 1):
        want = merge_pairs([one["updates"][number]])
        got = merge_pairs([rank["updates"][number] for rank in both])
        for name in ("baseline_loss", "baseline_grad_norm", "baseline_skipped_updates"):
            assert got[f"archer/{name}"] == pytest.approx(want[f"archer/{name}"], rel=1e-3), name
        assert want["archer/baseline_grad_norm"] > 1e-2
        states = [learnt(rank["states"][number])["archer_baseline"] for rank in both]
        assert_same_state(states[1], states[0])
        assert_close(states[0], learnt(one["states"][number])["archer_baseline"], TOLERANCE)
    for rank, part in enumerate(job["deal"]):
        for score, i in zip(both[rank]["scores"], part, strict=True):
            want = one["scores"][i].columns["archer_baseline"]
            np.testing.assert_allclose(score.columns["archer_baseline"], want, atol=1e-3)
