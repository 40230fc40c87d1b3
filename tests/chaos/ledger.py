"""What a run under chaos must have in common with the straight one, and must leave behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.running import NotKept, Running, wait_until
from tests.processes import arguments, mentioning
from tests.runs import assert_same_run, games_of, metrics_of

APART = tuple(
    f"{head}judge/{name}"
    for head in ("", "val-aux/")
    for name in ("retries", "timeouts", "timeout_rate", "restarts")
)
"""Metrics that count the faults themselves."""
GONE_SECONDS = 60.0
"""Longest that a process of the run may outlive it."""


def compare(straight: Path, run: Path, secrets: int, games: int) -> None:
    """The run is the straight one, bit for bit, and played what it had to.

    Args:
        straight: Folder of the run that nothing disturbed.
        run: Folder of the other.
        secrets: Training secrets of an epoch.
        games: Of each of them.

    Raises:
        NotKept: They differ.
    """
    try:
        assert_same_run(straight, run, *APART)
    except AssertionError as error:
        raise NotKept(f"the run differs from the straight one: {error}") from error
    mine, theirs = played(run), played(straight)
    if mine != theirs:
        raise NotKept(f"secrets played: {mine} instead of {theirs}")
    for epoch, counts in mine.items():
        if set(counts.values()) != {games} or (epoch < max(mine) and len(counts) != secrets):
            raise NotKept(f"epoch {epoch} played {dict(counts)}")


def played(out: Path) -> dict[int, Counter[str]]:
    """Training games of each secret in each epoch."""
    found: dict[int, Counter[str]] = {}
    games = games_of(out)
    for record in metrics_of(out):
        if "training/epoch" in record:
            rows = games[f"rollout/{record['step']}.jsonl"]
            epoch = found.setdefault(int(record["training/epoch"]), Counter())
            epoch.update(row["secret"] for row in rows)
    return found


def check_clean(run: Running) -> None:
    """Nothing of the run is left: no process, so no port, and no temporary file.

    Raises:
        NotKept: Something is.
    """
    wait_until(lambda: not mentioning(str(run.scratch)), GONE_SECONDS)
    left = {pid: " ".join(arguments(pid))[:200] for pid in mentioning(str(run.scratch))}
    if left:
        raise NotKept(f"processes outlive the run: {left}")
    files = sorted(str(path) for path in run.scratch.rglob("*"))
    if files:
        raise NotKept(f"temporary files outlive the run: {files[:20]} ({len(files)} in all)")
    root = run.out / "checkpoints"
    hidden = [path.name for path in root.iterdir() if path.name.startswith((".tmp", ".replaced"))]
    if hidden:
        raise NotKept(f"half-written checkpoints outlive the run: {hidden}")
