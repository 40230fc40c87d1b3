"""Rows of stored games in the three forms that ``delta-belief analyze`` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

TURNS = 4
"""Turn limit of the rows made here."""
INVALID = "You have not asked a valid question. Ask a brief yes/no question instead."
REPEATED = "You have already asked this question before. Ask a new yes/no question instead."

Pair = tuple[str, str]
LOST: tuple[Pair, ...] = (
    ("Is it alive?", "yes"),
    ("Is it a cup?", "no"),
    ("Is it a hat?", "no"),
    ("Is it a pan?", "no"),
)
WON: tuple[Pair, ...] = (("Is it alive?", "yes"), ("Is it a dog?", "finished"))
LISTED: tuple[Pair, ...] = (("Is it alive?", "yes"), ("Is it a cat, or a dog?", "finished"))
MENTIONED: tuple[Pair, ...] = (("Does it live with a dog?", "finished"),)


def published(
    pairs: Sequence[Pair] = LOST,
    secret: str = "dog",
    beliefs: Sequence[float] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A row as the published validation files have it; ``None`` as a change removes a field."""
    k, won = len(pairs), bool(pairs) and pairs[-1][1] == "finished"
    values = list(beliefs) if beliefs is not None else [-8.0 + 1.5 * t for t in range(k + 1)]
    diffs = [max(b - a, 0.0) for a, b in pairwise(values)]
    if won:
        diffs[-1] = 0.0
    invalid = sum("not asked a valid" in reply for _, reply in pairs)
    repeated = sum("already asked" in reply for _, reply in pairs)
    end = 2.0 * won - (0.05 * k if k > 1 else 0.0)
    score = k * end - 5.0 * invalid - repeated + 0.1 * sum(diffs)
    row: dict[str, Any] = {
        "secret": secret,
        "input": "system\nPlay.\nuser\nAsk.\n",
        "output": "".join(f"assistant\n{q}\nuser\n{r}\n" for q, r in pairs),
        "score": score,
        "game_status": int(won),
        "step": 3,
        "log_prob_reward": values + [0.0] * (TURNS - k),
        "log_prob_diff": diffs + [0.0] * (TURNS - k),
        "reward": score,
        "invalid_count": invalid,
        "repeated_count": repeated,
        "num_questions": k,
    }
    row |= changes
    return {name: value for name, value in row.items() if value is not None}


def val_only(pairs: Sequence[Pair] = LOST, secret: str = "dog", **changes: Any) -> dict[str, Any]:
    """The same game as an evaluation run writes it: messages, padding, no zeros."""
    full = published(pairs, secret)
    history: list[Any] = [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Ask."},
    ]
    for question, reply in pairs:
        history += [{"role": "assistant", "content": question}, {"role": "user", "content": reply}]
    won = bool(full["game_status"])
    row = {
        "secret": secret,
        "actor": "policy",
        "judge": "judge",
        "game_status": won,
        "finished_at": len(pairs) if won and len(pairs) < TURNS else -1,
        "score": full["score"],
        "log_prob_reward": [value for value in full["log_prob_reward"] if value],
        "log_prob_diff": [value for value in full["log_prob_diff"] if value],
        "history": history + ["", ""] * (TURNS - len(pairs)),
        "reward": full["score"],
        "invalid_count": full["invalid_count"],
        "repeated_count": full["repeated_count"],
        "num_questions": len(pairs),
    }
    return row | changes


def write(path: Path, rows: Iterable[Any]) -> Path:
    """A file of rows; text and bytes are written as they are, a line each."""
    lines = []
    for row in rows:
        if isinstance(row, bytes):
            lines.append(row)
        else:
            text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
            lines.append(text.encode())
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
