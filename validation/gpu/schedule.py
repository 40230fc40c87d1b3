"""Which check begins next, and on which GPUs; pure functions of what is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from validation.gpu.checks import Check

_EXACT = 1e-9
"""Shares are sums of decimal fractions."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A check and the GPUs that it gets."""

    check: Check
    gpus: tuple[int, ...]


def pick(
    waiting: Sequence[Check],
    free: Sequence[float],
    minutes: float,
    ready: Callable[[Check], bool],
) -> Turn | None:
    """The next check to begin; None where nothing can for now.

    The first one in order goes first. One behind it may begin earlier, but not on the GPUs that the
    first one waits for, or small checks could keep a large one waiting for ever.

    Args:
        waiting: Checks that have not begun, in their order.
        free: Share of the memory of each GPU that nobody has.
        minutes: That are left.
        ready: Whether everything is there that a check needs.
    """
    barred: set[int] = set()
    for check in waiting:
        if not ready(check) or check.least > minutes or check.gpus > len(free):
            continue
        gpus = place(check, free, barred)
        if gpus is not None:
            return Turn(check, gpus)
        barred |= set(_emptiest(free, barred)[: check.gpus])
    return None


def place(
    check: Check, free: Sequence[float], barred: set[int] | frozenset[int] = frozenset()
) -> tuple[int, ...] | None:
    """The GPUs for a check, the emptiest ones; None where too few have room."""
    room = [gpu for gpu in _emptiest(free, barred) if free[gpu] + _EXACT >= check.share]
    return tuple(sorted(room[: check.gpus])) if len(room) >= check.gpus else None


def _emptiest(free: Sequence[float], barred: set[int] | frozenset[int]) -> list[int]:
    return sorted((g for g in range(len(free)) if g not in barred), key=lambda gpu: -free[gpu])


def minutes_in_a_row(checks: Sequence[Check]) -> float:
    """What the checks take at least when they follow one another."""
    return sum(check.least for check in checks)
