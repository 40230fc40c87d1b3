"""A model's safetensors files: where they are, merged with an adapter, and whether they are whole.

Merging goes from file to file, so it needs the memory of the largest one and not of the model. Each
product is made in float32 and rounded once, to the number format of the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils.hub import cached_file

from delta_belief_rl.models.merged import adapted_modules, halves_of
from delta_belief_rl.types import UserError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(path: str) -> dict[str, Path]:
    """The files of a model's weights by their names.

    Args:
        path: A model folder, or an id of the hub.

    Raises:
        UserError: The model has no safetensors files.
    """
    index = _find(path, INDEX)
    if index is None:
        whole = _find(path, WHOLE)
        if whole is None:
            raise UserError(
                f"The model {path!r} has no {WHOLE} and no {INDEX}: save it with "
                "save_pretrained of transformers, or name another base model."
            )
        return {WHOLE: whole}
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    found = {name: _find(path, name) for name in names}
    if lacking := [name for name, file in found.items() if file is None]:
        raise UserError(
            f"The model {path!r} lacks {lacking[0]}, which its {INDEX} names: copy or download it "
            "again."
        )
    return {name: file for name, file in found.items() if file is not None}


def write_merged(
    path: str,
    state: Mapping[str, NDArray[np.float32]],
    scale: float,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write a model's weights with an adapter merged in, in as many files as the model has.

    Args:
        path: Of the base model: a folder, or an id of the hub.
        state: The adapter's arrays by PEFT's names, as ``adapters.adapter_state`` gives them.
        scale: ``alpha / rank``.
        folder: Where the files go.
        dtype: Of the weights written; tensors of integers stay as they are.

    Raises:
        UserError: The adapter does not belong to this model, or the model has no such files.
    """
    waiting = {f"{name}.weight": name for name in adapted_modules(state)}
    places: dict[str, str] = {}
    size = 0
    files = weight_files(path)
    for name, file in files.items():
        tensors: dict[str, torch.Tensor] = {}
        for key, tensor in _tensors(file):
            module = waiting.pop(key, None)
            if module is not None:
                tensor = _merge(tensor, halves_of(state, module), scale, module)
            tensors[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
            places[key] = name
            size += tensors[key].nbytes
        save_file(tensors, folder / name, metadata={"format": "pt"})
        # The library leaves its files to their owner alone.
        (folder / name).chmod(0o644)
    if waiting:
        raise UserError(
            f"The base model {path!r} has no weight {next(iter(waiting))!r}, which the adapter "
            "changes: use the base model that the adapter was trained on, not quantised."
        )
    if set(files) != {WHOLE}:
        body = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def broken_weights(folder: Path) -> str:
    """How a folder's files differ from what its index names; empty where they agree."""
    there = {file.name: set(_names(file)) for file in sorted(folder.glob("*.safetensors"))}
    index = folder / INDEX
    if not index.is_file():
        return "" if set(there) == {WHOLE} and there[WHOLE] else f"{WHOLE} is not there"
    places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    named: dict[str, set[str]] = {}
    for key, name in places.items():
        named.setdefault(name, set()).add(key)
    odd = sorted(name for name in named.keys() | there.keys() if named.get(name) != there.get(name))
    return f"{odd[0]} and {INDEX} name different weights" if odd else ""


def _find(path: str, name: str) -> Path | None:
    try:
        found = cached_file(path, name)
    except OSError:
        return None
    return Path(found) if found else None


def _tensors(file: Path) -> Any:
    with safe_open(file, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118 -- no mapping
            yield key, opened.get_tensor(key)


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError):
        return []


def _merge(
    base: torch.Tensor,
    halves: tuple[NDArray[np.float32], NDArray[np.float32]],
    scale: float,
    module: str,
) -> torch.Tensor:
    first, second = (torch.from_numpy(np.array(half, dtype=np.float32)) for half in halves)
    if (second.shape[0], first.shape[1]) != tuple(base.shape):
        raise UserError(
            f"The adapter weights of {module!r} do not fit the base model's {tuple(base.shape)}: "
            "use the base model that the adapter was trained on."
        )
    return torch.addmm(base.float(), second, first, alpha=scale)
