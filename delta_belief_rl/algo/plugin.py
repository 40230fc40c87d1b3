"""Methods of credit of a user's own: what a module that ``plugins`` names has to bring.

Such a module has one mapping of names to :class:`CreditPlugin`, called ``METHODS``; a name is then
a value of ``algorithm.adv_estimator``. See docs/add_a_method.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from delta_belief_rl.algo.base import Credit


@dataclass(frozen=True, slots=True)
class CreditPlugin:
    """One method.

    Attributes:
        method: Makes the method of its settings, usually its class.
        settings: The dataclass of its settings, whose fields are what ``algorithm.kwargs`` may
            name. Its ``__post_init__`` raises ``UserError`` where a value is out of range.
        summary: What it does, in one line, for ``delta-belief compare --list``.
    """

    method: Callable[[Any], Credit]
    settings: type[Any]
    summary: str = ""
