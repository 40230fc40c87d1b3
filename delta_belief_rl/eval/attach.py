"""A trained adapter put on a base model, from a checkpoint of ours or a folder in PEFT's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from delta_belief_rl.config.convert import to_config
from delta_belief_rl.models.loading import load_adapter_state
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer.actor import POLICY, AdapterSettings, parse_state
from delta_belief_rl.trainer.persist import ACTOR_FILE
from delta_belief_rl.trainer.settings import adapter_settings
from delta_belief_rl.types import UserError

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def attach_adapter(model: Any, folder: Path) -> Any:
    """Put an adapter on a model and make it active.

    Args:
        model: A base model without adapters.
        folder: ``checkpoints/global_step_<N>`` of a run, or a folder with PEFT's two files.

    Returns:
        The model with the adapter, in evaluation mode.

    Raises:
        UserError: The folder holds no adapter, it is damaged, or it is one of another model.
    """
    settings, state = read_adapter(folder)
    model = settings.put_on(model)
    load_adapter_state(model, POLICY, state)
    return model.eval()


def read_adapter(folder: Path) -> tuple[AdapterSettings, Mapping[str, NDArray[np.float32]]]:
    """The settings and the weights of an adapter, under PEFT's names.

    Args:
        folder: ``checkpoints/global_step_<N>`` of a run, or a folder with PEFT's two files.

    Raises:
        UserError: The folder holds no adapter, or it is damaged.
    """
    if (folder / checkpoint.MANIFEST).is_file():
        return _of_checkpoint(folder)
    if (folder / PEFT_CONFIG).is_file():
        return _of_peft(folder)
    raise UserError(
        f"{folder} holds no adapter: name a folder global_step_<N> of a run, or one with "
        f"{PEFT_CONFIG}."
    )


def _of_checkpoint(folder: Path) -> tuple[AdapterSettings, Mapping[str, NDArray[np.float32]]]:
    saved = checkpoint.load(folder)
    config = to_config(yaml.safe_load(saved.meta["config"]))
    return adapter_settings(config), parse_state(saved.read(ACTOR_FILE))["adapter"]


def _of_peft(folder: Path) -> tuple[AdapterSettings, Mapping[str, NDArray[np.float32]]]:
    try:
        body: Any = json.loads((folder / PEFT_CONFIG).read_bytes())
        state = load_file(folder / PEFT_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"The adapter in {folder} cannot be read ({error}): copy the folder again."
        ) from error
    unusual = [name for name in ("use_dora", "use_rslora", "modules_to_save") if body.get(name)]
    if body.get("peft_type") != "LORA" or unusual:
        kind = unusual[0] if unusual else f"peft_type {body.get('peft_type')!r}"
        raise UserError(f"The adapter in {folder} is no plain LoRA ({kind}): merge it first.")
    targets, exclude = body.get("target_modules"), body.get("exclude_modules") or ()
    settings = AdapterSettings(
        rank=int(body["r"]),
        alpha=float(body["lora_alpha"]),
        target_modules=targets if isinstance(targets, str) else tuple(targets or ()),
        exclude_modules=(exclude,) if isinstance(exclude, str) else tuple(exclude),
    )
    return settings, {key: value.astype(np.float32) for key, value in state.items()}
