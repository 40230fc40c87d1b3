"""``delta-belief view``: stored games, to be read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from delta_belief_rl.cli.transcript import game_text
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.eval.report import view_game
from delta_belief_rl.rollout.store import read_rows
from delta_belief_rl.types import UserError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a file of games, .jsonl or .jsonl.gz")
    parser.add_argument("--limit", type=int, default=10, help="games to show; 0 for all")
    parser.add_argument("--secret", help="only games of this secret")
    ended = parser.add_mutually_exclusive_group()
    ended.add_argument("--won", action="store_true", help="only games that were won")
    ended.add_argument("--lost", action="store_true", help="only the others")


def _run(args: argparse.Namespace) -> Result:
    rows = _rows(_file(args.file))
    games = [(view_game(row, _step(row)), row) for row in rows]
    chosen = [
        (game, row)
        for game, row in games
        if (args.secret is None or game.secret.lower() == args.secret.lower())
        and not (args.won and not game.won)
        and not (args.lost and game.won)
    ]
    shown = chosen[: args.limit] if args.limit > 0 else chosen
    print(f"{len(shown)} of {len(games)} games", file=sys.stderr)
    return Result(
        value=[asdict(game) for game, _ in shown],
        text="\n\n".join(game_text(game, *_notes(row)) for game, row in shown),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    """The games of a file; lines that hold none are counted on stderr.

    Raises:
        UserError: No line holds a game.
    """
    report = read_rows(path)
    rows = [row for row in report.rows if "secret" in row]
    skipped = len(report.rows) - len(rows) + len(report.damaged)
    if not rows:
        first = report.damaged[:1]
        reason = "".join(f" (line {line.number}: {line.reason})" for line in first)
        raise UserError(
            f"{path} holds no game{reason}: name a file of a run's folders rollout, validation or "
            "test."
        )
    if skipped:
        print(f"{path}: {skipped} lines hold no game and were skipped", file=sys.stderr)
    return rows


def _file(path: Path) -> Path:
    """The path itself; a folder is answered with what lies in it."""
    if not path.is_dir():
        return path
    found = sorted(file for kind in ("*.jsonl", "*.jsonl.gz") for file in path.rglob(kind))
    games = [str(file) for file in found if file.parent != path]
    if not games:
        raise UserError(f"{path} is a folder without files of games: name such a file.")
    some = ", ".join(games[-3:])
    raise UserError(f"{path} is a folder: name one of its {len(games)} files of games ({some}).")


def _step(row: Mapping[str, Any]) -> int:
    step = row.get("step", 0)
    return step if isinstance(step, int) else 0


def _notes(row: Mapping[str, Any]) -> list[str]:
    notes = [f"step {_step(row)}"]
    if isinstance(row.get("game"), int):
        notes.append(f"game {row['game']}")
    if isinstance(row.get("reward"), int | float):
        notes.append(f"reward {row['reward']:.2f}")
    if row.get("stop") not in (None, "win", "turn_limit"):
        notes.append(f"ended by {row['stop']}")
    return notes


VERB = Verb(
    name="view",
    help="Read stored games: questions, replies, and the belief in the secret after each turn.",
    example="delta-belief view outputs/quickstart/delta_belief/rollout/32.jsonl --won",
    add_arguments=_add_arguments,
    run=_run,
)
