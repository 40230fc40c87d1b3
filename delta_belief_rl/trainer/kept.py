"""The finished games of an evaluation, on the disk until its record is.

An evaluation alone (``trainer.val_only``) may take hours. Its games are written to one file as they
end, and a start of the same run that finds the file plays only the others. Scores, beliefs and
rates are computed anew from all games.

Each line is a unit that is there or not: a checksum, and a JSON object with some games, what the
judge pool had counted after them, and the seconds that they had taken. The first line says what the
games are games of; those of an equal key would be played the same again. What was cut off or is
damaged is cut away with all that follows it.

A unit is one game. With ``rollout.deterministic`` the games that share a forward pass are part of
the result, so secrets are played in parts of fixed size there, and a unit is a part: whatever was
kept, the same games are played together.

A unit with a game without an outcome, whose judge or engine failed, is played again by the next
start: what it had counted is kept, and none of its games.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from delta_belief_rl.algo.shapers.channels import WinRule, is_void
from delta_belief_rl.config.game_settings import game_digest
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.obs.disk import writing
from delta_belief_rl.rollout.store import from_row, to_row
from delta_belief_rl.trainer.checkpoint import write_atomic
from delta_belief_rl.trainer.identity import policy_identity
from delta_belief_rl.trainer.pending import Counts
from delta_belief_rl.types import Group, Task, Trajectory

PART_GAMES = 64
"""Games of a part, where parts are played one after another; a secret is never divided."""

_CHECKSUM = 9
"""Letters of a line before its object: eight of the checksum, and a space."""


@dataclass(frozen=True, slots=True)
class Key:
    """What the games of an evaluation are games of.

    Attributes:
        adapter: Checksum of the adapter that plays.
        settings: Checksum of the settings that a game depends on (``config.game_settings``).
        tasks: Checksum of the secrets and their first messages, in order.
        policy: Which weights or service the policy's name stands for (``identity``).
    """

    run_id: str
    step: int
    adapter: str
    settings: str
    tasks: str
    policy: str

    @classmethod
    def of(cls, cfg: RunConfig, run_id: str, step: int, adapter: str, tasks: Sequence[Task]) -> Key:
        """The key of an evaluation that is about to be played."""
        played = hashlib.sha256(repr(tuple(tasks)).encode()).hexdigest()
        policy = policy_identity(cfg.actor_rollout_ref.model)
        return cls(run_id, step, adapter, game_digest(cfg, "val"), played, policy)


class KeptGames:
    """The file of an evaluation's games; made by ``open``.

    Attributes:
        games: By task id and number.
        counts: Of the judge pool after the last of them.
        seconds: That they took, over all starts.
    """

    def __init__(self, path: Path, max_turns: int, rule: WinRule) -> None:
        self.path = path
        self.games: dict[tuple[str, int], Trajectory] = {}
        self.counts: Counts = Counter(), Counter()
        self.seconds = 0.0
        self._max_turns = max_turns
        self._rule = rule

    @classmethod
    def open(
        cls, path: Path, key: Key, max_turns: int, rule: WinRule, say: Callable[[str], None]
    ) -> KeptGames:
        """Read what is kept; begin the file anew where it is of something else.

        Args:
            path: The file; need not exist.
            key: Of the evaluation that is played.
            max_turns: Of its games.
            rule: By which they end.
            say: Told in a sentence of games that are there and do not fit.

        Raises:
            DiskRefused: The disk refuses.
        """
        kept = cls(path, max_turns, rule)
        data = path.read_bytes() if path.exists() else b""
        sound = 0
        for number, (end, body) in enumerate(_units(data)):
            if number == 0 and body != asdict(key):
                odd = [name for name, value in asdict(key).items() if body.get(name) != value]
                say(
                    "games that were kept are not those of this evaluation and are removed: "
                    f"{', '.join(odd)} differ"
                )
                break
            if number and not kept._take(body):
                break
            sound = end
        with writing("The games of the evaluation", path, "trainer.default_local_dir"):
            if not sound:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, _line(asdict(key)))
            elif sound < len(data):
                os.truncate(path, sound)
        return kept

    def append(self, games: Sequence[Trajectory], counts: Counts, seconds: float) -> None:
        """Keep a unit; it is on the disk when this returns.

        Args:
            games: Of the unit; none is kept where one of them has no outcome.
            counts: Of the judge pool after them.
            seconds: That all games took so far.

        Raises:
            DiskRefused: The disk refuses.
        """
        if any(is_void(game, self._rule) for game in games):
            games = ()
        body = {
            "games": [to_row(game, max_turns=self._max_turns) for game in games],
            "judge": [dict(part) for part in counts],
            "seconds": seconds,
        }
        with (
            writing("The games of the evaluation", self.path, "trainer.default_local_dir"),
            self.path.open("ab") as file,
        ):
            file.write(_line(body))
            file.flush()
            os.fsync(file.fileno())
        self.games |= {(game.task.id, game.game): game for game in games}

    def _take(self, body: dict[str, Any]) -> bool:
        """Take over a unit; False where it holds no games."""
        try:
            games = [from_row(row) for row in body["games"]]
            calls, reasons = (Counter[str](part) for part in body["judge"])
            self.seconds = float(body["seconds"])
        except (KeyError, TypeError, ValueError):
            return False
        self.games |= {(game.task.id, game.game): game for game in games}
        self.counts = calls, reasons
        return True


def kept_path(cfg: RunConfig, step: int) -> Path:
    """The file of the games of an evaluation after a step."""
    return Path(cfg.trainer.default_local_dir) / f"evaluation_{step}.jsonl"


def is_kept(cfg: RunConfig) -> bool:
    """Whether a run keeps the games of its evaluation."""
    return cfg.trainer.val_only and cfg.trainer.save_rollout


def remove(cfg: RunConfig, step: int) -> None:
    """Remove the games of an evaluation that has its record; what cannot be removed stays."""
    with suppress(OSError):
        kept_path(cfg, step).unlink(missing_ok=True)


def parts(tasks: Sequence[Task], games: int, *, fixed: bool) -> Iterator[Sequence[Task]]:
    """The secrets that are played together.

    Args:
        tasks: All of them.
        games: Of each.
        fixed: In parts of about ``PART_GAMES`` games; else in one.
    """
    size = max(1, PART_GAMES // games) if fixed else max(1, len(tasks))
    for start in range(0, len(tasks), size):
        yield tasks[start : start + size]


def whole(kept: KeptGames, tasks: Sequence[Task], games: int) -> list[Group] | None:
    """The groups of a part that was played before; None where a game is missing."""
    found = [[kept.games.get((task.id, game)) for game in range(games)] for task in tasks]
    groups = [
        Group(task, tuple(game for game in row if game is not None))
        for task, row in zip(tasks, found, strict=True)
    ]
    return groups if all(len(group.trajectories) == games for group in groups) else None


def _line(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, sort_keys=True).encode()
    return b"%08x " % zlib.crc32(text) + text + b"\n"


def _units(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Where each sound line ends, and its object; stops at the first that is not sound."""
    start = 0
    while (stop := data.find(b"\n", start)) >= 0:
        line = data[start:stop]
        text = line[_CHECKSUM:]
        if line[:_CHECKSUM] != b"%08x " % zlib.crc32(text):
            return
        start = stop + 1
        yield start, json.loads(text)
