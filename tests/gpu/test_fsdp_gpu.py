"""FSDP2 on two GPUs: the numbers of one GPU, and a clear end where a rank dies or hangs.

Both sides compute in bfloat16 but pack games differently, so a matrix product adds its parts in
another order and its result may be the next bfloat16 number: a relative 2^-8 in every layer. Summed
over the layers of this model that is some hundredths of a nat in a single log-prob (``LOGP``, and
less in a mean over many), and about a percent in gradients, which are kept in float32. Adam divides
each element of the first step by its own size, so an element whose gradient is as small as that
error may move the other way; hence the step is compared as a whole (``STEP``).
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from delta_belief_rl.cluster import ranks
from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.cluster.ranks import join_ranks
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.models.loading import build_causal_lm, tiny_qwen3_config
from delta_belief_rl.trainer.actor import (
    BASE,
    EMA,
    POLICY,
    ActorSettings,
    AdapterSettings,
    PolicyActor,
    dump_state,
    parse_state,
)
from delta_belief_rl.trainer.packing import UpdatePlan, deal
from delta_belief_rl.types import TrainBatch
from tests.rank_faults import fail_in, start_pair
from tests.unit import training_fakes as fakes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS = 2
DEADLINE = 120.0
LOGP, MEAN_LOGP = 0.1, 0.02
"""Nats: largest and mean difference of a log-prob."""
LOSS, NORM = 0.02, 0.02
"""Relative differences of loss and gradient norm."""
STEP = 0.15
"""Difference of the adapter's first step, over its length."""
TIMEOUT = 12.0

GROUPS = fakes.make_groups(((12, 7, 9), (15, 4), (8, 11, 10)))
REQUESTS = fakes.requests(GROUPS)


def visible() -> list[str]:
    """The job's GPUs as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def settings_of(folder: Path, device: str = "cuda", **changes: Any) -> ActorSettings:
    options: dict[str, Any] = {
        "adapter": AdapterSettings(rank=8, alpha=16.0, ema=True, ema_beta=0.5),
        "beliefs": (POLICY, EMA, BASE),
        "views": (BASE,),
        "kl_coef": 0.1,
        "score_tokens": 200,
        "device": device,
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        # The loss then depends on the log-probs and not on the advantages alone.
        "old_is_new": False,
    }
    return fakes.settings_of(folder, **(options | changes))


def scenes(actor: PolicyActor, job: dict[str, Any]) -> dict[str, Any]:
    """What one rank does: score its games, update once, hand out the adapter."""
    actor.load_state(parse_state(job["state"]))
    out: dict[str, Any] = {"scores": actor.score([REQUESTS[i] for i in job["deal"][actor.rank]])}
    batch: TrainBatch | None = job["batch"]
    if batch is None:
        batch = out["batch"] = stale_batch(out["scores"])
    plan: UpdatePlan = fakes.one_step(batch, ranks=actor.world_size, max_tokens=150)
    metrics = actor.update(fakes.share(batch, plan, actor.rank), 1)
    out |= {"metrics": metrics, "adapter": actor.snapshot(), "ema": actor.snapshot(EMA)}
    out["state"] = dump_state(actor.state())
    return out | {"usage": actor.usage()}


def stale_batch(scores: Any) -> TrainBatch:
    """A batch of a policy that is a little older."""
    batch = fakes.make_batch(GROUPS, scores)
    old = batch.old_logp + np.random.default_rng(3).normal(size=batch.old_logp.shape) * 0.1
    old = np.where(batch.turn_ids >= 0, old, 0.0)
    return replace(batch, old_logp=old, rollout_logp=old)


def play(rank: int, port: int, job: dict[str, Any], folder: Path) -> None:
    """Body of a spawned rank."""
    device = job["device"]
    if device == "cuda":
        torch.cuda.set_device(rank)
    join_ranks(device, rank, RANKS, ("127.0.0.1", port), 60.0)
    actor = PolicyActor(settings_of(folder / "model", device), rank, RANKS)
    out = scenes(actor, job)
    actor.barrier()
    (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(out))
    dist.destroy_process_group()


def run_ranks(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Both ranks' results; ranks that hang fail the test and are ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = mp.start_processes(
        play, (port, job, folder), nprocs=RANKS, join=False, start_method="spawn"
    )
    assert context is not None
    end = time.monotonic() + DEADLINE
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < end, f"the ranks hang: no end within {DEADLINE:g} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(RANKS)]


def save_model(folder: Path) -> Path:
    """A Qwen3 of 4 layers whose log-probs differ by nats between contexts."""
    config = tiny_qwen3_config(
        512, hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, intermediate=512
    )
    model = build_causal_lm(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def one_and_two(folder: Path, device: str = "cuda") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same scenes on one rank and on two; both begin with the same stirred adapter."""
    settings = settings_of(save_model(folder / "model"), device)
    state = dump_state(fakes.stir(PolicyActor(replace(settings, device="cpu")), 0.02).state())
    job: dict[str, Any] = {
        "state": state,
        "deal": [range(len(REQUESTS))],
        "batch": None,
        "device": device,
    }
    alone = scenes(PolicyActor(settings), job)
    lengths = [len(game.token_ids) for game in REQUESTS]
    job |= {"deal": deal(lengths, RANKS), "batch": alone["batch"]}
    pair = run_ranks(job, folder)
    return alone | {"start": parse_state(state)["adapter"], "deal": job["deal"]}, pair


