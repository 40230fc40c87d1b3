"""Code of a plug-in that fails while a run goes on: whose failure it is, in one sentence.

What the user's code raises is neither bad input nor a defect of this package. ``blamed`` turns it
into ``PluginFailed``, whose ``__cause__`` keeps the traceback, and ``guarded`` puts a method of
credit behind such calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, cast

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
        """What the method makes of the table.

        Raises:
            PluginFailed: It raised an exception, or returned something else.
        """
        with blamed(self.whose, "apply"):
            made = self.method.apply(table, previous)
        wrong = _what_is_wrong(made, table.num_rows)
        if wrong:
            raise PluginFailed(f"{self.whose} returned {wrong} from apply.")
        return made

    def paid(self, table: TurnTable) -> FloatArray:
        """The rewards that the method uses."""
        with blamed(self.whose, "paid"):
            return self.method.paid(table)

    def state_dict(self) -> dict[str, object]:
        """What the method keeps between steps."""
        with blamed(self.whose, "state_dict"):
            return self.method.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Give it back to the method."""
        with blamed(self.whose, "load_state_dict"):
            self.method.load_state_dict(state)


def _what_is_wrong(made: object, rows: int) -> str:
    """Why a result cannot be trained on; empty where it can."""
    if not isinstance(made, Advantage):
        return f"{type(made).__name__} and no Advantage"
    for field in ("turns", "weight"):
        shape = getattr(cast("object", getattr(made, field)), "shape", None)
        if shape != (rows,):
            return f"an Advantage whose {field} have the shape {shape} and not ({rows},)"
    return ""
