"""Trajectories as JSON lines.

A line has the fields of the published rollout files (secret, input, output, score, game_status,
step, log_prob_reward, log_prob_diff, reward, invalid_count, repeated_count, num_questions) and more
fields, from which the trajectory is rebuilt exactly. ``input`` and ``output`` are a view for
readers; tokens are in ``token_ids``.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from delta_belief_rl.types import (
    Candidate,
    Group,
    Message,
    StopReason,
    Task,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class GameScore:
    """What the reward stage adds to a line.

    Attributes:
        score: Sum of the game's rewards.
        log_prob_diff: Belief change of each turn after its transforms, in nats; padded when
            written, and left out where no belief was measured.
    """

    score: float
    log_prob_diff: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A line that was skipped. ``number`` counts from 1."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The trajectories of a file, and what could not be read."""

    trajectories: tuple[Trajectory, ...]
    damaged: tuple[DamagedLine, ...]


@dataclass(frozen=True, slots=True)
class RowReport:
    """The lines of a file as objects, and what could not be read.

    Attributes:
        numbers: Line number of each row, counted from 1.
    """

    rows: tuple[dict[str, Any], ...]
    damaged: tuple[DamagedLine, ...]
    numbers: tuple[int, ...] = ()


def to_row(
    game: Trajectory, *, max_turns: int, score: GameScore | None = None, run_seed: int | None = None
) -> dict[str, Any]:
    """One game as a JSON object.

    Args:
        max_turns: ``T``; beliefs are padded with zeros to ``T + 1`` and their changes to ``T``.
        score: Rewards, where they are known.
        run_seed: Kept beside the game, so that it can be replayed.
    """
    task = game.task
    row: dict[str, Any] = {
        "secret": task.secret,
        "input": "".join(f"{m.role}\n{m.content}\n" for m in task.messages),
        "output": "".join(f"assistant\n{t.action}\nuser\n{t.reply}\n" for t in game.turns),
        "game_status": int(game.compatible_win),
        "step": game.step,
        "invalid_count": game.count(Verdict.INVALID),
        "repeated_count": game.count(Verdict.REPEATED),
        "num_questions": game.num_turns,
    }
    if score is not None:
        row["score"] = row["reward"] = _plain(score.score)
        if score.log_prob_diff is not None:
            row["log_prob_diff"] = _padded(score.log_prob_diff, max_turns)
    if game.beliefs is not None:
        row["log_prob_reward"] = _padded(game.beliefs, max_turns + 1)
    row |= {
        "strict_status": int(game.strict_win),
        "stop": game.stop.value,
        "run_id": game.run_id,
        "run_seed": run_seed,
        "task_id": task.id,
        "game": game.game,
        "task": asdict(task),
        "token_ids": list(game.token_ids),
        "turns": [_turn_row(turn) for turn in game.turns],
        "beliefs": None if game.beliefs is None else [_plain(b) for b in game.beliefs],
    }
    if game.lineage:
        row["lineage"] = [list(pair) for pair in game.lineage]
    return row


