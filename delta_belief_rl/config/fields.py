"""How a setting is declared: a default, a line of help, and marks for rules and documents."""

from __future__ import annotations

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def opt(default: T, help: str, *, corrected: str = "", new: bool = False, needs: str = "") -> T:
    """Declare one setting of a frozen dataclass.

    Args:
        default: Immutable default value.
        help: One line for ``docs/config.md``.
        corrected: What differs on purpose from the published implementation; empty when nothing
        does. new: True for a setting that the published implementation does not have. needs: Names
        of the only back ends that read the setting, e.g. ``vllm, hf``; empty for all.
    """
    meta = {"help": help, "corrected": corrected, "new": new, "needs": needs}
    return field(default=default, metadata=meta)  # type: ignore[return-value]
