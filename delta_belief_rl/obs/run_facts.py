"""How a run tells whoever started it which folder is its own.

A supervisor of processes that knows the command line only (``watchdog.sh``) names a file in the
environment; the run writes one line of JSON there before anything can fail in it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "DBRL_RUN_FACTS"
"""Environment variable with the path of the file."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run says of itself.

    Attributes:
        run_dir: Its folder, an absolute path.
        pid: Its driver's process.
        events_bytes: Length of ``events.jsonl`` before this start wrote to it: what lies behind
            belongs to this start, whatever the clock does.
    """

    run_dir: str
    pid: int
    events_bytes: int


def tell_run_facts(run_dir: Path) -> None:
    """Write the facts of the run in this process, where somebody asked for them."""
    target = os.environ.get(VARIABLE)
    if not target:
        return
    events = run_dir / "events.jsonl"
    length = events.stat().st_size if events.exists() else 0
    facts = RunFacts(str(run_dir.resolve()), os.getpid(), length)
    beside = Path(f"{target}.{os.getpid()}")
    # Whoever asked has gone with its folder: that is no reason to end a run.
    with suppress(OSError):
        beside.write_text(json.dumps(asdict(facts)) + "\n", encoding="utf-8")
        beside.replace(target)


def read_run_facts(path: Path) -> RunFacts | None:
    """The facts in a file; None before they are written."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return RunFacts(str(fields["run_dir"]), int(fields["pid"]), int(fields["events_bytes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
