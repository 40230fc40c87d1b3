"""Saving and restoring a whole run: policy, optimizer, cursor, credit and reward state."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.trainer import checkpoint, pending
from delta_belief_rl.trainer.checkpoint import Checkpoint, Content, Kind
from delta_belief_rl.trainer.services import RunState, Services
from delta_belief_rl.trainer.steps import due

ACTOR_FILE = "actor/state.pt"
CREDIT_FILE = "credit.json"
KL_FILE = "kl_reward.json"
BEST_METRIC = "val-core/success_rate"


async def save_due(run: Services) -> None:
    """At the border of two steps: begin to write a checkpoint, where one is due.

    What it holds is taken now; the files are written while training goes on, and are whole once
    the next call or ``finish`` returns.

    Raises:
        DiskRefused: The checkpoint before this one could not be written.
    """
    run.saver.check()
    kind = due_kind(run.cfg, run.state, run.total_steps)
    if kind is not None:
        await save(run, kind)


async def finish(run: Services) -> None:
    """Wait until the last checkpoint is written.

    Raises:
        DiskRefused: It could not be.
    """
    run.progress.set_phase("save")
    await run.saver.finish()


def due_kind(cfg: RunConfig, state: RunState, last: int) -> Kind | None:
    """Which checkpoint is due after the finished step; None for none."""
    trainer = cfg.trainer
    if due(state.step, trainer.save_freq, last):
        return Kind.MILESTONE
    best = trainer.keep_best and saves(cfg) and state.best_step == state.step
    return Kind.RECOVERY if best or due(state.step, trainer.recovery_freq, last) else None


def saves(cfg: RunConfig) -> bool:
    """Whether a run writes checkpoints at all."""
    return cfg.trainer.save_freq > 0 or cfg.trainer.recovery_freq > 0


async def save(run: Services, kind: Kind = Kind.RECOVERY) -> None:
    """Take what a checkpoint of the finished step holds, and begin to write it.

    The data cursor is part of the run's state, and random numbers are functions of names, so
    neither needs a file.

    Raises:
        DiskRefused: The checkpoint before this one could not be written.
    """
    run.progress.set_phase("save")
    trainer, state, run_id = run.cfg.trainer, run.state, run.run_id
    root, step = Path(trainer.default_local_dir), state.step
    best = state.best_step if trainer.keep_best else None
    priced = run.kl_reward
    kl_state = {} if priced is None else {KL_FILE: json.dumps(priced.state_dict()).encode()}
    with run.timers.measure("save_checkpoint"):
        # Two states at once would take twice the memory.
        await run.saver.finish()
        snapshot = await run.policy.snapshot()
        files: dict[str, Content] = {
            ACTOR_FILE: await run.policy.dump(),
            CREDIT_FILE: json.dumps(run.credit.state_dict()).encode(),
            **kl_state,
        }
        meta: dict[str, Any] = {
            "state": asdict(state),
            "adapter_checksum": snapshot.checksum,
            "config": run.resolved,
            "best": {"metric": BEST_METRIC, "value": state.best, "step": state.best_step},
        }

        def write() -> None:
            keep = trainer.max_actor_ckpt_to_keep
            checkpoint.save(root, step, files, meta, run_id=run_id, keep=keep, kind=kind, best=best)
            pending.remove_until(root, step)

        await run.saver.start(write)


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
