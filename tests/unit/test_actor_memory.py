"""What leaves a training rank, and where its optimizer's averages are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import training_fakes as fakes

from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.models.loading import state_checksum
from delta_belief_rl.trainer.actor import PolicyActor, dump_state
from delta_belief_rl.trainer.optimizer import OptimizerSettings, move_state

GROUPS = fakes.make_groups()
REQUESTS = fakes.requests(GROUPS)
PLAIN = OptimizerSettings(lr=1e-2)
OFFLOADED = OptimizerSettings(lr=1e-2, offload=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("memory") / "model")


def make(folder: Path, optimizer: OptimizerSettings = PLAIN) -> PolicyActor:
    return fakes.stir(PolicyActor(fakes.settings_of(folder, optimizer=optimizer)))


def run(actor: PolicyActor, training_step: int = 1) -> dict[str, float]:
    """One training step on the same games; metrics as means."""
    batch = fakes.make_batch(GROUPS, actor.score(REQUESTS))
    return merge_pairs([actor.update(fakes.share(batch, fakes.one_step(batch)), training_step)])


def test_L5_L10_M4_what_leaves_a_rank_is_the_adapter_in_memory_of_its_own(folder: Path) -> None:
    actor = make(folder)
    sent = actor.snapshot()
    before = {name: array.copy() for name, array in sent.state.items()}
    run(actor)
    assert actor.snapshot().checksum != sent.checksum
    assert all(np.array_equal(array, before[name]) for name, array in sent.state.items())
    assert state_checksum(sent.state) == sent.checksum
    assert all(".lora_" in name for name in sent.state)


def test_M4_a_checkpoint_holds_the_adapter_and_its_averages_and_no_base_weight(
    folder: Path,
) -> None:
    actor = make(folder)
    run(actor)
    names = {name.split(".lora_")[0] for name in actor.snapshot().state}
    state = actor.state()
    assert set(state) == {"version", "adapter", "optimizer"}
    assert set(state["adapter"]) == set(actor.snapshot().state)
    assert len(state["optimizer"]["state"]) == len(state["adapter"]) == 2 * len(names)


def test_offloading_changes_no_number(folder: Path) -> None:
    plain, offloaded = make(folder), make(folder, OFFLOADED)
    for step in (1, 2):
        run(plain, step)
        run(offloaded, step)
    assert dump_state(offloaded.state()) == dump_state(plain.state())


def test_averages_are_beside_the_weights_in_the_step_only() -> None:
    """A device of its own is played by ``meta``, which keeps shapes and loses numbers."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    slots = optimizer.state[parameter]
    move_state(optimizer, torch.device("meta"))
    assert {slots["exp_avg"].device.type, slots["exp_avg_sq"].device.type} == {"meta"}
    assert slots["step"].device.type == "cpu"
    away = torch.nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([away])
    optimizer.state[away] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}
    move_state(optimizer, None)
    assert optimizer.state[away]["exp_avg"].device.type == "meta"
