"""Checks of files that a start makes before any process is placed.

They read headers and first lines only, so a mistake shows within a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.checkpoint import list_valid
from delta_belief_rl.trainer.resume import read_run_id
from delta_belief_rl.types import UserError

INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
"""Files one of which every tokenizer has."""


def check_tokenizer(path: str, setting: str = "actor_rollout_ref.model.tokenizer_path") -> None:
    """Refuse a folder without a tokenizer; the library would make an empty one.

    Args:
        path: The folder; anything else is an id of the hub, which is left alone.
        setting: Names another tokenizer.

    Raises:
        UserError: None of its files is there.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(
            f"The folder {path!r} holds no tokenizer: copy or download the model again, or set "
            f"{setting}."
        )


def check_weights(path: str) -> None:
    """Compare the weight files of a model folder with their own headers and index.

    Args:
        path: The folder; anything else is an id of the hub, which is left alone.

    Raises:
        UserError: No weights, a file that is absent, or one that is cut short.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    files = {file.name for file in folder.glob("*.safetensors")} | _indexed(folder / INDEX)
    if not files and not any(folder.glob("*.bin")):
        raise UserError(f"The model folder {path!r} holds no weights: copy or download it again.")
    for name in sorted(files):
        try:
            # The header's sizes are compared with the length of the file.
            with safe_open(folder / name, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"The weights {str(folder / name)!r} cannot be read ({reason}): copy or download "
                "the model again."
            ) from error


def _indexed(index: Path) -> set[str]:
    """Files that the index of a model in several parts names."""
    if not index.is_file():
        return set()
    try:
        body: Any = json.loads(index.read_bytes())
        return set(body["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{str(index)!r} is not the index of a model: copy or download the model again."
        ) from error


def check_owner(run_dir: Path, root: Path) -> None:
    """Refuse a run's folder whose record belongs to a run that the checkpoints do not know.

    Args:
        run_dir: ``trainer.output_dir``.
        root: ``trainer.default_local_dir``.

    Raises:
        UserError: The folder is another run's.
    """
    records = read_records(run_dir / "metrics.jsonl")
    if not records:
        return
    owner = records[0].get("run_id")
    if owner not in {read_run_id(root), *(saved.run_id for saved in list_valid(root))}:
        raise UserError(
            f"{run_dir} already holds run {owner}, whose checkpoints are not in {root}: set "
            "another trainer.experiment_name or trainer.output_dir, or move the folder away."
        )
