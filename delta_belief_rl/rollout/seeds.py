"""Random streams by name.

Every random choice of a rollout is a function of names: (run seed, task, step or epoch, game,
    turn). Nothing depends on the order in which games run, so a resumed run draws what the straight
    one would have drawn.
"""

from __future__ import annotations

import hashlib
import json


def named_seed(*names: str | int) -> int:
    """A 64-bit seed for a stream with this name.

    Names are told apart by value and type: ``("a", "bc")``, ``("ab", "c")``, ``("1",)`` and
        ``(1,)`` differ from each other as they should.

    Example:
        >>> named_seed("shuffle", 7, 0) == named_seed("shuffle", 7, 0)
        True
    """
    text = json.dumps(names, ensure_ascii=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def turn_seed(run_seed: int, task_id: str, step_or_epoch: int, game: int, turn: int) -> int:
    """The 64-bit seed from which the tokens of one turn are drawn."""
    return named_seed("turn", run_seed, task_id, step_or_epoch, game, turn)


def named_uniform(*names: str | int) -> float:
    """A uniform number in [0, 1) for the single choice with this name."""
    # As many bits as a float holds, so that rounding never gives 1.
    return (named_seed(*names) >> 11) * 2.0**-53


def candidate_seed(
    run_seed: int, task_id: str, step_or_epoch: int, game: int, turn: int, number: int
) -> int:
    """The 64-bit seed of one candidate of a turn; the first one is what the turn alone draws."""
    if number == 0:
        return turn_seed(run_seed, task_id, step_or_epoch, game, turn)
    return named_seed("candidate", run_seed, task_id, step_or_epoch, game, turn, number)
