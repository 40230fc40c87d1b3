"""A checkpoint that holds an adapter and nothing else, for a run to begin with.

A policy that is evaluated needs its adapter alone, whichever kind of folder it comes from. As a
checkpoint of the run it is loaded, compared with its checksum and sent to the engines like any
other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.config.compose import resolved_yaml
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.models.adapters import state_checksum
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer.actor import dump_state
from delta_belief_rl.trainer.checkpoint import Content
from delta_belief_rl.trainer.own_failures import guarded
from delta_belief_rl.trainer.persist import ACTOR_FILE, CREDIT_FILE
from delta_belief_rl.trainer.resume import new_run_id, read_run_id
from delta_belief_rl.trainer.services import RunState
from delta_belief_rl.trainer.settings import credit_method


def write_start(cfg: RunConfig, adapter: Mapping[str, NDArray[np.float32]], step: int) -> str:
    """Write the checkpoint that a run resumes from, unless it is there, and name the run.

    Args:
        cfg: Of the run.
        adapter: Weights under PEFT's names.
        step: Training steps behind them.

    Returns:
        The checksum of the adapter.

    Raises:
        DiskRefused: The disk refuses.
    """
    root, checksum = Path(cfg.trainer.default_local_dir), state_checksum(adapter)
    there = checkpoint.find_latest(root)
    if there is not None and there.meta["adapter_checksum"] == checksum:
        return checksum
    files: dict[str, Content] = {
        ACTOR_FILE: dump_state({"version": step, "adapter": dict(adapter)}),
        CREDIT_FILE: json.dumps(guarded(cfg, credit_method(cfg)).state_dict()).encode(),
    }
    meta = {
        "state": asdict(RunState(step=step)),
        "adapter_checksum": checksum,
        "config": resolved_yaml(cfg),
    }
    checkpoint.save(root, step, files, meta, run_id=read_run_id(root) or new_run_id())
    return checksum
