"""Who plays an evaluation: models, adapters, checkpoints and models behind an API, as settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.config.compose import PLAIN_RANK
from delta_belief_rl.config.schema_actor import ActorModel
from delta_belief_rl.eval.cells import Player
from delta_belief_rl.trainer.identity import policy_identity
from delta_belief_rl.types import UserError

_FOLDERS = ("checkpoints", "actor", "huggingface")
"""Parts of a path that tell nothing of a policy."""

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A player with what a run needs to be it.

    Attributes:
        settings: As on a command line.
        weights: Of its adapter; None without one.
    """

    player: Player
    settings: tuple[str, ...]
    weights: Weights | None = None


def contestants(
    models: Sequence[str],
    adapters: Sequence[Path],
    checkpoints: Sequence[Path],
    apis: Sequence[str],
) -> list[Contestant]:
    """All players of a command line, in the order: models, adapters, checkpoints, APIs.

    Args:
        models: Folders, packages or hub ids. Adapters and checkpoints sit on the only one of them,
            which then does not play alone; a checkpoint without one sits on the model of its run.

    Raises:
        UserError: An adapter without a model, or one that cannot be read.
    """
    if (adapters or checkpoints) and len(models) > 1:
        raise UserError(
            f"{len(models)} models are given: name one --model for --adapter and --checkpoint, and "
            "evaluate the others in a command of their own."
        )
    if adapters and not models:
        raise UserError("--adapter needs the model that it was trained on: name it with --model.")
    base = models[0] if models else None
    found = [] if adapters or checkpoints else [_plain(path) for path in models]
    found += [_adapted(folder, base) for folder in (*adapters, *checkpoints)]
    found += [_remote(name) for name in apis]
    return [
        replace(one, player=replace(one.player, name=name))
        for one, name in zip(found, _names([one.player for one in found]), strict=True)
    ]


def _plain(path: str) -> Contestant:
    settings = (setting("actor_rollout_ref.model.path", path), *plain_lora())
    identity = policy_identity(ActorModel(path=path))
    return Contestant(Player("", path, identity=identity), settings)


def _remote(name: str) -> Contestant:
    settings = (
        setting("actor_rollout_ref.model.api_model_name", name),
        "actor_rollout_ref.ngpus=0",
        *plain_lora(),
    )
    identity = policy_identity(ActorModel(api_model_name=name))
    return Contestant(Player("", name, api=True, identity=identity), settings)


def _adapted(folder: Path, base: str | None) -> Contestant:
    """An adapter of either kind of folder on its base model."""
    # Here, so that --list and --help do not load torch.
    from delta_belief_rl.eval.attach import read_adapter
    from delta_belief_rl.models.adapters import state_checksum

    lora, weights = read_adapter(folder)
    step, of_run = _run_of(folder)
    path = base or str(of_run.get("path") or "")
    if not path:
        raise UserError(f"{folder} does not say which model it sits on: name it with --model.")
    targets = lora.target_modules
    words = [setting("actor_rollout_ref.model.path", path)]
    if base is None and of_run.get("tokenizer_path"):
        words.append(setting("actor_rollout_ref.model.tokenizer_path", of_run["tokenizer_path"]))
    words += _lora(lora.rank, lora.alpha, targets, lora.exclude_modules)
    identity = policy_identity(ActorModel(path=path))
    player = Player("", path, str(folder), state_checksum(weights), step, identity=identity)
    return Contestant(player, tuple(words), weights)


def _run_of(folder: Path) -> tuple[int, Mapping[str, Any]]:
    """Step and model settings of the run whose checkpoint a folder is; 0 and none for others."""
    from delta_belief_rl.trainer import checkpoint

    if not (folder / checkpoint.MANIFEST).is_file():
        return 0, {}
    import yaml

    saved = checkpoint.load(folder)
    return saved.step, yaml.safe_load(saved.meta["config"])["actor_rollout_ref"]["model"]


def plain_lora() -> list[str]:
    """Settings of an adapter for a policy that has none: a new one changes no answer."""
    return _lora(PLAIN_RANK, PLAIN_RANK)


def _lora(
    rank: int,
    alpha: float,
    targets: str | Sequence[str] = "all-linear",
    exclude: Sequence[str] = (),
) -> list[str]:
    """Settings of the policy's adapter."""
    if alpha != int(alpha):
        raise UserError(f"The adapter's alpha is {alpha:g}, and only whole numbers are served.")
    parts = {
        "name": "actor_lora",
        "r": str(rank),
        "alpha": str(int(alpha)),
        "target_modules": targets if isinstance(targets, str) else f"[{','.join(targets)}]",
        **({"exclude_modules": f"[{','.join(exclude)}]"} if exclude else {}),
    }
    body = ", ".join(f"{name}: {value}" for name, value in parts.items())
    return [
        f"actor_rollout_ref.model.lora_rank={rank}",
        f"actor_rollout_ref.model.adapters=[{{{body}}}]",
    ]


def setting(name: str, value: str) -> str:
    """A setting whose value may hold anything; Hydra reads a backslash before a quote as it."""
    quoted = value.replace("'", "\\'")
    return f"{name}='{quoted}'"


def _names(players: Sequence[Player]) -> Iterator[str]:
    """A short name for each player, with as many parts of its path as tell all apart.

    Raises:
        UserError: A player is named twice.
    """
    places = [_parts(player.adapter or player.model) for player in players]
    for depth in range(1, max(map(len, places), default=1) + 1):
        names = ["-".join(parts[-depth:]) for parts in places]
        if len(set(names)) == len(names):
            return iter(names)
    raise UserError("The same player is named twice: name every model and adapter once.")


def _parts(path: str) -> list[str]:
    """Parts of a path or an id that may be names of folders; a run's step with the run's name."""
    parts = [part for part in Path(path).parts if part.strip("/.") and part not in _FOLDERS]
    words = [re.sub(r"[^\w.+-]+", "_", part) for part in parts] or ["model"]
    if len(words) > 1 and words[-1].startswith("global_step_"):
        words[-2:] = ["-".join(words[-2:])]
    return words
