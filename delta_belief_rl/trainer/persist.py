"""Saving and restoring a whole run: policy, optimizer, cursor, credit and reward state."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer.checkpoint import Checkpoint
from delta_belief_rl.trainer.services import RunState, Services

ACTOR_FILE = "actor/state.pt"
CREDIT_FILE = "credit.json"
KL_FILE = "kl_reward.json"


async def save(run: Services) -> Path:
    """Write a checkpoint of the step that has just finished.

    The data cursor is part of the run's state, and random numbers are functions of names, so
    neither needs a file.
    """
    run.progress.set_phase("save")
    priced = run.kl_reward
    kl_state = {} if priced is None else {KL_FILE: json.dumps(priced.state_dict()).encode()}
    with run.timers.measure("save_checkpoint"):
        snapshot = await run.policy.snapshot()
        return checkpoint.save(
            Path(run.cfg.trainer.default_local_dir),
            run.state.step,
            {
                ACTOR_FILE: await run.policy.dump(),
                CREDIT_FILE: json.dumps(run.credit.state_dict()).encode(),
                **kl_state,
            },
            {
                "state": asdict(run.state),
                "adapter_checksum": snapshot.checksum,
                "config": run.resolved,
            },
            run_id=run.run_id,
            keep=run.cfg.trainer.max_actor_ckpt_to_keep,
        )


async def restore(run: Services, saved: Checkpoint) -> None:
    """Take over a checkpoint; what was loaded must have the checksum that was saved (R11)."""
    checksum = await run.policy.load(saved.read(ACTOR_FILE))
    if checksum != saved.meta["adapter_checksum"]:
        raise saved.damaged("the adapter in place differs from the one that was saved")
    run.credit.load_state_dict(json.loads(saved.read(CREDIT_FILE)))
    # A run that turns the KL reward on later begins with the coefficient of its settings.
    if run.kl_reward is not None and KL_FILE in saved.files:
        run.kl_reward.load_state_dict(json.loads(saved.read(KL_FILE)))
    # A state without a cursor is that of a run that drew one batch a step.
    run.state = RunState(**{"batches": saved.step, **saved.meta["state"]})