def from_row(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a line that ``to_row`` made.

    Raises:
        KeyError, TypeError, ValueError: The object is not such a line.
    """
    beliefs = row["beliefs"]
    return Trajectory(
        task=_task(row["task"]),
        game=row["game"],
        token_ids=tuple(row["token_ids"]),
        turns=tuple(_turn(turn) for turn in row["turns"]),
        stop=StopReason(row["stop"]),
        beliefs=None if beliefs is None else tuple(float(b) for b in beliefs),
        run_id=row["run_id"],
        step=row["step"],
        lineage=tuple((game, turn) for game, turn in row.get("lineage", ())),
    )


def write_groups(
    path: str | os.PathLike[str],
    groups: Iterable[Group],
    *,
    max_turns: int,
    score_of: Callable[[Trajectory], GameScore] | None = None,
    run_seed: int | None = None,
) -> int:
    """Write a file of games, whole or not at all; games of a group are contiguous.

    The file is written beside its place, flushed to disk and renamed. Returns the number of lines.

    Raises:
        OSError: The disk refuses; an earlier file of this name is then untouched.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with beside.open("w", encoding="utf-8") as file:
            for group in groups:
                for game in group.trajectories:
                    score = score_of(game) if score_of is not None else None
                    row = to_row(game, max_turns=max_turns, score=score, run_seed=run_seed)
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                    count += 1
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return count


def read_rows(path: str | os.PathLike[str]) -> RowReport:
    """The lines of a file (``.gz`` too) as objects; also reads the published files.

    A compressed file that breaks off gives the lines before the break, and one damaged line.

    Raises:
        UserError: The file does not exist or may not be read.
    """
    rows: dict[int, dict[str, Any]] = {}
    damaged: list[DamagedLine] = []
    for number, text in _lines(Path(path)):
        row = _parsed(text)
        if isinstance(row, str):
            damaged.append(DamagedLine(number, row))
        else:
            rows[number] = row
    return RowReport(tuple(rows.values()), tuple(damaged), tuple(rows))


def read_trajectories(path: str | os.PathLike[str], run_id: str | None = None) -> ReadReport:
    """Rebuild the games of a file; damaged lines are skipped and reported by number.

    Args:
        run_id: Refuse games of any other run; None accepts all.

    Raises:
        UserError: The file does not exist, or holds a game of another run than ``run_id``.
    """
    games: list[Trajectory] = []
    damaged: list[DamagedLine] = []
    for number, text in _lines(Path(path)):
        row = _parsed(text)
        if isinstance(row, str):
            damaged.append(DamagedLine(number, row))
            continue
        try:
            game = from_row(row)
        except (KeyError, TypeError, ValueError) as error:
            damaged.append(DamagedLine(number, f"not a trajectory: {error!r}"))
            continue
        if run_id is not None and game.run_id != run_id:
            raise UserError(
                f"{path}, line {number}: the game belongs to run {game.run_id!r}, not to "
                f"{run_id!r}; remove the file or give the folder of that run"
            )
        games.append(game)
    return ReadReport(tuple(games), tuple(damaged))


def _lines(path: Path) -> Iterator[tuple[int, bytes | str]]:
    """Number and bytes of every line that is not blank.

    Where compressed data breaks off, the last entry holds the reason in place of the bytes.
    """
    if not path.is_file():
        raise UserError(f"there is no rollout file {path}")
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error) as error:
        yield number + 1, f"the compressed data is damaged and ends here: {error}"
    except gzip.BadGzipFile as error:  # a checksum: it does not say where the damage is
        yield number + 1, f"the compressed data is damaged, lines above may be too: {error}"
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): copy the file again."
        ) from error


def _parsed(line: bytes | str) -> dict[str, Any] | str:
    """The object of a line, or why it is none."""
    if isinstance(line, str):
        return line
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, a huge integer
        return f"not JSON: {error}"
    return row if isinstance(row, dict) else f"not an object: {type(row).__name__}"


def _plain(value: float) -> float | str:
    """A number that JSON can hold; ``float()`` reads the words back."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _padded(values: Sequence[float], length: int) -> list[float | str]:
    if len(values) > length:
        raise ValueError(f"{len(values)} values for {length} places: max_turns is too small")
    return [_plain(v) for v in values] + [0.0] * (length - len(values))


def _turn_row(turn: Turn) -> dict[str, Any]:
    row = asdict(turn)
    row["logprobs"] = [_plain(p) for p in turn.logprobs]
    row["verdict"] = turn.verdict.value
    row["candidates"] = [_candidate_row(candidate) for candidate in turn.candidates]
    for name in ("uncertainty", "truth_logp"):
        if row[name] is None:
            del row[name]
        else:
            row[name] = [_plain(value) for value in row[name]]
    for name in ("reads", "writes", "order"):
        if not row[name]:
            del row[name]
    return row


def _turn(row: Mapping[str, Any]) -> Turn:
    fields = dict(row)
    fields["logprobs"] = tuple(float(p) for p in fields["logprobs"])
    fields["verdict"] = Verdict(fields["verdict"])
    for name in ("diagnostics", "reads", "writes", "order"):
        fields[name] = tuple(fields.get(name, ()))
    fields["candidates"] = tuple(_candidate(entry) for entry in fields.get("candidates", ()))
    for name in ("uncertainty", "truth_logp"):
        if fields.get(name) is not None:
            before, after = fields[name]
            fields[name] = (float(before), float(after))
    return Turn(**fields)


def _candidate_row(candidate: Candidate) -> dict[str, Any]:
    row = asdict(candidate)
    for name in ("belief", "delta"):
        row[name] = None if row[name] is None else _plain(row[name])
    row["verdict"] = candidate.verdict.value
    return row


def _candidate(row: Mapping[str, Any]) -> Candidate:
    fields = dict(row)
    for name in ("belief", "delta"):
        fields[name] = None if fields[name] is None else float(fields[name])
    fields["verdict"] = Verdict(fields["verdict"])
    return Candidate(**fields)


def _task(row: Mapping[str, Any]) -> Task:
    fields = dict(row)
    fields["messages"] = tuple(Message(**m) for m in fields["messages"])
    fields["aliases"] = tuple(fields["aliases"])
    return Task(**fields)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
