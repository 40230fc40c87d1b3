"""Two real ranks over gloo against one: same numbers, no rank ever waits for another in vain.

The two ranks are spawned once and play all scenes; each test looks at one scene's results.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.models.adapters import state_checksum
from delta_belief_rl.trainer.actor import (
    BASE,
    EMA,
    POLICY,
    ActorSettings,
    PolicyActor,
    dump_state,
    parse_state,
)
from delta_belief_rl.trainer.packing import UpdatePlan, deal
from delta_belief_rl.types import TrainBatch
from tests.ranks import RANKS, run_ranks
from tests.runs import assert_same_state

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
HALF_STEP = 0.15
"""Difference of a half-precision step of the adapter, over its length."""
GROUPS = fakes.make_groups(((3, 1, 2), (9, 1)))
REQUESTS = fakes.requests(GROUPS)
PROBE = (3, 1, 4, 1, 5, 9, 2, 6)


def settings_of(folder: Path, **changes: Any) -> ActorSettings:
    options: dict[str, Any] = {
        "adapter": replace(fakes.ADAPTER, ema=True, ema_beta=0.5),
        "beliefs": (POLICY, EMA, BASE),
        "views": (BASE,),
        "kl_coef": 0.1,
        "score_tokens": 60,
    }
    return fakes.settings_of(folder, **(options | changes))


def scenes(actor: PolicyActor, job: dict[str, Any]) -> dict[str, Any]:
    """Everything one rank does, in order; ``job`` holds what the driver has planned."""
    rank = actor.rank
    out: dict[str, Any] = {}
    out["scores"] = actor.score([REQUESTS[i] for i in job["deal"][rank]])
    out["all on rank 0"] = actor.score(REQUESTS if rank == 0 else [])
    batch: TrainBatch = job["batch"]
    plans: list[UpdatePlan] = job["plans"]
    out["updates"] = []
    for step, plan in enumerate(plans, start=1):
        metrics = actor.update(fakes.share(batch, plan, rank), step)
        out["updates"].append((metrics, actor.snapshot(), actor.snapshot(EMA)))
        if step == 1:
            out["state"] = dump_state(actor.state())
    out["probe"] = actor.probe(PROBE)
    nothing = actor.update([], len(plans) + 1)
    out["nothing"] = (nothing, actor.snapshot())
    steps = fakes.share(batch, plans[0], rank)
    for micro_batches, _ in steps:
        for i, micro in enumerate(micro_batches):
            if micro is not None and rank == 0:
                micro_batches[i] = replace(micro, advantages=micro.advantages * np.nan)
    out["broken"] = (actor.update(steps, len(plans) + 2), actor.snapshot())
    return out


def resumed(actor: PolicyActor, state: bytes, batch: TrainBatch, plan: UpdatePlan) -> Any:
    """Load a state and make the second update."""
    actor.load_state(parse_state(state))
    loaded, held = actor.snapshot(), dump_state(actor.state())
    actor.update(fakes.share(batch, plan, actor.rank), 2)
    return loaded, held, actor.snapshot()


def play(rank: int, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Body of a spawned rank."""
    settings = settings_of(folder / "model")
    out = scenes(PolicyActor(settings, rank, RANKS), job)
    again = PolicyActor(replace(settings, gradient_checkpointing=True), rank, RANKS)
    out["resumed"] = resumed(again, job["state"], job["batch"], job["plans"][1])
    half = PolicyActor(replace(settings, dtype="bfloat16"), rank, RANKS)
    half.update(fakes.share(job["batch"], job["plans"][0], rank), 1)
    out["half"] = half.snapshot()
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp")
    fakes.save_model(path / "model")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """The same scenes on one rank, and the job that the two ranks were given."""
    actor = PolicyActor(settings_of(folder / "model"))
    batch = fakes.make_batch(GROUPS, actor.score(REQUESTS))
    options = {"max_tokens": 40}
    whole = fakes.one_step(batch, **options)
    halves = fakes.one_step(batch, games_per_step=3, **options)
    out = scenes(
        actor,
        {"deal": [range(len(REQUESTS))], "batch": batch, "plans": [whole, halves]},
    )
    job = {
        "deal": deal([len(game.token_ids) for game in REQUESTS], RANKS),
        "batch": batch,
        "plans": [
            fakes.one_step(batch, ranks=RANKS, **options),
            fakes.one_step(batch, ranks=RANKS, games_per_step=3, **options),
        ],
        "state": out["state"],
    }
    return out | {"job": job, "halves": halves}


@pytest.fixture(scope="module")
def pair(folder: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(play, alone["job"], folder)


def assert_scores_close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got.logp, want.logp, atol=TOLERANCE)
    assert abs(got.entropy - want.entropy) < TOLERANCE
    for name in (POLICY, EMA, BASE):
        np.testing.assert_allclose(got.beliefs[name], want.beliefs[name], atol=TOLERANCE)
    np.testing.assert_allclose(got.views[BASE], want.views[BASE], atol=TOLERANCE)


