"""How often a language model judged the games of a run rightly, and what its mistakes cost.

    python -m validation.gpu.judge_in_games checks/runs/train_llm_judge --out judge_in_games.json

The run's games are of the embedded world, so every yes and no can be held against the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from delta_belief_rl.cli.parser import OneLineParser
from delta_belief_rl.envs.worlds.grammar import Grammar, answer
from delta_belief_rl.envs.worlds.table import World, load_world
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.types import UserError
from validation.gpu import host

ANSWERS = ("yes", "no")


def read_games(path: Path) -> Iterator[tuple[str, list[dict[str, Any]], bool]]:
    """Secret, turns and strict win of each game of a file."""
    for row in read_records(path):
        turns = row["turns"]
        yield (
            row["secret"],
            json.loads(turns) if isinstance(turns, str) else turns,
            bool(row["strict_status"]),
        )


def judged(path: Path, world: World) -> dict[str, float]:
    """Counts and shares of one file of games.

    Raises:
        UserError: A secret is not a thing of the world.
    """
    grammar = Grammar(world)
    answers = right = 0
    won = {True: [0, 0], False: [0, 0]}
    for secret, turns, strict in read_games(path):
        thing = grammar.thing_of(secret)
        if thing is None:
            raise UserError(f"{path} has a game about {secret!r}, which {world.name} lacks.")
        clean = True
        for turn in turns:
            wanted = str(answer(world, grammar.parse(turn["action"]), thing))
            if turn["verdict"] in ANSWERS and wanted in ANSWERS:
                answers += 1
                right += turn["verdict"] == wanted
                clean = clean and turn["verdict"] == wanted
        won[clean][0] += 1
        won[clean][1] += strict
    return {
        "games": float(won[True][0] + won[False][0]),
        "answers": float(answers),
        "right": right / max(answers, 1),
        "clean_games": float(won[True][0]),
        "clean_won": won[True][1] / max(won[True][0], 1),
        "misled_won": won[False][1] / max(won[False][0], 1),
    }


def files_of(run: Path) -> dict[str, Path]:
    """Files of games by what the page calls them.

    Raises:
        UserError: The folder has none.
    """
    found: dict[str, Path] = {}
    for folder in ("validation", "rollout"):
        for path in sorted((run / folder).glob("*.jsonl"), key=lambda one: int(one.stem)):
            found[f"{folder}, step {path.stem}"] = path
    if not found:
        raise UserError(f"{run} has no games: name the folder of a run.")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Read a run's games and write the record."""
    parser = OneLineParser(
        prog="validation.gpu.judge_in_games",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--world", default="everyday")
    parser.add_argument("--played-on", default="", help="the run's hardware, for the record")
    parser.add_argument("--out", type=Path, help="file; standard output without it")
    args = parser.parse_args(argv)
    try:
        world = load_world(args.world)
        found = {name: judged(path, world) for name, path in files_of(args.run).items()}
    except UserError as error:
        print(f"validation.gpu.judge_in_games: {error}", file=sys.stderr)
        return 2
    body = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "run": args.run.name,
        "played_on": args.played_on,
        "read_on": host.hardware(),
        "files": found,
    }
    text = json.dumps(body, indent=1)
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
