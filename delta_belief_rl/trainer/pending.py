"""The games of the step in progress, on the disk until the step's checkpoint is.

Games take most of a step's time, so a crash between them and the checkpoint does not cost them:
the resumed run takes them from here. Scores and beliefs are computed again from the games. What is
kept is never a part of the policy's state, so there is nothing to resume from in the middle of an
update, and no update can be skipped.

Each batch of secrets that a step plays (one, unless groups are filtered) has a file of games and,
written after it, a JSON file that says what they are games of. Games without it do not exist, and
games that would be played differently now are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from delta_belief_rl.obs.disk import writing
from delta_belief_rl.rollout.store import read_trajectories, write_groups
from delta_belief_rl.trainer.checkpoint import write_atomic
from delta_belief_rl.types import Group, Task, UserError

_FILE = re.compile(r"pending_(\d+)_(\d+)\.(?:jsonl|json)$")
_ANY = re.compile(r"\.?pending_\d+_\d+\.jsonl?(?:\.\d+(?:\.tmp)?)?$")

Counts = tuple[Counter[str], Counter[str]]
"""What the judge pool had counted in the step so far (``JudgePool.mark``)."""


@dataclass(frozen=True, slots=True)
class Key:
    """What games are games of; those of an equal key would be played the same again.

    Attributes:
        cursor: Number of the batch of secrets.
        adapter: Checksum of the adapter that plays.
        settings: Checksum of the settings that a game depends on (``config.game_settings``). What
            only the update depends on is not among them: who mends an update that ran out of
            memory keeps the games.
    """

    run_id: str
    step: int
    cursor: int
    adapter: str
    settings: str


class Unfit(ValueError):
    """Games that are kept are damaged, or of something else."""


def keep(root: Path, key: Key, groups: Sequence[Group], counts: Counts, max_turns: int) -> None:
    """Write the games of a batch, whole or not at all.

    Args:
        root: Folder of the checkpoints.
        counts: Of the judge pool, after these games.

    Raises:
        DiskRefused: The disk refuses.
    """
    games, about = _paths(root, key)
    with writing(f"The games of step {key.step}", games, "trainer.default_local_dir"):
        about.unlink(missing_ok=True)
        write_groups(games, groups, max_turns=max_turns)
        body = {
            **asdict(key),
            "sizes": [len(group.trajectories) for group in groups],
            "games": _digest(games),
            "judge": [dict(part) for part in counts],
        }
        write_atomic(about, json.dumps(body, indent=1, sort_keys=True).encode())


def take(
    root: Path, key: Key, tasks: Sequence[Task], say: Callable[[str], None]
) -> tuple[list[Group], Counts] | None:
    """The games of a batch where they are kept; else what was kept of later ones is removed.

    Games of the steps before this one wait for a checkpoint, and stay.

    Args:
        root: Folder of the checkpoints.
        tasks: Secrets of the batch.
        say: Told in a sentence of games that are there and do not fit.
    """
    reason = ""
    if all(path.exists() for path in _paths(root, key)):
        try:
            return _read(root, key, tasks)
        except (Unfit, OSError) as error:
            reason = str(error)
    others = 0
    for path in root.iterdir():
        match = _FILE.match(path.name)
        if match and (int(match[1]), int(match[2])) < (key.step, key.cursor):
            continue
        if _ANY.match(path.name):
            path.unlink(missing_ok=True)
            others += path.name.endswith(".jsonl")
    if reason or others:
        reason = reason or "they are those of a later step"
        say(f"games that were kept are not those of step {key.step} and are removed: {reason}")
    return None


def count_kept(root: Path, step: int) -> int:
    """Games that are kept of the steps after one."""
    games = 0
    for path in root.glob("pending_*_*.json"):
        match = _FILE.match(path.name)
        if match and int(match[1]) > step:
            with suppress(OSError, ValueError, KeyError, TypeError):
                games += sum(json.loads(path.read_bytes())["sizes"])
    return games


def remove_until(root: Path, step: int) -> None:
    """Remove the games of steps that are finished; what cannot be removed stays."""
    with suppress(OSError):
        for path in root.iterdir():
            match = _FILE.match(path.name)
            if match and int(match[1]) <= step:
                path.unlink(missing_ok=True)


def _read(root: Path, key: Key, tasks: Sequence[Task]) -> tuple[list[Group], Counts]:
    games, about = _paths(root, key)
    try:
        body: dict[str, Any] = json.loads(about.read_bytes())
        odd = [name for name, value in asdict(key).items() if body[name] != value]
        sizes: list[int] = body["sizes"]
        calls, reasons = (Counter[str](part) for part in body["judge"])
        digest: str = body["games"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unfit(f"{about.name} cannot be read") from error
    if odd:
        raise Unfit(f"{', '.join(odd)} differ")
    if _digest(games) != digest:
        raise Unfit(f"{games.name} does not match its checksum")
    try:
        report = read_trajectories(games, key.run_id)
    except UserError as error:
        raise Unfit(str(error)) from error
    found = iter(report.trajectories)
    groups = [
        Group(task, tuple(islice(found, size))) for task, size in zip(tasks, sizes, strict=False)
    ]
    mixed = any(game.task != group.task for group in groups for game in group.trajectories)
    if report.damaged or mixed or len(sizes) != len(tasks) or next(found, None) is not None:
        raise Unfit(f"{games.name} holds games of other secrets")
    return groups, (calls, reasons)


def _paths(root: Path, key: Key) -> tuple[Path, Path]:
    name = f"pending_{key.step}_{key.cursor}"
    return root / f"{name}.jsonl", root / f"{name}.json"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