def test_A19_A21_the_plan_of_this_test_has_empty_micro_batches_and_uneven_ranks(
    alone: dict[str, Any],
) -> None:
    plan = alone["job"]["plans"][0]
    sizes = [[len(micro.games) for micro in rank] for rank in plan.steps[0].ranks]
    assert len(sizes[0]) == len(sizes[1])
    assert 0 in sizes[0] + sizes[1]
    assert sum(sizes[0]) != sum(sizes[1])
    assert len(alone["job"]["plans"][1].steps) == 2


def test_A19_ranks_with_unequal_numbers_of_games_score_them_as_one_rank_does(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    parts = alone["job"]["deal"]
    assert len({len(part) for part in parts}) == 2
    for rank, part in enumerate(parts):
        for score, i in zip(pair[rank]["scores"], part, strict=True):
            assert_scores_close(score, alone["scores"][i])


def test_A19_a_rank_without_games_takes_part_in_scoring(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    assert pair[1]["all on rank 0"] == []
    for got, want in zip(pair[0]["all on rank 0"], alone["scores"], strict=True):
        assert_scores_close(got, want)


@pytest.mark.parametrize("update", [0, 1])
def test_A11_two_ranks_give_the_metrics_and_adapters_of_one(
    alone: dict[str, Any], pair: list[dict[str, Any]], update: int
) -> None:
    metrics, snapshot, ema = alone["updates"][update]
    want = merge_pairs([metrics])
    got = merge_pairs([rank["updates"][update][0] for rank in pair])
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value == pytest.approx(want[name], abs=TOLERANCE, rel=TOLERANCE), name
    for rank in pair:
        fakes.assert_states_close(rank["updates"][update][1].state, snapshot.state, TOLERANCE)
        fakes.assert_states_close(rank["updates"][update][2].state, ema.state, TOLERANCE)


def test_L6_all_ranks_hand_out_the_same_adapter_and_the_same_probe(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    for update in (0, 1):
        first, second = (rank["updates"][update][1] for rank in pair)
        assert first.checksum == second.checksum == state_checksum(second.state)
        assert first.version == second.version == update + 1
    for rank in pair:
        np.testing.assert_allclose(rank["probe"], alone["probe"], atol=TOLERANCE)


def test_A18_nothing_to_train_is_nothing_on_every_rank(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["nothing"][1].checksum == rank["updates"][-1][1].checksum
        assert rank["nothing"][1].version == rank["updates"][-1][1].version
    assert merge_pairs([rank["nothing"][0] for rank in pair])["actor/empty_updates"] == 1.0


def test_A20_a_gradient_that_is_broken_on_one_rank_skips_the_step_on_all(
    pair: list[dict[str, Any]],
) -> None:
    for rank in pair:
        assert rank["broken"][1].checksum == rank["updates"][-1][1].checksum
    assert merge_pairs([rank["broken"][0] for rank in pair])["actor/skipped_updates"] == 1.0


def test_R11_a_state_of_one_rank_continues_on_two(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    for rank in pair:
        loaded, held, continued = rank["resumed"]
        assert_same_state(parse_state(held), parse_state(alone["state"]))
        assert loaded.checksum == alone["updates"][0][1].checksum
        assert loaded.version == 1
        fakes.assert_states_close(continued.state, alone["updates"][1][1].state, TOLERANCE)


def test_R11_a_state_of_two_ranks_continues_on_one(
    folder: Path, alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    assert pair[0]["state"] == pair[1]["state"]
    actor = PolicyActor(settings_of(folder / "model"))
    saved = pair[0]["state"]
    loaded, held, continued = resumed(actor, saved, alone["job"]["batch"], alone["halves"])
    assert_same_state(parse_state(held), parse_state(saved))
    assert loaded.checksum == pair[0]["updates"][0][1].checksum
    fakes.assert_states_close(continued.state, alone["updates"][1][1].state, TOLERANCE)


def test_A11_a_half_precision_base_with_full_precision_adapters_makes_the_step_of_one_rank(
    folder: Path, alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    first, second = (rank["half"] for rank in pair)
    assert first.checksum == second.checksum
    actor = PolicyActor(replace(settings_of(folder / "model"), dtype="bfloat16"))
    start = actor.snapshot().state
    plan = fakes.one_step(alone["job"]["batch"], max_tokens=40)
    actor.update(fakes.share(alone["job"]["batch"], plan), 1)
    one = actor.snapshot().state
    moved = sum(float(np.square(one[key] - start[key]).sum()) for key in one)
    apart = sum(float(np.square(one[key] - first.state[key]).sum()) for key in one)
    # Ranks pack games differently, so half-precision sums are rounded elsewhere.
    assert np.sqrt(apart / moved) < HALF_STEP
