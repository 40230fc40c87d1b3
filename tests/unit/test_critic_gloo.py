"""A critic on two real ranks over gloo against one: same values, same loss, same step.

The two ranks are spawned once and play all scenes; each test looks at one scene's results.
"""

from __future__ import annotations

import pickle
import socket
import time
from pathlib import Path
from typing import Any

import critic_fakes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import training_fakes as fakes

from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.trainer.actor import PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.critic import CriticSettings
from delta_belief_rl.trainer.packing import deal
from tests.runs import assert_same_state

pytestmark = pytest.mark.slow

RANKS = 2
DEADLINE = 240.0
TOLERANCE = 2e-5
GROUPS = fakes.make_groups(((3, 1, 2), (9, 1)))
REQUESTS = fakes.requests(GROUPS, None)
FORMS: dict[str, CriticSettings] = dict(zip(critic_fakes.NAMES, critic_fakes.FORMS, strict=True))


def actor_of(folder: Path, name: str, rank: int = 0, world_size: int = 1) -> PolicyActor:
    settings = critic_fakes.settings_of(folder / "model", FORMS[name], score_tokens=60)
    return PolicyActor(settings, rank, world_size)


def scenes(actor: PolicyActor, job: dict[str, Any]) -> dict[str, Any]:
    """Score, update twice, score again; ``job`` holds what the driver has planned."""
    out: dict[str, Any] = {"updates": [], "states": []}
    for step, plan in enumerate(job["plans"], start=1):
        out["updates"].append(actor.update(fakes.share(job["batch"], plan, actor.rank), step))
        out["states"].append(dump_state(actor.state()))
    out["scores"] = actor.score([REQUESTS[i] for i in job["deal"][actor.rank]])
    return out


def resumed(actor: PolicyActor, state: bytes, job: dict[str, Any]) -> tuple[bytes, bytes]:
    """The state as it was loaded, and after the second update."""
    actor.load_state(parse_state(state))
    held = dump_state(actor.state())
    actor.update(fakes.share(job["batch"], job["plans"][1], actor.rank), 2)
    return held, dump_state(actor.state())


def play(rank: int, port: int, jobs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Body of a spawned rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    out: dict[str, dict[str, Any]] = {}
    for name, job in jobs.items():
        out[name] = scenes(actor_of(folder, name, rank, RANKS), job)
        again = actor_of(folder, name, rank, RANKS)
        out[name]["resumed"] = resumed(again, job["state"], job)
    dist.barrier()
    (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(out))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(jobs: dict[str, dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Both ranks' results; a rank that waits for ever fails the test and is ended."""
    context = mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
        play, (free_port(), jobs, folder), nprocs=RANKS, join=False, start_method="spawn"
    )
    assert context is not None
    end = time.monotonic() + DEADLINE
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < end, f"the ranks hang: no end within {DEADLINE:g} s"
    finally:
        for process in context.processes:
            if process is not None and process.is_alive():
                process.kill()
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("critics")
    fakes.save_model(path / "model")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    """The same scenes on one rank, and the job that the two ranks are given, by form."""
    out: dict[str, dict[str, Any]] = {}
    for name in FORMS:
        actor = actor_of(folder, name)
        batch = critic_fakes.make_batch(GROUPS, actor.score(REQUESTS), share=0.6)
        plans = {
            ranks: [
                fakes.one_step(batch, ranks=ranks, max_tokens=40),
                fakes.one_step(batch, ranks=ranks, max_tokens=40, games_per_step=3),
            ]
            for ranks in (1, RANKS)
        }
        one = {"batch": batch, "plans": plans[1], "deal": [range(len(REQUESTS))]}
        out[name] = scenes(actor, one) | {"one": one}
        out[name]["job"] = {
            "batch": batch,
            "plans": plans[RANKS],
            "deal": deal([len(game.token_ids) for game in REQUESTS], RANKS),
            "state": out[name]["states"][0],
        }
    return out


@pytest.fixture(scope="module")
def pair(folder: Path, alone: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return run_ranks({name: scene["job"] for name, scene in alone.items()}, folder)


def assert_close(got: Any, want: Any, where: str = "") -> None:
    """Equal but for the rounding of float32 sums, all through a state."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key, value in want.items():
            assert_close(got[key], value, f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for index, value in enumerate(want):
            assert_close(got[index], value, f"{where}.{index}")
    elif hasattr(want, "shape"):
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), atol=TOLERANCE, rtol=1e-3, err_msg=where
        )
    else:
        assert got == want, where


@pytest.mark.parametrize("name", FORMS)
def test_A11_two_ranks_give_the_metrics_and_states_of_one(
    alone: dict[str, dict[str, Any]], pair: list[dict[str, Any]], name: str
) -> None:
    for update in (0, 1):
        want = merge_pairs([alone[name]["updates"][update]])
        got = merge_pairs([rank[name]["updates"][update] for rank in pair])
        assert got.keys() == want.keys()
        for metric, value in got.items():
            assert value == pytest.approx(want[metric], abs=TOLERANCE, rel=1e-4), metric
        assert want["critic/vf_loss"] > 0.1
        state = parse_state(alone[name]["states"][update])
        for rank in pair:
            assert_close(parse_state(rank[name]["states"][update]), state)
        assert pair[0][name]["states"][update] == pair[1][name]["states"][update]


@pytest.mark.parametrize("name", FORMS)
def test_A19_ranks_with_unequal_numbers_of_games_give_the_values_of_one(
    alone: dict[str, dict[str, Any]], pair: list[dict[str, Any]], name: str
) -> None:
    parts = alone[name]["job"]["deal"]
    assert len({len(part) for part in parts}) == 2
    for rank, part in enumerate(parts):
        for score, i in zip(pair[rank][name]["scores"], part, strict=True):
            want = alone[name]["scores"][i]
            np.testing.assert_allclose(score.values, want.values, atol=1e-4)
            assert score.end_value == pytest.approx(want.end_value, abs=1e-4)
            assert np.abs(want.values).max() > 1e-3


@pytest.mark.parametrize("name", FORMS)
def test_R11_a_critic_of_one_rank_continues_on_two_and_back(
    folder: Path, alone: dict[str, dict[str, Any]], pair: list[dict[str, Any]], name: str
) -> None:
    want = parse_state(alone[name]["states"][1])
    for rank in pair:
        held, after = rank[name]["resumed"]
        assert_same_state(parse_state(held), parse_state(alone[name]["job"]["state"]))
        assert_close(parse_state(after), want)
    saved = pair[0][name]["states"][0]
    held, after = resumed(actor_of(folder, name), saved, alone[name]["one"])
    assert_same_state(parse_state(held), parse_state(saved))
    assert_close(parse_state(after), want)
