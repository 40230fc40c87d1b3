"""Code of a plug-in that fails while a run goes on: whose failure it is, in one sentence.

What the user's code raises is neither bad input nor a defect of this package. ``blamed`` turns it
into ``PluginFailed``, whose ``__cause__`` keeps the traceback, and ``guarded`` puts a method of
credit behind such calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from delta_belief_rl.algo.base import Advantage, Credit, Grain
from delta_belief_rl.algo.chain import CreditChain
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.plugins import MISTAKES, describe, load_methods
from delta_belief_rl.trainer.own_credit import find_credit
from delta_belief_rl.types import FloatArray, TurnTable, UserError


class PluginFailed(Exception):
    """Code of a plug-in raised an exception, or returned what cannot be used."""


@contextmanager
def blamed(whose: str, call: str) -> Iterator[None]:
    """Code of a plug-in, whose exceptions are told as its own.

    Args:
        whose: Its part and the file, as a sentence begins with them.
        call: The function that is called.

    Raises:
        PluginFailed: It raised an exception that is no ``UserError``.
    """
    try:
        yield
    except (UserError, PluginFailed):
        raise
    except MISTAKES as error:
        raise PluginFailed(f"{whose} failed in {call} with {describe(error)}.") from error


def guarded(cfg: RunConfig, credit: Credit) -> Credit:
    """A method, or a chain, whose own failures name the plug-in that brings it.

    Args:
        cfg: The configuration that it was made of.
        credit: Of this package, or one whose first element is of a plug-in.
    """
    if find_credit(cfg) is None:
        return credit
    name = cfg.algorithm.adv_estimator
    file = next(one for one in cfg.plugins if name in load_methods([one]))
    whose = f"The method {name} of the plug-in {file}"
    if not isinstance(credit, CreditChain):
        return Guarded(credit, whose)
    first = Guarded(credit.parts[name], whose)
    # A key that is there keeps its place.
    return replace(credit, parts={**credit.parts, name: first})


@dataclass(frozen=True, slots=True)
class Guarded:
    """The calls of a method that a run makes.

    Attributes:
        method: The method itself.
        whose: Its name and its file, as a sentence begins with them.
    """

    method: Credit
    whose: str
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """As the method has it."""
        return self.method.needs_group

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """What the method makes of the table; ``rewards`` are those of ``paid`` where it has none.

        Raises:
            PluginFailed: It raised an exception, or returned something else.
        """
        with blamed(self.whose, "apply"):
            made = self.method.apply(table, previous)
            wrong = _what_is_wrong(made, table)
        if wrong:
            raise PluginFailed(f"{self.whose} returned {wrong} from apply.")
        if made.rewards.shape == (table.num_rows,):
            return made
        return replace(made, rewards=self.paid(table))

    def paid(self, table: TurnTable) -> FloatArray:
        """The rewards that the method uses.

        Raises:
            PluginFailed: It raised an exception, or returned something else.
        """
        with blamed(self.whose, "paid"):
            found = np.asarray(self.method.paid(table), dtype=np.float64)
        if found.shape != (table.num_rows,) or not np.isfinite(found).all():
            raise PluginFailed(
                f"{self.whose} returned from paid no finite number for each of {table.num_rows} "
                "turns."
            )
        return found

    def state_dict(self) -> dict[str, object]:
        """What the method keeps between steps.

        Raises:
            PluginFailed: It raised an exception, or returned what a checkpoint cannot hold.
        """
        with blamed(self.whose, "state_dict"):
            state: object = self.method.state_dict()
            json.dumps(state)
        if not isinstance(state, dict):
            raise PluginFailed(
                f"{self.whose} returned {type(state).__name__} and no dict from state_dict."
            )
        return cast("dict[str, object]", state)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Give it back to the method."""
        with blamed(self.whose, "load_state_dict"):
            self.method.load_state_dict(state)


def _what_is_wrong(made: object, table: TurnTable) -> str:
    """Why a result cannot be trained on; empty where it can."""
    if not isinstance(made, Advantage):
        return f"{type(made).__name__} and no Advantage"
    rows, tokens = (table.num_rows,), (int(table.n_tokens.sum()),)
    of_turns = {"turns": made.turns, "weight": made.weight, "distil": made.distil}
    # No rewards at all are those of paid().
    of_turns["rewards"] = made.rewards if np.shape(made.rewards) != (0,) else None
    of_tokens = {"tokens": made.tokens, "targets": made.targets, **made.columns}
    for needed, arrays in ((rows, of_turns), (tokens, of_tokens)):
        for name, array in arrays.items():
            shape = getattr(cast("object", array), "shape", None)
            absent = array is None and name not in ("turns", "weight")
            if shape != needed and not absent:
                return f"an Advantage whose {name} have the shape {shape} and not {needed}"
    used = made.weight > 0
    read = {"turns": made.turns[used], "rewards": of_turns["rewards"]}
    read |= {"weight": made.weight, "distil": made.distil}
    if made.tokens is not None:
        read["tokens"] = made.tokens[np.repeat(used, table.n_tokens)]
    for name, array in read.items():
        if array is not None and not np.isfinite(array).all():
            return f"an Advantage whose {name} are not all finite"
        if name in ("weight", "distil") and array is not None and (array < 0).any():
            return f"an Advantage whose {name} are not all at least 0"
    return ""