Both = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return one_and_two(tmp_path_factory.mktemp("fsdp"))


def score_gaps(alone: dict[str, Any], pair: list[dict[str, Any]]) -> np.ndarray:
    """Differences of every log-prob and belief under every model, in nats."""
    gaps: list[np.ndarray] = []
    for rank, part in enumerate(alone["deal"]):
        for got, i in zip(pair[rank]["scores"], part, strict=True):
            want = alone["scores"][i]
            gaps += [got.logp - want.logp, got.views[BASE] - want.views[BASE]]
            gaps += [got.beliefs[name] - want.beliefs[name] for name in (POLICY, EMA, BASE)]
    return np.abs(np.concatenate(gaps))


def relative(got: float, want: float) -> float:
    return abs(got - want) / abs(want)


def step_gap(alone: dict[str, Any], pair: list[dict[str, Any]]) -> float:
    """Difference of the adapter's change, over the length of the change."""
    start, one, two = alone["start"], alone["adapter"].state, pair[0]["adapter"].state
    moved = sum(float(np.square(one[k] - start[k]).sum()) for k in one)
    apart = sum(float(np.square(one[k] - two[k]).sum()) for k in one)
    return float(np.sqrt(apart / moved))


def test_A19_P6_two_gpus_give_the_scores_of_one(both: Both) -> None:
    gaps = score_gaps(*both)
    print(f"log-probs: largest gap {gaps.max():.4f}, mean {gaps.mean():.4f} nats")
    assert gaps.max() < LOGP
    assert gaps.mean() < MEAN_LOGP


def test_A11_two_gpus_give_the_loss_and_gradient_norm_of_one(both: Both) -> None:
    alone, pair = both
    want = merge_pairs([alone["metrics"]])
    got = merge_pairs([rank["metrics"] for rank in pair])
    assert got.keys() == want.keys()
    for name, bound in {"actor/pg_loss": LOSS, "actor/grad_norm": NORM}.items():
        print(f"{name}: {got[name]:.6f} of two, {want[name]:.6f} of one")
        assert relative(got[name], want[name]) < bound, name
    assert got["actor/optimizer_steps"] == want["actor/optimizer_steps"] == 1
    assert got["actor/skipped_updates"] == 0


def test_A11_L6_two_gpus_make_the_step_of_one_and_hand_out_one_adapter(both: Both) -> None:
    alone, pair = both
    print(f"adapter: step differs by {step_gap(alone, pair):.4f} of its length")
    assert step_gap(alone, pair) < STEP
    for name in ("adapter", "ema"):
        assert pair[0][name].checksum == pair[1][name].checksum
    assert pair[0]["state"] == pair[1]["state"]
    kept = parse_state(pair[0]["state"])["optimizer"]["state"]
    assert {slot.dtype for slots in kept.values() for slot in slots.values()} == {torch.float32}


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(RayInit(), 4, 0):
        yield


@pytest.mark.fault
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("kill", "rank 1 of 2 died in the update of the policy"),
        ("hang", f"rank 1 of 2 hangs in the update of the policy: the others waited {TIMEOUT:g} s"),
    ],
)
def test_L11_a_rank_that_dies_or_hangs_on_a_gpu_is_named(
    fault: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE", 4.0)
    model = save_model(tmp_path / "model")
    settings = settings_of(model, beliefs=(POLICY,), views=(), kl_coef=0.0)
    pair = start_pair(settings, TIMEOUT, tmp_path, visible()[:RANKS])
    try:
        outcome = fail_in(pair, "update", fault, rank=1)
    finally:
        pair.end()
    print(f"{fault}: after {outcome.seconds:.1f} s: {outcome.failure}")
    assert part in str(outcome.failure)
    assert outcome.failure.ranks == (1,)
    assert outcome.seconds < 60
