"""``events.jsonl``: what happened besides numbers, one JSON object an event.

Failures go here with their context (a judge call that timed out, an engine that was restarted, a
game that was dropped), so that a count in ``metrics.jsonl`` can be traced back to its cases.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventLog:
    """Append-only writer, safe to call from several threads of one process."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self.counts: Counter[str] = Counter()
        """Events of this process by kind."""
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, step: int | None = None, **fields: object) -> None:
        """Record one event.

        Args:
            kind: Its class in a word or two, e.g. ``"judge_error"``.
            fields: Anything that helps to understand it; values JSON cannot hold are written as
                text.
        """
        record = {"time": time.time(), "run_id": self.run_id, "kind": kind, "step": step, **fields}
        line = json.dumps(record, default=str, ensure_ascii=False) + "\n"
        with self._lock:
            self.counts[kind] += 1
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)


def config_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What changed between two nested configurations, by dotted key: ``(old value, new value)``.

    A key that only one of them has stands against None.

    Example:
        >>> config_diff({"a": {"b": 1}}, {"a": {"b": 2}})
        {'a.b': (1, 2)}
    """
    flat_old, flat_new = _flatten(old), _flatten(new)
    return {
        key: (flat_old.get(key), flat_new.get(key))
        for key in sorted(flat_old.keys() | flat_new.keys())
        if flat_old.get(key) != flat_new.get(key)
    }


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
